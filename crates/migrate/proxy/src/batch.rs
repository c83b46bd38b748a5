//! Writes to many connections with one system call.
//!
//! The obvious way is a system call for each write. But each write wakes a process, which may take the processor at the
//! end of the system call. With all processors busy, a thread that serves many sessions lost its processor at every
//! third pair of messages, and found little to do each time it ran again. io_uring makes all writes in one call. A
//! write is made at once or not at all: none waits for room, so none is under way when the call returns.

use io_uring::{IoUring, Probe, opcode, types};
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Most writes in one system call.
const WRITES_MAX: u32 = 128;
/// No signal reports a connection that is gone, and no write waits.
const FLAGS: SendFlags = SendFlags::NOSIGNAL.union(SendFlags::DONTWAIT);

/// A write.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Write<'a> {
    pub(crate) to: BorrowedFd<'a>,
    pub(crate) bytes: &'a [u8],
}

/// Number of bytes that a write took.
pub(crate) type Taken = Result<usize, Errno>;

/// Executes batches of writes.
pub(crate) struct Batch {
    /// Without a ring each write is a system call.
    ring: Option<IoUring>,
    taken: Vec<Taken>,
}

impl Batch {
    /// Creates a batch, without io_uring if the kernel has none or the operator does not allow it; the log says so.
    pub(crate) fn new() -> Batch {
        let ring = ring().inspect_err(|error| tracing::info!(%error, "no io_uring: each write is a system call"));
        Batch { ring: ring.ok(), taken: Vec::new() }
    }

    /// Makes all writes; the result of each is at its place.
    pub(crate) fn write(&mut self, writes: &[Write<'_>]) -> &[Taken] {
        self.taken.clear();
        if writes.len() > 1
            && let Some(ring) = &mut self.ring
        {
            let made = writes.chunks(WRITES_MAX as usize).try_for_each(|part| write_part(ring, part, &mut self.taken));
            if let Err(error) = made {
                tracing::warn!(%error, "io_uring fails: from now on each write is a system call");
                self.ring = None;
            }
        }
        // System calls bypass libc, whose calls are cancellation points and cost more for that.
        let others = writes[self.taken.len()..].iter().map(|write| send(write.to, write.bytes, FLAGS));
        self.taken.extend(others);
        &self.taken
    }
}

fn ring() -> io::Result<IoUring> {
    let ring = IoUring::new(WRITES_MAX)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    if probe.is_supported(opcode::Send::CODE) { Ok(ring) } else { Err(io::ErrorKind::Unsupported.into()) }
}

/// Makes no more than `WRITES_MAX` writes. After an error, writes without a place in `taken` were not made, and the caller
/// must not use the ring again.
fn write_part(ring: &mut IoUring, writes: &[Write<'_>], taken: &mut Vec<Taken>) -> io::Result<()> {
    for (place, write) in (taken.len() as u64..).zip(writes) {
        let len = u32::try_from(write.bytes.len()).unwrap_or(u32::MAX);
        let send = opcode::Send::new(types::Fd(write.to.as_raw_fd()), write.bytes.as_ptr(), len);
        let entry = send.flags(FLAGS.bits().cast_signed()).build().user_data(place);
        // SAFETY: the kernel uses the descriptor and the bytes from when it takes the entry until it answers it. Both
        // are borrowed until this function returns, and the loop below ends only when all entries that the kernel took
        // have been answered. The others stay in the ring, which is not used again, so the kernel never takes them.
        unsafe { ring.submission().push(&entry) }.map_err(io::Error::other)?;
    }
    let end = taken.len() + writes.len();
    taken.resize(end, Err(Errno::IO));
    let mut left = writes.len();
    while left > 0 {
        let submitted = ring.submit_and_wait(left);
        for answer in ring.completion() {
            let said = answer.result();
            taken[answer.user_data() as usize] =
                usize::try_from(said).map_err(|_| Errno::from_raw_os_error(said.saturating_neg()));
            left -= 1;
        }
        match submitted {
            Err(error) if error.kind() != io::ErrorKind::Interrupted && ring.submission().len() == left => {
                // The kernel takes entries in their order.
                taken.truncate(end - left);
                return Err(error);
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    /// Runs a test with io_uring, where the kernel has it, and with system calls.
    fn both(test: impl Fn(&mut Batch)) {
        [Batch::new(), Batch { ring: None, taken: Vec::new() }].iter_mut().for_each(test);
    }

    fn pair() -> (UnixStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (ours, theirs)
    }

    #[test]
    fn each_write_goes_where_it_is_to_go_also_when_they_are_more_than_fit_into_one_call() {
        both(|batch| {
            let mut pairs: Vec<_> = (0..2 * WRITES_MAX + 3).map(|_| pair()).collect();
            let texts: Vec<String> = (0..pairs.len()).map(|number| format!("to {number}")).collect();
            let expected: Vec<Taken> = texts.iter().map(|text| Ok(text.len())).collect();
            let writes = pairs.iter().zip(&texts);
            let writes: Vec<_> =
                writes.map(|((ours, _), text)| Write { to: ours.as_fd(), bytes: text.as_bytes() }).collect();
            assert_eq!(batch.write(&writes), expected);
            for ((_, theirs), text) in pairs.iter_mut().zip(texts) {
                let mut bytes = vec![0; text.len()];
                theirs.read_exact(&mut bytes).unwrap();
                assert_eq!(bytes, text.as_bytes());
            }
        });
    }

    #[test]
    fn peers_that_take_nothing_or_are_gone_keep_no_other_waiting() {
        both(|batch| {
            let (full, _slow) = pair();
            let much = vec![7; 1 << 16];
            while send(&full, &much, FLAGS).is_ok() {}
            let (left, gone) = pair();
            drop(gone);
            let (well, mut reader) = pair();
            let write = |to| Write { to, bytes: b"x" };
            let taken = batch.write(&[write(full.as_fd()), write(left.as_fd()), write(well.as_fd())]);
            assert_eq!(taken, [Err(Errno::AGAIN), Err(Errno::PIPE), Ok(1)]);
            let mut byte = [0];
            reader.read_exact(&mut byte).unwrap();
            assert_eq!(&byte, b"x");
        });
    }
}

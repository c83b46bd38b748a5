//! The page server of a dump: it stores what criu sends on its socket.

use crate::Error;
use crate::criu::Criu;
use crate::error::ErrorContext;
use crate::process_tree::ProcessHandles;
use crate::store::Store;
use rustix::event::Timespec;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use stillpoint_base::PAGE;
use stillpoint_kernel_criu::page_server::{Command, Destination, Form, PE_LAZY, PE_PARENT, PE_PRESENT};
use stillpoint_kernel_criu::rpc::{Answer, Request};
use stillpoint_kernel_foam::{LAZY, Object, PRESENT};

/// Bytes read from the socket at a time.
const CHUNK_BYTES: u64 = 1 << 20;
/// Time within which a process hits a breakpoint of criu after criu was killed at a bad moment.
const BREAKPOINT_TIMEOUT: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Counts of a dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DumpCounts {
    /// The form of criu's message headers.
    pub(crate) form: Form,
    /// Number of messages.
    pub(crate) commands: u64,
    /// Bytes of pages.
    pub(crate) bytes: u64,
}

/// Result of a request whose pages went into a store.
pub(crate) struct PageServerOutcome<T> {
    /// criu's answer.
    pub(crate) answer: Result<Answer, Error>,
    /// Result of `at_end` on the store while the processes were stopped, if criu came so far.
    pub(crate) at_end_result: Option<Result<T, Error>>,
    /// The store, if `at_end` did not run.
    pub(crate) unserved: Option<(Result<DumpCounts, Error>, Store)>,
    /// The processes, and those of them that ended with a criu that was killed.
    pub(crate) processes: ProcessHandles,
    pub(crate) lost_pids: Vec<i32>,
}

/// Sends criu a request that sends pages; they go into the store until criu has closed the connection. `at_end` takes
/// the store when everything has been dumped and the processes are still stopped; they run on if that fails.
///
/// They also run on when criu is killed, with one exception: criu makes system calls in a process by writing
/// instructions over the process's own. A process that is in such a call when criu dies hits the breakpoint after it.
pub(crate) fn through_page_server<T>(
    pid: i32,
    criu: &Criu,
    mut store: Store,
    request: impl FnOnce(i32) -> Request,
    mut at_end: impl FnMut(Result<DumpCounts, Error>, Store) -> Result<T, Error>,
) -> Result<PageServerOutcome<T>, Error> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .with_action("make a socket for pages")?;
    let mut worker = criu.private_worker(&[theirs.as_fd()])?;
    worker.protect_from_oom();
    // while criu starts
    let processes = ProcessHandles::open(pid);
    let request = request(theirs.as_raw_fd());
    // criu alone holds its end now: when criu dies, the page server reads the end of the connection
    drop(theirs);
    let mut server = Some(std::thread::spawn(move || -> (Result<DumpCounts, Error>, Store) {
        let received = serve(&mut UnixStream::from(ours), &mut store);
        (received, store)
    }));
    let panicked = || Error::Daemon("the page server panicked".into());
    let mut at_end_result = None;
    let answer = worker.request(&request, |step, _| {
        if step != "post-dump" {
            return true;
        }
        at_end_result = server.take().map(|server| {
            let (received, store) = server.join().map_err(|_| panicked())?;
            at_end(received, store)
        });
        matches!(at_end_result, Some(Ok(_)))
    });
    let died = worker.has_died();
    match answer {
        Ok(_) => worker.end(),
        Err(_) => worker.kill(),
    }
    let lost_pids = if died { processes.ended(BREAKPOINT_TIMEOUT) } else { Vec::new() };
    let unserved = server.take().and_then(|server| server.join().ok());
    Ok(PageServerOutcome { answer, at_end_result, unserved, processes, lost_pids })
}

/// Serves one pass, until criu sends its end. A connection that ends before is an error: the pass is worth nothing.
pub(crate) fn serve(socket: &mut (impl Read + Write), store: &mut Store) -> Result<DumpCounts, Error> {
    let mut header = [0; 32];
    socket.read_exact(&mut header[..24]).with_action("read the first message of a dump")?;
    let mut first = [0; 24];
    first.copy_from_slice(&header[..24]);
    let form = Form::of_first(&first)?;
    socket.read_exact(&mut header[24..form.bytes()]).with_action("read the first message of a dump")?;
    let mut received = DumpCounts { form, commands: 0, bytes: 0 };
    let mut buffer = vec![0; CHUNK_BYTES as usize];
    store.begin_pass();
    loop {
        received.commands += 1;
        match Command::decode(form, &header[..form.bytes()])? {
            Command::Open { destination, wants_answer } => {
                let object = object(destination);
                let parent = store.has_parent(object);
                store.open(object)?;
                if wants_answer {
                    socket.write_all(&[u8::from(parent)]).with_action("answer a dump")?;
                }
            }
            Command::Parent(destination) => {
                let parent = i32::from(store.has_parent(object(destination)));
                socket.write_all(&parent.to_le_bytes()).with_action("answer a dump")?;
            }
            Command::Pages { destination, start, pages, flags } => {
                received.bytes +=
                    receive_pages(socket, store, &mut buffer, (object(destination), start, pages, flags))?;
            }
            Command::Close => {
                store.end_pass()?;
                socket.write_all(&0i32.to_le_bytes()).with_action("answer a dump")?;
                return Ok(received);
            }
        }
        socket.read_exact(&mut header[..form.bytes()]).with_action("read a message of a dump")?;
    }
}

fn receive_pages(
    socket: &mut impl Read,
    store: &mut Store,
    buffer: &mut [u8],
    (object, start, pages, flags): (Object, u64, u64, u32),
) -> Result<u64, Error> {
    if flags & PE_PARENT != 0 {
        store.keep_unchanged(object, start, pages)?;
        return Ok(0);
    }
    let lazy = if flags & PE_LAZY != 0 { LAZY } else { 0 };
    let present = if flags & PE_PRESENT != 0 { PRESENT } else { 0 };
    store.add(object, start, pages, lazy | present)?;
    if present == 0 {
        return Ok(0);
    }
    let bytes = pages * PAGE;
    let mut at = 0;
    while at < bytes {
        let part = &mut buffer[..(bytes - at).min(CHUNK_BYTES) as usize];
        socket.read_exact(part).with_action("read pages of a dump")?;
        store.put(object, start + at, part)?;
        at += part.len() as u64;
    }
    Ok(bytes)
}

fn object(destination: Destination) -> Object {
    match destination {
        Destination::Task(pid) => Object::Task(pid),
        Destination::Shmem(id) => Object::Shmem(id),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{self, Cursor};
    use stillpoint_kernel_foam::Form as Files;

    struct Peer {
        says: Cursor<Vec<u8>>,
        hears: Vec<u8>,
    }

    impl Read for Peer {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.says.read(into)
        }
    }

    impl Write for Peer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.hears.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const TASK: Destination = Destination::Task(7);

    fn pass(form: Form, store: &mut Store, commands: &[(Command, &[u8])]) -> (Result<DumpCounts, Error>, Vec<u8>) {
        let mut says = Vec::new();
        for (command, data) in commands {
            command.encode(form, &mut says);
            says.extend_from_slice(data);
        }
        let mut peer = Peer { says: Cursor::new(says), hears: Vec::new() };
        (serve(&mut peer, store), peer.hears)
    }

    #[test]
    fn two_passes_of_either_form_become_one_memory() {
        for form in [Form::Short, Form::Long] {
            let parent = tempfile::tempdir().unwrap();
            let mut store = Store::create(&parent.path().join("i"), Some(Files::Dense)).unwrap();
            let (open, data) = (Command::Open { destination: TASK, wants_answer: true }, vec![7; 2 * PAGE as usize]);
            let pages = |start, pages, flags| Command::Pages { destination: TASK, start, pages, flags };
            let first = [
                (Command::Parent(TASK), &[][..]),
                (open, &[]),
                (pages(0x10000, 2, PE_LAZY | PE_PRESENT), &data),
                (pages(0x7000_0000_0000, 1, PE_PRESENT), &data[..PAGE as usize]),
                (Command::Close, &[]),
            ];
            let (received, heard) = pass(form, &mut store, &first);
            assert_eq!(received.unwrap(), DumpCounts { form, commands: 5, bytes: 3 * PAGE });
            assert_eq!(heard, [0, 0, 0, 0, 0, 0, 0, 0, 0], "no parent, no parent, all is well");
            let second = [
                (Command::Parent(TASK), &[][..]),
                (open, &[]),
                (pages(0x10000, 2, PE_PARENT), &[]),
                (pages(0x7000_0000_0000, 1, PE_PARENT), &[]),
                (Command::Close, &[]),
            ];
            let (received, heard) = pass(form, &mut store, &second);
            assert_eq!(received.unwrap().bytes, 0);
            assert_eq!(heard, [1, 0, 0, 0, 1, 0, 0, 0, 0]);
            assert_eq!(store.written().0, 3 * PAGE);
        }
    }

    #[test]
    fn a_dump_that_breaks_off_is_an_error() {
        let parent = tempfile::tempdir().unwrap();
        let mut store = Store::create(&parent.path().join("i"), Some(Files::Dense)).unwrap();
        let open = Command::Open { destination: TASK, wants_answer: true };
        let pages = Command::Pages { destination: TASK, start: 0x10000, pages: 2, flags: PE_PRESENT };
        for commands in [&[(open, &[][..])][..], &[(open, &[]), (pages, &[1; 100])]] {
            assert!(pass(Form::Long, &mut store, commands).0.is_err());
        }
    }
}

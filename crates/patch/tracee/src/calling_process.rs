//! System calls on this very process: forking a helper, and becoming another program without a trace of this one.

use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Resource, getrlimit};
use std::ffi::{CString, OsStr, OsString};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use stillpoint_host::kernel_files;

/// State with which this process was started and which Rust's runtime changes before `main`. Bits 0 to 2: a standard descriptor was closed
/// (the runtime opens `/dev/null` there). Bit 3: SIGPIPE was ignored (the runtime always ignores it).
static STARTED_WITH: AtomicU32 = AtomicU32::new(0);
const SIGPIPE_IGNORED: u32 = 1 << 3;

/// Records that state; runs before Rust's runtime.
extern "C" fn record() {
    let mut found = 0;
    for descriptor in 0..3 {
        // SAFETY: plain integers.
        if unsafe { libc::fcntl(descriptor, libc::F_GETFD) } < 0 {
            found |= 1 << descriptor;
        }
    }
    // SAFETY: plain data, for which all zeroes is a value.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: the call writes one sigaction.
    unsafe { libc::sigaction(libc::SIGPIPE, ptr::null(), &raw mut action) };
    if action.sa_sigaction == libc::SIG_IGN {
        found |= SIGPIPE_IGNORED;
    }
    STARTED_WITH.store(found, Ordering::Relaxed);
}

// SAFETY: the section is an array of functions without arguments that the C library calls at start; `record` uses
// nothing of Rust's runtime.
#[used]
#[unsafe(link_section = ".init_array")]
static RECORD: extern "C" fn() = record;

/// Reverts the changes of Rust's runtime to the state that a program inherits.
pub(crate) fn undo_runtime() {
    // This reference makes the linker include the entry of the section.
    std::hint::black_box(&RECORD);
    let started_with = STARTED_WITH.load(Ordering::Relaxed);
    let pipe = if started_with & SIGPIPE_IGNORED == 0 { libc::SIG_DFL } else { libc::SIG_IGN };
    // SAFETY: no handler of ours is installed or replaced.
    unsafe { libc::signal(libc::SIGPIPE, pipe) };
    for descriptor in (0..3).filter(|d| started_with & 1 << d != 0) {
        // SAFETY: the runtime opened it, no value owns it, and the exec follows next.
        unsafe { libc::close(descriptor) };
    }
}

/// Calls `execvp` with the unchanged environment; returns only on failure.
pub(crate) fn exec(program: &OsStr, arguments: &[OsString]) -> io::Error {
    let text = |word: &OsStr| CString::new(word.as_bytes());
    let (Ok(program), Ok(words)) =
        (text(program), arguments.iter().map(|word| text(word)).collect::<Result<Vec<_>, _>>())
    else {
        return io::Error::from(io::ErrorKind::InvalidInput);
    };
    let mut list: Vec<*const libc::c_char> = words.iter().map(|word| word.as_ptr()).collect();
    list.push(ptr::null());
    // SAFETY: a string and an array of strings that ends in a null pointer, all of which outlive the call.
    unsafe { libc::execvp(program.as_ptr(), list.as_ptr()) };
    io::Error::last_os_error()
}

/// Forks twice; returns true in the grandchild. The child between them has ended and was waited for.
pub(crate) fn fork_grandchild() -> io::Result<bool> {
    if kernel_files::list("/proc/self/task")?.count() != 1 {
        return Err(io::Error::other("more than one thread runs"));
    }
    // SAFETY: no other thread runs, so no lock is held that would never be released.
    match unsafe { libc::fork() } {
        n if n < 0 => Err(io::Error::last_os_error()),
        // SAFETY: as above; a fork that goes no further must end without destructors.
        0 => match unsafe { libc::fork() } {
            0 => Ok(true),
            // SAFETY: as above.
            n => unsafe { libc::_exit(i32::from(n < 0)) },
        },
        child => {
            let mut status = 0;
            // SAFETY: the call writes one int. It fails if SIGCHLD is ignored: then there is no child left to wait for.
            let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
            match waited < 0 || status == 0 {
                true => Ok(false),
                false => Err(io::Error::other("the helper could not be forked")),
            }
        }
    }
}

/// Closes all descriptors except the standard ones and this one.
pub(crate) fn keep_only(descriptor: OwnedFd) -> io::Result<OwnedFd> {
    let number = descriptor.as_raw_fd() as libc::c_uint;
    let close = |first: libc::c_uint, last: libc::c_uint| {
        // SAFETY: plain integers. No value of this process uses any of these descriptors: it was forked just now, and the caller holds only
        // the one that stays.
        unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) }
    };
    if number > 3 {
        close(3, number - 1);
    }
    close(number + 1, libc::c_uint::MAX);
    Ok(descriptor)
}

/// Duplicates the descriptor to one of the highest numbers, kept open over an exec.
pub(crate) fn duplicate_high(descriptor: impl AsFd) -> io::Result<OwnedFd> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let lowest = limit.min(1024).saturating_sub(32).max(10) as RawFd;
    let duplicate = |lowest| fcntl_dupfd_cloexec(&descriptor, lowest);
    // the lowest free number, if only so few may be open
    let high = duplicate(lowest).or_else(|_| duplicate(10)).or_else(|_| duplicate(3))?;
    fcntl_setfd(&high, FdFlags::empty())?;
    Ok(high)
}

/// Returns the number of the process that connected to a socket. rustix has no value for a process outside our PID namespace.
pub(crate) fn peer(socket: RawFd) -> io::Result<i32> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the call writes at most one ucred, whose size is passed.
    let result =
        unsafe { libc::getsockopt(socket, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut len) };
    // Zero stands for a process outside our PID namespace.
    if result == 0 && peer.pid > 0 { Ok(peer.pid) } else { Err(io::Error::last_os_error()) }
}

/// A message, and the kernel's information about it.
pub(crate) struct Message {
    /// Bytes received.
    pub(crate) len: usize,
    /// Number of the process that sent it; `None` for a process outside our PID namespace.
    pub(crate) sender: Option<i32>,
    /// Descriptors that came with it. If there are more than fit, the kernel closes them and the result is an error.
    pub(crate) descriptors: Vec<OwnedFd>,
}

/// Words of a control buffer: room for credentials and a few descriptors.
const CONTROL_WORDS: usize = 16;

/// Receives one message, or as much of it as fits. rustix has no value for a sender outside our PID namespace.
pub(crate) fn receive(socket: RawFd, bytes: &mut [u8]) -> io::Result<Message> {
    let mut control = [0_u64; CONTROL_WORDS];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    // SAFETY: plain data, for which all zeroes is a value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    (header.msg_iov, header.msg_iovlen) = (&raw mut part, 1);
    (header.msg_control, header.msg_controllen) = (control.as_mut_ptr().cast(), size_of_val(&control));
    // SAFETY: the header describes two buffers of ours that outlive the call.
    let len = check(unsafe { libc::recvmsg(socket, &raw mut header, libc::MSG_CMSG_CLOEXEC) })?;
    let mut message = Message { len, sender: None, descriptors: Vec::new() };
    // SAFETY: the kernel filled the control buffer as far as the header states now; the macros stay within that.
    let mut at = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
    while !at.is_null() {
        // SAFETY: `at` is a header within the buffer, and its data follow it; they are read without an alignment requirement.
        unsafe {
            let data = libc::CMSG_DATA(at);
            let data_len = (*at).cmsg_len.saturating_sub(data.offset_from_unsigned(at.cast()));
            match ((*at).cmsg_level, (*at).cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    let numbers = (0..data_len / size_of::<RawFd>()).map(|i| data.cast::<RawFd>().add(i));
                    // each is new, and no other value owns it
                    message.descriptors.extend(numbers.map(|n| OwnedFd::from_raw_fd(n.read_unaligned())));
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if data_len >= size_of::<libc::ucred>() => {
                    let sender = data.cast::<libc::ucred>().read_unaligned().pid;
                    message.sender = (sender > 0).then_some(sender);
                }
                _ => {}
            }
            at = libc::CMSG_NXTHDR(&raw const header, at);
        }
    }
    match header.msg_flags & (libc::MSG_CTRUNC | libc::MSG_TRUNC) {
        0 => Ok(message),
        _ => Err(io::Error::new(io::ErrorKind::InvalidData, "a message with too much beside it")),
    }
}

/// Sends a message together with a descriptor.
pub(crate) fn send_with(socket: impl AsFd, bytes: &[u8], descriptor: impl AsFd) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    whole(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?, bytes)
}

/// Sends bytes without waiting; all of them, or returns an error.
pub(crate) fn send(socket: impl AsFd, bytes: &[u8]) -> io::Result<()> {
    whole(rustix::net::send(socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)?, bytes)
}

fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn whole(sent: usize, bytes: &[u8]) -> io::Result<()> {
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Returns true if a file has capabilities of its own.
pub(crate) fn has_file_capabilities(path: &Path) -> bool {
    rustix::fs::getxattr(path, c"security.capability", &mut [0_u8; 0]).is_ok_and(|bytes| bytes > 0)
}

//! Timer that wakes the event loop at an instant, with the precision of the kernel.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

/// Timerfd in the event loop. `epoll_wait` counts in milliseconds; a timerfd fires within some microseconds, since timer slack does not
/// apply to it.
#[derive(Debug)]
pub(crate) struct Timer {
    fd: OwnedFd,
    armed_ns: u64,
}

impl Timer {
    pub(crate) fn new(registry: &Registry, token: Token) -> io::Result<Self> {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        registry.register(&mut SourceFd(&fd.as_raw_fd()), token, Interest::READABLE)?;
        Ok(Timer { fd, armed_ns: 0 })
    }

    /// Lets the event loop wake up at `t_ns`. The timer is never read: setting it again resets the expiry, and the loop is edge-triggered.
    pub(crate) fn arm(&mut self, t_ns: u64) -> io::Result<()> {
        if self.armed_ns == t_ns {
            return Ok(());
        }
        let value = Timespec { tv_sec: (t_ns / 1_000_000_000) as i64, tv_nsec: (t_ns % 1_000_000_000) as i64 };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        timerfd_settime(&self.fd, TimerfdTimerFlags::ABSTIME, &once)?;
        self.armed_ns = t_ns;
        Ok(())
    }
}

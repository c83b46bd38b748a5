//! Evaluation of a thread's seccomp filters for a system call.

use crate::bpf::{self, Call, Instruction, Verdict};
use crate::{Error, Process, Tid, sys};

/// All filters of one thread; they can only become stricter.
#[derive(Debug)]
pub(crate) struct Filters(Vec<Vec<Instruction>>);

impl Filters {
    /// Reads the filters of a stopped thread.
    pub(crate) fn of(process: &Process, tid: Tid) -> Result<Filters, Error> {
        let unreadable = |why: String| Error::SeccompUnreadable { tid, why };
        match process.thread_status(tid)?.seccomp {
            0 => return Ok(Filters(Vec::new())),
            2 => {}
            1 => return Err(unreadable("it is in strict mode, which allows read, write and exit only".to_owned())),
            mode => return Err(unreadable(format!("mode {mode} is unknown"))),
        }
        let mut filters = Vec::new();
        loop {
            match sys::seccomp_filter(tid.0, filters.len()) {
                Ok(None) => return Ok(Filters(filters)),
                Ok(Some(bytes)) => {
                    let filter = bpf::decode(&bytes);
                    filters.push(filter.ok_or_else(|| unreadable("the kernel handed out no filter".to_owned()))?);
                }
                Err(error) => {
                    return Err(unreadable(match error.raw_os_error() {
                        Some(libc::EACCES | libc::EPERM) => {
                            "that needs CAP_SYS_ADMIN, and a tool that has no filter itself".to_owned()
                        }
                        Some(libc::EIO) => "the kernel lacks CONFIG_CHECKPOINT_RESTORE".to_owned(),
                        _ => error.to_string(),
                    }));
                }
            }
        }
    }

    /// Refuses a call that any filter would not allow unconditionally.
    pub(crate) fn check(&self, tid: Tid, call: &Call) -> Result<(), Error> {
        let mut strictest = Verdict::ALLOW;
        for filter in &self.0 {
            let verdict = bpf::evaluate(filter, call).ok_or_else(|| Error::SeccompUnreadable {
                tid,
                why: "a filter holds an instruction that is unknown".to_owned(),
            })?;
            strictest = strictest.and(verdict);
        }
        if strictest.allows() {
            return Ok(());
        }
        Err(Error::Seccomp { tid, nr: u64::from(call.nr), verdict: strictest.to_string() })
    }
}

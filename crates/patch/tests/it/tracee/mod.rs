//! Tests of tracing on small programs in C.

mod freeze;
mod killed_tool;
mod refusals;
mod remote;
mod stop;
mod storm;
mod support;

use stillpoint_patch_tracee::Error;

/// Returns true if the target was refused before anything was changed (exit code 3); false for a later failure.
fn is_refusal(error: &Error) -> bool {
    use Error::*;
    matches!(
        error,
        Gone(_)
            | NotAProcess { .. }
            | Zombie(_)
            | KernelThread(_)
            | NotX86_64 { .. }
            | Static(_)
            | AlreadyTraced { .. }
            | Own(_)
            | Permission { .. }
            | Unsupported(_)
            | NoGadget { .. }
            | Seccomp { .. }
            | SeccompUnreadable { .. }
    )
}

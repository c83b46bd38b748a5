//! Takes short turns on the processor before `main`, and first yields to the threads that have waited for it since the kernel and the
//! loader began to start this process, which takes half a millisecond.
//!
//! The turns are short, but not SCHED_IDLE: on a fully loaded machine a SCHED_IDLE process takes seconds to reach `main`, and no thread
//! limits that time yet.

use crate::sys;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};

static TOUCHES: AtomicBool = AtomicBool::new(false);

/// Commands that change or inspect a running program.
const TOUCHING: [&[u8]; 4] = [b"apply", b"check", b"status", b"revert"];

/// Runs before the initialisation of any library and of Rust's runtime, with the arguments of C's `main`.
extern "C" fn take_short_turns(count: libc::c_int, words: *const *const libc::c_char) {
    let word = |at: usize| {
        // SAFETY: the C library passes this number of strings, and no code has changed them yet.
        unsafe { CStr::from_ptr(*words.add(at)) }.to_bytes()
    };
    if touches((1..usize::try_from(count).unwrap_or(0)).map(word)) {
        sys::run_like_others(0);
        sys::let_others_run();
        TOUCHES.store(true, Ordering::Relaxed);
    }
}

// SAFETY: the section is an array of functions that the C library calls before all others, with the arguments of C's `main`;
// `take_short_turns` makes system calls and uses nothing of Rust's runtime.
#[used]
#[unsafe(link_section = ".preinit_array")]
static TAKE_SHORT_TURNS: extern "C" fn(libc::c_int, *const *const libc::c_char) = take_short_turns;

/// Returns true if this process was called as `stillpoint patch apply`, `check`, `status` or `revert`.
pub(crate) fn called_to_touch() -> bool {
    // This reference makes the linker include the entry of the section.
    std::hint::black_box(&TAKE_SHORT_TURNS);
    TOUCHES.load(Ordering::Relaxed)
}

/// Returns true if the first words that are not options name a command that changes or inspects a running program.
fn touches<'w>(words: impl Iterator<Item = &'w [u8]>) -> bool {
    let mut names = words.filter(|word| !word.starts_with(b"-"));
    names.next() == Some(b"patch") && names.next().is_some_and(|word| TOUCHING.contains(&word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_touches_a_program_is_known_before_options_are_read() {
        let touches = |line: &str| touches(line.split(' ').map(str::as_bytes));
        assert!(touches("patch apply --pid 1 x"));
        assert!(touches("--json patch --json revert"));
        assert!(!touches("patch"));
        assert!(!touches("patch build apply"));
        assert!(!touches("kernel apply"));
    }

    #[test]
    fn tests_are_called_for_other_things() {
        assert!(!called_to_touch());
    }
}

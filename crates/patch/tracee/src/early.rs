//! Taking short turns before `main`, and letting those run first who have waited for our processor since the kernel and its
//! loader began to start us, which takes half a millisecond.
//!
//! Turns are short, not the last ones: on a machine that has nothing to spare who comes last takes seconds to reach `main`,
//! and nobody watches over that yet.

use crate::sys;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};

static TOUCHES: AtomicBool = AtomicBool::new(false);

/// Commands that touch a running program, or look at one.
const TOUCHING: [&[u8]; 4] = [b"apply", b"check", b"status", b"revert"];

/// Runs before the initialisation of any library and Rust's runtime, with what `main` is called with in C.
extern "C" fn take_short_turns(count: libc::c_int, words: *const *const libc::c_char) {
    let word = |at: usize| {
        // SAFETY: the C library calls with so many strings, which nobody has changed yet.
        unsafe { CStr::from_ptr(*words.add(at)) }.to_bytes()
    };
    if touches((1..usize::try_from(count).unwrap_or(0)).map(word)) {
        sys::run_like_others(0);
        sys::let_others_run();
        TOUCHES.store(true, Ordering::Relaxed);
    }
}

// SAFETY: the section is an array of functions that the C library calls first of all, with the arguments of C's `main`;
// `take_short_turns` makes system calls and uses nothing of Rust's runtime.
#[used]
#[unsafe(link_section = ".preinit_array")]
static TAKE_SHORT_TURNS: extern "C" fn(libc::c_int, *const *const libc::c_char) = take_short_turns;

/// Whether this process was called as `stillpoint patch apply`, `check`, `status` or `revert`.
pub(crate) fn called_to_touch() -> bool {
    // The reference is what makes the linker take the entry of the section in.
    std::hint::black_box(&TAKE_SHORT_TURNS);
    TOUCHES.load(Ordering::Relaxed)
}

/// Whether the first words that are no options name a command that touches a running program.
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

//! Helpers for the tests of every pillar, independent of all pillars: the tool itself, ports, processes that never
//! outlive their test, waiting for conditions, Debian's programs (unpacked, which needs `apt`), and reports that a test
//! cannot run here.
//!
//! The caller guarantees that the thread which starts a process through [`child::bound_command`] lives as long as that process.
//!
//! The crate guarantees that every wait has a limit and names its condition when the limit passes, and that a test
//! which cannot run reports so in a line that `make test` counts; with `REQUIRE_ALL=1` in the environment it fails.
//!
//! It starts no server by itself and installs nothing.
//!
//! ```
//! use stillpoint_testing::{child::{ChildGuard, bound_command}, wait};
//! let child = bound_command("true".as_ref()).spawn().unwrap();
//! let mut program = ChildGuard::from_child(child);
//! assert!(wait::until("the program to end", || program.ended()).success());
//! ```

pub mod binary;
pub mod child;
pub mod container;
pub mod figure;
pub mod go_tpc;
mod line_client;
pub mod machine;
pub mod packages;
pub mod port;
pub mod postgresql;
pub mod random;
pub mod recipes;
pub mod soak;
pub mod test_timeout;
mod unavailable;
pub mod wait;
pub mod withholding;

pub use line_client::LineClient;
pub use unavailable::{Unavailable, WITHHELD_CODE};

use std::io::Write;
use std::path::{Path, PathBuf};

/// Returns the root of the source tree.
pub fn workspace_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).expect("the crate lies two folders below the root")
}

/// Returns the cache's directory, for `--cache` of the tool; entries of the tests themselves come from [`recipes`].
pub fn cache_dir() -> PathBuf {
    stillpoint_host::cache::default_root().expect("the environment names a place for the cache")
}

/// Ends the calling test because this machine lacks something: see [`skipped`].
#[macro_export]
macro_rules! skip {
    ($why:ident) => {{
        $crate::skipped($why);
        return;
    }};
    ($($why:tt)*) => {{
        $crate::skipped(format!($($why)*));
        return;
    }};
}

/// Prints `SKIPPED`, the test's name and the reason (`make test` counts these lines); panics when `REQUIRE_ALL=1`. For
/// packages that the archive withholds it calls [`withheld`] instead. The caller then leaves the test.
#[track_caller]
pub fn skipped(why: impl Into<Unavailable>) {
    match why.into() {
        Unavailable::Withheld(why) => withheld(&why),
        Unavailable::Missing(why) => {
            assert!(!require_all(), "cannot run here and REQUIRE_ALL=1: {why}");
            print_past_capture("SKIPPED", &why);
        }
    }
}

/// Prints `WITHHELD`, the test's name and the reason (`make test` counts these lines separately): the archive lists
/// what the test needs, and answers 404 for every version that it could use. No setting turns it into a failure. The
/// caller then leaves the test.
pub fn withheld(why: &str) {
    print_past_capture("WITHHELD", why);
}

/// Prints to the process's own standard error, past libtest's capture, so that a passing test shows the line as well.
fn print_past_capture(word: &str, why: &str) {
    let name = std::thread::current().name().unwrap_or("?").to_owned();
    // One line each, since lines are counted; an error is ignored, as standard error may be closed.
    let why = why.trim().replace('\n', "; ");
    let _ = writeln!(std::io::stderr().lock(), "{word} {name}: {why}");
}

/// Returns true if a test that cannot run here must fail.
pub fn require_all() -> bool {
    std::env::var_os("REQUIRE_ALL").is_some_and(|value| value == "1")
}

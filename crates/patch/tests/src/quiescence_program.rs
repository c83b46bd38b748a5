//! Programs of ours with quiescence points: compiled with libstillpoint, patched in each of its modes.

use crate::cli::Stillpoint;
use crate::victim::{Kind, Phase, Program, Victim, apply, revert};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Returns the directory of libstillpoint, shared and static; made once for this test.
#[track_caller]
pub fn libstillpoint() -> &'static Path {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    MADE.get_or_init(|| stillpoint_testing::recipes::libstillpoint().unwrap_or_else(|why| panic!("{why}")))
}

/// Compiles `crates/patch/tests/programs/NAME.c`, linked with libstillpoint.
#[track_caller]
pub fn program(name: &str) -> Program {
    let (include, link) = flags();
    let link: Vec<&str> = link.iter().map(String::as_str).collect();
    Program::build_as(name, Kind::Pie, &[&include], &link)
}

/// Returns flags for the compiler and for the linker.
#[track_caller]
pub fn flags() -> (String, Vec<String>) {
    let library = libstillpoint().display();
    let include = format!("-I{}", crate::workspace_root().join("crates/patch/runtime/include").display());
    (include, vec![format!("-L{library}"), "-lstillpoint".into(), format!("-Wl,-rpath,{library}")])
}

/// Adds a mode and a time-out to the call.
pub fn in_mode(call: Stillpoint, mode: &str, timeout: &str) -> Stillpoint {
    call.args(["--quiescence", mode, "--timeout", timeout])
}

/// Applies a patch with version 2 and reverts it, `count` times, in one mode.
#[track_caller]
pub fn there_and_back(victim: &mut Victim, patch: &Path, mode: &str, count: u32) {
    for cycle in 0..count {
        println!("{mode}: cycle {cycle} of {count}");
        victim.announce(Phase::Over(1, 2));
        in_mode(apply(patch, victim.pid()), mode, "60s").succeed();
        victim.assert_settled(2);
        victim.announce(Phase::Over(2, 1));
        in_mode(revert(victim.pid()), mode, "60s").succeed();
        victim.assert_settled(1);
    }
    victim.assert_running();
}

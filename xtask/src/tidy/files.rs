//! Files are opened in one place: what root reads and writes on request lies where other users have a part in it.

use super::lexer::{code_only, lines_outside_tests};
use super::{Finding, Tree};

/// Ways to open, make or change a file by its path.
const WAYS: [&str; 7] =
    ["std::fs", "File::open", "File::create", "OpenOptions", "DirBuilder", "rustix::fs::open", "openat"];
/// Packages whose commands root runs for others, by their folders.
const FOLDERS: [&str; 4] =
    ["crates/cli/src", "crates/kernel/engine/src", "crates/migrate/engine/src", "crates/patch/engine/src"];
/// Files that read the file systems of the kernel itself, to whose magic links the opener's rule does not apply, and are to go
/// through `stillpoint_host::kernel_files`.
const OF_THE_KERNEL: &[&str] = &[
    "crates/kernel/engine/src/apart.rs",
    "crates/kernel/engine/src/criu.rs",
    "crates/kernel/engine/src/passes.rs",
    "crates/kernel/engine/src/switch/guardian.rs",
    "crates/kernel/engine/src/switch/health.rs",
    "crates/kernel/engine/src/switch/region.rs",
    "crates/kernel/engine/src/switch/stays.rs",
    "crates/kernel/engine/src/switch/watchdog.rs",
    "crates/patch/engine/src/fleet.rs",
    "crates/patch/engine/src/prepare.rs",
];
/// Files that open others by paths of root's own, and are to go through the opener as well.
const BY_THEMSELVES: &[&str] = &[
    "crates/cli/src/measure.rs",
    "crates/cli/src/measure/postgres.rs",
    "crates/cli/src/patch/enable.rs",
    "crates/cli/src/patch/enabled.rs",
    "crates/cli/src/patch/exec_helper.rs",
    "crates/cli/src/patch/key.rs",
    "crates/cli/src/patch/refresh.rs",
    "crates/cli/src/patch/unit_file.rs",
    "crates/kernel/engine/src/checkpoint.rs",
    "crates/kernel/engine/src/derive.rs",
    "crates/kernel/engine/src/guard/keeper.rs",
    "crates/kernel/engine/src/image.rs",
    "crates/kernel/engine/src/journal.rs",
    "crates/kernel/engine/src/lazy/keeper.rs",
    "crates/kernel/engine/src/restore.rs",
    "crates/kernel/engine/src/store.rs",
    "crates/kernel/engine/src/switch/boot.rs",
    "crates/kernel/engine/src/switch/handover.rs",
    "crates/kernel/engine/src/switch/journal.rs",
    "crates/kernel/engine/src/switch/loader.rs",
    "crates/kernel/engine/src/switch/meeting.rs",
    "crates/kernel/engine/src/switch/obstacles.rs",
    "crates/kernel/engine/src/switch/phases.rs",
    "crates/kernel/engine/src/switch/reserve.rs",
    "crates/kernel/engine/src/switch/resume.rs",
    "crates/kernel/engine/src/switch/system.rs",
    "crates/kernel/engine/src/volatile.rs",
    "crates/migrate/engine/src/journal.rs",
    "crates/migrate/engine/src/recording.rs",
    "crates/patch/engine/src/debuggers.rs",
];

/// Only listed files open others by a path; all else goes through `stillpoint_host::trusted`, `stillpoint_host::file`
/// and `stillpoint_host::kernel_files`.
pub(super) fn opened_in_one_place(tree: &Tree) -> Vec<Finding> {
    opened_but_in(tree, &[OF_THE_KERNEL, BY_THEMSELVES].concat())
}

fn opened_but_in(tree: &Tree, listed: &[&str]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in FOLDERS.iter().flat_map(|folder| tree.rust_below(folder)).filter(|file| !file.is_test()) {
        let code = code_only(&file.text);
        let lines = lines_outside_tests(&code);
        let found = lines.iter().find(|(_, line)| WAYS.iter().any(|way| line.contains(way)));
        match (found, listed.contains(&file.path.as_str())) {
            (Some((number, _)), false) => {
                let text = "opens files by itself: take stillpoint_host::trusted, or list it in xtask's tidy/files.rs";
                findings.push(Finding::new(&file.path, *number, text));
            }
            (None, true) => findings.push(Finding::new(&file.path, 0, "take it out of the list in tidy/files.rs")),
            _ => {}
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_opens_others_is_found_and_one_that_does_not_is_taken_out() {
        let path = "crates/cli/src/patch/x.rs";
        for way in WAYS {
            let text = format!("//! std::fs\nfn f() {{ {way}; }}\n#[cfg(test)]\nmod tests {{}}\n");
            let tree = Tree::of_files([(path, text.as_str()), ("crates/measure/src/x.rs", "use std::fs;\n")]);
            let found = opened_but_in(&tree, &[]);
            assert_eq!(found.iter().map(|finding| finding.line).collect::<Vec<_>>(), [2], "{way}");
            assert_eq!(opened_but_in(&tree, &[path]), []);
        }
        let tests = "fn f() {}\n#[cfg(test)]\nmod tests {\n use std::fs;\n}\n";
        let tree = Tree::of_files([(path, tests)]);
        assert_eq!(opened_but_in(&tree, &[]), []);
        assert_eq!(opened_but_in(&tree, &[path]).len(), 1);
    }
}

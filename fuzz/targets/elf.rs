//! ELF reader of the differ: the target may be any file that an operator names.
#![no_main]

use libfuzzer_sys::fuzz_target;
use stillpoint_patch_differ::{TargetElf, place};

fuzz_target!(init: stillpoint_fuzz::seed(stillpoint_fuzz::elf_files), |input: &[u8]| {
    // The same rules read the unit: a file that is both exercises both readers.
    if let Ok(target) = TargetElf::parse(input, "input") {
        let _ = place(&target, "unit.c", input);
    }
});

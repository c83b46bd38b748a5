//! Comparison of the Rust mirror of the runtime's ABI with the C header.

use std::fmt::Write;
use std::path::Path;
use std::process::Command;
use stillpoint_patch_engine::abi;

/// Returns every size, offset and constant, by its name in C.
fn facts() -> Vec<(&'static str, u64)> {
    let mut facts = abi::facts();
    facts.extend([
        ("SP_CONTROL_VERSION", u64::from(abi::VERSION)),
        ("SP_THREADS_MAX", u64::from(abi::THREADS_MAX)),
        ("SP_PRIORITIES_MAX", u64::from(abi::PRIORITIES_MAX)),
        ("SP_NAME_MAX", abi::NAME_MAX as u64),
        ("SP_LOCAL", abi::Mode::Local as u64),
        ("SP_GROUP", abi::Mode::Group as u64),
        ("SP_GLOBAL", abi::Mode::Global as u64),
        ("SP_OTHERS", abi::Mode::Others as u64),
        ("SP_GATHERING", abi::GatherOutcome::Gathering as u64),
        ("SP_RELEASED", abi::GatherOutcome::Released as u64),
        ("SP_ABANDONED", abi::GatherOutcome::Abandoned as u64),
        ("SP_FREE", abi::ThreadState::Free as u64),
        ("SP_ACTIVE", abi::ThreadState::Active as u64),
        ("SP_PARKED", abi::ThreadState::Parked as u64),
        ("SP_INACTIVE", abi::ThreadState::Inactive as u64),
        ("SP_BLOCKED", abi::ThreadState::Blocked as u64),
        ("sizeof SP_CONTROL_MAGIC", abi::MAGIC.len() as u64),
        ("sizeof(uint32_t)", 4),
    ]);
    facts
}

#[test]
fn every_size_offset_and_constant_is_that_of_the_header() {
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("../runtime/include");
    let mut source =
        String::from("#include <stddef.h>\n#include <stdio.h>\n#include <stillpoint_abi.h>\nint main(void) {\n");
    for (name, _) in facts() {
        writeln!(source, "printf(\"%llu\\n\", (unsigned long long)({name}));").expect("a string grows");
    }
    source.push_str("fputs(SP_CONTROL_MAGIC, stdout);\n}\n");
    let dir = tempfile::tempdir().expect("make a directory");
    let (c, program) = (dir.path().join("facts.c"), dir.path().join("facts"));
    std::fs::write(&c, source).expect("write the program");
    let cc = Command::new("cc").arg("-I").arg(include).arg(&c).arg("-o").arg(&program).output().expect("run cc");
    assert!(cc.status.success(), "{}", String::from_utf8_lossy(&cc.stderr));
    let printed = Command::new(&program).output().expect("run the program").stdout;
    let printed = String::from_utf8(printed).expect("text");
    let mut lines = printed.lines();
    for (name, here) in facts() {
        let there: u64 = lines.next().and_then(|l| l.parse().ok()).expect("a number for each fact");
        assert_eq!(here, there, "{name}");
    }
    assert_eq!(lines.next().map(str::as_bytes), Some(&abi::MAGIC[..15]));
}

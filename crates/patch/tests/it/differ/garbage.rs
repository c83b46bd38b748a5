//! Damaged input: an answer or a refusal for any bytes, never a panic, and never much memory.

use std::process::Command;
use stillpoint_patch_differ::{Options, TargetElf, UnitInput, diff, exports, place};
use stillpoint_testing::random::Random;

const SOURCE: &str = r#"
#include <stdio.h>
static int calls;
static const char *const names[] = {"one", "two"};
__thread int depth;
__attribute__((noinline)) static int kind(int x)
{
	switch (x) {
	case 0: return puts("zero");
	case 1: return printf("%f", x * 1.5);
	case 2: return calls++;
	case 3: return depth++;
	case 4: return (int)(long)names[x & 1];
	default: return VALUE;
	}
}
int main(int argc, char **argv) { (void)argv; return kind(argc); }
"#;

/// Builds shipped, before and after object, and the target.
fn build() -> [Vec<u8>; 4] {
    let directory = tempfile::tempdir().expect("temporary directory");
    let at = |name: &str| directory.path().join(name);
    std::fs::write(at("unit.c"), SOURCE).expect("write the source");
    let cc = |args: &[&str]| {
        let status = Command::new("cc").current_dir(directory.path()).args(args).status().expect("run cc");
        assert!(status.success(), "cc {args:?}");
    };
    cc(&["-O2", "-g", "-DVALUE=7", "-c", "unit.c", "-o", "shipped.o"]);
    let sections = ["-O2", "-g", "-ffunction-sections", "-fdata-sections", "-c", "unit.c"];
    cc(&[&sections[..], &["-DVALUE=7", "-o", "before.o"]].concat());
    cc(&[&sections[..], &["-DVALUE=8", "-o", "after.o"]].concat());
    cc(&["shipped.o", "-o", "target"]);
    ["shipped.o", "before.o", "after.o", "target"].map(|name| std::fs::read(at(name)).expect("read what cc wrote"))
}

/// Damages a few bytes, mostly with harmful values, or truncates the end.
fn damage(random: &mut Random, bytes: &mut Vec<u8>) {
    for _ in 0..=random.below(6) {
        let at = random.index(bytes.len());
        match random.below(5) {
            0 => bytes[at] = random.below(256) as u8,
            1 => bytes[at] ^= 1 << random.below(8),
            2 => bytes.iter_mut().skip(at).take(8).for_each(|b| *b = 0xff),
            3 => bytes.iter_mut().skip(at).take(4).for_each(|b| *b = 0),
            _ => bytes.iter_mut().skip(at).take(8).for_each(|b| *b = 0x7f),
        }
    }
    if random.below(20) == 0 {
        bytes.truncate(random.index(bytes.len()));
    }
}

#[test]
fn damage_is_refused_and_never_panics() {
    let clean = build();
    let mut random = Random::new(0x5eed);
    let rounds = 2000;
    for round in 0..rounds {
        let mut bytes = clean.clone();
        let victim = random.index(4);
        damage(&mut random, &mut bytes[victim]);
        let [shipped, before, after, elf] = &bytes;
        println!("round {round}: damaged {victim}");
        let _ = exports(elf);
        if let Ok(target) = TargetElf::parse(elf, "target") {
            let _ = place(&target, "unit.c", shipped);
            let input = UnitInput { path: "unit.c", shipped, before, after, sources: None };
            let _ = diff(&target, &[input], &Options { name: "damage".to_owned(), ..Options::default() });
        }
    }
}

#[test]
fn headers_damaged_one_byte_at_a_time_never_panic() {
    let [shipped, before, after, elf] = build();
    for at in 0..64 {
        for value in [0, 0x7f, 0xff] {
            let mut target = elf.clone();
            target[at] = value;
            let _ = exports(&target);
            let _ = TargetElf::parse(&target, "target");
            let mut object = shipped.clone();
            object[at] = value;
            if let Ok(target) = TargetElf::parse(&elf, "target") {
                let _ = place(&target, "unit.c", &object);
            }
        }
    }
    let target = TargetElf::parse(&elf, "target").expect("the clean target");
    let input = UnitInput { path: "unit.c", shipped: &shipped, before: &before, after: &after, sources: None };
    let options = Options { name: "clean".to_owned(), ..Options::default() };
    assert!(diff(&target, &[input], &options).is_ok(), "undamaged input is a patch");
}

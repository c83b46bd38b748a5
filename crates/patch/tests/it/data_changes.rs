//! Patches that change initialised data, on a program whose threads compare all values with the version of their code.

use std::path::{Path, PathBuf};
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::kill_injection::{KillInstant, run, sample};
use stillpoint_patch_tests::quiescence_program::{flags, there_and_back};
use stillpoint_patch_tests::victim::{Kind, Phase, Program, Victim, apply, refused, revert, soak, status};
use stillpoint_patch_tests::wait;

const ALL_AT_ONCE: [&str; 2] = ["--quiescence", "stop"];

fn apply_data(patch: &Path, victim: &Victim) -> Stillpoint {
    apply(patch, victim.pid()).args(ALL_AT_ONCE)
}

fn revert_data(victim: &Victim) -> Stillpoint {
    revert(victim.pid()).args(ALL_AT_ONCE)
}

fn patch(program: &Program, to: u32) -> PathBuf {
    program.patch_with(to, &["--write-data"])
}

#[test]
fn tables_change_and_return() {
    for kind in [Kind::Pie, Kind::Executable] {
        let program = Program::build_as("tables", kind, &[], &[]);
        let without = program.builder(2, &program.dir().join("without.patch")).run();
        refused(&without, &["`limits`", "`ceilings`", "`labels`", "`handlers`", "try: --write-data"]);
        let patch = patch(&program, 2);
        let mut victim = program.start(&[]);
        refused(&apply(&patch, victim.pid()).run(), &["scope process", "--quiescence global, or stop"]);
        for _ in 0..2 {
            victim.announce(Phase::Over(1, 2));
            apply_data(&patch, &victim).succeed();
            victim.assert_settled(2);
            let told = status(victim.pid()).succeed().stdout;
            assert!(told.contains("limits") && !told.contains("has changed"), "{told}");
            victim.announce(Phase::Over(2, 1));
            revert_data(&victim).succeed();
            victim.assert_settled(1);
            victim.assert_no_residue();
            assert_eq!(writable_constants(&victim, program.elf()), 0, "constants are read-only again");
        }
    }
}

/// Threads that wait at their quiescence points when the data change.
#[test]
fn tables_change_at_quiescence_points() {
    let (include, link) = flags();
    let link: Vec<&str> = link.iter().map(String::as_str).collect();
    let program = Program::build_as("tables", Kind::Pie, &[&include, "-DPOINTS"], &link);
    let patch = patch(&program, 2);
    there_and_back(&mut program.start(&[]), &patch, "global", 2);
}

/// Counts the mappings of the file's constants that are writable: those before its code's end are never.
fn writable_constants(victim: &Victim, elf: &Path) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", victim.pid())).expect("maps");
    let of_file = maps.lines().filter(|line| line.ends_with(&*elf.to_string_lossy()));
    // one mapping of data, in which nothing is read-only after relocation
    of_file.filter(|line| line.contains(" rw-p ")).count() - 1
}

#[test]
fn a_second_patch_changes_what_the_first_wrote() {
    let program = Program::build("tables");
    let first = patch(&program, 2);
    let second = program.patch_on_top_with(&first, 2, 3, &["--write-data"]);
    let mut victim = program.start(&[]);
    // it compares with what the first one wrote
    refused(&apply_data(&second, &victim).run(), &["is based on"]);
    victim.announce(Phase::Over(1, 2));
    apply_data(&first, &victim).succeed();
    victim.announce(Phase::Over(2, 3));
    apply_data(&second, &victim).succeed();
    victim.assert_settled(3);
    victim.announce(Phase::Over(3, 2));
    revert_data(&victim).succeed();
    victim.assert_settled(2);
    victim.announce(Phase::Over(2, 1));
    revert_data(&victim).succeed();
    victim.assert_settled(1);
}

/// Makes the program write to a table, and waits until it has.
fn touch(victim: &mut Victim) {
    victim.command();
    wait::until("the program to write", || (!victim.is_commanded()).then_some(()));
    victim.assert_answering();
}

#[test]
fn values_that_the_program_has_written_stay() {
    let program = Program::build("tables");
    let patch = patch(&program, 2);
    let mut victim = program.start(&[]);
    touch(&mut victim);
    refused(&apply_data(&patch, &victim).run(), &["`touched`", "its initial value", "try: "]);
    victim.assert_settled(1);

    let mut victim = program.start(&[]);
    victim.announce(Phase::Over(1, 2));
    apply_data(&patch, &victim).succeed();
    touch(&mut victim);
    victim.assert_settled(2);
    refused(&revert_data(&victim).run(), &["`touched`", "what patch tables-1-2 wrote", "try: "]);
    victim.assert_settled(2);
    let told = status(victim.pid()).succeed().stdout;
    assert!(told.contains("tables-1-2") && told.contains("has changed touched"), "{told}");
}

/// Number of writes before the end of a run that are killed in the short form: those of the data, and those around them.
const LAST_WRITES: u64 = 16;

/// Kills the tool before writes into the program's memory; the threads see one version at all times, and the next call completes or
/// undoes the change.
fn killed_before_writes(back: bool) {
    let program = Program::build("tables");
    let patch = patch(&program, 2);
    let mut victim = program.start(&["3"]);
    let mut kill = |moment: KillInstant, finish: bool| {
        if back {
            victim.announce(Phase::Over(1, 2));
            apply_data(&patch, &victim).succeed();
            victim.assert_settled(2);
        }
        victim.announce(if back { Phase::Over(2, 1) } else { Phase::Over(1, 2) });
        let tool = if back { revert_data(&victim) } else { apply_data(&patch, &victim) };
        let ending = run(&tool, moment);
        println!("{moment:?}: {ending}");
        victim.assert_answering();
        victim.assert_no_residue();
        status(victim.pid()).succeed();
        victim.announce(Phase::Either(1, 2));
        if finish {
            apply_data(&patch, &victim).succeed();
            victim.assert_settled(2);
            victim.announce(Phase::Over(2, 1));
        }
        revert_data(&victim).succeed();
        victim.assert_settled(1);
        victim.assert_no_residue();
        ending
    };
    // the first apply writes the patch as well, which later ones find in memory
    kill(KillInstant::Never, false);
    let whole = kill(KillInstant::Never, false);
    assert_eq!(whole.run.code, Some(0), "{whole}");
    let first = if soak() { 1 } else { whole.writes.saturating_sub(LAST_WRITES) };
    let mut killed = 0;
    for n in first..=whole.writes {
        killed += u64::from(kill(KillInstant::BeforeWrite(n), n % 2 == 0).killed);
    }
    assert!(killed >= LAST_WRITES / 2, "only {killed} of the runs were killed before their end");
    for n in sample(whole.syscalls, 4) {
        kill(KillInstant::AfterSyscalls(n), n % 2 == 0);
    }
}

#[test]
fn killed_before_the_writes_of_an_apply() {
    killed_before_writes(false);
}

#[test]
fn killed_before_the_writes_of_a_revert() {
    killed_before_writes(true);
}

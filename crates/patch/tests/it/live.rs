//! One directive program, patched while it runs.

use crate::differ::driver::{self, Built, Case, Live, Server, Variant};
use std::path::PathBuf;
use stillpoint_patch_differ::{Outcome, Refusal};
use stillpoint_patch_tests::cli::{Run, Stillpoint};
use stillpoint_patch_tests::{patch_calls, skip};

/// Number of variants of a case, unless all are requested: the differ's own tests use more.
const VARIANTS: usize = 1;

/// Runs one program in its variants; panics with every failure and the command that repeats it.
pub(crate) fn check(name: &str) {
    let case = driver::read(name);
    if let Some(flag) = driver::lacking(&case) {
        skip!("this processor has no {flag}");
    }
    let variants = driver::variants(&case, VARIANTS);
    println!("COUNT ways to compile {}", variants.len());
    let results = variants.into_iter().filter_map(|variant| {
        let why = check_variant(&case, &variant).err()?;
        Some(format!("{variant}: {why}"))
    });
    let failures: Vec<String> = results.collect();
    assert!(
        failures.is_empty(),
        "{name} ({})\n{}\nrerun: PROGRAMS_ALL=1 cargo test -p stillpoint-patch-tests --test it -- --exact {}::{name}",
        case.rule,
        failures.join("\n"),
        if case.is_cxx() { "programs_cxx_live" } else { "programs_live" },
    );
}

fn check_variant(case: &Case, variant: &Variant) -> Result<(), String> {
    let built = Built::new(case, variant);
    let base = driver::diff_base(case, &built).map(|made| write(&built, "base.patch", made)).transpose()?;
    let file = write(&built, "case.patch", driver::diff(case, &built))?;

    let mut server = Server::start(&built.program);
    let pid = i32::try_from(server.pid()).map_err(|e| e.to_string())?;
    expect("before the patch", &mut server, &case.before)?;
    match &case.live {
        Live::Yes => (),
        Live::Refused(why) => return given_up(case, &mut server, &patch_calls::apply(&file, pid).run(), &[3], why),
        Live::Busy(function) => {
            let run = patch_calls::apply(&file, pid).args(["--timeout", "2s"]).run();
            return given_up(case, &mut server, &run, &[3, 4], function);
        }
    }
    // data change for all threads at once
    let how: &[&str] = if case.data.is_empty() { &[] } else { &["--quiescence", "stop"] };
    if let Some(base) = &base {
        exits_with_0(&patch_calls::apply(base, pid))?;
        expect("under the first patch", &mut server, &case.base)?;
    }
    exits_with_0(&patch_calls::apply(&file, pid).args(how.iter().copied()))?;
    expect("under the patch", &mut server, &case.after)?;
    let again = exits_with_0(&patch_calls::apply(&file, pid).args(how.iter().copied()))?;
    if !format!("{}{}", again.stdout, again.stderr).contains("already") {
        return Err(format!("a second apply does not say that it is already applied: {again}"));
    }
    exits_with_0(&patch_calls::revert(pid).args(how.iter().copied()))?;
    expect("after the revert", &mut server, &case.reverted)
}

/// Writes the patch to a file.
fn write(built: &Built, name: &str, made: Result<Outcome, Vec<Refusal>>) -> Result<PathBuf, String> {
    let patch = match made {
        Ok(Outcome::Patch(patch)) => patch,
        other => return Err(format!("the differ makes no patch: {other:?}")),
    };
    let file = built.root().join(name);
    let bytes = stillpoint_patch_format::encode(&patch).map_err(|e| e.to_string())?;
    std::fs::write(&file, bytes).map_err(|e| e.to_string())?;
    Ok(file)
}

/// Asserts that the engine aborts with one of the `codes` and reports `why`, and that the program runs as before.
fn given_up(case: &Case, server: &mut Server, run: &Run, codes: &[i32], why: &str) -> Result<(), String> {
    if !run.code.is_some_and(|code| codes.contains(&code)) || !run.stderr.contains(why) {
        return Err(format!("expected exit {codes:?} and {why:?}: {run}"));
    }
    expect("after the patch was given up", server, &case.reverted)
}

fn exits_with_0(call: &Stillpoint) -> Result<Run, String> {
    let run = call.run();
    if run.code == Some(0) { Ok(run) } else { Err(run.to_string()) }
}

fn expect(when: &str, server: &mut Server, answers: &[String]) -> Result<(), String> {
    let found = server.ask_all(answers);
    (found == answers).then_some(()).ok_or_else(|| format!("{when} the answers are {found:?}, expected {answers:?}"))
}

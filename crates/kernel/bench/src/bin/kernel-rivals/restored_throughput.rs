//! Throughput of a program after its restore: it reads words of its memory at random, and had the memory in huge pages.

use crate::{ended, has_ended, lines_of, number, spread, start};
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;
use stillpoint_patch_tests::checkpointed_server::CheckpointedServer;
use stillpoint_patch_tests::packages::Binary;
use stillpoint_patch_tests::wait;
use tempfile::TempDir;

/// Number of the program's lines, four a second, of which the median counts.
const LINES: usize = 8;
/// Lines after the end of the restore that do not count: the caches fill again.
const WARM_UP_LINES: usize = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RestoreMethod {
    CriuAtOnce,
    CriuOnDemand,
    Ours,
}

impl RestoreMethod {
    const ALL: [RestoreMethod; 3] = [RestoreMethod::CriuAtOnce, RestoreMethod::CriuOnDemand, RestoreMethod::Ours];

    fn name(self) -> &'static str {
        match self {
            RestoreMethod::CriuAtOnce => "criu, all memory before it runs",
            RestoreMethod::CriuOnDemand => "criu lazy-pages",
            RestoreMethod::Ours => "stillpoint",
        }
    }
}

/// Prints the number of reads a second before and after, each tool in turns.
pub(crate) fn table(criu: &Path, mib: u64, rounds: u64) {
    let dir = TempDir::new().expect("a directory");
    let program = compiled(dir.path());
    let mut all: Vec<(RestoreMethod, f64, f64)> = Vec::new();
    for round in 0..rounds {
        for way in RestoreMethod::ALL {
            let (before, after) = once(way, criu, &program, mib);
            eprintln!("round {}: {}: {before:.2} and {after:.2} million reads a second", round + 1, way.name());
            all.push((way, before, after));
        }
    }
    println!(
        "\nA program with {mib} MiB in huge pages that reads words of it at random, each where the last one says: millions of reads \
         a second before it was taken, and when all of its memory is there again. {rounds} rounds in turns, medians (smallest \
         to largest).\n"
    );
    println!("| | before | after | kept, % |");
    println!("|---|---|---|---|");
    for way in RestoreMethod::ALL {
        let of = |value: fn(f64, f64) -> f64| {
            let values =
                all.iter().filter(|(found, ..)| *found == way).map(|(_, before, after)| value(*before, *after));
            spread(values.collect())
        };
        let ((before, ..), (after, ..)) = (of(|before, _| before), of(|_, after| after));
        let (kept, least, most) = of(|before, after| after / before * 100.0);
        println!("| {} | {before:.2} | {after:.2} | {kept:.0} ({least:.0} to {most:.0}) |", way.name());
    }
}

fn once(way: RestoreMethod, criu: &Path, program: &Binary, mib: u64) -> (f64, f64) {
    let dir = TempDir::new().expect("a directory");
    let mut taken = CheckpointedServer::start(program, &[OsString::from(mib.to_string())], dir.path());
    let out = dir.path().join("out");
    let lines = || -> Vec<f64> {
        let text = fs::read_to_string(&out).unwrap_or_default();
        // the last line may be incomplete
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole
            .lines()
            .map(|line| line.split(' ').next().and_then(|number| number.parse().ok()).expect("a rate"))
            .collect()
    };
    let enough = |from: usize| wait::until("it to read", || lines().get(from..from + LINES).map(<[f64]>::to_vec));
    let (before, ..) = spread(enough(WARM_UP_LINES));
    let (image, pid) = (taken.images().join("image"), taken.pid().to_string());
    let begin = |verb: &str, more: &[&str]| start(criu, &image, verb, more);
    if way == RestoreMethod::Ours {
        let (_, restored) = taken.there_and_back(criu, "image");
        let keeper = number(&lines_of(&restored), "restored", "keeper");
        wait::until("all memory to come", || has_ended(keeper).then_some(()));
    } else {
        fs::create_dir(&image).expect("make a directory");
        ended(begin("dump", &["-t", &pid, "--shell-job"]), &image.join("dump.log"));
        taken.until_gone();
        let daemon = (way == RestoreMethod::CriuOnDemand).then(|| begin("lazy-pages", &[]));
        if daemon.is_some() {
            wait::until("criu's daemon", || image.join("lazy-pages.socket").exists().then_some(()));
        }
        let lazy: &[&str] = if daemon.is_some() { &["--lazy-pages"] } else { &[] };
        ended(begin("restore", &[&["-d", "--shell-job"], lazy].concat()), &image.join("restore.log"));
        daemon.into_iter().for_each(|daemon| ended(daemon, &image.join("lazy-pages.log")));
    }
    let (after, ..) = spread(enough(lines().len() + WARM_UP_LINES));
    (before, after)
}

fn compiled(dir: &Path) -> Binary {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin/kernel-rivals/reads.c");
    let path = dir.join("reads");
    let built = Command::new("cc").args(["-O2", "-o"]).args([&path, &source]).status();
    assert!(built.is_ok_and(|status| status.success()), "cc builds {}", source.display());
    Binary { path, libraries: Vec::new() }
}

//! Processor time of a patch's build, as a ratio to the full build of its package in the same clean root.
//!
//! The patch is the reverse of the newest diff of the package's series that can be built so. A cache of its own keeps sources and roots; what is
//! compiled is removed before each cold build.

use crate::results::{Section, number};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde::Serialize;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use stillpoint_patch_bench::operation::Spread;
use stillpoint_patch_bench::package_diff::{changes_code, write_reversed};
use stillpoint_patch_builder::{Builder, Cache, DebianRequest, Parts, Shipped, ShippedAs, SourcePackage, Statement};
use stillpoint_patch_tests::cli::Stillpoint;

/// Kinds of entries of the cache that a first build of a version makes, besides its source and its root.
const FIRST: [&str; 4] = ["built", "tree", "object", "text"];
/// Those of them that each further change to the version makes.
const FURTHER: [&str; 3] = ["tree", "object", "text"];

/// Package and the program to patch: `PACKAGE/PROGRAM`.
pub(crate) const DEFAULT: [&str; 2] = ["memcached/memcached", "cjson/libcjson.so.1"];

#[derive(Serialize)]
struct Measurement {
    package: String,
    version: String,
    diff: String,
    full_s: Spread,
    cold_s: Spread,
    further_s: Spread,
    warm_s: Spread,
}

/// Measures builds for some packages, each `rounds` times.
pub(crate) fn builds(packages: &[String], rounds: usize) -> Result<Section, String> {
    let columns = ["package", "full build, s", "first patch", "another change, same version", "the same again"];
    let title = "Processor time of a patch's build, as a ratio to the package's full build: median (min to max)";
    let mut section = Section::new("builds", title, &columns);
    let mut all = Vec::new();
    for package in packages {
        let measured = measure(package, rounds)?;
        section.rows.push(row(&measured));
        section.notes.push(format!("{}: the reverse of {}.", measured.package, measured.diff));
        all.push(measured);
    }
    section.notes.push(
        "Full build: `DEB_BUILD_OPTIONS=nocheck dpkg-buildpackage -b` in the root that the builder made.".to_owned(),
    );
    section.raw(&all);
    Ok(section)
}

fn row(measured: &Measurement) -> Vec<String> {
    let full = &measured.full_s;
    let ratio = |spread: &Spread| {
        let of = |seconds: f64| number(seconds / full.median);
        format!("{} ({} to {})", of(spread.median), of(spread.min), of(spread.max))
    };
    vec![
        format!("{} {}", measured.package, measured.version),
        format!("{} ({} to {})", number(full.median), number(full.min), number(full.max)),
        ratio(&measured.cold_s),
        ratio(&measured.further_s),
        ratio(&measured.warm_s),
    ]
}

fn measure(package: &str, rounds: usize) -> Result<Measurement, String> {
    let (name, program) = package.split_once('/').ok_or_else(|| format!("{package} is not PACKAGE/PROGRAM"))?;
    let place = stillpoint_host::cache::default_root().map_err(|error| error.to_string())?.join("costs");
    let tell = |event: stillpoint_patch_builder::Event| eprintln!("  {event}");
    let builder = Builder::new(Cache::at(&place).map_err(|error| error.to_string())?, jobs(), &tell);
    let source = builder.fetch_source(name, None, Parts::SourceAndBinaries).map_err(|error| error.to_string())?;
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let (diff, reversed) = change(&builder, &source, program, directory.path())?;
    let build = || {
        Stillpoint::new()
            .args(["patch", "build", "--dry-run", "--debian"])
            .arg(format!("{name}={}", source.version()))
            .arg("--diff")
            .arg(&reversed)
            .arg("--target")
            .arg(program)
            .arg("--cache")
            .arg(&place)
            .succeed();
    };
    let without = |kinds: &[&str]| {
        kinds.iter().for_each(|kind| drop(fs::remove_dir_all(place.join(kind))));
        processor_time(build)
    };
    println!("{name} {}: reverse of {diff}", source.version());
    let (mut full, mut cold, mut further, mut warm) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        full.push(full_build(&place, &source)?);
        cold.push(without(&FIRST));
        further.push(without(&FURTHER));
        warm.push(without(&[]));
    }
    let [full_s, cold_s, further_s, warm_s] = [full, cold, further, warm].map(Spread::of);
    let version = source.version().to_owned();
    Ok(Measurement { package: name.to_owned(), version, diff, full_s, cold_s, further_s, warm_s })
}

fn jobs() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Finds the newest diff of the series whose reverse is a patch of the program; returns its name and the file.
fn change(
    builder: &Builder,
    source: &SourcePackage,
    program: &str,
    directory: &Path,
) -> Result<(String, PathBuf), String> {
    for diff in source.series.diffs.iter().rev().filter(|diff| changes_code(&diff.text)) {
        let file = write_reversed(directory, diff)?;
        let request = DebianRequest {
            package: source.name().to_owned(),
            version: Some(source.version().to_owned()),
            quilt: Vec::new(),
            diffs: vec![file.clone()],
            on_top_of: Vec::new(),
            shipped: ShippedAs::Series(Shipped::Full),
            integrated: None,
            names: Vec::new(),
            binary: Some(PathBuf::from(program)),
            is_partial: false,
        };
        match builder.build_debian(&request, &Statement::default()) {
            Ok(built) if built.patch.is_some() => return Ok((diff.name.clone(), file)),
            Ok(_) => {}
            Err(error) => eprintln!("  {}: {error}", diff.name),
        }
    }
    Err(format!("no diff of {} can be built for {program} in reverse", source.name()))
}

/// Returns the processor time of children that have ended during `work`, in seconds.
fn processor_time(work: impl FnOnce()) -> f64 {
    let now = || {
        let usage = getrusage(UsageWho::RUSAGE_CHILDREN).expect("children have usage");
        (usage.user_time().num_microseconds() + usage.system_time().num_microseconds()) as f64 / 1e6
    };
    let before = now();
    work();
    now() - before
}

/// Builds the package by its own rules in the clean root; returns the processor time in seconds.
fn full_build(cache: &Path, source: &SourcePackage) -> Result<f64, String> {
    let named = |kind: &str, start: String| {
        let entries = fs::read_dir(cache.join(kind)).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_it =
            |path: &PathBuf| path.is_dir() && path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&start));
        entries.into_iter().find(is_it).ok_or_else(|| format!("the cache has no {kind} of {start}"))
    };
    let root = named("root", format!("{}-", source.name()))?;
    let files = named("source", format!("{}_{}", source.name(), source.version().replace([':', '/'], "%")))?;
    let description = fs::read_dir(&files).into_iter().flatten().flatten().map(|entry| entry.path());
    let description = description.into_iter().find(|path| path.extension().is_some_and(|ext| ext == "dsc"));
    let scratch = tempfile::tempdir_in(cache).map_err(|error| error.to_string())?;
    let tree = scratch.path().join("tree");
    let mut unpack = Command::new("dpkg-source");
    unpack.args(["--no-check", "--extract"]).arg(description.ok_or("the source has no description")?).arg(&tree);
    run(&mut unpack, "unpack the source")?;
    let script = "mount --bind \"$1\" \"$0/build\" && mount -t proc proc \"$0/proc\" && mount --rbind /dev \"$0/dev\" \
         && exec chroot \"$0\" sh -c 'cd /build/tree && exec dpkg-buildpackage -b -d --no-sign'";
    let mut build = Command::new("unshare");
    build.args(["--mount", "--net", "--pid", "--fork", "--kill-child", "--propagation", "private", "sh", "-c", script]);
    build.arg(&root).arg(scratch.path()).env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    build.env("LC_ALL", "C.UTF-8").env("HOME", "/nonexistent");
    build.env("DEB_BUILD_OPTIONS", format!("nocheck parallel={}", jobs())).env("DEB_BUILD_PROFILES", "nocheck");
    fs::create_dir_all(root.join("build")).map_err(|error| error.to_string())?;
    let mut result = Ok(());
    let seconds = processor_time(|| result = run(&mut build, "build the package"));
    result.map(|()| seconds)
}

fn run(command: &mut Command, what: &str) -> Result<(), String> {
    let output = command.stdin(Stdio::null()).output().map_err(|error| format!("{what}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let lines: Vec<&str> = text.lines().collect();
    Err(format!("{what}: {}\n{}", output.status, lines[lines.len().saturating_sub(30)..].join("\n")))
}

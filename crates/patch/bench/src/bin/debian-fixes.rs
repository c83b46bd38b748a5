//! Diffs of Debian's source packages, each built to a live patch of the programs that the packages ship: what the
//! builder makes of software that it was not written with.
//!
//! A diff is built in reverse, against the newest program that the archive serves: the running code has the fix, the
//! patch takes it out. That touches the same functions and types as the fix. Only members of structures differ: what
//! the fix adds, its reverse removes.
//!
//! usage: debian-fixes LIST STATE PAGE [PACKAGE...]
//!
//! `LIST` has a line for each package: its name and the programs to try. Results are kept in the directory `STATE`, one
//! file for each version of a package; a run goes on where the one before was ended. Without packages, all.

use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;
use stillpoint_patch_builder::{
    Builder, Cache, DebianRequest, Diff, Error, Parts, Shipped, ShippedAs, SourcePackage, Statement, Verdict,
};

/// Result for one diff, from the best to the worst: the best one of several programs counts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Outcome {
    /// A patch of this number of functions.
    Built { program: String, functions: usize },
    /// Code and reason.
    Refused { code: String, reason: String },
    /// The builder failed.
    Failed { reason: String },
    /// Some program reads the files, and its code stays the same.
    SameCode,
    /// Provably no part of the programs.
    NoPart,
    /// The reverse cannot be made: later diffs of the series change the same lines.
    NotReversible { reason: String },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Row {
    diff: String,
    fixes_cve: bool,
    seconds: f64,
    outcome: Outcome,
}

fn main() {
    if let Err(error) = run() {
        eprintln!("debian-fixes: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [list, state, page, only @ ..] = &arguments[..] else {
        return Err("usage: debian-fixes LIST STATE PAGE [PACKAGE...]".into());
    };
    let text = fs::read_to_string(list).map_err(|error| format!("{list}: {error}"))?;
    fs::create_dir_all(state).map_err(|error| format!("{state}: {error}"))?;
    let packages: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or("").split_whitespace().collect())
        .filter(|words: &Vec<&str>| !words.is_empty())
        .collect();
    for words in packages.iter().filter(|words| only.is_empty() || only.iter().any(|name| name == words[0])) {
        if let Err(error) = package(words[0], &words[1..], Path::new(state)) {
            eprintln!("{}: {error}", words[0]);
            store(&Path::new(state).join(format!("{}.failed", words[0])), &error)?;
        }
    }
    fs::write(page, render(Path::new(state), &packages)?).map_err(|error| format!("{page}: {error}"))
}

fn package(name: &str, programs: &[&str], state: &Path) -> Result<(), String> {
    let report = |event: stillpoint_patch_builder::Event| eprintln!("  {event}");
    let cache = Cache::open().map_err(|error| error.to_string())?;
    let builder = Builder::new(cache, 2, &report);
    let begun = Instant::now();
    let source = builder.fetch_source(name, None, Parts::SourceAndBinaries).map_err(|error| error.to_string())?;
    let file = state.join(format!("{name}_{}.json", source.version().replace([':', '/'], "%")));
    let mut rows: Vec<Row> =
        fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    let known: BTreeSet<String> = rows.iter().map(|row| row.diff.clone()).collect();
    let diffs: Vec<(usize, &Diff)> =
        source.series.diffs.iter().enumerate().filter(|(_, diff)| changes_code(diff)).collect();
    eprintln!("{name} {}: {} diffs of code", source.version(), diffs.len());
    let _ = fs::remove_file(state.join(format!("{name}.failed")));
    for (index, diff) in diffs.into_iter().filter(|(_, diff)| !known.contains(&diff.name)) {
        let begin = if rows.is_empty() { begun } else { Instant::now() };
        let outcome = outcome(&builder, &source, index, programs)?;
        eprintln!("{name} {}: {outcome:?}", diff.name);
        let seconds = begin.elapsed().as_secs_f64();
        rows.push(Row { diff: diff.name.clone(), fixes_cve: !diff.cves.is_empty(), seconds, outcome });
        store(&file, &rows)?;
    }
    store(&file, &rows)
}

fn store(path: &Path, value: &impl Serialize) -> Result<(), String> {
    let text = serde_json::to_vec_pretty(value).map_err(|error| error.to_string())?;
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

fn changes_code(diff: &Diff) -> bool {
    const SUFFIXES: [&str; 12] = ["c", "cc", "cpp", "cxx", "h", "hh", "hpp", "hxx", "S", "y", "l", "inc"];
    let text = String::from_utf8_lossy(&diff.text);
    let files = text.lines().filter_map(|line| line.strip_prefix("+++ ")).filter_map(|rest| rest.split('\t').next());
    files.map(Path::new).any(|file| file.extension().is_some_and(|e| SUFFIXES.contains(&e.to_string_lossy().as_ref())))
}

/// Builds the reverse of a diff; where later diffs need it, on top of their reverse.
fn outcome(builder: &Builder, source: &SourcePackage, index: usize, programs: &[&str]) -> Result<Outcome, String> {
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let diffs = &source.series.diffs;
    let reversed = write_reversed(directory.path(), &diffs[index])?;
    let mut best: Option<Outcome> = None;
    for program in programs {
        let mut request = DebianRequest {
            package: source.name().to_owned(),
            version: Some(source.version().to_owned()),
            quilt: Vec::new(),
            diffs: vec![reversed.clone()],
            on_top_of: Vec::new(),
            shipped: ShippedAs::Series(Shipped::Full),
            integrated: None,
            names: Vec::new(),
            is_partial: false,
            binary: Some(PathBuf::from(program)),
        };
        let mut found = of(builder, &request, program);
        let needs_later = |found: &Outcome| match found {
            Outcome::NotReversible { .. } | Outcome::Failed { .. } => true,
            Outcome::Refused { code, .. } => code == "unresolved-symbol",
            _ => false,
        };
        // what a later diff of the series changes or uses goes first
        if needs_later(&found) {
            for diff in diffs[index + 1..].iter().rev().filter(|diff| changes_code(diff)) {
                request.on_top_of.push(write_reversed(directory.path(), diff)?.display().to_string());
            }
            let later = of(builder, &request, program);
            if !matches!(later, Outcome::NotReversible { .. } | Outcome::Failed { .. }) {
                found = later;
            }
        }
        best = Some(best.map_or(found.clone(), |best| best.min(found)));
        if matches!(best, Some(Outcome::Built { .. } | Outcome::NotReversible { .. })) {
            break;
        }
    }
    best.ok_or_else(|| "the list names no program".to_owned())
}

fn of(builder: &Builder, request: &DebianRequest, program: &str) -> Outcome {
    let first = |text: String| text.lines().map(str::trim).collect::<Vec<_>>().join(" ").chars().take(400).collect();
    match builder.build_debian(request, &Statement::default()) {
        Ok(built) => match built.patch {
            Some(patch) => Outcome::Built { program: program.to_owned(), functions: patch.functions.len() },
            None if built.report.files.iter().any(|file| file.verdict == Verdict::NoDifference) => Outcome::SameCode,
            None => Outcome::NoPart,
        },
        Err(Error::Refused(refusals)) => Outcome::Refused {
            code: refusals.first().map_or_else(String::new, |refusal| refusal.code().to_owned()),
            reason: first(Error::Refused(refusals).to_string()),
        },
        Err(error @ Error::ChangesBuild { .. }) => {
            Outcome::Refused { code: "changes-build".into(), reason: first(error.to_string()) }
        }
        Err(error @ Error::NotInTarget { .. }) => {
            Outcome::Refused { code: "not-in-target".into(), reason: first(error.to_string()) }
        }
        Err(error @ Error::Unaccounted { .. }) => {
            Outcome::Refused { code: "unaccounted".into(), reason: first(error.to_string()) }
        }
        Err(error @ Error::DoesNotApply { .. }) => Outcome::NotReversible { reason: first(error.to_string()) },
        Err(error) => Outcome::Failed { reason: first(error.to_string()) },
    }
}

fn write_reversed(directory: &Path, diff: &Diff) -> Result<PathBuf, String> {
    let path = directory.join(diff.name.replace('/', "%"));
    fs::write(&path, reversed(&diff.text)).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(path)
}

/// Exchanges the two sides of a unified diff.
fn reversed(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    // lines of the present hunk that are still to come, on the old and on the new side
    let mut left = (0usize, 0usize);
    let mut header: Option<Vec<u8>> = None;
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        if left != (0, 0) {
            let (kind, rest) = line.split_first().unwrap_or((&b' ', b""));
            let other = match kind {
                b'-' => (left.0 = left.0.saturating_sub(1), b'+').1,
                b'+' => (left.1 = left.1.saturating_sub(1), b'-').1,
                b'\\' => b'\\',
                _ => {
                    left = (left.0.saturating_sub(1), left.1.saturating_sub(1));
                    *kind
                }
            };
            out.push(other);
            out.extend_from_slice(rest);
        } else if line.starts_with(b"--- ") {
            header = Some(line[4..].to_vec());
        } else if let (true, Some(old)) = (line.starts_with(b"+++ "), header.take()) {
            out.extend([b"--- ", &line[4..], b"+++ ", &old[..]].concat());
        } else if let Some((old, new, rest)) = hunk(line) {
            left = (lines_of(old), lines_of(new));
            out.extend(format!("@@ -{new} +{old} @@{rest}").into_bytes());
        } else if line.starts_with(b"\\") {
            out.extend_from_slice(line);
        }
    }
    out
}

/// Splits `@@ -OLD +NEW @@REST`.
fn hunk(line: &[u8]) -> Option<(&str, &str, &str)> {
    let rest = str::from_utf8(line).ok()?.strip_prefix("@@ -")?;
    let (old, rest) = rest.split_once(" +")?;
    let (new, rest) = rest.split_once(" @@")?;
    Some((old, new, rest))
}

fn lines_of(range: &str) -> usize {
    range.split_once(',').map_or(Some(1), |(_, count)| count.parse().ok()).unwrap_or(0)
}

fn render(state: &Path, packages: &[Vec<&str>]) -> Result<String, String> {
    let mut table = String::from(
        "| package | version | diffs | built | refused | same code | no part | failed | not reversible |\n|---|---|---|---|---|---|---|---|---|\n",
    );
    let (mut details, mut codes) = (String::new(), BTreeMap::<String, usize>::new());
    let mut total = [0usize; 7];
    for words in packages {
        let name = words[0];
        let mut files: Vec<PathBuf> =
            fs::read_dir(state).map_err(|error| error.to_string())?.flatten().map(|e| e.path()).collect();
        files.retain(|path| {
            path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&format!("{name}_")))
        });
        files.sort();
        let Some(file) = files.last() else {
            let why = fs::read_to_string(state.join(format!("{name}.failed"))).unwrap_or_else(|_| "not run".into());
            let _ = writeln!(
                table,
                "| {name} | {} | | | | | | | |",
                why.replace(['\n', '|'], " ").chars().take(120).collect::<String>()
            );
            continue;
        };
        let rows: Vec<Row> = serde_json::from_slice(&fs::read(file).map_err(|error| error.to_string())?)
            .map_err(|error| format!("{}: {error}", file.display()))?;
        let version =
            file.file_stem().unwrap_or_default().to_string_lossy().replace(&format!("{name}_"), "").replace('%', ":");
        let mut counts = [0usize; 7];
        counts[0] = rows.len();
        for row in &rows {
            let (column, why) = match &row.outcome {
                Outcome::Built { .. } => (1, None),
                Outcome::Refused { code, reason } => {
                    *codes.entry(code.clone()).or_default() += 1;
                    (2, Some(format!("refused: {reason}")))
                }
                Outcome::SameCode => (3, None),
                Outcome::NoPart => (4, None),
                Outcome::Failed { reason } => (5, Some(format!("FAILED: {reason}"))),
                Outcome::NotReversible { .. } => (6, None),
            };
            counts[column] += 1;
            if let Some(why) = why {
                let short: String = why.replace(['\n', '|'], " ").chars().take(240).collect();
                let _ = writeln!(details, "| {name} | {} | {short} |", row.diff);
            }
        }
        let cells: Vec<String> = counts.iter().map(usize::to_string).collect();
        let _ = writeln!(table, "| {name} | {version} | {} |", cells.join(" | "));
        counts.iter().zip(&mut total).for_each(|(one, all)| *all += one);
    }
    let cells: Vec<String> = total.iter().map(usize::to_string).collect();
    let _ = writeln!(table, "| all | | {} |", cells.join(" | "));
    let code = total[1] + total[2] + total[5];
    let share = 100.0 * total[1] as f64 / code.max(1) as f64;
    let kinds: Vec<String> = codes.iter().map(|(code, count)| format!("{code} {count}")).collect();
    Ok(format!(
        "`experiments/debian-fixes`: each diff in reverse against the newest program that the archive serves. Of {code} diffs that change \
         code of a program, {} were built ({share:.1} %). Refusals: {}.\n\n{table}\n| package | diff | why not |\n|---|---|---|\n{details}",
        total[1],
        kinds.join(", "),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_sides_are_exchanged() {
        let text =
            b"Subject: x\n--- a/one.c\n+++ b/one.c\n@@ -1,3 +1,2 @@ f()\n a\n-b\n--- c\n+d\n@@ -9 +8 @@\n-x\n+y\n";
        let back = b"--- b/one.c\n+++ a/one.c\n@@ -1,2 +1,3 @@ f()\n a\n+b\n+-- c\n-d\n@@ -8 +9 @@\n+x\n-y\n";
        assert_eq!(String::from_utf8_lossy(&reversed(text)), String::from_utf8_lossy(back));
        assert_eq!(reversed(&reversed(text)), reversed(back));
    }
}

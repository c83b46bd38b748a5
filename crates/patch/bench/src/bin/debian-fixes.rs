//! Diffs of Debian's source packages, each built to a live patch of the programs that the packages ship: what the
//! builder makes of software that it was not written with.
//!
//! A diff is built in reverse, against the newest program that the archive serves: the running code has the fix, the
//! patch takes it out. That touches the same functions and types as the fix. Only members of structures differ: what
//! the fix adds, its reverse removes.
//!
//! With `--forward`, each diff that fixes a CVE is built as a user would: against a program made of the series without
//! these diffs, on top of the ones before it that are not refused. The package is built once for that.
//!
//! usage: debian-fixes LIST STATE PAGE [--release CODENAME] [--forward] [PACKAGE...]
//!
//! `LIST` has a line for each package: its name and the programs to try. Results are kept in the directory `STATE`, one
//! file for each version of a package; a run goes on where the one before was ended. Without packages, all.

use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;
use stillpoint_patch_bench::package_diff::{changes_code, is_code, write_reversed};
use stillpoint_patch_builder::{
    Builder, Built, Cache, DebianRequest, Diff, Error, Parts, Refusal, Shipped, ShippedAs, SourcePackage, Statement,
    Verdict,
};
use stillpoint_patch_format::{Patch, decode, encode};

/// Result for one diff, from the best to the worst: the best one of several programs counts.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
enum Outcome {
    /// A patch of this number of functions, its members that became shadow variables, and whether it writes data.
    Built {
        program: String,
        functions: usize,
        #[serde(default)]
        shadow_members: usize,
        #[serde(default)]
        write_data: bool,
    },
    /// Code and reason.
    Refused { code: String, reason: String },
    /// The builder failed.
    Failed { reason: String },
    /// Some program reads the files, and its code stays the same.
    SameCode,
    /// Provably no part of the programs.
    NoPart,
    /// The reverse cannot be made: later diffs of the series change the same lines. Forward: the diff needs one that was refused.
    NotReversible { reason: String },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Row {
    diff: String,
    fixes_cve: bool,
    /// Built against a program without the diff, not in reverse.
    #[serde(default)]
    forward: bool,
    seconds: f64,
    outcome: Outcome,
}

/// Diffs to build.
struct Scope {
    release: Option<String>,
    forward: bool,
    packages: Vec<String>,
}

fn main() {
    if let Err(error) = run() {
        eprintln!("debian-fixes: {error}");
        std::process::exit(1);
    }
}

fn run() -> Result<(), String> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [list, state, page, rest @ ..] = &arguments[..] else {
        return Err("usage: debian-fixes LIST STATE PAGE [--release CODENAME] [--forward] [PACKAGE...]".into());
    };
    let mut scope = Scope { release: None, forward: false, packages: Vec::new() };
    let mut rest = rest.iter().cloned();
    while let Some(word) = rest.next() {
        match word.as_str() {
            "--release" => scope.release = Some(rest.next().ok_or("--release needs a codename")?),
            "--forward" => scope.forward = true,
            _ => scope.packages.push(word),
        }
    }
    let text = fs::read_to_string(list).map_err(|error| format!("{list}: {error}"))?;
    fs::create_dir_all(state).map_err(|error| format!("{state}: {error}"))?;
    let packages: Vec<Vec<&str>> = text
        .lines()
        .map(|line| line.split('#').next().unwrap_or("").split_whitespace().collect())
        .filter(|words: &Vec<&str>| !words.is_empty())
        .collect();
    let only = &scope.packages;
    for words in packages.iter().filter(|words| only.is_empty() || only.iter().any(|name| name == words[0])) {
        if let Err(error) = package(words[0], &words[1..], Path::new(state), &scope) {
            eprintln!("{}: {error}", words[0]);
            store(&Path::new(state).join(format!("{}.failed", words[0])), &error)?;
        }
    }
    fs::write(page, render(Path::new(state), &packages)?).map_err(|error| format!("{page}: {error}"))
}

fn package(name: &str, programs: &[&str], state: &Path, scope: &Scope) -> Result<(), String> {
    let report = |event: stillpoint_patch_builder::Event| eprintln!("  {event}");
    let cache = Cache::open().map_err(|error| error.to_string())?;
    let builder = Builder::new(cache, 2, &report).of_release(scope.release.clone());
    let begun = Instant::now();
    let source = builder.fetch_source(name, None, Parts::SourceAndBinaries).map_err(|error| error.to_string())?;
    let file = state.join(format!("{name}_{}.json", source.version().replace([':', '/'], "%")));
    let mut rows: Vec<Row> =
        fs::read(&file).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    let known: BTreeSet<String> =
        rows.iter().filter(|row| row.forward == scope.forward).map(|row| row.diff.clone()).collect();
    let is_asked = |diff: &Diff| changes_code(&diff.text) && (!scope.forward || !diff.cves.is_empty());
    let older = Older::new(&source, state);
    let diffs: Vec<(usize, &Diff)> = source.series.diffs.iter().enumerate().filter(|(_, d)| is_asked(d)).collect();
    eprintln!("{name} {}: {} diffs of code", source.version(), diffs.len());
    let _ = fs::remove_file(state.join(format!("{name}.failed")));
    for (index, diff) in diffs.into_iter().filter(|(_, diff)| !known.contains(&diff.name)) {
        let begin = if rows.is_empty() { begun } else { Instant::now() };
        let outcome = match scope.forward {
            true => older.forward(&builder, index, programs, &rows)?,
            false => reverse(&builder, &source, index, programs)?,
        };
        eprintln!("{name} {}: {outcome:?}", diff.name);
        let seconds = begin.elapsed().as_secs_f64();
        let fixes_cve = !diff.cves.is_empty();
        rows.push(Row { diff: diff.name.clone(), fixes_cve, forward: scope.forward, seconds, outcome });
        store(&file, &rows)?;
    }
    store(&file, &rows)
}

fn store(path: &Path, value: &impl Serialize) -> Result<(), String> {
    let text = serde_json::to_vec_pretty(value).map_err(|error| error.to_string())?;
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// Program without the diffs that fix a CVE, and without those that do not apply without them.
struct Older<'a> {
    source: &'a SourcePackage,
    /// Directory and beginning of the name of patches that were built.
    patches: PathBuf,
    without: RefCell<BTreeSet<String>>,
    /// Diffs that apply only on top of one that was refused.
    dependent: RefCell<BTreeSet<String>>,
}

impl<'a> Older<'a> {
    fn new(source: &'a SourcePackage, state: &Path) -> Self {
        let without = source.series.diffs.iter().filter(|diff| !diff.cves.is_empty()).map(|diff| diff.name.clone());
        let name = format!("{}_{}", source.name(), source.version().replace([':', '/'], "%"));
        let dependent = RefCell::default();
        Older { source, patches: state.join(name), without: RefCell::new(without.collect()), dependent }
    }

    fn patch_file(&self, diff: &str) -> PathBuf {
        let mut path = self.patches.clone().into_os_string();
        path.push(format!(".{}.patch", diff.replace('/', "%")));
        PathBuf::from(path)
    }

    /// Builds a diff on top of those before it; what was refused is not active.
    fn forward(&self, builder: &Builder, index: usize, programs: &[&str], rows: &[Row]) -> Result<Outcome, String> {
        let name = &self.source.series.diffs[index].name;
        best(programs, |program| {
            let (found, patch) = self.with_options(builder, index, program, rows)?;
            if let Some(patch) = patch {
                let bytes = encode(&patch).map_err(|error| error.to_string())?;
                fs::write(self.patch_file(name), bytes).map_err(|error| error.to_string())?;
            }
            Ok(found)
        })
    }

    fn request(&self, index: usize, program: &str, rows: &[Row]) -> DebianRequest {
        let diffs = &self.source.series.diffs;
        let (without, dependent) = (self.without.borrow(), self.dependent.borrow());
        let is_out = |diff: &Diff| {
            let is_it = |row: &&Row| row.forward && row.diff == diff.name;
            let is_refused = |row: &Row| matches!(row.outcome, Outcome::Refused { .. } | Outcome::NotReversible { .. });
            dependent.contains(&diff.name) || rows.iter().find(is_it).is_some_and(is_refused)
        };
        let earlier = diffs[..index].iter().filter(|diff| without.contains(&diff.name) && !is_out(diff));
        DebianRequest {
            package: self.source.name().to_owned(),
            version: Some(self.source.version().to_owned()),
            quilt: vec![diffs[index].name.clone()],
            diffs: Vec::new(),
            on_top_of: earlier.map(|diff| diff.name.clone()).collect(),
            shipped: ShippedAs::Series(Shipped::Without(without.iter().cloned().collect())),
            integrated: None,
            names: Vec::new(),
            binary: Some(PathBuf::from(program)),
            is_partial: false,
        }
    }

    /// Builds a patch; where the builder proposes options, with them.
    fn with_options(
        &self,
        builder: &Builder,
        index: usize,
        program: &str,
        rows: &[Row],
    ) -> Result<(Outcome, Option<Patch>), String> {
        let mut request = self.request(index, program, rows);
        let mut statement = Statement { earlier: self.earlier(&request, program, rows)?, ..Statement::default() };
        let mut result = builder.build_debian(&request, &statement);
        for _ in 0..PROPOSALS_MAX {
            if let Some(diff) = result.as_ref().err().and_then(not_applied) {
                if diff == request.quilt[0] {
                    let reason = result.err().map(|error| first(&error)).unwrap_or_default();
                    return Ok((Outcome::NotReversible { reason }, None));
                }
                if !self.without.borrow_mut().insert(diff.clone()) && !self.dependent.borrow_mut().insert(diff) {
                    break;
                }
                request = self.request(index, program, rows);
            } else if !result.as_ref().is_err_and(|error| follow(&mut statement, error)) {
                break;
            }
            result = builder.build_debian(&request, &statement);
        }
        let found = outcome(&result, program, &statement);
        Ok((found, result.ok().and_then(|built| built.patch)))
    }

    /// Returns the patches of earlier diffs for the same program: the new one may use what they added.
    fn earlier(&self, request: &DebianRequest, program: &str, rows: &[Row]) -> Result<Vec<Patch>, String> {
        let is_for_it = |row: &Row| matches!(&row.outcome, Outcome::Built { program: of, .. } if of == program);
        let is_built = |name: &&String| rows.iter().any(|row| row.forward && row.diff == **name && is_for_it(row));
        let files =
            request.on_top_of.iter().filter(is_built).map(|name| self.patch_file(name)).filter(|path| path.is_file());
        files
            .map(|path| {
                let bytes = fs::read(&path).map_err(|error| error.to_string())?;
                decode(&bytes).map(|signed| signed.patch).map_err(|error| error.to_string())
            })
            .collect()
    }
}

/// Returns the diff of the series that does not apply.
fn not_applied(error: &Error) -> Option<String> {
    let Error::Command { what, .. } = error else { return None };
    what.strip_prefix("applying ").map(str::to_owned)
}

/// Adds the options that a refusal proposes, and returns false if it proposes none. What the author has to know of the program is taken
/// as said: that zero is right for each member, that each of these functions is an allocator, and that no copies of data matter.
fn follow(statement: &mut Statement, error: &Error) -> bool {
    if let Some(proposed) = statement.shadow_members.proposed(error) {
        statement.shadow_members = proposed;
        return true;
    }
    let Error::Refused(refusals) = error else { return false };
    refusals.iter().all(Refusal::is_writable) && !std::mem::replace(&mut statement.write_data, true)
}

/// Limit of proposals that are followed.
const PROPOSALS_MAX: usize = 12;

/// Builds the reverse of a diff; where later diffs need it, on top of their reverse.
fn reverse(builder: &Builder, source: &SourcePackage, index: usize, programs: &[&str]) -> Result<Outcome, String> {
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let diffs = &source.series.diffs;
    let reversed = write_reversed(directory.path(), &diffs[index])?;
    best(programs, |program| {
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
        let build = |request: &DebianRequest| {
            let mut statement = Statement::default();
            let mut result = builder.build_debian(request, &statement);
            // members are removed in reverse: there is nothing to keep beside an object
            if result.as_ref().is_err_and(|error| follow(&mut statement, error)) && statement.write_data {
                result = builder.build_debian(request, &statement);
            }
            match result {
                // an earlier diff of the series compiles only with this one
                Err(error @ Error::Compile { side: "after", .. }) => Outcome::NotReversible { reason: first(&error) },
                result => outcome(&result, program, &statement),
            }
        };
        let found = build(&request);
        let needs_later = match &found {
            Outcome::NotReversible { .. } | Outcome::Failed { .. } => true,
            Outcome::Refused { code, .. } => code == "unresolved-symbol",
            _ => false,
        };
        // what a later diff of the series changes or uses goes first
        if needs_later {
            for diff in diffs[index + 1..].iter().rev().filter(|diff| changes_code(&diff.text)) {
                request.on_top_of.push(write_reversed(directory.path(), diff)?.display().to_string());
            }
            let later = build(&request);
            if !matches!(later, Outcome::NotReversible { .. } | Outcome::Failed { .. }) {
                return Ok(later);
            }
        }
        Ok(found)
    })
}

/// Returns the best outcome of several programs; the first patch ends the search.
fn best(programs: &[&str], mut build: impl FnMut(&str) -> Result<Outcome, String>) -> Result<Outcome, String> {
    let mut best: Option<Outcome> = None;
    for program in programs {
        let found = build(program)?;
        eprintln!("{program}: {found:?}");
        best = Some(best.map_or(found.clone(), |best| best.min(found)));
        if matches!(best, Some(Outcome::Built { .. } | Outcome::NotReversible { .. })) {
            break;
        }
    }
    best.ok_or_else(|| "the list names no program".to_owned())
}

/// Returns the beginning of an error, in one line.
fn first(error: &Error) -> String {
    error.to_string().lines().map(str::trim).collect::<Vec<_>>().join(" ").chars().take(400).collect()
}

fn outcome(result: &Result<Built, Error>, program: &str, statement: &Statement) -> Outcome {
    match result {
        Ok(built) => match &built.patch {
            Some(patch) => Outcome::Built {
                program: program.to_owned(),
                functions: patch.functions.len(),
                shadow_members: statement.shadow_members.members.len(),
                write_data: !patch.data.is_empty(),
            },
            // tests and documents are also compared, by what the rules make of them
            None if built.report.files.iter().any(|f| f.verdict == Verdict::NoDifference && is_code(&f.path)) => {
                Outcome::SameCode
            }
            None => Outcome::NoPart,
        },
        Err(error) => {
            let reason = first(error);
            let code = match error {
                Error::ShadowMembers(_) => "shadow-member",
                Error::Refused(refusals) => &refusals.first().map_or_else(String::new, |refusal| refusal.code()),
                Error::ChangesBuild { .. } => "changes-build",
                Error::NotInTarget { .. } => "not-in-target",
                Error::Ambiguous { .. } => "ambiguous",
                Error::Unaccounted { .. } => "unaccounted",
                Error::DoesNotApply { .. } => return Outcome::NotReversible { reason },
                _ if not_applied(error).is_some() => return Outcome::NotReversible { reason },
                _ => return Outcome::Failed { reason },
            };
            Outcome::Refused { code: code.to_owned(), reason }
        }
    }
}

const COLUMNS: [&str; 11] = [
    "diffs",
    "built",
    "with options",
    "built in reverse",
    "refused",
    "refused in reverse",
    "same code",
    "no part",
    "failed",
    "not applied",
    "CVEs built",
];

fn render(state: &Path, packages: &[Vec<&str>]) -> Result<String, String> {
    let mut table = format!("| package | version | {} |\n|{}\n", COLUMNS.join(" | "), "---|".repeat(COLUMNS.len() + 2));
    let (mut details, mut codes) = (String::new(), BTreeMap::<String, usize>::new());
    let mut total = [0usize; COLUMNS.len()];
    for words in packages {
        let name = words[0];
        let Some(file) = newest_results(state, name)? else {
            let why = fs::read_to_string(state.join(format!("{name}.failed"))).unwrap_or_else(|_| "not run".into());
            let why: String = why.replace(['\n', '|'], " ").chars().take(120).collect();
            let _ = writeln!(table, "| {name} | {why} |{}", " |".repeat(COLUMNS.len()));
            continue;
        };
        let rows: Vec<Row> = serde_json::from_slice(&fs::read(&file).map_err(|error| error.to_string())?)
            .map_err(|error| format!("{}: {error}", file.display()))?;
        let version =
            file.file_stem().unwrap_or_default().to_string_lossy().replace(&format!("{name}_"), "").replace('%', ":");
        let mut counts = [0usize; COLUMNS.len()];
        // where a diff was built forward, its reverse counts no more
        let forward: BTreeSet<&str> = rows.iter().filter(|row| row.forward).map(|row| row.diff.as_str()).collect();
        for row in rows.iter().filter(|row| row.forward || !forward.contains(row.diff.as_str())) {
            let (column, why) = match &row.outcome {
                Outcome::Built { shadow_members: 1.., .. } | Outcome::Built { write_data: true, .. } => (2, None),
                Outcome::Built { .. } => (if row.forward { 1 } else { 3 }, None),
                Outcome::Refused { code, reason } => {
                    *codes.entry(code.clone()).or_default() += 1;
                    (if row.forward { 4 } else { 5 }, Some(format!("refused: {reason}")))
                }
                Outcome::SameCode => (6, None),
                Outcome::NoPart => (7, None),
                Outcome::Failed { reason } => (8, Some(format!("FAILED: {reason}"))),
                Outcome::NotReversible { .. } => (9, None),
            };
            counts[0] += 1;
            counts[column] += 1;
            counts[10] += usize::from(row.fixes_cve && matches!(row.outcome, Outcome::Built { .. }));
            if let Some(why) = why {
                let short: String = why.replace(['\n', '|'], " ").chars().take(240).collect();
                let side = if row.forward { "" } else { " (reverse)" };
                let _ = writeln!(details, "| {name} | {}{side} | {short} |", row.diff);
            }
        }
        let cells: Vec<String> = counts.iter().map(usize::to_string).collect();
        let _ = writeln!(table, "| {name} | {version} | {} |", cells.join(" | "));
        counts.iter().zip(&mut total).for_each(|(one, all)| *all += one);
    }
    let cells: Vec<String> = total.iter().map(usize::to_string).collect();
    let _ = writeln!(table, "| all | | {} |", cells.join(" | "));
    let (built, with_options) = (total[1] + total[3], total[1] + total[2] + total[3]);
    let code = with_options + total[4] + total[5] + total[8];
    let share = |count: usize| 100.0 * count as f64 / code.max(1) as f64;
    let kinds: Vec<String> = codes.iter().map(|(code, count)| format!("{code} {count}")).collect();
    Ok(format!(
        "`experiments/debian-fixes`: each diff of code, in reverse against the newest program that the archive serves, or (columns without \
         \"reverse\") against a program built without the fixes of CVEs. Of {code} diffs that change code of a program, {built} were built \
         ({:.1} %), and with --shadow-member or --write-data where a refusal names it {with_options} ({:.1} %). Refusals: {}.\n\n{table}\n| package | diff | why not |\n|---|---|---|\n{details}",
        share(built),
        share(with_options),
        kinds.join(", "),
    ))
}

/// Returns the file with the results for the last version of a package.
fn newest_results(state: &Path, package: &str) -> Result<Option<PathBuf>, String> {
    let entries = fs::read_dir(state).map_err(|error| format!("{}: {error}", state.display()))?;
    let is_of = |path: &PathBuf| {
        path.file_name().is_some_and(|file| file.to_string_lossy().starts_with(&format!("{package}_")))
    };
    Ok(entries.flatten().map(|entry| entry.path()).filter(is_of).max())
}

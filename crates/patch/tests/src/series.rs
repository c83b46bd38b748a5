//! A redis or memcached without its CVE fixes, and live patches built from Debian's own series of diffs, by the command
//! line only.

use crate::Unavailable;
use crate::annotation;
use crate::cli::Stillpoint;
use crate::packages::{self, Binary};
use serde_json::Value;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use stillpoint_patch_format::{SectionKind, decode};
use stillpoint_testing::recipes;

/// Reason why there is no patch of a diff that does not change the program.
pub const NOTHING_CHANGES: &str = "nothing in this program changes";

/// One live patch of the series.
#[derive(Debug, Clone)]
pub struct SeriesPatch {
    /// The diff's name in the series.
    pub diff: String,
    /// Name of the patch.
    pub name: String,
    /// CVEs that it fixes.
    pub cves: Vec<String>,
    /// The patch file.
    pub file: PathBuf,
    /// Functions that it replaces.
    pub functions: u64,
    /// Length of the new code in bytes.
    pub text_bytes: u64,
}

/// A diff that cannot become a live patch.
#[derive(Debug, Clone)]
pub struct RefusedDiff {
    /// The diff's name in the series.
    pub diff: String,
    /// Reasons, one line each.
    pub reasons: Vec<String>,
}

/// The program and its patches, in the order of the series.
#[derive(Debug)]
pub struct Series {
    /// Version of the source package.
    pub version: String,
    /// The program to patch.
    pub binary: Binary,
    /// Patches that were built.
    pub patches: Vec<SeriesPatch>,
    /// Diffs that were refused.
    pub refused: Vec<RefusedDiff>,
}

/// The binary to patch, and the diffs.
struct Plan<'a> {
    package: String,
    shipped: &'a str,
    target: PathBuf,
    diffs: Vec<String>,
    dir: PathBuf,
    /// Further options of `patch build`.
    options: Vec<OsString>,
}

impl Series {
    /// Builds redis as Debian does but without its CVE fixes, and a patch from each of these fixes, or of those that
    /// are named. `tell` gets progress messages.
    ///
    /// # Errors
    /// The archive does not offer a needed file.
    pub fn build(only: &[&str], tell: &mut dyn FnMut(&str)) -> Result<Series, Unavailable> {
        let (version, libraries) = redis_with_source()?;
        Series::of(["redis", &version, "redis-server", "redis"], &libraries, only, Vec::new(), tell)
    }

    /// Builds redis with our quiescence points, and the same patches.
    ///
    /// # Errors
    /// The archive does not offer a needed file, or libstillpoint cannot be built.
    pub fn annotated(only: &[&str], tell: &mut dyn FnMut(&str)) -> Result<Series, Unavailable> {
        let (version, mut libraries) = redis_with_source()?;
        let names = ["redis", &version, "redis-server", "redis-annotated"];
        libraries.libraries.insert(0, annotation::libstillpoint()?.to_owned());
        Series::of(names, &libraries, only, annotation::options("redis")?, tell)
    }

    /// Builds, as [`Series::build`] does, memcached and a patch from each of its fixes.
    ///
    /// # Errors
    /// The archive does not offer a needed file.
    pub fn memcached(tell: &mut dyn FnMut(&str)) -> Result<Series, Unavailable> {
        let version = newest_with_source(&["memcached"])?;
        let libraries = packages::memcached(Some(&version))?;
        Series::of(["memcached", &version, "memcached", "memcached"], &libraries, &[], Vec::new(), tell)
    }

    fn of(
        [package, version, program, name]: [&str; 4],
        libraries: &Binary,
        only: &[&str],
        options: Vec<OsString>,
        tell: &mut dyn FnMut(&str),
    ) -> Result<Series, Unavailable> {
        let of_version = format!("{package}={version}");
        tell(&format!("building {program} from Debian's source, without its CVE fixes"));
        let dir = dir(name)?;
        let call = Stillpoint::new()
            .args(["patch", "target", "--shipped", "without-cves", "--program", program])
            .debian(&of_version)
            .arg("--output")
            .arg(&dir)
            .args(options.iter().cloned());
        let line = last_line(&call)?;
        let target = PathBuf::from(text(&line, "program"));
        let version = text(&line, "version");
        tell(&format!("{package} {version}: {}", target.display()));
        let wanted = |diff: &String| only.is_empty() || only.iter().any(|name| diff.contains(name));
        let missing = entries(&line).filter(|entry| entry["shipped"] == false).map(|entry| text(entry, "name"));
        let diffs = missing.filter(wanted).collect();
        let binary = packages::with_libraries_of(&target, libraries);
        let package = format!("{package}={version}");
        let (patches, refused) = Plan { package, shipped: "without-cves", target, diffs, dir, options }.run(tell)?;
        Ok(Series { version, binary, patches, refused })
    }

    /// Builds patches that add the newest version's fixes to Debian's own binary of an older version, exactly as
    /// shipped.
    ///
    /// # Errors
    /// The archive does not offer a needed file.
    pub fn for_packaged(older: &str, tell: &mut dyn FnMut(&str)) -> Result<Series, Unavailable> {
        let binary = packages::redis(Some(older))?;
        let series =
            |version: &str| last_line(&Stillpoint::new().args(["patch", "target"]).debian(&format!("redis={version}")));
        let (newest, old) = (series(&newest_with_source(&REDIS)?)?, series(older)?);
        let has: Vec<String> = entries(&old).map(|entry| text(entry, "name")).collect();
        let diffs: Vec<String> =
            entries(&newest).map(|entry| text(entry, "name")).filter(|name| !has.contains(name)).collect();
        let version = text(&newest, "version");
        tell(&format!("redis {older} lacks {} of the fixes of {version}", diffs.len()));
        let dir = dir(&format!("redis-{}", older.replace(':', "%3a")))?;
        let target = binary.path.canonicalize().map_err(|e| format!("find {}: {e}", binary.path.display()))?;
        let plan =
            Plan { package: format!("redis={version}"), shipped: older, target, diffs, dir, options: Vec::new() };
        let (patches, refused) = plan.run(tell)?;
        Ok(Series { version, binary, patches, refused })
    }

    /// Returns the first patch: the one that is based on no other.
    pub fn first(&self) -> &SeriesPatch {
        self.patches.first().expect("the series has patches")
    }
}

impl Plan<'_> {
    fn run(&self, tell: &mut dyn FnMut(&str)) -> Result<(Vec<SeriesPatch>, Vec<RefusedDiff>), String> {
        let (mut patches, mut refused) = (Vec::<SeriesPatch>::new(), Vec::new());
        for (i, diff) in self.diffs.iter().enumerate() {
            let progress = format!("[{:>2}/{}] {diff}", i + 1, self.diffs.len());
            match self.build_one(diff, &patches)? {
                Ok(patch) => {
                    tell(&format!("{progress}: {} functions, {} bytes of code", patch.functions, patch.text_bytes));
                    patches.push(patch);
                }
                Err(reasons) => {
                    tell(&format!("{progress}: refused"));
                    refused.push(RefusedDiff { diff: diff.clone(), reasons });
                }
            }
        }
        Ok((patches, refused))
    }

    /// Builds a patch; the inner error has the reasons of a refusal.
    fn build_one(&self, diff: &str, before: &[SeriesPatch]) -> Result<Result<SeriesPatch, Vec<String>>, String> {
        let name = Path::new(diff).file_stem().map_or_else(|| diff.into(), |stem| stem.to_string_lossy());
        let file = self.dir.join(format!("{name}.patch"));
        let mut call = Stillpoint::new()
            .args(["patch", "build", "--shipped", self.shipped, "--quilt", diff])
            .debian(&self.package)
            .arg("--target")
            .arg(&self.target)
            .arg("--output")
            .arg(&file)
            .args(self.options.iter().cloned());
        if !before.is_empty() {
            call = call.arg("--on-top-of").args(before.iter().map(|patch| &patch.diff));
            call = call.arg("--earlier").args(before.iter().map(|patch| &patch.file));
        }
        let run = call.json().run();
        let line = || run.json().into_iter().next_back().unwrap_or_default();
        match run.code {
            Some(0) if file_is_there(&run.json()) => read(diff, &file, &line()).map(Ok),
            Some(6) => Ok(Err(vec![NOTHING_CHANGES.into()])),
            Some(3) => Ok(Err(reasons(&run.json(), &run.stderr))),
            _ => Err(run.to_string()),
        }
    }
}

/// Debian's packages of redis with programs, of one version.
const REDIS: [&str; 2] = ["redis-server", "redis-tools"];

fn newest_with_source(packages: &[&str]) -> Result<String, Unavailable> {
    let versions = packages::versions_with_source(packages)?;
    Ok(versions.into_iter().next().expect("at least one is served"))
}

fn redis_with_source() -> Result<(String, Binary), Unavailable> {
    let version = newest_with_source(&REDIS)?;
    let binary = packages::redis(Some(&version))?;
    Ok((version, binary))
}

/// Returns the directory of the patches of a series.
fn dir(name: &str) -> Result<PathBuf, String> {
    recipes::directory("series", name)
}

fn file_is_there(lines: &[Value]) -> bool {
    lines.iter().any(|line| line["event"] == "built")
}

fn read(diff: &str, file: &Path, line: &Value) -> Result<SeriesPatch, String> {
    let bytes = std::fs::read(file).map_err(|e| format!("read {}: {e}", file.display()))?;
    let patch = decode(&bytes).map_err(|e| format!("{}: {e}", file.display()))?.patch;
    let text = patch.sections.iter().filter(|section| section.kind == SectionKind::Text);
    Ok(SeriesPatch {
        diff: diff.to_owned(),
        name: patch.name.clone(),
        cves: line["cves"].as_array().into_iter().flatten().filter_map(|v| v.as_str().map(str::to_owned)).collect(),
        file: file.to_owned(),
        functions: patch.functions.len() as u64,
        text_bytes: text.map(|section| section.size).sum(),
    })
}

fn reasons(lines: &[Value], stderr: &str) -> Vec<String> {
    let refusals = lines.iter().filter_map(|line| line["refusals"].as_array()).flatten();
    let reasons: Vec<String> = refusals.map(|refusal| text(refusal, "text")).collect();
    if reasons.is_empty() { vec![stderr.lines().next().unwrap_or_default().to_owned()] } else { reasons }
}

fn entries(line: &Value) -> impl Iterator<Item = &Value> {
    line["series"].as_array().into_iter().flatten()
}

fn text(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap_or_default().to_owned()
}

fn last_line(call: &Stillpoint) -> Result<Value, String> {
    let run = call.clone().json().run();
    match run.code {
        Some(0) => run.json().into_iter().next_back().ok_or_else(|| format!("nothing was printed by {}", run.line)),
        _ => Err(run.to_string()),
    }
}

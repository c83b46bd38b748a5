//! Statements of a patch's author, and the facts that a patch file states of its origin.

use crate::Error;
use crate::build::Job;
use crate::debian::Diff;
use crate::shadow_members::ShadowMembers;
use std::collections::BTreeMap;
use std::path::PathBuf;
use stillpoint_patch_differ::{HookNames, Options, TargetElf};
use stillpoint_patch_format::{Patch, Scope, Source, SymbolValue, Toolchain};

/// Statements of the author about a patch, independent of its sources.
#[derive(Debug, Clone, Default)]
pub struct Statement {
    /// Name of the patch; the diff's name when there is one diff.
    pub name: Option<String>,
    /// One line for people; the diff's subject when there is one diff.
    pub description: Option<String>,
    /// CVE identifiers besides those that the diffs name.
    pub cves: Vec<String>,
    /// Limit on how far apart old and new code may run.
    pub scope: Option<Scope>,
    /// Functions that must be on no stack.
    pub off_stack: Vec<String>,
    /// Functions in which a thread may continue with the old version; such a patch needs a kernel that supports this.
    pub staying: Vec<String>,
    /// True if constants may change in place, which needs a kernel with address-space generations.
    pub in_place: bool,
    /// True if variables and constants that the program holds may get their new initial value, while all its threads are stopped.
    pub write_data: bool,
    /// Functions that run around the transition.
    pub hooks: HookNames,
    /// Patches that this one replaces.
    pub replaces: Vec<String>,
    /// Patches of the series that are already active.
    pub earlier: Vec<Patch>,
    /// Sources in addition to the program's own: hooks, for instance.
    pub extra_units: Vec<PathBuf>,
    /// True if the patch includes the code of shadow variables.
    pub shadow_variables: bool,
    /// Added members of structures that become shadow variables.
    pub shadow_members: ShadowMembers,
    /// Files, or directories of files, that the diffs change and that make no difference to the target: for instance
    /// lists of tests in build files.
    pub leave_out: Vec<String>,
}

/// Returns names that later patches of the series may refer to.
pub(crate) fn exports(patch: &Patch) -> impl Iterator<Item = &str> {
    let symbols = patch.exports.iter().filter_map(|&i| patch.symbols.get(i as usize));
    symbols.filter(|s| matches!(s.value, SymbolValue::Patch { .. })).map(|s| s.name.as_str())
}

/// Refuses earlier patches of another build.
pub(crate) fn check_earlier(earlier: &[Patch], target: &TargetElf) -> Result<(), Error> {
    let wanted = target.identity();
    for patch in earlier {
        let fits = patch.target.build_id == wanted.build_id && patch.target.text_sha256 == wanted.text_sha256;
        if !fits {
            let (theirs, ours) = (&patch.target, wanted);
            return Err(Error::Target(format!(
                "earlier patch {} fits {} (build-id {}), this one is to fit {} (build-id {})",
                patch.name, theirs.file_name, theirs.build_id, ours.file_name, ours.build_id
            )));
        }
    }
    Ok(())
}

/// Returns what the differ has to know of a job.
pub(crate) fn options(job: &Job, compiler: String, imports: Option<BTreeMap<String, Option<String>>>) -> Options {
    let statement = job.statement;
    let mut cves: Vec<String> =
        job.diffs.iter().flat_map(|d| d.cves.iter().cloned()).chain(statement.cves.clone()).collect();
    cves.sort();
    cves.dedup();
    let (package, version) = job.package.clone().unzip();
    let diffs = job.diffs.iter().map(Diff::fact).collect();
    Options {
        name: statement.name.clone().unwrap_or_else(|| default_name(&job.diffs)),
        description: statement.description.clone().unwrap_or_else(|| default_description(&job.diffs)),
        cves,
        replaces: statement.replaces.clone(),
        scope: if statement.shadow_members.is_empty() { statement.scope } else { Some(Scope::Process) },
        off_stack: statement.off_stack.clone(),
        staying: statement.staying.clone(),
        in_place: statement.in_place,
        write_data: statement.write_data,
        hooks: statement.shadow_members.hooks(&statement.hooks, &statement.earlier),
        based_on: job.base.iter().filter(|diff| job.report.based_on.contains(&diff.name)).map(Diff::fact).collect(),
        known: statement.earlier.iter().flat_map(exports).map(str::to_owned).collect(),
        imports,
        source: Source { package, version, diffs, units: Vec::new() },
        toolchain: Toolchain { compiler, stillpoint: env!("CARGO_PKG_VERSION").to_owned() },
    }
}

/// Makes a patch name from the first diff's name and the number of other diffs.
fn default_name(diffs: &[Diff]) -> String {
    let first = diffs.first().map_or("patch", |d| d.short_name());
    let fits = |c: char| if c.is_ascii_alphanumeric() || "._+:~-".contains(c) { c } else { '-' };
    let mut name: String = first.chars().map(fits).take(100).collect();
    if diffs.len() > 1 {
        name += &format!("+{}", diffs.len() - 1);
    }
    name
}

fn default_description(diffs: &[Diff]) -> String {
    match diffs {
        [one] => one.subject.chars().take(500).collect(),
        _ => format!("{} diffs", diffs.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_the_patch_file() {
        let diff = |name: &str| Diff::new(name, Vec::new());
        assert_eq!(default_name(&[diff("debian/0001 fix(x).patch")]), "0001-fix-x-");
        assert_eq!(default_name(&[diff("a.diff"), diff("b.diff"), diff("c.diff")]), "a+2");
    }
}

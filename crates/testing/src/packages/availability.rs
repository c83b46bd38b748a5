//! Versions that the archive serves, among those that its lists name.
//!
//! The lists alone are not sufficient: an archive may list a version and answer 404 for its files. So each version is
//! requested, which costs one small download, and the answer is valid for an hour, in a file of the cache. A failure of
//! the network gives no information about the archive, and is an error.

use super::release::{self, LISTS_MAX_AGE};
use super::run;
use crate::{Unavailable, recipes};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::SystemTime;

/// Result for a version: `Ok` if all of its files are served, otherwise the reason.
pub(super) type Availability = Result<(), Unavailable>;

/// Returns the versions of `package` that the lists name, newest first.
pub(super) fn listed_versions(package: &str) -> Result<Vec<String>, String> {
    let out = run(release::command("apt-cache")?.args(["madison", package]))?;
    let mut versions = Vec::new();
    for line in out.lines().filter(|line| line.contains("Packages")) {
        if let Some(version) = line.split('|').nth(1).map(|v| v.trim().to_owned())
            && !versions.contains(&version)
        {
            versions.push(version);
        }
    }
    Ok(versions)
}

/// Returns the first one of `candidates` that is served; prints the reason why it is not an earlier one.
pub(super) fn first_available(
    package: &str,
    candidates: impl Iterator<Item = String>,
    is_served: impl Fn(&str) -> Result<Availability, String>,
) -> Result<String, Unavailable> {
    let mut reasons = Vec::new();
    for version in candidates {
        match is_served(&version)? {
            Ok(()) => {
                report(package, &reasons, &version);
                return Ok(version);
            }
            Err(why) => reasons.push(why),
        }
    }
    Err(none_of(package, &reasons))
}

/// Returns those of the listed versions that are served, newest first; prints the others. Returns an error if there are
/// none.
pub(super) fn available(
    package: &str,
    is_served: impl Fn(&str) -> Result<Availability, String>,
) -> Result<Vec<String>, Unavailable> {
    let listed = listed_versions(package)?;
    if listed.is_empty() {
        return Err(Unavailable::Missing(format!("the package lists know no {package}; try `make setup`")));
    }
    let (mut versions, mut reasons) = (Vec::new(), Vec::new());
    for version in listed {
        match is_served(&version)? {
            Ok(()) => versions.push(version),
            Err(why) => reasons.push(why),
        }
    }
    let Some(newest) = versions.first() else { return Err(none_of(package, &reasons)) };
    report(package, &reasons, newest);
    Ok(versions)
}

/// Returns the reason that no version is served. A package that is not listed does not count as withheld.
fn none_of(package: &str, reasons: &[Unavailable]) -> Unavailable {
    let text = format!("the archive serves no version of {package}: {}", join_reasons(reasons));
    match reasons.iter().any(|why| matches!(why, Unavailable::Withheld(_))) {
        true => Unavailable::Withheld(text),
        false => Unavailable::Missing(text),
    }
}

fn join_reasons(reasons: &[Unavailable]) -> String {
    reasons.iter().map(Unavailable::text).collect::<Vec<_>>().join("; ")
}

/// Prints the reasons once for each process.
fn report(package: &str, reasons: &[Unavailable], taken: &str) {
    static REPORTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if reasons.is_empty() {
        return;
    }
    let line = format!("{package}: {}; using {taken}", join_reasons(reasons));
    let new = REPORTED.lock().expect("no thread panics while it prints").insert(line.clone());
    if new {
        eprintln!("{line}");
    }
}

/// Requests the archives of `packages` in one version.
pub(super) fn all_binaries(packages: &[&str], version: &str) -> Result<Availability, String> {
    for package in packages {
        let name = format!("{package}={version}");
        let served = ask_once_an_hour(&name, || {
            let uris = run(release::command("apt-get")?.args(["download", "--print-uris", &name]))?;
            let withheld = || Unavailable::Withheld(format!("{package} {version} is listed and not served (404)"));
            Ok(if all_served(quoted_uris(&uris), &[])? { Ok(()) } else { Err(withheld()) })
        })?;
        if served.is_err() {
            return Ok(served);
        }
    }
    Ok(Ok(()))
}

/// Requests the source that one version of a package was built from: all of its files except upstream's archive, which
/// several versions share.
pub(super) fn source_of(package: &str, version: &str) -> Result<Availability, String> {
    ask_once_an_hour(&format!("source of {package}={version}"), || request_source(package, version))
}

fn request_source(package: &str, version: &str) -> Result<Availability, String> {
    let record = run(release::command("apt-cache")?.args(["show", &format!("{package}={version}")]))?;
    // `NAME`, or `NAME (VERSION)` where the version is another one.
    let source = record.lines().find_map(|line| line.strip_prefix("Source: ")).unwrap_or(package);
    let (source, of) = source.split_once(" (").unwrap_or((source, version));
    let of = of.trim_end_matches(')');
    let lists = source_lists()?;
    let mut apt = release::command("apt-get")?;
    apt.args(&lists).args(["source", "--download-only", "--only-source", "--print-uris", &format!("{source}={of}")]);
    let Ok(uris) = run(&mut apt) else {
        return Ok(Err(Unavailable::Missing(format!("the source of {source} {of} is not listed"))));
    };
    let own = |uri: &&str| !uri.contains(".orig.tar.") && !uri.contains(".orig-");
    let withheld = || Unavailable::Withheld(format!("{source} {of} is listed, and its source is not served (404)"));
    Ok(if all_served(quoted_uris(&uris).filter(own), &lists)? { Ok(()) } else { Err(withheld()) })
}

fn all_served<'a>(uris: impl Iterator<Item = &'a str>, options: &[String]) -> Result<bool, String> {
    for uri in uris {
        if !ask(uri, options)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the URIs of apt's lines `'URI' NAME SIZE SUM`.
fn quoted_uris(uris: &str) -> impl Iterator<Item = &str> {
    uris.lines().filter_map(|line| line.strip_prefix('\'')?.split('\'').next())
}

/// Returns the answer to a question of the last hour, or else the result of `ask`.
fn ask_once_an_hour(
    question: &str,
    ask: impl FnOnce() -> Result<Availability, String>,
) -> Result<Availability, String> {
    let records = recipes::directory("lists", "served")?.join("answers");
    // An answer is valid only for the proxy that it came through.
    let proxy = std::env::var("http_proxy").unwrap_or_default();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let known = std::fs::read_to_string(&records).unwrap_or_default();
    let last = known.lines().rev().find_map(|line| {
        let [at, way, of, answer, why] = line.split('\t').collect::<Vec<_>>()[..] else { return None };
        let valid = at.parse::<u64>().is_ok_and(|at| at <= now && now - at < LISTS_MAX_AGE.as_secs());
        let is_asked = valid && way == proxy && of == question;
        match answer {
            "served" if is_asked => Some(Ok(())),
            "withheld" if is_asked => Some(Err(Unavailable::Withheld(why.to_owned()))),
            "missing" if is_asked => Some(Err(Unavailable::Missing(why.to_owned()))),
            _ => None,
        }
    });
    if let Some(served) = last {
        return Ok(served);
    }
    let served = ask()?;
    let (answer, why) = match &served {
        Ok(()) => ("served", ""),
        Err(Unavailable::Withheld(why)) => ("withheld", why.as_str()),
        Err(Unavailable::Missing(why)) => ("missing", why.as_str()),
    };
    let line = format!("{now}\t{proxy}\t{question}\t{answer}\t{why}\n");
    let appended = File::options().create(true).append(true).open(&records).and_then(|mut file| {
        // Answers are short, and old ones are useless.
        if file.metadata()?.len() > 1_000_000 {
            file.set_len(0)?;
        }
        file.write_all(line.as_bytes())
    });
    appended.map_err(|e| format!("write {}: {e}", records.display()))?;
    Ok(served)
}

/// Requests one file from the archive; returns true if it is served.
fn ask(uri: &str, options: &[String]) -> Result<bool, String> {
    let dir = tempfile::tempdir().map_err(|e| format!("make a directory: {e}"))?;
    let mut helper = Command::new("/usr/lib/apt/apt-helper");
    helper.args(options).args(["-o", "APT::Sandbox::User=", "download-file", uri]).arg(dir.path().join("file"));
    let out = helper.env("LC_ALL", "C").output().map_err(|e| format!("run apt-helper: {e}"))?;
    if out.status.success() {
        return Ok(true);
    }
    let errors = String::from_utf8_lossy(&out.stderr);
    if errors.lines().any(is_not_found) { Ok(false) } else { Err(format!("download {uri}: {}", errors.trim())) }
}

/// Returns true for apt's line about a file that the archive does not have.
fn is_not_found(line: &str) -> bool {
    let answer = line.strip_prefix("E: Failed to fetch ").and_then(|rest| rest.split_once(' '));
    answer.is_some_and(|(_, why)| ["404 ", "410 "].iter().any(|code| why.trim_start().starts_with(code)))
}

/// Returns options of apt for lists of sources, which the system's own lists need not name. The lists are kept in the
/// cache, and fetched again after an hour.
/// Returns options of apt for lists that name sources.
pub(super) fn source_lists() -> Result<Vec<String>, String> {
    let dir = recipes::directory("lists", "sources")?;
    let parts = dir.join("parts");
    let option = |name: &str, path: &Path| ["-o".to_owned(), format!("{name}={}", path.display())];
    let options = [
        option("Dir::Etc::sourcelist", Path::new("/dev/null")),
        option("Dir::Etc::sourceparts", &parts),
        option("Dir::State::lists", &dir.join("lists")),
        option("Dir::Cache::pkgcache", Path::new("")),
        option("Dir::Cache::srcpkgcache", Path::new("")),
        option("APT::Sandbox::User", Path::new("")),
    ]
    .concat();
    release::fresh(&dir, || {
        std::fs::create_dir_all(&parts).map_err(|e| format!("make {}: {e}", parts.display()))?;
        for (name, text) in lists()? {
            let to = parts.join(name);
            std::fs::write(&to, text).map_err(|e| format!("write {}: {e}", to.display()))?;
        }
        run(Command::new("apt-get").args(&options).args(["-qq", "update"])).map(drop)
    })?;
    Ok(options)
}

/// Returns the lists of the tested release, changed into lists of sources.
fn lists() -> Result<Vec<(OsString, String)>, String> {
    if let Some(release) = release::foreign_release() {
        let lines = release::list(release)?.lines().filter_map(source_list).collect();
        return Ok(vec![(format!("{release}.list").into(), lines)]);
    }
    let lists = system_lists()?.into_iter();
    Ok(lists.filter_map(|(path, text)| Some((path.file_name()?.to_owned(), text))).collect())
}

/// Returns the system's lists, changed into lists of sources.
fn system_lists() -> Result<Vec<(PathBuf, String)>, String> {
    let mut paths = vec![PathBuf::from("/etc/apt/sources.list")];
    let parts = std::fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    paths.extend(parts.map(|entry| entry.path()));
    let mut lists = Vec::new();
    for path in paths.into_iter().filter(|path| path.exists()) {
        let text = std::fs::read_to_string(&path).map_err(|e| format!("read {}: {e}", path.display()))?;
        let lines = text.lines();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("sources") => lists.push((path, lines.map(source_line).collect())),
            Some("list") => lists.push((path, lines.filter_map(source_list).collect())),
            _ => {}
        }
    }
    Ok(lists)
}

fn source_line(line: &str) -> String {
    let is_types = line.get(..6).is_some_and(|field| field.eq_ignore_ascii_case("types:"));
    if is_types { "Types: deb-src\n".to_owned() } else { format!("{line}\n") }
}

fn source_list(line: &str) -> Option<String> {
    line.strip_prefix("deb ").map(|rest| format!("deb-src {rest}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_found_is_told_from_a_network_that_fails() {
        for line in [
            "E: Failed to fetch http://h/p/a_1_amd64.deb  404  Not Found [IP: 127.0.0.1 80]",
            "E: Failed to fetch http://h/p/a_1.dsc  410  Gone",
        ] {
            assert!(is_not_found(line), "{line}");
        }
        for line in [
            "E: Failed to fetch http://h/p/a_1_amd64.deb  Could not connect to h:80 (404)",
            "E: Failed to fetch http://404  Temporary failure resolving '404 '",
            "E: Failed to fetch http://h/a.deb  502  Bad Gateway",
            "  404  Not Found [IP: 127.0.0.1 80]",
            "",
        ] {
            assert!(!is_not_found(line), "{line}");
        }
    }

    #[test]
    fn lists_of_packages_become_lists_of_sources() {
        assert_eq!(
            source_list("deb [signed-by=/k] http://h/d bookworm main").unwrap(),
            "deb-src [signed-by=/k] http://h/d bookworm main\n"
        );
        assert_eq!((source_list("# deb http://h x y"), source_list("deb-src http://h x y")), (None, None));
        assert_eq!(
            (source_line("Types: deb"), source_line("URIs: http://h")),
            ("Types: deb-src\n".into(), "URIs: http://h\n".into())
        );
    }
}

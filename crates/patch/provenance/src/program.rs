//! Program that is to be patched: the bytes that a process runs, and their origin.

use crate::mapped::{MappedFile, ProcessFiles};
use crate::origin::{Origin, Origins, Subject};
use crate::{Database, Error, Evidence, OnDisk, Package, Release, SeenPackages};
use std::path::{Path, PathBuf};
use stillpoint_host::file::{bounded, list, open_regular};
use stillpoint_host::untrusted::{FILE_MAX, Tree};
use stillpoint_patch_tracee::Pid;

/// Executable or library with its origin.
#[derive(Debug)]
pub struct Program {
    /// Process that runs it; `None` for a file.
    pub pid: Option<Pid>,
    /// Path in the root file system of the process.
    pub path: PathBuf,
    /// Other names of the file: links beside it that lead to it. Packages install one program under several names.
    pub names: Vec<String>,
    /// Bytes of the file, as they are mapped.
    pub bytes: Vec<u8>,
    /// Origin of the file.
    pub origin: Origin,
    /// True if the process has another root file system, as in a container: the packages are those of that one.
    pub has_other_root: bool,
    /// Release of the root file system.
    pub release: Option<Release>,
}

impl Program {
    /// Looks at the executable of a process, or at a library that it maps.
    ///
    /// # Errors
    /// The process cannot be looked at, or maps no such library; its root file system has no database of packages; or the file cannot be
    /// read.
    pub fn of_process(pid: Pid, library: Option<&str>, seen: &SeenPackages) -> Result<Program, Error> {
        let process = ProcessFiles::of(pid)?.ok_or_else(|| Error::Mapped { pid, why: "runs no program".into() })?;
        let file = mapped(&process, library)?;
        let root = match process.has_other_root {
            true => PathBuf::from(format!("/proc/{pid}/root")),
            false => PathBuf::from("/"),
        };
        let opened = file.open()?;
        let bytes = bounded(&opened, &file.path, FILE_MAX)?;
        let subject = Subject { path: file.path.clone(), deleted: file.deleted, file: Some(opened) };
        let (origin, release) = find(&root, subject, seen)?;
        let has_other_root = process.has_other_root;
        let names = links_to(&root, &file.path);
        Ok(Program { pid: Some(pid), path: file.path.clone(), names, bytes, origin, has_other_root, release })
    }

    /// Looks at a file of this machine that no process need run.
    ///
    /// # Errors
    /// As [`Program::of_process`].
    pub fn of_file(path: &Path, seen: &SeenPackages) -> Result<Program, Error> {
        let tree = Tree::open(Path::new("/"))?.known_as(Path::new("/"));
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        // also through alternatives, which are links
        let path = Path::new("/").join(tree.real(&absolute)?);
        let opened = open_regular(&path)?;
        let bytes = bounded(&opened, &path, FILE_MAX)?;
        let subject = Subject { path: path.clone(), deleted: false, file: Some(opened) };
        let (origin, release) = find(Path::new("/"), subject, seen)?;
        let names = links_to(Path::new("/"), &path);
        Ok(Program { pid: None, path, names, bytes, origin, has_other_root: false, release })
    }

    /// Returns the package and version that it came from, with the evidence.
    ///
    /// # Errors
    /// [`Error::NoPackage`] if they are not known, with the places that were searched.
    pub fn running(&self) -> Result<&(Package, Evidence), Error> {
        let origin = &self.origin;
        origin.running.as_ref().ok_or_else(|| Error::NoPackage { path: self.path.clone(), why: self.unknown() })
    }

    fn unknown(&self) -> String {
        let build_id = self.origin.identity.as_ref().and_then(|identity| identity.build_id.as_ref());
        let id = build_id.map_or_else(|| "it has no build-id".to_owned(), |id| format!("its build-id is {id}"));
        match (&self.origin.installed, self.origin.on_disk) {
            (None, _) => {
                format!("no installed package has a file of this name, and no package that was seen has it; {id}")
            }
            (Some(package), OnDisk::Same) => {
                format!(
                    "it is not as {} {} has it, and no version of the package that was seen has it; {id}",
                    package.name, package.version
                )
            }
            (Some(package), _) => format!(
                "another file has its name now, of {} {}, and neither a version of the package that was seen nor the dates of its changelog \
                 show which version runs; {id}",
                package.name, package.version
            ),
        }
    }
}

/// Limit of names in a directory that are looked at.
const NAMES_MAX: usize = 50_000;

/// Returns the names of links in a file's directory that lead to it. `root` is the root file system of the file's path.
fn links_to(root: &Path, path: &Path) -> Vec<String> {
    let found = || {
        let tree = Tree::open(root).ok()?.known_as(Path::new("/"));
        let (directory, name) = (path.parent()?, path.file_name()?);
        let inside = tree.real(directory).ok()?;
        let names = list(&root.join(&inside)).ok()?;
        let real = inside.join(name);
        let leads_to = |link: &String| {
            let link = inside.join(link);
            tree.link(&link).is_ok() && tree.real(&link).is_ok_and(|to| to == real)
        };
        Some(names.into_iter().take(NAMES_MAX).filter(leads_to).collect())
    };
    found().unwrap_or_default()
}

fn mapped<'a>(process: &'a ProcessFiles, library: Option<&str>) -> Result<&'a MappedFile, Error> {
    match library {
        Some(name) => process.library(name),
        None => process
            .files
            .iter()
            .find(|file| file.is_executable)
            .ok_or_else(|| Error::Mapped { pid: process.pid, why: "does not map its executable".into() }),
    }
}

fn find(root: &Path, subject: Subject, seen: &SeenPackages) -> Result<(Origin, Option<Release>), Error> {
    let database = Database::open(root)?;
    let release = database.root().read_text("etc/os-release").ok().and_then(|text| Release::parse(&text));
    let path = subject.path.clone();
    let mut origin = Origins::new(database, seen.clone()).of(&[subject])?.remove(0);
    let build_id = origin.identity.as_ref().and_then(|identity| identity.build_id.as_ref());
    if let (None, Some(build_id)) = (&origin.installed, build_id) {
        let found = seen.find_in_all(build_id, &path);
        origin.running = found.map(|seen| (seen.package, Evidence::BuildId(seen.from.display().to_string())));
    }
    Ok((origin, release))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_of_this_system_is_known_by_any_of_its_names() {
        let seen = SeenPackages::default();
        for path in ["/bin/sleep", "/usr/bin/sleep"] {
            let program = Program::of_file(Path::new(path), &seen).unwrap();
            let (package, evidence) = program.running().unwrap();
            assert_eq!((package.name.as_str(), evidence), ("coreutils", &Evidence::Checksum));
            assert_eq!(program.path, Path::new("/usr/bin/sleep"));
        }
        let own = Program::of_file(&std::env::current_exe().unwrap(), &seen).unwrap();
        let why = own.running().unwrap_err().to_string();
        assert!(
            why.contains(
                "no installed package has a file of this name, and no package that was seen has it; its build-id is "
            ),
            "{why}"
        );
    }

    #[test]
    fn links_beside_a_file_are_names_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        std::fs::write(path("own"), "x").unwrap();
        for (name, to) in [("near", "own"), ("far", "/own"), ("other", "near"), ("out", "../own")] {
            std::os::unix::fs::symlink(to, path(name)).unwrap();
        }
        assert_eq!(links_to(dir.path(), Path::new("/own")), ["far", "near", "other"]);
    }

    #[test]
    fn the_libraries_of_a_process_are_known() {
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let pid = Pid(child.id() as i32);
        // the kernel lets the parent go on before the child has its new mappings
        let has_started = || {
            let files = ProcessFiles::of(pid).unwrap();
            files.is_some_and(|files| files.name == "sleep" && files.library("libc.so.6").is_ok())
        };
        while !has_started() {}
        let of = |library| Program::of_process(pid, library, &SeenPackages::default());
        let found = [of(None), of(Some("libc.so.6"))]
            .map(|program| program.map(|program| program.running().unwrap().0.source.clone()));
        let none = of(Some("libssl.so.3"));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(found.map(Result::unwrap), ["coreutils", "glibc"]);
        assert!(none.unwrap_err().to_string().contains("maps no library libssl.so.3"));
        assert!(matches!(of(None), Err(Error::Ended(_))));
    }
}

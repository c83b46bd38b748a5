//! Programs that were optimised when they were linked (gcc's `-flto`).
//!
//! Objects of such a program have intermediate code. The link step reads those of the whole program, optimises across
//! them, and compiles partitions of the result. So there is no machine code of one unit: the *link* is run again, with the
//! recorded command, once as shipped and once for each side, with the objects of the changed units in place of the
//! shipped ones. A program that stands in for the compiler's `lto-wrapper` copies the partitions that the linker gets.
//! These are joined to one object, so that a function may move from one partition to another.
//!
//! ```text
//! shipped: objects of the build -------------------- link ----> partitions --join--> placed in the target
//! before:  ... with changed units of the before side -- link, sections --> joined --+
//! after:   ... with changed units of the after side  -- link, sections --> joined --+-- code compared
//! ```
//! Which functions are inlined where, and in which partition each is, follows from the code alone: the number of
//! parallel compilers makes no difference.

use crate::commands::{CompileCommand, Job, LinkCall, Recording, resolve};
use crate::compile::{Compiler, parallel};
use crate::preprocess::Text;
use crate::sandbox::run;
use crate::{Builder, Error};
use object::read::archive::ArchiveFile;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use stillpoint_host::cache::key;
use stillpoint_host::untrusted::Tree;
use stillpoint_patch_differ::{Refusal, SourceObjects, distinguish_statics};

/// Program that copies what the compiler's wrapper makes.
const WRAPPER: &str = include_str!("../recorder/lto-wrapper.sh");
const WRAPPER_NAME: &str = "lto-wrapper";
/// Version of the steps that make a joined object; increase it with every change of these.
const VERSION: &[u8] = b"2";
/// Sections of partitions that stay apart when these are joined: their order in the target is that of the linker.
const APART: [&str; 9] = [".text", ".text.*", ".data", ".data.*", ".bss", ".bss.*", ".rodata*", ".tdata*", ".tbss*"];

/// Returns true if an object has intermediate code of gcc.
pub(crate) fn is_intermediate(object: &[u8]) -> bool {
    use object::{Object, ObjectSection};
    object::File::parse(object)
        .is_ok_and(|file| file.sections().any(|s| s.name().is_ok_and(|name| name.starts_with(".gnu.lto_"))))
}

/// Returns true if a command asks for optimisation at the link.
pub(crate) fn asks(argv: &[String]) -> bool {
    let last = argv.iter().rfind(|a| a.starts_with("-flto") && !a.starts_with("-flto-") || *a == "-fno-lto");
    last.is_some_and(|option| option != "-fno-lto")
}

/// Returns true if a build optimises any of its programs when it links them.
pub(crate) fn is_used(recording: &Recording) -> bool {
    recording.commands.iter().any(|command| asks(&command.argv))
}

/// Returns the command of a list that links the target.
pub(crate) fn link_of(commands: &[CompileCommand], target: &Path) -> Option<LinkCall> {
    let makes = |path: &Path| path == target || path.canonicalize().is_ok_and(|path| path == target);
    let is_link = |c: &&CompileCommand| !c.argv.iter().any(|a| a == "-c") && c.object.as_deref().is_some_and(makes);
    let found = commands.iter().find(is_link)?;
    Some(LinkCall { directory: found.directory.clone(), argv: found.argv.clone(), env: found.env.clone() })
}

/// A program in its three builds.
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) shipped: Vec<u8>,
    pub(crate) before: Vec<u8>,
    pub(crate) after: Vec<u8>,
    pub(crate) sources: Vec<SourceObjects>,
}

/// One changed unit of a program, with the objects of its three builds.
pub(crate) struct ChangedUnit<'a> {
    pub(crate) path: &'a str,
    pub(crate) command: &'a CompileCommand,
    pub(crate) after_command: &'a CompileCommand,
    pub(crate) texts: (&'a Text, &'a Text),
}

/// Objects of one side that differ from those at their places in the shipped tree.
type Replaced = BTreeMap<PathBuf, Vec<u8>>;

impl Builder<'_> {
    /// Compiles the changed units of a program, and links it as shipped and for both sides.
    ///
    /// # Errors
    /// [`Refusal::Lto`] where the link is not known or does not take the units; otherwise a compiler or linker fails.
    pub(crate) fn link_time(
        &self,
        compiler: &Compiler,
        (before, after): (&Path, &Path),
        changed: &[ChangedUnit],
    ) -> Result<Program, Error> {
        let Some(link) = &compiler.project.link else {
            return Err(refused(changed, "the command of its link is not known"));
        };
        let recorded = self.recorded_objects(compiler, changed)?;
        let sides = parallel(self.jobs, changed, |unit| {
            let compile =
                |tree, command, text, side| compiler.object(tree, unit.path, command, Job::Shipped, text, side);
            let one = compile(before, unit.command, unit.texts.0, "before")?;
            Ok::<_, Error>((one, compile(after, unit.after_command, unit.texts.1, "after")?))
        });
        let (mut old, mut new, mut sources) = (recorded.clone(), recorded.clone(), Vec::new());
        for (unit, objects) in changed.iter().zip(sides) {
            let (one, two) = objects?;
            let object = unit.command.object.clone().unwrap_or_default();
            let shipped = compiler.shipped_object(unit.path, unit.command)?;
            sources.push(SourceObjects { path: unit.path.to_owned(), shipped, after: two.clone() });
            old.insert(object.clone(), one);
            new.insert(object, two);
        }
        let places: BTreeSet<&Path> = changed.iter().filter_map(|unit| unit.command.object.as_deref()).collect();
        if places.len() != changed.len() {
            return Err(refused(changed, "two units are compiled to one object"));
        }
        let name = link.output().file_name().unwrap_or_default().to_string_lossy().into_owned();
        let joined = |side, objects: &Replaced, sections| {
            self.progress(&format!("linking {name} ({side}): it was optimised when it was linked"));
            let call = Relink { compiler, link, objects, jobs: self.jobs };
            call.joined(side, sections, if side == "shipped" { &[] } else { changed })
        };
        let shipped = joined("shipped", &recorded, false)?;
        let (before, after) = (joined("before", &old, true)?, joined("after", &new, true)?);
        Ok(Program { name: name.clone(), shipped, before, after, sources })
    }

    /// Returns the objects of units that the tree does not have with debug information.
    fn recorded_objects(&self, compiler: &Compiler, changed: &[ChangedUnit]) -> Result<Replaced, Error> {
        let project = compiler.project;
        let made = parallel(self.jobs, &project.commands, |(unit, command)| {
            let Some(object) = command.object.as_ref().filter(|_| asks(&command.argv)) else { return Ok(None) };
            let there = project
                .built
                .then(|| project.read(&project.shipped, relative(project.source.as_path(), object)))
                .flatten();
            if there.as_deref().is_some_and(crate::compile::has_debug_information) {
                return Ok(None);
            }
            Ok::<_, Error>(Some((object.clone(), compiler.shipped_object(unit, command)?)))
        });
        let mut all = Replaced::new();
        for one in made {
            if let Some((object, bytes)) = one?
                && all.insert(object.clone(), bytes.clone()).is_some_and(|other| other != bytes)
            {
                return Err(refused(changed, &format!("{} is compiled in several ways", object.display())));
            }
        }
        Ok(all)
    }
}

fn relative<'p>(source: &Path, path: &'p Path) -> &'p Path {
    path.strip_prefix(source).unwrap_or(path)
}

fn refused(changed: &[ChangedUnit], why: &str) -> Error {
    let refuse = |unit: &ChangedUnit| Refusal::Lto {
        unit: unit.path.to_owned(),
        side: "shipped",
        section: ".gnu.lto_*".to_owned(),
        why: why.to_owned(),
    };
    Error::Refused(changed.iter().map(refuse).collect())
}

/// One run of the recorded link, with some objects replaced.
struct Relink<'r, 'c> {
    compiler: &'r Compiler<'c>,
    link: &'r LinkCall,
    objects: &'r Replaced,
    jobs: usize,
}

impl Relink<'_, '_> {
    /// Returns the partitions, joined; all of `changed` must be among the inputs.
    fn joined(&self, side: &'static str, sections: bool, changed: &[ChangedUnit]) -> Result<Vec<u8>, Error> {
        let project = self.compiler.project;
        let how: &[u8] = if sections { b"sections" } else { b"shipped" };
        let root = project.root.as_deref().unwrap_or(Path::new("")).as_os_str().as_encoded_bytes();
        let places = self.objects.iter().flat_map(|(path, bytes)| [path.as_os_str().as_encoded_bytes(), bytes]);
        let words = self.link.argv.iter().map(String::as_bytes);
        let parts = [VERSION, how, root, project.identity.as_bytes()].into_iter().chain(places).chain(words);
        let name = key(parts) + ".joined";
        let is_fixed = project.built;
        if let Some(bytes) = self.compiler.cached(&name).filter(|_| is_fixed) {
            return Ok(bytes);
        }
        let scratch = self.compiler.scratch_directory()?;
        let result = self.run(&scratch, side, sections, changed);
        self.compiler.remove_scratch(&scratch)?;
        let bytes = result?;
        if is_fixed {
            self.compiler.store(&name, &bytes)?;
        }
        Ok(bytes)
    }

    fn run(
        &self,
        scratch: &Path,
        side: &'static str,
        sections: bool,
        changed: &[ChangedUnit],
    ) -> Result<Vec<u8>, Error> {
        let (compiler, link) = (self.compiler, self.link);
        let own = compiler.own();
        let inside = |name: &str| compiler.inside(&scratch.join(name));
        let mut inputs = Inputs { relink: self, scratch, old: self.old_objects(), used: BTreeSet::new(), number: 0 };
        let mut argv = inputs.arguments()?;
        let missing: Vec<&ChangedUnit> = changed
            .iter()
            .filter(|unit| unit.command.object.as_ref().is_none_or(|object| !inputs.used.contains(object)))
            .collect();
        if let Some(unit) = missing.first() {
            return Err(refused(changed, &format!("the link does not take the object of {}", unit.path)));
        }
        own.make_directory(scratch.join("partitions"))?;
        own.make_directory(scratch.join("temporary"))?;
        own.write_program(scratch.join("wrapper").join(WRAPPER_NAME), WRAPPER.as_bytes())?;
        argv.extend(["-o".into(), inside("output").into(), format!("-flto={}", self.jobs).into()]);
        argv.push(format!("-B{}/", inside("wrapper").display()).into());
        if sections {
            argv.extend(["-ffunction-sections", "-fdata-sections"].map(OsString::from));
        }
        let mut env = link.env.clone();
        env.extend([
            ("STILLPOINT_LTO_WRAPPER".to_owned(), self.asked("-print-prog-name=lto-wrapper")?.into()),
            ("STILLPOINT_PARTITIONS".to_owned(), inside("partitions").into()),
            ("TMPDIR".to_owned(), inside("temporary").into()),
        ]);
        let sandbox = compiler.sandbox(&compiler.project.shipped);
        run(&mut sandbox.command(&link.directory, &argv, &env), &format!("linking again ({side})"))?;
        let made = Tree::open(&own.path().join(scratch).join("partitions"))?.entries()?;
        let mut made: Vec<OsString> = made.iter().map(|entry| inside("partitions").join(&entry.name).into()).collect();
        made.sort();
        if made.is_empty() {
            return Err(refused(changed, "its link made no partitions"));
        }
        let mut join: Vec<OsString> = ["ld", "-r"].map(OsString::from).into();
        join.extend(APART.iter().map(|name| format!("--unique={name}").into()));
        join.extend(["-o".into(), inside("joined").into()]);
        join.extend(made);
        run(&mut sandbox.command(Path::new("/"), &join, &[]), "joining the partitions of the link")?;
        let joined = own.read(scratch.join("joined"))?;
        let name = link.output().file_name().unwrap_or_default().to_string_lossy().into_owned();
        distinguish_statics(&joined, &name, side).map_err(|refusal| Error::Refused(vec![refusal]))
    }

    /// Returns the first line that the compiler prints for an option.
    fn asked(&self, option: &str) -> Result<String, Error> {
        let sandbox = self.compiler.sandbox(&self.compiler.project.shipped);
        let argv = [self.link.argv[0].as_str(), option];
        let output =
            run(&mut sandbox.command(&self.link.directory, &argv, &[]), "asking the compiler for its programs")?;
        Ok(String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or_default().to_owned())
    }

    /// Returns the contents that the tree has at the places of replaced objects.
    fn old_objects(&self) -> HashMap<Vec<u8>, &PathBuf> {
        let project = self.compiler.project;
        let read = |object: &PathBuf| project.read(&project.shipped, relative(&project.source, object));
        self.objects.keys().filter_map(|object| Some((read(object)?, object))).collect()
    }
}

/// Inputs of a link: finds those that are replaced.
struct Inputs<'i, 'r, 'c> {
    relink: &'i Relink<'r, 'c>,
    scratch: &'i Path,
    old: HashMap<Vec<u8>, &'i PathBuf>,
    /// Replaced objects that the link takes.
    used: BTreeSet<PathBuf>,
    number: usize,
}

impl Inputs<'_, '_, '_> {
    /// Returns the arguments of the link without its output, with replaced inputs.
    fn arguments(&mut self) -> Result<Vec<OsString>, Error> {
        let link = self.relink.link;
        let directories: Vec<PathBuf> = link.searched();
        let (mut out, mut rest) = (Vec::new(), link.argv.iter());
        while let Some(argument) = rest.next() {
            if argument == "-o" {
                rest.next();
            } else if let Some(list) = argument.strip_prefix("-Wl,") {
                if list.starts_with("-Map") {
                    continue;
                }
                let mut words = Vec::new();
                for word in list.split(',') {
                    let replaced = if word.starts_with('-') {
                        None
                    } else {
                        self.file(&resolve(&link.directory, Path::new(word)))?
                    };
                    words.push(replaced.map_or_else(|| word.to_owned(), |path| path.display().to_string()));
                }
                out.push(format!("-Wl,{}", words.join(",")).into());
            } else if let Some(name) = argument.strip_prefix("-l").filter(|name| !name.is_empty()) {
                out.push(self.library(name, &directories)?.map_or_else(|| argument.into(), PathBuf::into_os_string));
            } else if argument.starts_with('-') {
                let is_output = argument.starts_with("-o") || argument.starts_with("-save-temps");
                out.extend((!is_output).then(|| argument.into()));
            } else {
                let replaced = self.file(&resolve(&link.directory, Path::new(argument)))?;
                out.push(replaced.map_or_else(|| argument.into(), PathBuf::into_os_string));
            }
        }
        Ok(out)
    }

    /// Returns the archive in place of `-lNAME`, if it has replaced members.
    fn library(&mut self, name: &str, directories: &[PathBuf]) -> Result<Option<PathBuf>, Error> {
        let project = self.relink.compiler.project;
        let tree = project.open(&project.shipped)?;
        for directory in directories.iter().filter(|directory| directory.starts_with(&project.source)) {
            let has = |suffix: &str| tree.has(directory.join(format!("lib{name}.{suffix}")));
            if has("so") {
                return Ok(None);
            }
            if has("a") {
                return self.file(&directory.join(format!("lib{name}.a")));
            }
        }
        Ok(None)
    }

    /// Returns the path of the file that replaces an input: an object, or an archive with replaced members.
    fn file(&mut self, path: &Path) -> Result<Option<PathBuf>, Error> {
        let compiler = self.relink.compiler;
        let project = compiler.project;
        // units that are compiled and linked at once have objects of no lasting name
        let at_once = || {
            let name = format!("({})", path.display());
            self.relink.objects.keys().find(|object| object.to_string_lossy().ends_with(&name)).cloned()
        };
        let own = self.relink.objects.contains_key(path).then(|| path.to_owned()).or_else(at_once);
        let bytes = match own {
            Some(object) => {
                self.used.insert(object.clone());
                return self.place(path, &self.relink.objects[&object].clone()).map(Some);
            }
            None if path.starts_with(&project.source) => {
                project.read(&project.shipped, relative(&project.source, path))
            }
            None => None,
        };
        let Some(bytes) = bytes else { return Ok(None) };
        if let Some(object) = self.old.get(&bytes) {
            let object = (*object).clone();
            self.used.insert(object.clone());
            return self.place(path, &self.relink.objects[&object].clone()).map(Some);
        }
        let placed = match (self.archive(&bytes), self.members_of_thin(path, &bytes)?) {
            (Some(archive), _) => self.place(path, &archive)?,
            (None, Some(members)) => self.archive_of(path, members)?,
            (None, None) => return Ok(None),
        };
        let plugin = self.relink.asked("-print-file-name=liblto_plugin.so")?;
        let index = ["ranlib".into(), "--plugin".into(), plugin.into(), placed.clone().into_os_string()];
        run(&mut compiler.sandbox(&project.shipped).command(Path::new("/"), &index, &[]), "indexing an archive")?;
        Ok(Some(placed))
    }

    /// Writes a replaced input, under its own name; returns its path inside the sandbox.
    fn place(&mut self, path: &Path, bytes: &[u8]) -> Result<PathBuf, Error> {
        self.number += 1;
        let mut name =
            self.scratch.join("inputs").join(self.number.to_string()).join(path.file_name().unwrap_or_default());
        if crate::tree::is_unit(&name.to_string_lossy()) {
            name.as_mut_os_string().push(".o");
        }
        self.relink.compiler.own().write(&name, bytes)?;
        Ok(self.relink.compiler.inside(&name))
    }

    /// Returns the members of a thin archive, which has their paths only; `None` if none is replaced.
    fn members_of_thin(&mut self, path: &Path, bytes: &[u8]) -> Result<Option<Vec<PathBuf>>, Error> {
        let Some(archive) = ArchiveFile::parse(bytes).ok().filter(ArchiveFile::is_thin) else { return Ok(None) };
        let (compiler, directory) = (self.relink.compiler, path.parent().unwrap_or(Path::new("/")));
        let (mut members, mut is_changed) = (Vec::new(), false);
        for member in archive.members() {
            let Ok(member) = member else { return Ok(None) };
            let own = resolve(directory, Path::new(OsStr::from_bytes(member.name())));
            // an archiver takes the members of a thin archive, and not itself
            let is_object = compiler.project.read(&compiler.project.shipped, relative(&compiler.project.source, &own));
            let is_object = is_object.is_none_or(|bytes| ArchiveFile::parse(&bytes[..]).is_err());
            let replaced = if is_object { self.file(&own)? } else { None };
            is_changed |= replaced.is_some();
            members.push(replaced.unwrap_or(own));
        }
        Ok(is_changed.then_some(members))
    }

    /// Makes an archive of these members, in this order, in place of a thin one; returns its path inside the sandbox.
    fn archive_of(&mut self, path: &Path, members: Vec<PathBuf>) -> Result<PathBuf, Error> {
        let placed = self.place(path, b"!<arch>\n")?;
        let mut call: Vec<OsString> = ["ar".into(), "qcSD".into(), placed.clone().into_os_string()].into();
        call.extend(members.into_iter().map(PathBuf::into_os_string));
        let compiler = self.relink.compiler;
        run(&mut compiler.sandbox(&compiler.project.shipped).command(Path::new("/"), &call, &[]), "making an archive")?;
        Ok(placed)
    }

    /// Returns an archive with its replaced members; `None` if none is replaced, or it is thin.
    fn archive(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        let archive = ArchiveFile::parse(bytes).ok().filter(|archive| !archive.is_thin())?;
        let mut parts = Vec::new();
        for member in archive.members() {
            let member = member.ok()?;
            let (start, size) = member.file_range();
            let data = member.data(bytes).ok()?;
            let new = self.old.get(data).map(|object| (*object).clone());
            if let Some(object) = &new {
                self.used.insert(object.clone());
            }
            parts.push((start, size, new));
        }
        let is_changed = parts.iter().any(|(_, _, new)| new.is_some());
        is_changed.then(|| with_members(bytes, &parts, self.relink.objects)).flatten()
    }
}

/// Length of the header of a member of an archive, and the field with the size in it.
const MEMBER_HEADER: usize = 60;
const MEMBER_SIZE: std::ops::Range<usize> = 48..58;

/// Returns an archive without its index; members with a path have that object in place of their own. The table of long
/// names stays before the members.
fn with_members(bytes: &[u8], parts: &[(u64, u64, Option<PathBuf>)], objects: &Replaced) -> Option<Vec<u8>> {
    let mut out = bytes.get(..8)?.to_vec();
    let mut add = |header: &[u8], data: &[u8]| {
        let at = out.len();
        out.extend_from_slice(header);
        out.get_mut(at..)?.get_mut(MEMBER_SIZE)?.copy_from_slice(format!("{:<10}", data.len()).as_bytes());
        out.extend_from_slice(data);
        if data.len() % 2 == 1 {
            out.push(b'\n');
        }
        Some(())
    };
    if let Some((header, names)) = long_names(bytes) {
        add(header, names)?;
    }
    for (start, size, new) in parts {
        let start = usize::try_from(*start).ok()?;
        let header = bytes.get(start.checked_sub(MEMBER_HEADER)?..start)?;
        let own = bytes.get(start..start.checked_add(usize::try_from(*size).ok()?)?)?;
        add(header, new.as_ref().map_or(own, |object| &objects[object]))?;
    }
    Some(out)
}

/// Finds the table of long names of an archive: its header, and its text.
fn long_names(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut at: usize = 8;
    loop {
        let header = bytes.get(at..at.checked_add(MEMBER_HEADER)?)?;
        let size: usize = str::from_utf8(header.get(MEMBER_SIZE)?).ok()?.trim().parse().ok()?;
        let data = bytes.get(at + MEMBER_HEADER..)?.get(..size)?;
        if header.starts_with(b"// ") {
            return Some((header, data));
        }
        at = at.checked_add(MEMBER_HEADER)?.checked_add(size)?.next_multiple_of(2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_option_decides() {
        let asks = |line: &str| super::asks(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert!(asks("gcc -flto=auto -ffat-lto-objects -c a.c") && asks("gcc -fno-lto -flto -c a.c"));
        assert!(!asks("gcc -flto -fno-lto -c a.c") && !asks("gcc -flto-partition=one -c a.c"));
    }

    #[test]
    fn members_of_archives_are_replaced_in_their_places() {
        let dir = tempfile::tempdir().unwrap();
        let long = "a_name_of_more_than_sixteen_letters.o";
        for (name, text) in [("a.o", "first"), (long, "second"), ("c.o", "third")] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let mut ar = std::process::Command::new("ar");
        ar.args(["rc", "l.a", "a.o", long, "c.o"]).current_dir(dir.path());
        crate::sandbox::output(&mut ar).unwrap();
        let bytes = std::fs::read(dir.path().join("l.a")).unwrap();
        let archive = ArchiveFile::parse(&bytes[..]).unwrap();
        let ranges: Vec<(u64, u64)> = archive.members().map(|member| member.unwrap().file_range()).collect();
        let new = PathBuf::from("new");
        let parts: Vec<_> =
            ranges.iter().zip([None, Some(new.clone()), None]).map(|((at, len), new)| (*at, *len, new)).collect();
        let made = with_members(&bytes, &parts, &Replaced::from([(new, b"longer than before".to_vec())])).unwrap();
        let archive = ArchiveFile::parse(&made[..]).unwrap();
        let members: Vec<(String, Vec<u8>)> = archive
            .members()
            .map(|member| member.unwrap())
            .map(|m| (String::from_utf8_lossy(m.name()).into_owned(), m.data(&made[..]).unwrap().to_vec()))
            .collect();
        let wanted = [("a.o", "first"), (long, "longer than before"), ("c.o", "third")];
        assert_eq!(members, wanted.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec())));
    }
}

//! The account of a target: the recorded commands that made the code in its link, and the code that none of them made.
//!
//! The obvious way is to compare the paths in compile commands with the paths in the link. Build rules that rename,
//! copy, extract or join objects in between break it: the units of these objects seem to be no part of the target. So
//! the builder reads each input that no command names. The symbol table of the input has the names of its sources, and
//! its bytes are compared with those of the objects that were compiled from sources of these names.

use crate::commands::{CompileCommand, Recording, is_linked};
use crate::elf::{self, Piece};
use crate::link::{Input, Kind};
use crate::recorder;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use stillpoint_host::untrusted::Tree;

/// Condition under which a link takes an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Inclusion {
    /// Member of an archive: the linker takes it only if another object needs it.
    IfNeeded,
    Always,
}

/// The objects of a target, and the gaps in what is known of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Account {
    /// Objects of the target, under the names that their compile commands gave them.
    pub(crate) objects: BTreeMap<PathBuf, Inclusion>,
    /// Number of different inputs of the target's link.
    pub(crate) inputs: usize,
    /// Inputs of the target's link that no recorded command made.
    pub(crate) missing: BTreeSet<String>,
    /// Reason why the link itself is not known.
    pub(crate) unknown: Option<String>,
    /// True if each object has exactly one command.
    pub(crate) exact: bool,
    /// True if this is the account of several outputs, any of which may be the target.
    pub(crate) is_joined: bool,
}

impl Account {
    /// Makes the account of a target whose link is not known.
    pub(crate) fn unknown(why: String) -> Self {
        Account { unknown: Some(why), ..Account::default() }
    }

    /// Makes the account of a target whose link is not known, from the names of sources in its symbol table. Each name
    /// must belong to as many compiled units; `has_unit` tests if the source directory has a unit of a name.
    pub(crate) fn by_symbols(
        commands: &[CompileCommand],
        linked: &[String],
        has_unit: impl Fn(&str) -> bool,
    ) -> Result<Self, Vec<String>> {
        let count = |name: &str| linked.iter().filter(|linked| *linked == name).count();
        let compiled = |name: &str| commands.iter().filter(|c| c.file.file_name() == Some(OsStr::new(name))).count();
        let names: BTreeSet<&String> = linked.iter().collect();
        let is_missing = |name: &&String| has_unit(name) && compiled(name) < count(name);
        let missing: Vec<String> = names.iter().copied().filter(is_missing).cloned().collect();
        if !missing.is_empty() {
            return Err(missing);
        }
        // assemblers leave no name, and objects without symbols have none: these are searched for
        let inclusion =
            |c: &CompileCommand| match c.file.file_name().is_some_and(|name| count(&name.to_string_lossy()) > 0) {
                true => Inclusion::Always,
                false => Inclusion::IfNeeded,
            };
        let objects = commands.iter().filter_map(|c| Some((c.object.clone()?, inclusion(c)))).collect();
        Ok(Account { objects, inputs: linked.len(), ..Account::default() })
    }

    /// Joins the accounts of two outputs, either of which may be the target.
    pub(crate) fn or(mut self, other: Account) -> Self {
        self.objects.extend(other.objects);
        self.missing.extend(other.missing);
        Account { unknown: self.unknown.or(other.unknown), exact: false, is_joined: true, ..self }
    }

    /// Returns true if every input of the link is known: a file that no command of `objects` reads is no part of the
    /// target.
    pub(crate) fn is_complete(&self) -> bool {
        self.unknown.is_none() && self.missing.is_empty()
    }

    /// Returns true if the target certainly has an object.
    pub(crate) fn always_takes(&self, object: Option<&PathBuf>) -> bool {
        object.and_then(|object| self.objects.get(object)) != Some(&Inclusion::IfNeeded)
    }

    /// Follows the recorded links that lead to an output.
    pub(crate) fn of(recording: &Recording, output: &Path, place: &Place) -> Self {
        let mut walk = Walk::new(recording, place);
        let mut open = vec![(output.to_owned(), Inclusion::Always)];
        let mut seen: BTreeMap<PathBuf, Inclusion> = BTreeMap::new();
        while let Some((path, inclusion)) = open.pop() {
            if seen.get(&path).is_some_and(|before| *before >= inclusion) {
                continue;
            }
            seen.insert(path.clone(), inclusion);
            for input in recording.links.get(&path).into_iter().flat_map(|link| &link.inputs) {
                open.extend(walk.input(input, inclusion));
            }
        }
        Account { inputs: walk.inputs.len(), ..walk.account }
    }
}

/// Locations of a build's files.
#[derive(Debug)]
pub(crate) struct Place<'a> {
    /// Source directory that the build saw.
    pub(crate) source: &'a Path,
    /// The same directory, at its present path.
    pub(crate) tree: &'a Tree,
    /// Root directory of the build.
    pub(crate) root: &'a Tree,
}

impl Place<'_> {
    fn read(&self, inside: &Path) -> Option<Vec<u8>> {
        let Ok(relative) = inside.strip_prefix(self.source) else { return self.root.read(inside).ok() };
        let of_system = || self.root.read(self.tree.link(relative).ok()?).ok();
        self.tree.read(relative).ok().or_else(of_system)
    }

    fn exists(&self, inside: &Path) -> bool {
        inside.strip_prefix(self.source).map_or_else(|_| self.root.has(inside), |relative| self.tree.has(relative))
    }
}

struct Walk<'a> {
    recording: &'a Recording,
    place: &'a Place<'a>,
    /// Number of commands that make an object.
    by_object: BTreeMap<&'a Path, usize>,
    by_source_name: HashMap<&'a OsStr, Vec<&'a CompileCommand>>,
    inputs: BTreeSet<PathBuf>,
    account: Account,
}

impl<'a> Walk<'a> {
    fn new(recording: &'a Recording, place: &'a Place<'a>) -> Self {
        let mut by_object: BTreeMap<&Path, usize> = BTreeMap::new();
        let mut by_source_name: HashMap<&OsStr, Vec<&CompileCommand>> = HashMap::new();
        for command in &recording.commands {
            *by_object.entry(command.object.as_deref().unwrap_or(Path::new(""))).or_default() += 1;
            by_source_name.entry(command.file.file_name().unwrap_or_default()).or_default().push(command);
        }
        let account = Account { exact: true, ..Account::default() };
        Walk { recording, place, by_object, by_source_name, inputs: BTreeSet::new(), account }
    }

    /// Records an input; returns it if it was itself linked, so that the caller follows it.
    fn input(&mut self, input: &Input, inclusion: Inclusion) -> Option<(PathBuf, Inclusion)> {
        match input {
            Input::File { path, whole } => self.file(path, *whole, inclusion),
            Input::Library { name, directories, archives_only, whole } => {
                let path = self.library(name, directories, *archives_only)?;
                self.file(&path, *whole, inclusion)
            }
            Input::Response(path) => {
                self.inputs.insert(path.clone());
                self.account.missing.insert(format!("the files that {} listed", self.shown(path)));
                None
            }
        }
    }

    fn file(&mut self, path: &Path, whole: bool, inclusion: Inclusion) -> Option<(PathBuf, Inclusion)> {
        if self.by_object.contains_key(path) {
            self.inputs.insert(path.to_owned());
            self.object(path, inclusion);
            return None;
        }
        if let Some(link) = self.recording.links.get(path) {
            return match link.kind {
                Kind::Archive if !whole => Some((path.to_owned(), Inclusion::IfNeeded)),
                Kind::Archive | Kind::Object => Some((path.to_owned(), inclusion)),
                // a shared library is a target of its own
                Kind::Image => None,
            };
        }
        let members = self.extracted(path);
        if !members.is_empty() {
            self.inputs.insert(path.to_owned());
            members.iter().for_each(|member| self.object(member, inclusion));
            return None;
        }
        self.unnamed(path, whole, inclusion)
    }

    fn object(&mut self, path: &Path, inclusion: Inclusion) {
        self.account.exact &= self.by_object.get(path) == Some(&1);
        let entry = self.account.objects.entry(path.to_owned()).or_insert(inclusion);
        *entry = inclusion.max(*entry);
    }

    /// Recorded objects whose copies were extracted to a path.
    fn extracted(&self, path: &Path) -> Vec<PathBuf> {
        let archives = path.parent().and_then(|directory| self.recording.extracted.get(directory));
        let links = archives.into_iter().flatten().filter_map(|archive| self.recording.links.get(archive));
        let files = links.flat_map(|link| &link.inputs).filter_map(|input| match input {
            Input::File { path, .. } => Some(path),
            _ => None,
        });
        let is_member =
            |file: &&PathBuf| file.file_name() == path.file_name() && self.by_object.contains_key(file.as_path());
        files.filter(is_member).cloned().collect()
    }

    /// Finds the archive that `-lNAME` names; `None` if the linker would find a shared library.
    fn library(&self, name: &str, directories: &[PathBuf], archives_only: bool) -> Option<PathBuf> {
        let is_there = |path: &Path| self.recording.links.contains_key(path) || self.place.exists(path);
        for directory in directories {
            let exact = name.strip_prefix(':').map(|file| directory.join(file));
            let shared = directory.join(format!("lib{name}.so"));
            let archive = exact.unwrap_or_else(|| directory.join(format!("lib{name}.a")));
            if !archives_only && is_there(&shared) {
                return None;
            }
            if is_there(&archive) {
                return Some(archive);
            }
        }
        None
    }

    /// Attributes an input that no recorded command names, by its content; returns a linked file of which it is a copy.
    fn unnamed(&mut self, path: &Path, whole: bool, inclusion: Inclusion) -> Option<(PathBuf, Inclusion)> {
        let bytes = match self.place.read(path) {
            Some(bytes) => bytes,
            None if is_linked(path) && !is_shared(path) => {
                self.inputs.insert(path.to_owned());
                self.account.missing.insert(self.shown(path));
                return None;
            }
            None => return None,
        };
        if let Some(record) = recorder::records_of(&bytes).first() {
            return match self.recording.by_record.get(*record) {
                Some(result) if result != path => self.file(result, whole, inclusion),
                _ => {
                    self.account.missing.insert(self.shown(path));
                    None
                }
            };
        }
        // files of the system are no part of this source
        if !path.starts_with(self.place.source) {
            return None;
        }
        for piece in elf::pieces(&bytes).into_iter().flatten() {
            let name = match piece.member.as_str() {
                "" => path.to_owned(),
                member => path.join(member),
            };
            self.inputs.insert(name);
            let inclusion = if piece.member.is_empty() || whole { inclusion } else { Inclusion::IfNeeded };
            self.piece(path, &piece, inclusion);
        }
        None
    }

    /// Attributes an object by the names of its sources, and by its bytes.
    fn piece(&mut self, path: &Path, piece: &Piece, inclusion: Inclusion) {
        let mut is_known = !piece.sources.is_empty() || !piece.has_code;
        for source in &piece.sources {
            let commands = self.made_from(source, piece.bytes);
            is_known &= !commands.is_empty() || !piece.has_code;
            self.account.exact &= commands.len() <= 1;
            commands.iter().for_each(|object| self.object(object, inclusion));
        }
        if !is_known {
            let member = if piece.member.is_empty() { String::new() } else { format!("({})", piece.member) };
            self.account.missing.insert(self.shown(path) + &member);
        }
    }

    /// Finds objects of the commands that may have made an object from a source of this name: those equal to it and
    /// those no longer at the path of their command; if there are none, all.
    fn made_from(&self, source: &str, bytes: &[u8]) -> Vec<PathBuf> {
        let commands = self.by_source_name.get(OsStr::new(source)).map_or(&[][..], Vec::as_slice);
        let objects: BTreeSet<&PathBuf> = commands.iter().filter_map(|command| command.object.as_ref()).collect();
        let is_likely = |object: &&PathBuf| self.place.read(object).is_none_or(|other| other == bytes);
        let likely: Vec<PathBuf> = objects.iter().copied().filter(is_likely).cloned().collect();
        if likely.is_empty() { objects.into_iter().cloned().collect() } else { likely }
    }

    fn shown(&self, path: &Path) -> String {
        path.strip_prefix(self.place.source).unwrap_or(path).display().to_string()
    }
}

/// Returns true if a file has the name of a shared library.
fn is_shared(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "so")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::process::Command;

    /// A directory in which the test records builds.
    struct Build {
        directory: tempfile::TempDir,
        recording: Recording,
    }

    impl Build {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            for unit in ["a", "b"] {
                fs::write(
                    directory.path().join(unit).with_extension("c"),
                    format!("int {unit}(void) {{ return 1; }}\n"),
                )
                .unwrap();
            }
            Build { directory, recording: Recording::default() }
        }

        /// Runs a command, and records it.
        fn recorded(&mut self, line: &str) {
            self.run(line);
            let at = self.directory.path();
            let argv: Vec<String> = line.split(' ').map(str::to_owned).collect();
            match crate::commands::compile(at, argv.clone(), Vec::new()) {
                Some(command) => self.recording.commands.push(command),
                None => self.recording.link(at, &argv, &[]),
            }
        }

        fn run(&self, line: &str) {
            let status = Command::new("sh").args(["-c", line]).current_dir(self.directory.path()).status();
            assert!(status.unwrap().success(), "{line}");
        }

        fn account(&self, output: &str) -> Account {
            let source = self.directory.path();
            let [root, tree] = [Path::new("/"), source].map(|path| Tree::open(path).unwrap());
            Account::of(&self.recording, &source.join(output), &Place { source, tree: &tree, root: &root })
        }

        /// Objects, relative to the directory.
        fn objects(&self, account: &Account) -> Vec<String> {
            let relative = |path: &PathBuf| path.strip_prefix(self.directory.path()).unwrap().display().to_string();
            account.objects.keys().map(relative).collect()
        }
    }

    const LINK: &str = "cc -shared -o l.so";

    #[test]
    fn links_are_followed_through_archives() {
        let mut build = Build::new();
        for line in ["cc -c a.c", "cc -c b.c", "ar rc libb.a b.o", "cc -shared -o l.so a.o -L. -lb"] {
            build.recorded(line);
        }
        let account = build.account("l.so");
        assert!(account.is_complete() && account.exact, "{account:?}");
        assert_eq!(build.objects(&account), ["a.o", "b.o"]);
        let inclusion: Vec<Inclusion> = account.objects.values().copied().collect();
        assert_eq!((inclusion, account.inputs), (vec![Inclusion::Always, Inclusion::IfNeeded], 2));
        assert!(build.account("other").objects.is_empty());
        build.recorded("cc -shared -o whole.so a.o -Wl,--whole-archive,libb.a,--no-whole-archive");
        assert!(build.account("whole.so").objects.values().all(|inclusion| *inclusion == Inclusion::Always));
    }

    #[test]
    fn an_object_that_was_renamed_is_found_by_its_content() {
        let mut build = Build::new();
        build.recorded("cc -c a.c");
        build.recorded("cc -O2 -c -o other.o a.c");
        build.run("mv other.o a.lo");
        build.recorded(&format!("{LINK} a.lo"));
        let account = build.account("l.so");
        assert!(account.is_complete(), "{account:?}");
        assert_eq!(build.objects(&account), ["other.o"]);
    }

    #[test]
    fn objects_that_were_copied_joined_and_extracted_are_found() {
        let mut build = Build::new();
        build.recorded("cc -c a.c");
        build.recorded("cc -c b.c");
        build.run("cp a.o copy.o; ld -r -o joined.o a.o b.o; mkdir x");
        build.recorded(&format!("{LINK} copy.o"));
        assert_eq!(build.objects(&build.account("l.so")), ["a.o"]);
        build.recorded("cc -shared -o joined.so joined.o");
        assert_eq!(build.objects(&build.account("joined.so")), ["a.o", "b.o"]);
        build.recorded("cc -r -nostdlib -o again.o a.o b.o");
        build.recorded("cc -shared -o again.so again.o");
        assert_eq!(build.objects(&build.account("again.so")), ["a.o", "b.o"]);
        build.recorded("ar rc libb.a b.o");
        build.run("cd x && ar x ../libb.a");
        let x = build.directory.path().join("x");
        build.recording.link(&x, &["ar", "x", "../libb.a"].map(str::to_owned), &[]);
        build.recorded("cc -shared -o extracted.so x/b.o");
        build.run("rm -r x");
        let account = build.account("extracted.so");
        assert!(account.is_complete(), "{account:?}");
        assert_eq!(build.objects(&account), ["b.o"]);
    }

    #[test]
    fn inputs_that_no_recorded_command_made_are_missing() {
        let mut build = Build::new();
        build.run("cc -c a.c; cc -c b.c; ar rc libb.a b.o; echo a.o > list");
        build.recorded(&format!("{LINK} a.o libb.a"));
        let account = build.account("l.so");
        assert_eq!(account.missing, BTreeSet::from(["a.o".to_owned(), "libb.a(b.o)".to_owned()]));
        assert_eq!(account.inputs, 2);
        build.recorded("cc -shared -o listed.so @list");
        assert_eq!(build.account("listed.so").missing, BTreeSet::from(["the files that list listed".to_owned()]));
        build.run("rm a.o");
        assert!(build.account("l.so").missing.contains("a.o"), "it is gone");
    }

    #[test]
    fn libraries_of_the_system_and_linker_scripts_are_no_part() {
        let mut build = Build::new();
        build.run("echo '{ global: *; };' > l.map");
        build.recorded("cc -fPIC -c a.c");
        build.recorded("cc -fPIC -c b.c");
        build.recorded("cc -shared -o libb.so b.o");
        build.recorded(&format!("{LINK} a.o libb.so -L. -lb -Wl,--version-script,l.map -lm -Wl,-soname -Wl,libl.so.1"));
        let account = build.account("l.so");
        assert!(account.is_complete(), "{account:?}");
        assert_eq!(account.inputs, 1);
    }

    #[test]
    fn the_names_in_a_symbol_table_are_an_account() {
        let mut build = Build::new();
        build.recorded("cc -c a.c");
        build.recorded("cc -c b.c");
        let commands = &build.recording.commands;
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let account = |linked: &[&str], units: &[&str]| {
            Account::by_symbols(commands, &names(linked), |name| units.contains(&name))
        };
        let known = account(&["a.c", "crtstuff.c"], &["a.c", "b.c", "c.c"]).unwrap();
        assert!(known.is_complete() && !known.exact);
        assert_eq!(known.objects.values().copied().collect::<Vec<_>>(), [Inclusion::Always, Inclusion::IfNeeded]);
        assert_eq!(account(&["a.c", "c.c"], &["a.c", "c.c"]), Err(names(&["c.c"])));
        assert_eq!(account(&["a.c", "a.c"], &["a.c"]), Err(names(&["a.c"])), "another one of this name");
    }
}

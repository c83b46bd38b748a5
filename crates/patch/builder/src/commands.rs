//! Compile commands: from `compile_commands.json`, or recorded while a package was built by its own rules.

use crate::Error;
use crate::link::{self, Archiver, Input, Link};
use crate::tree::is_unit;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use stillpoint_host::At;
use stillpoint_host::untrusted::Tree;

/// The command that compiles one unit. Paths are as the compiler sees them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CompileCommand {
    /// Working directory.
    pub(crate) directory: PathBuf,
    /// The source file, absolute.
    pub(crate) file: PathBuf,
    /// The object that it makes, absolute.
    pub(crate) object: Option<PathBuf>,
    /// Compiler and arguments.
    pub(crate) argv: Vec<String>,
    /// Variables that affect the compiler.
    pub(crate) env: Vec<(String, OsString)>,
    /// Dependency files of the compiler: make rules with the files that it read.
    pub(crate) dependency_files: Vec<PathBuf>,
}

/// Way to run a command on a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Job {
    /// Exactly the shipped command, with debug information.
    Shipped,
    /// The shipped command with one section for each function and object, and with debug information.
    Sections,
    /// Preprocesses only.
    Preprocess,
    /// Checks only: every error is printed, and so is a pointer of another type.
    Check,
}

/// Options that have no effect on code and would write further files.
const DROPPED: [&str; 9] = ["-MD", "-MMD", "-MP", "-MG", "-MM", "-M", "-c", "-gsplit-dwarf", "-save-temps"];
const DROPPED_WITH_VALUE: [&str; 4] = ["-MF", "-MT", "-MQ", "-o"];
/// Variables that affect a compiler.
const ENV: [&str; 4] = ["SOURCE_DATE_EPOCH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"];

impl CompileCommand {
    /// Makes the command for a job; it writes to `output`.
    pub(crate) fn arguments(&self, job: Job, output: &Path) -> Vec<OsString> {
        let mut kept: Vec<OsString> = Vec::new();
        let mut arguments = self.argv.iter();
        while let Some(argument) = arguments.next() {
            if DROPPED_WITH_VALUE.contains(&argument.as_str()) {
                arguments.next();
            } else if !is_dropped(argument) {
                kept.push(argument.into());
            }
        }
        let has_debug = self.argv.iter().any(|a| matches!(a.as_str(), "-g" | "-g1" | "-g2" | "-g3" | "-ggdb"));
        match job {
            Job::Preprocess => kept.push("-E".into()),
            Job::Check => {
                kept.retain(|argument| argument != "-w" && argument != "-Wfatal-errors");
                let limit = if self.compiler().contains("clang") { "-ferror-limit=0" } else { "-fmax-errors=0" };
                let checks = ["-fsyntax-only", "-Werror=incompatible-pointer-types", "-Werror=int-conversion", limit];
                kept.extend(checks.map(OsString::from));
            }
            Job::Shipped if has_debug => kept.push("-c".into()),
            Job::Shipped => kept.extend(["-c".into(), "-g".into()]),
            Job::Sections => kept.extend(["-c", "-g", "-ffunction-sections", "-fdata-sections"].map(OsString::from)),
        }
        // By default, compilers of C++ leave a class's members to the unit that has its first virtual function.
        let is_c = self.file.extension().is_some_and(|extension| ["c", "S", "s"].iter().any(|c| extension == *c));
        if job != Job::Preprocess && !is_c {
            let is_clang = self.compiler().contains("clang");
            kept.push(if is_clang { "-fstandalone-debug" } else { "-femit-class-debug-always" }.into());
        }
        kept.extend(["-o".into(), output.into()]);
        kept
    }

    /// Returns true if it certainly compiles C.
    pub(crate) fn is_plain_c(&self) -> bool {
        let otherwise = self.compiler().contains("++") || self.argv.iter().any(|a| a.starts_with("-x"));
        self.file.extension().is_some_and(|extension| extension == "c") && !otherwise
    }

    /// Returns true for assembler that no preprocessor reads.
    pub(crate) fn is_assembler(&self) -> bool {
        self.file.extension().is_some_and(|extension| extension == "s")
    }

    fn compiler(&self) -> &str {
        let program = self.argv.first().map_or("", String::as_str);
        program.rsplit('/').next().unwrap_or(program)
    }

    /// Returns the flags as text: they decide the code together with the source.
    pub(crate) fn identity(&self) -> Vec<u8> {
        let mut identity = Vec::new();
        for argument in self.arguments(Job::Preprocess, Path::new("")) {
            identity.extend_from_slice(argument.as_encoded_bytes());
            identity.push(0);
        }
        identity.extend_from_slice(self.directory.as_os_str().as_encoded_bytes());
        for (name, value) in &self.env {
            identity.push(0);
            identity.extend_from_slice(name.as_bytes());
            identity.extend_from_slice(value.as_encoded_bytes());
        }
        identity
    }
}

fn is_dropped(argument: &str) -> bool {
    let joined = ["-MF", "-MT", "-MQ"].iter().any(|o| argument.starts_with(o));
    let through = argument.starts_with("-Wp,-M");
    let output = argument.starts_with("-o") && argument.len() > 2;
    DROPPED.contains(&argument) || joined || through || output || argument.starts_with("-save-temps=")
}

fn names_unit(argument: &str) -> bool {
    !argument.starts_with('-') && is_unit(argument)
}

fn value_of<'a>(argv: &'a [String], option: &str) -> Option<&'a str> {
    let at = argv.iter().position(|a| a == option)?;
    argv.get(at + 1).map(String::as_str)
}

/// Joins two paths and removes `.` and `..`, without access to any file.
pub(crate) fn resolve(directory: &Path, path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for component in directory.join(path).components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => drop(out.pop()),
            other => out.push(other),
        }
    }
    out
}

/// Makes a command from a recorded call, if it compiled exactly one unit to an object.
pub(crate) fn compile(directory: &Path, argv: Vec<String>, env: Vec<(String, OsString)>) -> Option<CompileCommand> {
    let stops = ["-E", "-S", "-M", "-MM", "-fsyntax-only"];
    if !argv.iter().any(|a| a == "-c") || argv.iter().any(|a| stops.contains(&a.as_str())) {
        return None;
    }
    let mut units = argv.iter().skip(1).filter(|a| names_unit(a));
    let (unit, more) = (units.next()?, units.next());
    if more.is_some() {
        return None;
    }
    let file = resolve(directory, Path::new(unit));
    let object = match value_of(&argv, "-o") {
        Some(path) => resolve(directory, Path::new(path)),
        None => directory.join(Path::new(file.file_name()?).with_extension("o")),
    };
    let dependency_files = dependency_files(directory, &argv, &object);
    Some(CompileCommand { directory: directory.to_owned(), file, object: Some(object), argv, env, dependency_files })
}

/// Suffixes of files that a compiler driver hands to the linker.
const LINKED: [&str; 8] = ["o", "lo", "os", "So", "pico", "obj", "a", "so"];

/// Returns true if a file has the suffix of a file from which a linker takes code.
pub(crate) fn is_linked(path: &Path) -> bool {
    path.extension().and_then(|e| e.to_str()).is_some_and(|e| LINKED.contains(&e))
}

/// Makes a command of each unit that a driver compiles and links at once. Its object has no lasting name: it gets one
/// that no build would choose.
fn one_step(directory: &Path, output: &Path, argv: &[String], env: &[(String, OsString)]) -> Vec<CompileCommand> {
    let units: Vec<&String> = argv.iter().skip(1).filter(|a| names_unit(a)).collect();
    let of_unit = |unit: &&String| {
        let is_other = |a: &str| a != unit.as_str() && !a.starts_with('-') && (is_unit(a) || is_linked(Path::new(a)));
        let file = resolve(directory, Path::new(unit));
        let mut object = output.as_os_str().to_owned();
        object.push(format!("({})", file.display()));
        let (mut own, mut rest) = (Vec::new(), argv.iter());
        while let Some(argument) = rest.next() {
            if argument == "-o" {
                rest.next();
            } else if !is_other(argument) {
                own.push(argument.clone());
            }
        }
        CompileCommand {
            directory: directory.to_owned(),
            file,
            object: Some(object.into()),
            argv: own,
            env: env.to_vec(),
            dependency_files: Vec::new(),
        }
    };
    units.iter().map(of_unit).collect()
}

/// Returns the possible paths of the dependency file. Automake renames the file when the compilation succeeded.
fn dependency_files(directory: &Path, argv: &[String], object: &Path) -> Vec<PathBuf> {
    let makes = |a: &String| a == "-MD" || a == "-MMD" || a.starts_with("-Wp,-MD") || a.starts_with("-Wp,-MMD");
    let Some(option) = argv.iter().find(|a| makes(a)) else { return Vec::new() };
    let named = value_of(argv, "-MF").or_else(|| option.split(',').nth(2));
    let path = match named {
        Some(path) => resolve(directory, Path::new(path)),
        None => object.with_extension("d"),
    };
    let renamed = path.extension().is_some_and(|e| e == "Tpo").then(|| path.with_extension("Po"));
    [Some(path), renamed].into_iter().flatten().collect()
}

/// Returns the files that a make rule names, without the target.
pub(crate) fn parse_dependencies(text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    let rule = joined.lines().find(|l| l.contains(':')).unwrap_or("");
    let names = rule.split_once(": ").map_or("", |(_, names)| names);
    names.split_whitespace().map(str::to_owned).collect()
}

#[derive(Deserialize)]
struct Entry {
    directory: PathBuf,
    file: PathBuf,
    command: Option<String>,
    arguments: Option<Vec<String>>,
    output: Option<PathBuf>,
}

/// Parses a `compile_commands.json`; `path` is for messages.
pub(crate) fn parse_json(text: &[u8], path: &Path) -> Result<Vec<CompileCommand>, Error> {
    let malformed = |why: String| Error::Malformed { what: path.display().to_string(), why };
    let entries: Vec<Entry> = serde_json::from_slice(text).map_err(|e| malformed(e.to_string()))?;
    let here = std::env::current_dir().at("asking for", Path::new("the current directory"))?;
    let env = ENV.iter().filter_map(|name| Some((name.to_string(), std::env::var_os(name)?))).collect::<Vec<_>>();
    let mut commands = Vec::new();
    for entry in entries {
        let argv = match (entry.arguments, entry.command) {
            (Some(arguments), _) => arguments,
            (None, Some(command)) => {
                shlex::split(&command).ok_or_else(|| malformed(format!("command with an open quote: {command}")))?
            }
            (None, None) => {
                return Err(malformed(format!("{} has neither arguments nor command", entry.file.display())));
            }
        };
        if argv.is_empty() {
            return Err(malformed(format!("{} has an empty command", entry.file.display())));
        }
        let directory = resolve(&here, &entry.directory);
        let file = resolve(&directory, &entry.file);
        // CMake gives the output relative to another directory than the one it names
        let object = value_of(&argv, "-o").map(Path::new).or(entry.output.as_deref()).map(|o| resolve(&directory, o));
        commands.push(CompileCommand { directory, file, object, argv, env: env.clone(), dependency_files: Vec::new() });
    }
    Ok(commands)
}

/// Commands that ran while a package was built.
#[derive(Debug, Default)]
pub(crate) struct Recording {
    /// Compilations. An object that was compiled in several variants has several.
    pub(crate) commands: Vec<CompileCommand>,
    /// Outputs of linkers and archivers, each with its inputs.
    pub(crate) links: BTreeMap<PathBuf, Link>,
    /// Directories into which members of archives were extracted.
    pub(crate) extracted: BTreeMap<PathBuf, BTreeSet<PathBuf>>,
    /// Results of calls that were put off, by the name of the record.
    pub(crate) by_record: HashMap<String, PathBuf>,
    /// Calls that linked a program or a library, by their output.
    pub(crate) link_calls: BTreeMap<PathBuf, LinkCall>,
    /// Libraries that were linked at once, as the rules load them.
    pub(crate) loaded: Vec<PathBuf>,
    /// Sources that the build made and whose compilation was put off, with the record that has a copy of each.
    pub(crate) kept: Vec<(PathBuf, PathBuf)>,
}

/// One call of a compiler's driver that linked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LinkCall {
    pub(crate) directory: PathBuf,
    pub(crate) argv: Vec<String>,
    pub(crate) env: Vec<(String, OsString)>,
}

impl LinkCall {
    /// Returns the linked file.
    pub(crate) fn output(&self) -> PathBuf {
        link::linker(&self.directory, &self.argv).0
    }

    /// Returns the directories that the linker searches for libraries, in order.
    pub(crate) fn searched(&self) -> Vec<PathBuf> {
        link::searched(&self.directory, &link::flattened(&self.argv))
    }
}

/// One recorded call that is no compilation.
struct OtherCall {
    directory: PathBuf,
    argv: Vec<String>,
    env: Vec<(String, OsString)>,
    /// Script of an archiver.
    script: Option<String>,
    /// Inputs that were placeholders or may be gone, with their origins.
    placeholders: HashMap<PathBuf, Origin>,
    record: String,
}

impl Recording {
    /// Reads the records of a directory, which the build saw as `/stillpoint/records`.
    pub(crate) fn read(directory: &Path) -> Result<Self, Error> {
        let mut recording = Recording::default();
        let records = Tree::open(directory)?;
        let (mut others, mut deferred) = (Vec::new(), Vec::new());
        for entry in records.entries()?.iter().filter(|entry| entry.name.extension().is_some_and(|e| e == "command")) {
            let bytes = records.read(&entry.name)?;
            let text = String::from_utf8_lossy(&bytes);
            let fields: Vec<&str> = text.split_terminator('\0').collect();
            let [at, name, env @ ..] = &fields[..] else { continue };
            let Some((values, arguments)) = env.split_at_checked(ENV.len()) else { continue };
            let set = ENV.iter().zip(values).filter(|(_, value)| !value.is_empty());
            let env: Vec<_> = set.map(|(name, value)| (name.to_string(), OsString::from(value))).collect();
            let mut argv = vec![name.to_string()];
            argv.extend(arguments.iter().map(|a| a.to_string()));
            let record = entry.name.with_extension("").to_string_lossy().into_owned();
            // the texts of all of a command's response files are in one file
            let mut response = records.read_text(entry.name.with_extension("response")).ok();
            let script = response.take_if(|_| argv.get(1).is_some_and(|argument| argument == "-M"));
            let compiled = compile(Path::new(at), argv.clone(), env.clone());
            if compiled.is_none() {
                argv = link::expanded(argv, |_| response.as_mut().map(std::mem::take));
            }
            match compiled.or_else(|| compile(Path::new(at), argv.clone(), env.clone())) {
                Some(mut command) => {
                    if command.dependency_files.is_empty() {
                        command.dependency_files.push(directory.join(&entry.name).with_extension("d"));
                    }
                    let copy = entry.name.with_extension("source");
                    recording.kept.extend(records.has(&copy).then(|| (command.file.clone(), copy)));
                    let is_deferred = records.has(entry.name.with_extension("deferred"));
                    deferred.extend(is_deferred.then_some((recording.commands.len(), record)));
                    recording.commands.push(command);
                }
                None => {
                    let inputs = records.read_existing(entry.name.with_extension("inputs"))?.unwrap_or_default();
                    let placeholders = placeholders(&inputs);
                    others.push(OtherCall { directory: at.into(), argv, env, script, placeholders, record });
                }
            }
        }
        recording.distinguish(&deferred);
        recording.others(&others);
        recording.sort();
        let loaded = records.read_existing(crate::recorder::LOADED)?.unwrap_or_default();
        let paths = loaded.split(|byte| *byte == 0).filter(|path| !path.is_empty());
        recording.loaded = paths.map(|path| PathBuf::from(OsStr::from_bytes(path))).collect();
        Ok(recording)
    }

    /// Gives a name of its own to each of several objects that were put off under one name. What the build would have
    /// left there last is no object of the programs that it linked before.
    fn distinguish(&mut self, deferred: &[(usize, String)]) {
        let mut of_object: BTreeMap<PathBuf, Vec<Vec<u8>>> = BTreeMap::new();
        let same =
            |command: &CompileCommand| [command.file.as_os_str().as_encoded_bytes(), &command.identity()].concat();
        for (command, object) in self.commands.iter().filter_map(|c| Some((c, c.object.clone()?))) {
            let kinds = of_object.entry(object).or_default();
            let kind = same(command);
            if !kinds.contains(&kind) {
                kinds.push(kind);
            }
        }
        let all: BTreeSet<usize> = deferred.iter().map(|(index, _)| *index).collect();
        let made_at_once: BTreeSet<PathBuf> = self
            .commands
            .iter()
            .enumerate()
            .filter(|(index, _)| !all.contains(index))
            .filter_map(|(_, c)| c.object.clone())
            .collect();
        for (index, record) in deferred {
            let command = &mut self.commands[*index];
            let Some(object) = command.object.clone() else { continue };
            let kinds = of_object.get(&object).map_or(&[][..], Vec::as_slice);
            if kinds.len() > 1 && !made_at_once.contains(&object) {
                let number = kinds.iter().position(|kind| *kind == same(command)).unwrap_or_default();
                let mut name = object.into_os_string();
                name.push(format!("({number})"));
                command.object = Some(name.into());
            }
            self.by_record.extend(command.object.clone().map(|object| (record.clone(), object)));
        }
    }

    /// Records links, and replaces the names of placeholders by those of the results that they stand for.
    fn others(&mut self, calls: &[OtherCall]) {
        let mut links = Vec::new();
        for call in calls {
            match &call.script {
                Some(script) => self.script(&call.directory, script),
                None => self.link(&call.directory, &call.argv, &call.env),
            }
            for (output, link) in std::mem::take(&mut self.links) {
                self.by_record.insert(call.record.clone(), output.clone());
                links.push((output, link, call));
            }
        }
        for (output, link, call) in links {
            let result_of = |path: &PathBuf| match call.placeholders.get(path)? {
                Origin::Record(record) => self.by_record.get(record).cloned(),
                Origin::Copy(path) => Some(path.clone()),
            };
            let real = |input: Input| match input {
                Input::File { path, whole } => Input::File { path: result_of(&path).unwrap_or(path), whole },
                other => other,
            };
            let inputs: Vec<Input> = link.inputs.into_iter().map(real).collect();
            let made = self.links.entry(output).or_default();
            made.kind = link.kind;
            made.inputs.extend(inputs);
            made.options.extend(link.options);
        }
    }

    /// Records a script of an archiver: it joins archives and objects to one archive.
    fn script(&mut self, directory: &Path, text: &str) {
        let mut archive = None;
        for line in text.lines() {
            let mut words = line.split([' ', '\t', ',']).filter(|word| !word.is_empty());
            let command = words.next().unwrap_or_default().to_ascii_lowercase();
            let mut files = words.map(|file| resolve(directory, Path::new(file)));
            if command == "create" || command == "open" {
                archive = files.next();
            }
            let Some(archive) = &archive else { continue };
            let made = self.links.entry(archive.clone()).or_default();
            made.kind = link::Kind::Archive;
            if command == "addlib" || command == "addmod" {
                made.inputs.extend(files.map(|path| Input::File { path, whole: true }));
            }
        }
    }

    /// Orders the commands, and removes duplicates.
    fn sort(&mut self) {
        let same = |c: &CompileCommand| (c.object.clone(), c.file.clone(), c.identity());
        self.commands.sort_by_cached_key(same);
        self.commands.dedup_by(|one, other| same(one) == same(other));
    }

    /// Records a call of a linker or an archiver; ignores every other call.
    pub(crate) fn link(&mut self, directory: &Path, argv: &[String], env: &[(String, OsString)]) {
        let Some(program) = argv.first().filter(|p| !p.ends_with("ranlib")) else { return };
        if program.ends_with("ar") {
            match link::archiver(directory, argv) {
                Some(Archiver::Adds { archive, files }) => {
                    let made = self.links.entry(archive).or_default();
                    made.kind = link::Kind::Archive;
                    made.inputs.extend(files.into_iter().map(|path| match path.starts_with("/") {
                        true => Input::File { path, whole: true },
                        false => Input::Response(path),
                    }));
                }
                Some(Archiver::Extracts { archive }) => {
                    self.extracted.entry(directory.to_owned()).or_default().insert(archive);
                }
                None => {}
            }
            return;
        }
        if argv.iter().any(|a| matches!(a.as_str(), "-c" | "-E" | "-S" | "-M" | "-MM" | "-fsyntax-only")) {
            return;
        }
        let (output, Link { kind, mut inputs, options }) = link::linker(directory, argv);
        let call = LinkCall { directory: directory.to_owned(), argv: argv.to_vec(), env: env.to_vec() };
        self.link_calls.insert(output.clone(), call);
        inputs.retain(|input| !matches!(input, Input::File { path, .. } if is_unit(&path.to_string_lossy())));
        for command in one_step(directory, &output, argv, env) {
            inputs.extend(command.object.clone().map(|path| Input::File { path, whole: false }));
            self.commands.push(command);
        }
        if !inputs.is_empty() {
            let made = self.links.entry(output).or_default();
            made.kind = kind;
            made.inputs.extend(inputs);
            made.options.extend(options);
        }
    }

    /// Returns the programs and shared libraries that were linked.
    pub(crate) fn images(&self) -> impl Iterator<Item = &Path> {
        let is_image = |(_, link): &(&PathBuf, &Link)| link.kind == link::Kind::Image;
        self.links.iter().filter(is_image).map(|(output, _)| output.as_path())
    }

    /// Returns the programs and shared libraries that may have code of some sources, by the names in their links.
    pub(crate) fn images_with(&self, is_source: impl Fn(&Path) -> bool) -> BTreeSet<PathBuf> {
        let units = self.commands.iter().filter(|command| is_source(&command.file));
        let mut parts: BTreeSet<&Path> = units.filter_map(|command| command.object.as_deref()).collect();
        loop {
            let is_archive = |name: &str, part: &Path| part.file_name() == Some(OsStr::new(&format!("lib{name}.a")));
            let has_part = |input: &Input| match input {
                Input::File { path, .. } => parts.contains(path.as_path()),
                Input::Library { name, .. } => parts.iter().any(|part| is_archive(name, part)),
                Input::Response(_) => false,
            };
            let found = self
                .links
                .iter()
                .filter(|(output, link)| !parts.contains(output.as_path()) && link.inputs.iter().any(has_part));
            let (images, joined): (Vec<_>, Vec<_>) = found.partition(|(_, link)| link.kind == link::Kind::Image);
            if joined.is_empty() {
                return images.into_iter().map(|(output, _)| output.clone()).collect();
            }
            parts.extend(joined.into_iter().map(|(output, _)| output.as_path()));
        }
    }
}

/// Origin of an input of a call that was put off.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Origin {
    /// The placeholder of a record.
    Record(String),
    /// A file that the build may have removed; this is a copy.
    Copy(PathBuf),
}

/// Parses the list of the inputs of a call that was put off: records and path, each ended by a zero.
fn placeholders(text: &[u8]) -> HashMap<PathBuf, Origin> {
    let text = String::from_utf8_lossy(text);
    let fields: Vec<&str> = text.split_terminator('\0').collect();
    let pairs = fields.chunks_exact(2).filter_map(|pair| {
        let record = pair[0].split(',').next()?.rsplit('/').next()?;
        let origin = match pair[0].strip_prefix('=') {
            Some(copy) => Origin::Copy(resolve(Path::new("/"), Path::new(copy))),
            None if record.is_empty() => return None,
            None => Origin::Record(record.to_owned()),
        };
        Some((resolve(Path::new("/"), Path::new(pair[1])), origin))
    });
    pairs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_command_is_turned_to_each_job() {
        let argv = words("cc -O2 -MMD -MF x.Tpo -I. -c -o out/a.o ../a.c");
        let command = compile(Path::new("/b/src"), argv, Vec::new()).unwrap();
        assert_eq!(command.file, Path::new("/b/a.c"));
        assert_eq!(command.object.as_deref(), Some(Path::new("/b/src/out/a.o")));
        assert_eq!(command.dependency_files, [Path::new("/b/src/x.Tpo"), Path::new("/b/src/x.Po")]);
        let text = |job| {
            let arguments = command.arguments(job, Path::new("/o"));
            arguments.iter().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(text(Job::Shipped), "cc -O2 -I. ../a.c -c -g -o /o");
        assert_eq!(text(Job::Sections), "cc -O2 -I. ../a.c -c -g -ffunction-sections -fdata-sections -o /o");
        assert_eq!(text(Job::Preprocess), "cc -O2 -I. ../a.c -E -o /o");
    }

    #[test]
    fn units_in_cxx_are_asked_for_all_of_their_types() {
        let text = |compiler: &str, job| {
            let argv = words(&format!("{compiler} -c a.cc"));
            let command = compile(Path::new("/b"), argv, Vec::new()).unwrap();
            let arguments = command.arguments(job, Path::new("/o"));
            arguments.iter().map(|a| a.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(text("g++", Job::Shipped), "g++ a.cc -c -g -femit-class-debug-always -o /o");
        assert_eq!(
            text("/usr/bin/clang++-14", Job::Shipped),
            "/usr/bin/clang++-14 a.cc -c -g -fstandalone-debug -o /o"
        );
        assert_eq!(text("g++", Job::Preprocess), "g++ a.cc -E -o /o");
    }

    #[test]
    fn only_compilations_of_one_unit_count() {
        for argv in ["cc -o a a.c", "cc -c a.c b.c", "cc -MM -c a.c", "cc -c a.o", "cc -E -c a.c"] {
            assert_eq!(compile(Path::new("/b"), words(argv), Vec::new()), None, "{argv}");
        }
    }

    #[test]
    fn a_program_made_in_one_step_has_a_command_for_each_unit() {
        let mut recording = Recording::default();
        recording.link(Path::new("/b"), &words("gcc -O2 -o prog a.c sub/b.c c.o libd.a -lm"), &[]);
        let commands: Vec<(&Path, String)> =
            recording.commands.iter().map(|c| (c.file.as_path(), c.argv.join(" "))).collect();
        assert_eq!(
            commands,
            [
                (Path::new("/b/a.c"), "gcc -O2 a.c -lm".to_owned()),
                (Path::new("/b/sub/b.c"), "gcc -O2 sub/b.c -lm".to_owned())
            ]
        );
        let inputs = &recording.links[Path::new("/b/prog")].inputs;
        let is_input = |path: &Path| inputs.contains(&Input::File { path: path.to_owned(), whole: false });
        assert!(recording.commands.iter().all(|c| is_input(c.object.as_deref().unwrap())), "{inputs:?}");
        assert!(is_input(Path::new("/b/c.o")) && !is_input(Path::new("/b/a.c")), "{inputs:?}");
    }

    #[test]
    fn an_object_that_is_compiled_in_two_ways_has_two_commands() {
        let command = |line: &str| compile(Path::new("/b"), words(line), Vec::new()).unwrap();
        let lines = ["gcc -DONE -c -o a.o a.c", "gcc -DTWO -c -o a.o a.c", "gcc -DONE -MMD -c -o a.o a.c"];
        let mut recording = Recording { commands: lines.map(command).into(), ..Recording::default() };
        recording.sort();
        assert_eq!(recording.commands.len(), 2);
    }

    #[test]
    fn dependencies_are_read_from_the_first_rule() {
        let text = "a.o: a.c b.h \\\n ../c.h\n\nb.h:\n../c.h:\n";
        assert_eq!(parse_dependencies(text), ["a.c", "b.h", "../c.h"]);
        assert_eq!(parse_dependencies(""), [""; 0]);
    }
}

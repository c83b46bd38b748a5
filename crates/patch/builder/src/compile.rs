//! Compilation of units of one program in several trees: the same commands, at the same paths, nothing twice.

use crate::account::Account;
use crate::commands::{CompileCommand, Job, LinkCall, parse_dependencies, resolve};
use crate::includes::Includes;
use crate::preprocess::{Text, evaluate};
use crate::root::OWN_PATH;
use crate::sandbox::{Sandbox, first_error, output, run};
use crate::{Cache, Error};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use stillpoint_host::At;
use stillpoint_host::cache::key;
use stillpoint_host::file::{list, read_regular};
use stillpoint_host::untrusted::{FILE_MAX, Tree};

/// A source as its package contains it.
#[derive(Debug)]
pub(crate) struct Original {
    /// The package, unpacked.
    pub(crate) tree: PathBuf,
    /// Files that diffs of its series create.
    pub(crate) created: BTreeSet<String>,
}

impl Original {
    /// Returns true if no build made the file.
    pub(crate) fn has(&self, file: &str) -> bool {
        self.created.contains(file) || self.tree.join(file).symlink_metadata().is_ok()
    }
}

/// A program that can be compiled unit by unit.
#[derive(Debug)]
pub(crate) struct Project {
    /// Clean root, or `None` for this system.
    pub(crate) root: Option<PathBuf>,
    /// The source directory, as the compiler sees it.
    pub(crate) source: PathBuf,
    /// The tree as shipped.
    pub(crate) shipped: PathBuf,
    /// The source before any build; `None` where only the tree is available.
    pub(crate) original: Option<Original>,
    /// Identifier that distinguishes shipped trees.
    pub(crate) identity: String,
    /// Cache of patched trees.
    pub(crate) trees: Cache,
    /// Units, by their path relative to the source directory.
    pub(crate) commands: Vec<(String, CompileCommand)>,
    /// Units that the build compiled only for other programs.
    pub(crate) other_units: BTreeSet<String>,
    /// Known facts about the target's objects.
    pub(crate) account: Account,
    /// True if the shipped tree holds the objects of its own build.
    pub(crate) built: bool,
    /// Includes of the tree, where no build has recorded the files that its units read.
    pub(crate) includes: Option<Includes>,
    /// The link of the target, if it is known.
    pub(crate) link: Option<LinkCall>,
    /// True if this link was put off, and its inputs are not there.
    pub(crate) link_put_off: bool,
}

impl Project {
    /// Opens one of the trees of the project.
    pub(crate) fn open(&self, tree: &Path) -> Result<Tree, Error> {
        Ok(Tree::open(tree)?.known_as(&self.source))
    }

    /// Returns the tree without what a build made, where there is one.
    pub(crate) fn unbuilt(&self) -> &Path {
        self.original.as_ref().map_or(&self.shipped, |original| &original.tree)
    }

    /// Returns true if a file is certainly no part of the target, because the build compiled it for other programs.
    pub(crate) fn is_of_others(&self, file: &str) -> bool {
        self.account.is_complete() && self.other_units.contains(file)
    }

    /// Reads a file of one of the trees; `None` if that is not possible.
    pub(crate) fn read(&self, tree: &Path, file: impl AsRef<Path>) -> Option<Vec<u8>> {
        self.open(tree).ok()?.read(file).ok()
    }
}

/// Directory for the output of compilers.
enum Scratch {
    OfCache(stillpoint_host::cache::Scratch),
    Temporary(tempfile::TempDir),
}

impl Scratch {
    fn path(&self) -> &Path {
        match self {
            Scratch::OfCache(scratch) => scratch.path(),
            Scratch::Temporary(scratch) => scratch.path(),
        }
    }
}

/// Compiler of the units of one project.
pub(crate) struct Compiler<'a> {
    pub(crate) project: &'a Project,
    pub(crate) cache: &'a Cache,
    scratch: Scratch,
    /// Contents of the scratch directory.
    own: Tree,
    /// True if sources can include `stillpoint-shadow.h`.
    shadow_variables: bool,
    counter: std::sync::atomic::AtomicU64,
    hashes: Mutex<HashMap<PathBuf, Option<String>>>,
    names: Mutex<HashMap<PathBuf, HashMap<String, Vec<String>>>>,
    versions: Mutex<HashMap<String, String>>,
}

/// Cached state of a unit: its text for these contents of its files.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Remembered {
    contents: Vec<(String, String)>,
    same_names: String,
    text: Text,
}

/// Version of the meaning of a [`Text`] of C; increase it with every change of that meaning.
const C_TEXT_VERSION: &[u8] = b"2";
const REMEMBERED_MAX: usize = 64;

impl<'a> Compiler<'a> {
    pub(crate) fn new(project: &'a Project, cache: &'a Cache, shadow_variables: bool) -> Result<Self, Error> {
        let scratch = match project.root {
            Some(_) => Scratch::OfCache(cache.scratch()?),
            // below /tmp, as the cache may be located in the source directory, over which the tree is mounted while
            // compiling
            None => Scratch::Temporary(tempfile::tempdir().at("making", Path::new("a temporary directory"))?),
        };
        let own = Tree::open(scratch.path())?;
        for (name, text) in crate::SHADOW_SOURCES.into_iter().chain([stillpoint_patch_shadow::RUNTIME]) {
            own.write(Path::new("shadow").join(name), text.as_bytes())?;
        }
        Ok(Compiler {
            project,
            cache,
            scratch,
            own,
            shadow_variables,
            counter: Default::default(),
            hashes: Default::default(),
            names: Default::default(),
            versions: Default::default(),
        })
    }

    pub(crate) fn sandbox(&self, tree: &Path) -> Sandbox {
        let mut sandbox = Sandbox { root: self.project.root.clone(), ..Sandbox::default() };
        if self.project.root.is_some() || tree != self.project.source {
            sandbox = sandbox.with(tree, &self.project.source);
        }
        if self.project.root.is_some() {
            sandbox = sandbox.with(self.scratch.path(), &Path::new(OWN_PATH).join("out"));
        }
        sandbox
    }

    /// Returns the path of a file of the scratch directory inside the sandbox.
    pub(crate) fn inside(&self, name: &Path) -> PathBuf {
        match self.project.root {
            Some(_) => Path::new(OWN_PATH).join("out").join(name),
            None => self.scratch.path().join(name),
        }
    }

    /// Returns the contents of the scratch directory.
    pub(crate) fn own(&self) -> &Tree {
        &self.own
    }

    /// Makes a directory; its name is relative to the scratch directory.
    pub(crate) fn scratch_directory(&self) -> Result<PathBuf, Error> {
        let number = self.counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = PathBuf::from(format!("{number}.d"));
        self.own.make_directory(&name)?;
        Ok(name)
    }

    /// Removes a directory of the scratch directory.
    pub(crate) fn remove_scratch(&self, name: &Path) -> Result<(), Error> {
        Ok(self.own.remove_all(name)?)
    }

    /// Returns an object of the cache.
    pub(crate) fn cached(&self, name: &str) -> Option<Vec<u8>> {
        self.cache.load("object", name)
    }

    /// Writes an object to the cache.
    pub(crate) fn store(&self, name: &str, bytes: &[u8]) -> Result<(), Error> {
        Ok(self.cache.store("object", name, bytes)?)
    }

    /// Returns the path of the source of shadow variables.
    pub(crate) fn shadow_source(&self) -> PathBuf {
        self.scratch.path().join("shadow/stillpoint-shadow.c")
    }

    /// Runs one job; `Err` of the inner result is the output of the compiler.
    fn execute(&self, tree: &Path, command: &CompileCommand, job: Job) -> Result<Result<Vec<u8>, String>, Error> {
        if job == Job::Preprocess && command.is_assembler() {
            let text = self.project.read(tree, &command.file);
            return Ok(text.ok_or_else(|| format!("{}: no such file", command.file.display())));
        }
        let number = self.counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("{number}.out");
        let mut argv = command.arguments(job, &self.inside(Path::new(&name)));
        if self.shadow_variables {
            argv.extend(["-idirafter".into(), self.inside(Path::new("shadow")).into()]);
        }
        let result = output(&mut self.sandbox(tree).command(&command.directory, &argv, &command.env))?;
        if !result.status.success() {
            return Ok(Err(first_error(&result)));
        }
        let bytes = self.own.read(&name)?;
        self.own.remove(&name)?;
        Ok(Ok(bytes))
    }

    /// Runs a command on a text that is preprocessed. Returns its output file, if it made one, and its result.
    pub(crate) fn on_text(
        &self,
        tree: &Path,
        command: &CompileCommand,
        text: &[u8],
        job: Job,
    ) -> Result<(Option<Vec<u8>>, std::process::Output), Error> {
        let number = self.counter.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (input, made) = (format!("{number}.i"), format!("{number}.o"));
        self.own.write(&input, text)?;
        let mut argv = command.arguments(job, &self.inside(Path::new(&made)));
        let is_source =
            |a: &OsString| a.to_str().is_some_and(|a| resolve(&command.directory, Path::new(a)) == command.file);
        argv.retain(|a| !is_source(a));
        if job == Job::Sections {
            // the text is not what its author would be warned of
            argv.push("-w".into());
        }
        argv.push(self.inside(Path::new(&input)).into());
        let result = output(&mut self.sandbox(tree).command(&command.directory, &argv, &command.env))?;
        let bytes = self.own.read_existing(&made)?;
        self.own.remove(&input)?;
        if bytes.is_some() {
            self.own.remove(&made)?;
        }
        Ok((bytes.filter(|_| result.status.success()), result))
    }

    /// Returns the preprocessed text of a unit, as the compiler prints it; the inner error is the compiler's.
    pub(crate) fn preprocessed(&self, tree: &Path, command: &CompileCommand) -> Result<Result<Vec<u8>, String>, Error> {
        self.execute(tree, command, Job::Preprocess)
    }

    /// Returns the path of the source of the table of added members.
    pub(crate) fn members_source(&self) -> PathBuf {
        self.scratch.path().join("shadow").join(stillpoint_patch_shadow::RUNTIME.0)
    }

    /// Returns the first line of the compiler's `--version`.
    pub(crate) fn version(&self, command: &CompileCommand) -> Result<String, Error> {
        let program = command.argv[0].clone();
        if let Some(version) = self.versions.lock().expect("no panic holds it").get(&program) {
            return Ok(version.clone());
        }
        let argv: [OsString; 2] = [program.clone().into(), "--version".into()];
        let sandbox = self.sandbox(&self.project.shipped);
        let output = run(&mut sandbox.command(&command.directory, &argv, &[]), "asking for the compiler's version")?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text.lines().next().unwrap_or("unknown").to_owned();
        self.versions.lock().expect("no panic holds it").insert(program, version.clone());
        Ok(version)
    }

    /// Returns the files that the recorded build read for a unit, relative to the source directory; `None` when not
    /// recorded.
    pub(crate) fn shipped_files(&self, command: &CompileCommand) -> Option<BTreeSet<String>> {
        let read = |path: &PathBuf| match path.starts_with(&self.project.source) {
            true => self.project.read(&self.project.shipped, path),
            // beside the record of the command
            false => Tree::open(path.parent()?).ok()?.read(path.file_name()?).ok(),
        };
        let text = command.dependency_files.iter().find_map(read)?;
        let names = parse_dependencies(&String::from_utf8_lossy(&text));
        let relative = |name: &String| {
            let path = resolve(&command.directory, Path::new(name));
            path.strip_prefix(&self.project.source).ok().map(|p| p.to_string_lossy().into_owned())
        };
        (!names.is_empty()).then(|| names.iter().filter_map(relative).collect())
    }

    fn hash(&self, tree: &Path, file: &str) -> Option<String> {
        let path = match &self.project.root {
            // a clean root never changes: its name identifies its files
            Some(_) if file.starts_with('/') => return Some(String::new()),
            _ => tree.join(file),
        };
        if let Some(known) = self.hashes.lock().expect("no panic holds it").get(&path) {
            return known.clone();
        }
        let bytes = match file.starts_with('/') {
            true => read_regular(&path, FILE_MAX).ok(),
            false => self.project.read(tree, file),
        };
        let hash = bytes.map(|bytes| key([&bytes[..]]));
        self.hashes.lock().expect("no panic holds it").insert(path, hash.clone());
        hash
    }

    /// Lists the files of a tree that share a name with those read: the compiler could find a new one in place of
    /// another.
    fn same_names(&self, tree: &Path, files: &BTreeSet<String>) -> String {
        let mut names = self.names.lock().expect("no panic holds it");
        let by_name = names.entry(tree.to_owned()).or_insert_with(|| files_by_name(tree));
        let last = |f: &String| f.rsplit('/').next().unwrap_or(f).to_owned();
        let wanted: BTreeSet<String> = files.iter().map(last).collect();
        let same: Vec<&[u8]> = wanted.iter().filter_map(|n| by_name.get(n)).flatten().map(|p| p.as_bytes()).collect();
        key(same)
    }

    /// Returns the preprocessed text of a unit in a tree. The inner error is the output of the compiler.
    pub(crate) fn text(
        &self,
        tree: &Path,
        unit: &str,
        command: &CompileCommand,
    ) -> Result<Result<Text, String>, Error> {
        let root = self.project.root.as_deref().unwrap_or(Path::new("")).as_os_str().as_encoded_bytes();
        let source = self.project.source.as_os_str().as_encoded_bytes();
        let version = self.version(command)?;
        let identity = command.identity();
        let parts = [root, source, unit.as_bytes(), version.as_bytes(), &identity];
        let name = key(parts.into_iter().chain(command.is_plain_c().then_some(C_TEXT_VERSION))) + ".json";
        let stored = self.cache.load("text", &name);
        let mut remembered: Vec<Remembered> =
            stored.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        let holds = |r: &&Remembered| {
            r.contents.iter().all(|(file, hash)| self.hash(tree, file).as_ref() == Some(hash))
                && self.same_names(tree, &r.text.files) == r.same_names
        };
        if let Some(found) = remembered.iter().find(holds) {
            return Ok(Ok(found.text.clone()));
        }
        let bytes = match self.execute(tree, command, Job::Preprocess)? {
            Ok(bytes) => bytes,
            Err(printed) => return Ok(Err(printed)),
        };
        let text = evaluate(&bytes, &command.directory, &self.project.source, command.is_plain_c());
        let contents = text.files.iter().map(|f| Some((f.clone(), self.hash(tree, f)?))).collect::<Option<Vec<_>>>();
        if let Some(contents) = contents {
            let same_names = self.same_names(tree, &text.files);
            remembered.insert(0, Remembered { contents, same_names, text: text.clone() });
            remembered.truncate(REMEMBERED_MAX);
            let bytes = serde_json::to_vec(&remembered)
                .map_err(|e| Error::Malformed { what: name.clone(), why: e.to_string() })?;
            self.cache.store("text", &name, &bytes)?;
        }
        Ok(Ok(text))
    }

    /// Returns the object of a unit in a tree; `text` is its preprocessed text there.
    pub(crate) fn object(
        &self,
        tree: &Path,
        unit: &str,
        command: &CompileCommand,
        job: Job,
        text: &Text,
        side: &'static str,
    ) -> Result<Vec<u8>, Error> {
        let root = self.project.root.as_deref().unwrap_or(Path::new("")).as_os_str().as_encoded_bytes();
        let source = self.project.source.as_os_str().as_encoded_bytes();
        let version = self.version(command)?;
        let how: &[u8] = if job == Job::Shipped { b"shipped" } else { b"sections" };
        let identity = command.identity();
        let parts = [how, root, source, unit.as_bytes(), version.as_bytes(), &identity, text.full.as_bytes()];
        let name = key(parts) + ".o";
        if let Some(bytes) = self.cache.load("object", &name) {
            return Ok(bytes);
        }
        let bytes = self.execute(tree, command, job)?.map_err(|output| Error::Compile {
            unit: unit.to_owned(),
            side,
            output,
        })?;
        self.cache.store("object", &name, &bytes)?;
        Ok(bytes)
    }

    /// Returns the object of the shipped build, or one made by exactly the same command.
    pub(crate) fn shipped_object(&self, unit: &str, command: &CompileCommand) -> Result<Vec<u8>, Error> {
        let recorded = command.object.as_ref().filter(|object| self.has_one_command(object));
        let recorded = recorded.and_then(|path| path.strip_prefix(&self.project.source).ok());
        if let (true, Some(path)) = (self.project.built, recorded)
            && let Some(bytes) = self.project.read(&self.project.shipped, path)
            && has_debug_information(&bytes)
        {
            return Ok(bytes);
        }
        let failed = |output| Error::Compile { unit: unit.to_owned(), side: "shipped", output };
        let text = self.text(&self.project.shipped, unit, command)?.map_err(failed)?;
        self.object(&self.project.shipped, unit, command, Job::Shipped, &text, "shipped")
    }

    /// Returns true if no other command made an object of the same name.
    fn has_one_command(&self, object: &Path) -> bool {
        self.project.commands.iter().filter(|(_, command)| command.object.as_deref() == Some(object)).count() == 1
    }

    /// Compiles a source of ours or of the user that is no part of the project, with the flags of one of its units.
    /// Headers in the directory of the source are found.
    pub(crate) fn extra(&self, tree: &Path, source: &Path, like: &CompileCommand) -> Result<Vec<u8>, Error> {
        let file_name = source.file_name().unwrap_or(source.as_os_str());
        let source = source.canonicalize().at("resolving", source)?;
        let beside = source.parent().unwrap_or(Path::new("/"));
        let name = Path::new("extra").join(key([source.as_os_str().as_encoded_bytes()]));
        self.own.write(name.join(file_name), &read_regular(&source, FILE_MAX)?)?;
        let headers = Tree::open(beside)?;
        for header in list(beside)?.iter().filter(|header| header.ends_with(".h")) {
            match headers.read(header) {
                Ok(text) => self.own.write(name.join(header), &text)?,
                Err(error) => tracing::warn!(%error, "a header beside an extra unit is left out"),
            }
        }
        let mut command = like.clone();
        command.argv.retain(|a| resolve(&like.directory, Path::new(a)) != like.file);
        command.argv.push(self.inside(&name).join(file_name).to_string_lossy().into_owned());
        if crate::lto::asks(&command.argv) {
            // it is no part of the program's link
            command.argv.push("-fno-lto".to_owned());
        }
        let unit = file_name.to_string_lossy().into_owned();
        self.execute(tree, &command, Job::Sections)?.map_err(|output| Error::Compile { unit, side: "after", output })
    }
}

/// Returns true if an object has debug information, for itself or for the link that optimises it.
pub(crate) fn has_debug_information(object: &[u8]) -> bool {
    use object::{Object, ObjectSection};
    const NAMES: [&str; 3] = [".debug_info", ".zdebug_info", ".gnu.debuglto_.debug_info"];
    object::File::parse(object)
        .is_ok_and(|file| file.sections().any(|s| s.name().is_ok_and(|name| NAMES.contains(&name)) && s.size() > 0))
}

/// Returns the paths of a tree's files, by their base names.
fn files_by_name(tree: &Path) -> HashMap<String, Vec<String>> {
    let mut found: HashMap<String, Vec<String>> = HashMap::new();
    let entries = Tree::open(tree).and_then(|tree| tree.entries()).unwrap_or_default();
    for entry in entries.iter().filter(|entry| !entry.is_directory()) {
        let name = entry.name.file_name().unwrap_or_default().to_string_lossy().into_owned();
        found.entry(name).or_default().push(entry.name.to_string_lossy().into_owned());
    }
    found
}

/// Runs `work` on every item, `jobs` at a time; the results are in the order of the items.
pub(crate) fn parallel<T: Sync, R: Send>(jobs: usize, items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let results: Vec<Mutex<Option<R>>> = items.iter().map(|_| Mutex::new(None)).collect();
    std::thread::scope(|scope| {
        for _ in 0..jobs.clamp(1, items.len().max(1)) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                    let Some(item) = items.get(at) else { break };
                    *results[at].lock().expect("written once") = Some(work(item));
                }
            });
        }
    });
    results.into_iter().filter_map(|slot| slot.into_inner().expect("written once")).collect()
}

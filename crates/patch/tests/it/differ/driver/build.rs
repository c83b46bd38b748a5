//! Compiles and links a program in one variant, sends it queries, and runs the differ on it.

use super::case::{Case, Compiler, SourceFile};
use object::Object as _;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;
use stillpoint_patch_differ::{HookNames, Options, Outcome, Refusal, TargetElf, UnitInput, exports};
use stillpoint_patch_format::{DiffFact, Source, Toolchain};

/// Options by which a program is compiled and linked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Variant {
    pub(crate) opt: String,
    pub(crate) link: String,
    pub(crate) cf: &'static str,
    pub(crate) patchable: &'static str,
    pub(crate) stripped: bool,
    pub(crate) compiler: Compiler,
}

impl std::fmt::Display for Variant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let stripped = if self.stripped { "stripped" } else { "with symbols" };
        write!(f, "{} {} {} {} {} {stripped}", self.compiler.cxx(), self.opt, self.link, self.cf, self.patchable)
    }
}

const CF: [&str; 3] = ["-fcf-protection=none", "-fcf-protection=full", "-fcf-protection=branch"];
const PATCHABLE: [&str; 3] = ["", "-fpatchable-function-entry=5", "-fpatchable-function-entry=8,3"];
/// Pairs of levels: every pair of levels of four factors occurs once (optimisation, link, control flow, patchable
/// entry); a fifth column, stripped or not, is combined with each level in both ways.
const ROWS: [[usize; 5]; 9] = [
    [0, 0, 0, 0, 1],
    [0, 1, 1, 1, 0],
    [0, 2, 2, 2, 1],
    [1, 0, 1, 2, 0],
    [1, 1, 2, 0, 1],
    [1, 2, 0, 1, 0],
    [2, 0, 2, 1, 0],
    [2, 1, 0, 2, 1],
    [2, 2, 1, 0, 0],
];

/// Returns `count` variants of a case, different ones for each case, C++ with both compilers in turn; with
/// `PROGRAMS_ALL=1` all nine by each compiler, and with `STILLPOINT_ALL=1`, as in the soak form, every combination of
/// C++.
pub(crate) fn variants(case: &Case, count: usize) -> Vec<Variant> {
    let set = |name: &str| std::env::var_os(name).is_some_and(|value| value == "1");
    let compilers: &[Compiler] = if case.is_cxx() { &case.compilers } else { &[Compiler::Gnu] };
    let seed = case.name.bytes().fold(0usize, |sum, b| sum.wrapping_mul(31).wrapping_add(usize::from(b)));
    let rows: Vec<([usize; 5], Compiler)> = if case.is_cxx() && (set("STILLPOINT_ALL") || set("STILLPOINT_SOAK")) {
        every_combination(compilers)
    } else if set("PROGRAMS_ALL") {
        ROWS.iter().flat_map(|row| compilers.iter().map(|compiler| (*row, *compiler))).collect()
    } else {
        // Steps of four through nine rows: three consecutive ones differ in optimisation and link.
        let row = |i: usize| (ROWS[(seed + 4 * i) % ROWS.len()], compilers[(seed / ROWS.len() + i) % compilers.len()]);
        (0..count).map(row).collect()
    };
    let mut chosen = Vec::new();
    for ([opt, link, cf, patchable, stripped], compiler) in rows {
        let variant = Variant {
            opt: case.opts[opt % case.opts.len()].clone(),
            link: case.links[link % case.links.len()].clone(),
            cf: CF[cf],
            patchable: if case.patchable { PATCHABLE[patchable] } else { PATCHABLE[0] },
            stripped: stripped == 1,
            compiler,
        };
        if !chosen.contains(&variant) {
            chosen.push(variant);
        }
    }
    chosen
}

/// Returns all levels of the four factors with each compiler; every second one is stripped.
fn every_combination(compilers: &[Compiler]) -> Vec<([usize; 5], Compiler)> {
    let levels = 0..3_usize.pow(4);
    let row = |n: usize| [n / 27, n / 9 % 3, n / 3 % 3, n % 3, n % 2];
    levels.flat_map(|n| compilers.iter().map(move |compiler| (row(n), *compiler))).collect()
}

/// The objects of one unit.
pub(crate) struct UnitObjects {
    path: String,
    /// Object as in the target.
    pub(crate) shipped: Vec<u8>,
    /// Object of the same source, with a section for each function.
    plain: Vec<u8>,
    /// Object with the series' first patch, for a case about the second.
    base: Option<Vec<u8>>,
    /// Object with the patch of the case.
    pub(crate) after: Vec<u8>,
}

/// A program, built: three objects of each unit, and the target.
pub(crate) struct Built {
    directory: tempfile::TempDir,
    /// The executable to run.
    pub(crate) program: PathBuf,
    /// The ELF file to patch: the executable, or the shared library.
    pub(crate) target: PathBuf,
    /// The target before it was stripped.
    pub(crate) full: PathBuf,
    /// The after side, linked as a program of its own.
    pub(crate) after_program: PathBuf,
    /// The units, each in all its builds.
    pub(crate) units: Vec<UnitObjects>,
}

fn run(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
}

impl Built {
    /// Compiles and links `case` in the given variant.
    pub(crate) fn new(case: &Case, variant: &Variant) -> Built {
        let directory = tempfile::tempdir().expect("temporary directory");
        let root = directory.path().to_owned();
        case.units.iter().chain(&case.headers).for_each(|SourceFile { name, text }| {
            std::fs::write(root.join(name), text).expect("write a source file");
        });
        let compile = |unit: &str, side: &str, extra: &[&str]| {
            let object = root.join(format!("{unit}.{side}.o"));
            let pic = match variant.link.as_str() {
                "nopie" => "-fno-pie",
                "shared" => "-fPIC",
                _ => "-fPIE",
            };
            let words = [&variant.opt, "-g", pic, variant.cf, variant.patchable];
            let compiler = if unit.ends_with(".cc") { variant.compiler.cxx() } else { "cc" };
            let all_types = match compiler {
                "g++" => Some("-femit-class-debug-always"),
                "cc" => None,
                _ => Some("-fstandalone-debug"),
            };
            run(Command::new(compiler)
                .current_dir(&root)
                .args(all_types)
                .args(words.iter().filter(|word| !word.is_empty()))
                .args(&case.flags)
                .args(extra)
                .arg("-I")
                .arg(super::directory().join("include"))
                .args(["-c", "-o"])
                .arg(&object)
                .arg(unit));
            object
        };
        let (mut units, mut shipped, mut after) = (Vec::new(), Vec::new(), Vec::new());
        const SECTIONS: [&str; 2] = ["-ffunction-sections", "-fdata-sections"];
        for SourceFile { name, .. } in &case.units {
            let with_sections = |side: &str, defines: &[&str]| compile(name, side, &[&SECTIONS, defines].concat());
            let read = |path: &PathBuf| std::fs::read(path).expect("read an object");
            let base = case.is_second().then(|| with_sections("base", &["-DSP_BASE"]));
            let defines: &[&str] = if case.is_second() { &["-DSP_BASE", "-DSP_AFTER"] } else { &["-DSP_AFTER"] };
            let sides = [compile(name, "shipped", &[]), with_sections("after", defines)];
            units.push(UnitObjects {
                path: name.clone(),
                shipped: read(&sides[0]),
                plain: read(&with_sections("plain", &[])),
                base: base.as_ref().map(read),
                after: read(&sides[1]),
            });
            shipped.push(sides[0].clone());
            after.push(sides[1].clone());
        }
        if !case.own_main {
            std::fs::copy(super::directory().join("include/serve.c"), root.join("serve.c")).expect("copy serve.c");
        }
        let serve = (!case.own_main).then(|| compile("serve.c", "shipped", &[]));
        let (program, target) = link(case, variant, &root, "shipped", serve.as_deref(), &shipped);
        let (after_program, _) = link(case, variant, &root, "after", serve.as_deref(), &after);
        let full = root.join("full");
        std::fs::copy(&target, &full).expect("keep the symbols");
        if variant.stripped {
            run(Command::new("strip").arg(&target));
        }
        Built { directory, program, target, full, after_program, units }
    }

    /// Returns the directory of all files.
    pub(crate) fn root(&self) -> &Path {
        self.directory.path()
    }
}

fn link(
    case: &Case,
    variant: &Variant,
    root: &Path,
    side: &str,
    serve: Option<&Path>,
    objects: &[PathBuf],
) -> (PathBuf, PathBuf) {
    let here = root.join(side);
    std::fs::create_dir(&here).expect("create a directory");
    let program = here.join("program");
    let cc = || {
        let mut cc = Command::new(if case.is_cxx() { variant.compiler.cxx() } else { "cc" });
        cc.current_dir(root)
            .arg(&variant.opt)
            .arg("-Wl,--build-id")
            .args(case.flags.iter().filter(|f| f.starts_with("-f")));
        cc
    };
    if variant.link != "shared" {
        let pie = match variant.link.as_str() {
            "nopie" => "-no-pie",
            "pie" => "-pie",
            other => panic!("{}: link {other}", case.name),
        };
        run(cc().arg(pie).arg("-o").arg(&program).args(serve).args(objects).args(&case.libs));
        return (program.clone(), program);
    }
    let library = here.join("libcase.so");
    run(cc().arg("-shared").arg("-o").arg(&library).args(objects).args(&case.libs));
    run(cc().arg("-o").arg(&program).args(serve).arg(&library).arg("-Wl,-rpath,$ORIGIN").args(&case.libs));
    (program, library)
}

/// Makes the patch of the case with the differ.
pub(crate) fn diff(case: &Case, built: &Built) -> Result<Outcome, Vec<Refusal>> {
    let units: Vec<UnitInput<'_>> = built
        .units
        .iter()
        .map(|unit| UnitInput {
            path: &unit.path,
            shipped: &unit.shipped,
            before: unit.base.as_deref().unwrap_or(&unit.plain),
            after: &unit.after,
            sources: None,
        })
        .collect();
    let mut known = Vec::new();
    if let Some(Outcome::Patch(base)) = diff_base(case, built).transpose()? {
        known.extend(base.exports.iter().map(|&export| base.symbols[export as usize].name.clone()));
    }
    let options = Options { hooks: hooks(case), based_on: based_on(case), known, ..options(case, "") };
    run_diff(built, &units, options)
}

/// Makes the first patch of the series with the differ, if the case is about the second.
pub(crate) fn diff_base(case: &Case, built: &Built) -> Option<Result<Outcome, Vec<Refusal>>> {
    let units: Option<Vec<UnitInput<'_>>> = built.units.iter().map(UnitObjects::first_of_series).collect();
    let source = Source { diffs: based_on(case), ..Source::default() };
    Some(run_diff(built, &units?, Options { source, ..options(case, "-base") }))
}

impl UnitObjects {
    fn first_of_series(&self) -> Option<UnitInput<'_>> {
        let base = self.base.as_deref()?;
        Some(UnitInput { path: &self.path, shipped: &self.shipped, before: &self.plain, after: base, sources: None })
    }
}

fn based_on(case: &Case) -> Vec<DiffFact> {
    let fact = || DiffFact { name: format!("{}-base.diff", case.name), sha256: [7; 32] };
    case.is_second().then(fact).into_iter().collect()
}

fn options(case: &Case, suffix: &str) -> Options {
    Options {
        name: format!("{}{suffix}", case.name),
        description: case.rule.clone(),
        in_place: !case.in_place.is_empty(),
        write_data: !case.data.is_empty(),
        staying: case.staying.clone(),
        toolchain: Toolchain { compiler: "cc".to_owned(), stillpoint: env!("CARGO_PKG_VERSION").to_owned() },
        ..Options::default()
    }
}

fn run_diff(built: &Built, units: &[UnitInput<'_>], options: Options) -> Result<Outcome, Vec<Refusal>> {
    let bytes = std::fs::read(&built.target).expect("read the target");
    let name = built.target.file_name().expect("a file name").to_string_lossy();
    let target = TargetElf::parse(&bytes, &name).map_err(|e| vec![e])?;
    let imports = Some(imports(&bytes));
    stillpoint_patch_differ::diff(&target, units, &Options { imports, ..options })
}

fn hooks(case: &Case) -> HookNames {
    let mut hooks = HookNames::default();
    for (phase, function) in &case.hooks {
        let list = match phase.as_str() {
            "pre_apply" => &mut hooks.pre_apply,
            "post_apply" => &mut hooks.post_apply,
            "pre_revert" => &mut hooks.pre_revert,
            "post_revert" => &mut hooks.post_revert,
            _ => panic!("{}: hook {phase}", case.name),
        };
        list.push(function.clone());
    }
    hooks
}

/// Returns the exports, on this machine, of the libraries that the target needs and of those that they need.
fn imports(target: &[u8]) -> BTreeMap<String, Option<String>> {
    let (mut all, mut libraries) = (BTreeMap::new(), needed(target));
    let mut next = 0;
    while let Some(library) = libraries.get(next) {
        let output = Command::new("cc").arg(format!("-print-file-name={library}")).output().expect("run cc");
        let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        for (name, version) in exports(&bytes).unwrap_or_else(|e| panic!("{path}: {e}")) {
            all.entry(name).or_insert(version);
        }
        let further: Vec<String> = needed(&bytes).into_iter().filter(|name| !libraries.contains(name)).collect();
        libraries.extend(further);
        next += 1;
    }
    all
}

/// Returns the libraries that a file names as needed.
fn needed(bytes: &[u8]) -> Vec<String> {
    let file = object::File::parse(bytes).expect("parse an ELF file");
    let libraries = file.import_libraries().expect("read the libraries");
    libraries.map(|l| String::from_utf8_lossy(l.expect("a library").name()).into_owned()).collect()
}

/// A running program. Its end is that of its owner.
pub(crate) struct Server {
    child: Child,
    questions: ChildStdin,
    answers: std::sync::mpsc::Receiver<String>,
}

/// Time limit of an answer; long, as a machine under load is slow.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

impl Server {
    /// Starts a program.
    pub(crate) fn start(program: &Path) -> Server {
        let mut command = Command::new(program);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", program.display()));
        let questions = child.stdin.take().expect("standard input");
        let lines = BufReader::new(child.stdout.take().expect("standard output")).lines();
        let (sender, answers) = std::sync::mpsc::channel();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Server { child, questions, answers }
    }

    /// The process's id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the present answer of the program.
    pub(crate) fn ask(&mut self) -> String {
        let asked = self.questions.write_all(b"?\n").and_then(|()| self.questions.flush());
        match asked.map(|()| self.answers.recv_timeout(ANSWER_TIMEOUT)) {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => format!("(no answer: {:?})", self.child.try_wait()),
            Err(e) => format!("(no answer: {e}; {:?})", self.child.try_wait()),
        }
    }

    /// Sends as many queries as there are expected answers, and returns the answers.
    pub(crate) fn ask_all(&mut self, expected: &[String]) -> Vec<String> {
        expected.iter().map(|_| self.ask()).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

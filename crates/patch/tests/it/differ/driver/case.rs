//! One directive program, parsed.

use std::path::{Path, PathBuf};

/// Expected result of the differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Expect {
    /// A patch.
    Accept,
    /// A refusal with this code.
    Refuse(String),
    /// Nothing to patch.
    Nothing,
}

/// Expected result of a run under a live patch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Live {
    /// Its answer changes.
    Yes,
    /// The engine refuses trampolines with this message.
    Refused(String),
    /// A thread never leaves this function, and the engine reports it.
    Busy(String),
}

/// Compiler and linker of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Compiler {
    /// The system's compilers: gcc and g++.
    Gnu,
    /// The system's clang.
    Clang,
}

impl Compiler {
    /// Returns the command for C++.
    pub(crate) fn cxx(self) -> &'static str {
        match self {
            Compiler::Gnu => "g++",
            Compiler::Clang => "clang++",
        }
    }
}

/// A file of a program.
#[derive(Debug, Clone)]
pub(crate) struct SourceFile {
    /// Its name.
    pub(crate) name: String,
    /// Its text.
    pub(crate) text: String,
}

/// One directive program.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
    pub(crate) rule: String,
    pub(crate) expect: Expect,
    pub(crate) changed: Vec<String>,
    pub(crate) unchanged: Vec<String>,
    pub(crate) refusals: Vec<String>,
    pub(crate) warnings: Vec<String>,
    pub(crate) before: Vec<String>,
    pub(crate) base: Vec<String>,
    pub(crate) after: Vec<String>,
    pub(crate) reverted: Vec<String>,
    pub(crate) flags: Vec<String>,
    pub(crate) libs: Vec<String>,
    pub(crate) opts: Vec<String>,
    pub(crate) links: Vec<String>,
    pub(crate) needs: Vec<String>,
    pub(crate) has: Vec<String>,
    pub(crate) folded: Vec<String>,
    pub(crate) hooks: Vec<(String, String)>,
    pub(crate) live: Live,
    pub(crate) own_main: bool,
    pub(crate) compilers: Vec<Compiler>,
    /// True if entries may be made patchable.
    pub(crate) patchable: bool,
    /// Constants that must change in place; if there are any, such changes are allowed.
    pub(crate) in_place: Vec<String>,
    /// Variables that must be written; if there are any, such changes are allowed.
    pub(crate) data: Vec<String>,
    /// Functions in which threads may stay.
    pub(crate) staying: Vec<String>,
    pub(crate) units: Vec<SourceFile>,
    pub(crate) headers: Vec<SourceFile>,
}

impl Case {
    /// Reads and checks a program; panics with the file's name on an invalid directive.
    pub(crate) fn read(path: &Path) -> Case {
        let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let name = path.file_stem().expect("a file name").to_string_lossy().into_owned();
        let mut case = Case::empty(name, path);
        let first = path.file_name().expect("a file name").to_string_lossy().into_owned();
        let mut expect = None;
        let mut file: Option<(bool, SourceFile)> = Some((false, SourceFile { name: first, text: String::new() }));
        for line in text.lines() {
            let Some(directive) = line.strip_prefix("//#") else {
                let (_, file) = file.as_mut().expect("a file is open");
                file.text.push_str(line);
                file.text.push('\n');
                continue;
            };
            let (key, value) = directive.split_once(':').unwrap_or_else(|| panic!("{}: {line}", path.display()));
            let value = value.trim();
            match key {
                "Expect" => expect = Some(parse_expect(value, path)),
                "Unit" | "Header" => {
                    case.close(
                        file.replace((key == "Header", SourceFile { name: value.to_owned(), text: String::new() })),
                    );
                }
                _ => case.directive(key, value),
            }
        }
        case.close(file);
        case.expect = expect.unwrap_or_else(|| panic!("{}: no //#Expect", path.display()));
        case.check();
        case
    }

    fn empty(name: String, path: &Path) -> Case {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect();
        Case {
            name,
            path: path.to_owned(),
            rule: String::new(),
            expect: Expect::Nothing,
            changed: Vec::new(),
            unchanged: Vec::new(),
            refusals: Vec::new(),
            warnings: Vec::new(),
            before: Vec::new(),
            base: Vec::new(),
            after: Vec::new(),
            reverted: Vec::new(),
            flags: Vec::new(),
            libs: Vec::new(),
            opts: words("-O2 -O0 -O3"),
            links: words("pie nopie shared"),
            needs: Vec::new(),
            has: Vec::new(),
            folded: Vec::new(),
            hooks: Vec::new(),
            live: Live::Yes,
            own_main: false,
            compilers: vec![Compiler::Gnu, Compiler::Clang],
            patchable: true,
            in_place: Vec::new(),
            data: Vec::new(),
            staying: Vec::new(),
            units: Vec::new(),
            headers: Vec::new(),
        }
    }

    fn directive(&mut self, key: &str, value: &str) {
        let words = || value.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let answers = || value.split(" | ").map(|answer| answer.trim().to_owned()).collect::<Vec<_>>();
        match key {
            "Rule" => self.rule = value.to_owned(),
            "Changed" => self.changed = words(),
            "Unchanged" => self.unchanged = words(),
            "Refusal" => self.refusals.push(value.to_owned()),
            "Warning" => self.warnings.push(value.to_owned()),
            "Output-before" => self.before = answers(),
            "Output-base" => self.base = answers(),
            "Output-after" => self.after = answers(),
            "Output-reverted" => self.reverted = answers(),
            "Flags" => self.flags = words(),
            "Libs" => self.libs = words(),
            "Opt" => self.opts = words(),
            "Link" => self.links = words(),
            "Needs" => self.needs = words(),
            "Has" => self.has.push(value.to_owned()),
            "Folded" => self.folded = words(),
            "Main" => self.own_main = value == "own",
            "In-place" => self.in_place = words(),
            "Data" => self.data = words(),
            "May-stay" => self.staying = words(),
            "Patchable" => self.patchable = value != "no",
            "Compiler" => {
                self.compilers = vec![match value {
                    "gnu" => Compiler::Gnu,
                    "clang" => Compiler::Clang,
                    _ => panic!("{}: Compiler {value}", self.name),
                }];
            }
            "Hook" => {
                let (phase, function) = value.split_once(' ').unwrap_or_else(|| panic!("{}: Hook {value}", self.name));
                self.hooks.push((phase.to_owned(), function.to_owned()));
            }
            "Live" => {
                let (how, what) = value.split_once(' ').unwrap_or_else(|| panic!("{}: Live {value}", self.name));
                self.live = match how {
                    "refused" => Live::Refused(what.to_owned()),
                    "busy" => Live::Busy(what.to_owned()),
                    _ => panic!("{}: Live {value}", self.name),
                };
            }
            _ => panic!("{}: unknown directive {key}", self.name),
        }
    }

    fn close(&mut self, file: Option<(bool, SourceFile)>) {
        if let Some((is_header, file)) = file
            && !file.text.trim().is_empty()
        {
            (if is_header { &mut self.headers } else { &mut self.units }).push(file);
        }
    }

    /// Checks that a case has all directives of a test.
    fn check(&mut self) {
        let name = &self.name;
        assert!(!self.rule.is_empty(), "{name}: no //#Rule");
        assert!(!self.units.is_empty(), "{name}: no code");
        assert!(!self.before.is_empty(), "{name}: no //#Output-before");
        match &self.expect {
            Expect::Accept => {
                let changed = !self.changed.is_empty() || !self.in_place.is_empty() || !self.data.is_empty();
                assert!(changed, "{name}: accepted, so what is //#Changed");
                assert!(!self.after.is_empty(), "{name}: accepted, so what is //#Output-after");
                assert_ne!(self.before, self.after, "{name}: the answers do not show if the patch is active");
            }
            Expect::Refuse(_) => {
                assert!(!self.refusals.is_empty(), "{name}: refused, and no //#Refusal names the thing")
            }
            Expect::Nothing => assert!(self.changed.is_empty(), "{name}: nothing to patch, and //#Changed"),
        }
        if self.reverted.is_empty() {
            self.reverted = if self.base.is_empty() { self.before.clone() } else { self.base.clone() };
        }
    }

    /// Returns true if the answer to a query does not depend on earlier queries.
    pub(crate) fn is_stateless(&self) -> bool {
        self.before.len() == 1 && self.after.len() == 1 && (self.reverted == self.before || self.reverted == self.base)
    }

    /// Returns true if it is in C++.
    pub(crate) fn is_cxx(&self) -> bool {
        self.path.extension().is_some_and(|extension| extension == "cc")
    }

    /// Returns true if the patch is based on an earlier one.
    pub(crate) fn is_second(&self) -> bool {
        !self.base.is_empty()
    }
}

fn parse_expect(value: &str, path: &Path) -> Expect {
    match value.split_once(' ') {
        None if value == "accept" => Expect::Accept,
        None if value == "nothing" => Expect::Nothing,
        Some(("refuse", code)) => Expect::Refuse(code.to_owned()),
        _ => panic!("{}: Expect {value}", path.display()),
    }
}

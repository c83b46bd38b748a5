//! Links: the inputs of a linker or an archiver, from its command line.

use crate::commands::resolve;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// One source of code of a link.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Input {
    /// File on the command line. With `whole` the linker takes every member of an archive, otherwise only those needed.
    File { path: PathBuf, whole: bool },
    /// `-lNAME`, with the directories that the linker searches, in order.
    Library { name: String, directories: Vec<PathBuf>, archives_only: bool, whole: bool },
    /// Response file with unknown text.
    Response(PathBuf),
}

/// Kind of a linked file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Program or shared library.
    #[default]
    Image,
    Archive,
    /// Object joined from other objects.
    Object,
}

/// The inputs from which one file was made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) kind: Kind,
    pub(crate) inputs: BTreeSet<Input>,
    /// Options of the linker and of its driver, without those that name inputs and the output.
    pub(crate) options: BTreeSet<String>,
}

impl Link {
    /// Returns the name that the link gives to a library.
    pub(crate) fn soname(&self) -> Option<&str> {
        // the two spellings of the linker; the first one has several forms
        const FORMS: [&str; 5] = ["-soname ", "-soname=", "--soname ", "--soname=", "-h "];
        self.options.iter().find_map(|option| FORMS.iter().find_map(|form| option.strip_prefix(form)))
    }
}

/// One run of an archiver.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Archiver {
    /// Adds files to an archive.
    Adds { archive: PathBuf, files: Vec<PathBuf> },
    /// Writes members of an archive to the current directory.
    Extracts { archive: PathBuf },
}

/// Replaces response files by their text; one with unknown text stays.
pub(crate) fn expanded(argv: Vec<String>, mut text_of: impl FnMut(&str) -> Option<String>) -> Vec<String> {
    let mut out = Vec::new();
    for argument in argv {
        let text = argument.strip_prefix('@').and_then(&mut text_of).and_then(|text| shlex::split(&text));
        match text {
            Some(words) => out.extend(words),
            None => out.push(argument),
        }
    }
    out
}

/// Options of linkers whose value is the next argument.
const VALUED: [&str; 13] = [
    "-z",
    "-soname",
    "--soname",
    "-h",
    "-rpath",
    "-rpath-link",
    "-m",
    "-e",
    "-u",
    "-dynamic-linker",
    "--defsym",
    "--hash-style",
    "-plugin-opt",
];
/// Options of linkers with a script, which decides about exports or places.
const SCRIPTS: [&str; 3] = ["--version-script", "--dynamic-list", "--retain-symbols-file"];

/// Returns the output of a compiler driver that links, and its inputs.
pub(crate) fn linker(directory: &Path, argv: &[String]) -> (PathBuf, Link) {
    let tokens = flattened(argv.get(1..).unwrap_or_default());
    let directories = searched(directory, &tokens);
    let output = valued_output(&tokens).unwrap_or("a.out");
    let (mut whole, mut archives_only) = (false, false);
    let mut inputs = BTreeSet::new();
    let mut library = |name: &str, archives_only, whole| {
        let (name, directories) = (name.to_owned(), directories.clone());
        inputs.insert(Input::Library { name, directories, archives_only, whole });
    };
    let (mut files, mut options) = (BTreeSet::new(), BTreeSet::new());
    let mut rest = tokens.iter().copied();
    while let Some(token) = rest.next() {
        match token {
            "-" => {}
            "-o" | "-L" => drop(rest.next()),
            _ if VALUED.contains(&token) => {
                let value = rest.next().unwrap_or_default();
                options.insert(format!("{token} {value}"));
            }
            "-l" => rest.next().into_iter().for_each(|name| library(name, archives_only, whole)),
            "--whole-archive" | "-whole-archive" => whole = true,
            "--no-whole-archive" | "-no-whole-archive" => whole = false,
            "-static" | "-Bstatic" | "-dn" | "-non_shared" => archives_only = true,
            "-Bdynamic" | "-dy" | "-call_shared" => archives_only = false,
            _ => {
                if let Some(name) = token.strip_prefix("-l") {
                    library(name, archives_only, whole);
                } else if let Some(path) = token.strip_prefix('@') {
                    files.insert(Input::Response(resolve(directory, Path::new(path))));
                } else if !token.starts_with('-') {
                    files.insert(Input::File { path: resolve(directory, Path::new(token)), whole });
                } else if !token.starts_with("-L") && !token.starts_with("-o") {
                    let script = token.split_once('=').filter(|(option, _)| SCRIPTS.contains(option));
                    let path = script.map(|(_, path)| resolve(directory, Path::new(path)));
                    files.extend(path.map(|path| Input::File { path, whole }));
                    options.insert(token.to_owned());
                }
            }
        }
    }
    inputs.append(&mut files);
    let joins = tokens.iter().any(|token| matches!(*token, "-r" | "-i" | "-Ur" | "--relocatable"));
    let kind = if joins { Kind::Object } else { Kind::Image };
    (resolve(directory, Path::new(output)), Link { kind, inputs, options })
}

/// Returns the directories that the linker searches for libraries, in order.
pub(crate) fn searched(directory: &Path, tokens: &[&str]) -> Vec<PathBuf> {
    let (mut found, mut rest) = (Vec::new(), tokens.iter().copied());
    while let Some(token) = rest.next() {
        let path = match token {
            "-L" => rest.next(),
            _ => token.strip_prefix("-L"),
        };
        found.extend(path.map(|path| resolve(directory, Path::new(path))));
    }
    found
}

/// Returns `FILE` of `-o FILE` or `-oFILE`.
fn valued_output<'a>(tokens: &[&'a str]) -> Option<&'a str> {
    let at = tokens.iter().position(|token| token.starts_with("-o"))?;
    match tokens[at] {
        "-o" => tokens.get(at + 1).copied(),
        joined => joined.strip_prefix("-o"),
    }
}

/// Returns arguments as the linker gets them: those that the driver passes through become separate arguments.
pub(crate) fn flattened(arguments: &[String]) -> Vec<&str> {
    let mut out = Vec::new();
    for argument in arguments {
        match argument.strip_prefix("-Wl,") {
            Some(through) => out.extend(through.split(',')),
            None if argument == "-Xlinker" => {}
            None => out.push(argument.as_str()),
        }
    }
    out
}

/// Reads the command line of an archiver; `None` when it neither adds nor extracts.
pub(crate) fn archiver(directory: &Path, argv: &[String]) -> Option<Archiver> {
    let (first, rest) = argv.get(1..)?.split_first()?;
    let (options, files): (Vec<&String>, Vec<&String>) = rest.iter().partition(|a| a.starts_with('-'));
    let letters: String = std::iter::once(first).chain(options).filter(|o| !o.starts_with("--")).cloned().collect();
    let mut files = files.into_iter().map(|file| match file.strip_prefix('@') {
        Some(_) => PathBuf::from(file),
        None => resolve(directory, Path::new(file)),
    });
    let archive = files.next()?;
    if letters.contains(['r', 'q']) {
        Some(Archiver::Adds { archive, files: files.collect() })
    } else if letters.contains('x') {
        Some(Archiver::Extracts { archive })
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    fn file(path: &str, whole: bool) -> Input {
        Input::File { path: path.into(), whole }
    }

    #[test]
    fn everything_that_code_comes_from_is_an_input() {
        let line =
            "gcc -L lib -Lmore -Wl,--whole-archive,w.a -Wl,--no-whole-archive x.lo -lz -Wl,-Bstatic -l y @gone -oprog";
        let (output, link) = linker(Path::new("/b"), &words(line));
        assert_eq!((output.as_path(), link.kind), (Path::new("/b/prog"), Kind::Image));
        let directories = vec![PathBuf::from("/b/lib"), PathBuf::from("/b/more")];
        let library = |name: &str, archives_only| Input::Library {
            name: name.into(),
            directories: directories.clone(),
            archives_only,
            whole: false,
        };
        let wanted = [
            file("/b/w.a", true),
            file("/b/x.lo", false),
            library("z", false),
            library("y", true),
            Input::Response("/b/gone".into()),
        ];
        assert_eq!(link.inputs, BTreeSet::from(wanted));
        assert_eq!(linker(Path::new("/b"), &words("gcc -r -o x.o y.o")).1.kind, Kind::Object);
    }

    #[test]
    fn a_library_has_the_name_of_either_spelling() {
        let name = |words_of: &str| linker(Path::new("/b"), &words(words_of)).1.soname().map(str::to_owned);
        for options in [
            "-Wl,-soname,l.so.1",
            "-Wl,-soname -Wl,l.so.1",
            "-Wl,-soname=l.so.1",
            "-Wl,-h,l.so.1",
            "-Wl,--soname,l.so.1",
        ] {
            assert_eq!(name(&format!("gcc -shared {options} -o l.so x.o")).as_deref(), Some("l.so.1"), "{options}");
        }
        assert_eq!(name("gcc -shared -o l.so x.o"), None);
    }

    #[test]
    fn archivers_add_and_extract() {
        let run = |line: &str| archiver(Path::new("/b"), &words(line));
        let adds = |files: &[&str]| {
            Some(Archiver::Adds { archive: "/b/l.a".into(), files: files.iter().map(PathBuf::from).collect() })
        };
        assert_eq!(run("ar crs l.a x.o d/y.o"), adds(&["/b/x.o", "/b/d/y.o"]));
        assert_eq!(run("ar -r -c l.a x.o"), adds(&["/b/x.o"]));
        assert_eq!(run("ar x ../l.a"), Some(Archiver::Extracts { archive: "/l.a".into() }));
        assert_eq!(run("ar t l.a"), None);
        assert_eq!(run("ar --version"), None);
    }

    #[test]
    fn response_files_are_read_where_their_text_is_known() {
        let text = |name: &str| (name == "list").then(|| "a.o 'b c.o'\n".to_owned());
        assert_eq!(expanded(words("ar rc l.a @list @gone"), text), ["ar", "rc", "l.a", "a.o", "b c.o", "@gone"]);
    }
}

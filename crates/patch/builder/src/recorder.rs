//! The program that stands in for compilers, linkers and archivers while a package's rules run, and the placeholders
//! that it leaves in place of results that the build did not need.
//!
//! The obvious way to learn a package's compile commands is to build it. A build of a large package takes an hour, and a
//! patch needs a few units of it. So the recorder puts calls off, as a lazy language does: the result of a compilation
//! or a link is a placeholder that names the record of the call. The build goes on as if the file were there. What it
//! really needs, above all programs of its own that it executes, is made at that moment.

/// The program, in Perl: `perl-base` is an essential package of every release.
pub(crate) const PROGRAM: &str = include_str!("../recorder/recorder.pl");
/// Name, below the directory of records, of the file that makes the recorder put calls off. Sources that are newer than
/// this file were made by the build.
pub(crate) const DEFER: &str = "defer";
/// Name of the file with the libraries that are linked at once: their paths, each with a zero byte after it.
pub(crate) const LOADED: &str = "loaded";
/// Name of the program that makes a placeholder real.
pub(crate) const REALIZE: &str = "realize";

/// Length limit of a placeholder, in bytes; archives have a line for each call that added files.
const PLACEHOLDER_MAX: usize = 1 << 20;

/// Names of compilers' drivers.
const COMPILERS: [&str; 6] = ["cc", "gcc", "g++", "c++", "clang", "clang++"];
/// Tools that read results of compilers, and would not understand a placeholder.
const READERS: [&str; 10] =
    ["ranlib", "strip", "nm", "size", "objcopy", "objdump", "readelf", "ld", "ld.bfd", "ld.gold"];

/// Generators of manual pages.
const DOCUMENTS: [&str; 3] = ["pod2man", "pod2html", "help2man"];

/// Returns the name of a program without the names of a machine and of the compiler's driver, and without a version:
/// `ar` for `x86_64-linux-gnu-gcc-ar-12`.
fn plain_name(name: &str) -> &str {
    let name = match name.rsplit_once('-') {
        Some((rest, version)) if !version.is_empty() && version.bytes().all(|b| b.is_ascii_digit()) => rest,
        _ => name,
    };
    let name = name.strip_prefix("x86_64-linux-gnu-").unwrap_or(name);
    name.strip_prefix("gcc-").unwrap_or(name)
}

/// Returns true if the recorder stands in for a program; `deferring` if results may be placeholders.
pub(crate) fn stands_in(name: &str, deferring: bool) -> bool {
    let plain = plain_name(name);
    COMPILERS.contains(&plain) || plain == "ar" || deferring && (READERS.contains(&plain) || DOCUMENTS.contains(&name))
}

/// Returns the names of the records of a placeholder: one, or several for an archive to which calls added files one
/// after another; empty for any other file.
pub(crate) fn records_of(bytes: &[u8]) -> Vec<&str> {
    if bytes.len() > PLACEHOLDER_MAX || !bytes.starts_with(b"#!") {
        return Vec::new();
    }
    str::from_utf8(bytes).unwrap_or_default().lines().filter_map(name_of).collect()
}

fn name_of(line: &str) -> Option<&str> {
    let (own, path) = line.strip_prefix("#!")?.split_once("/bin/realize ")?;
    let name = path.strip_prefix(own)?.strip_prefix("/records/")?;
    (!name.is_empty() && name.bytes().all(|b| b.is_ascii_digit() || b == b'+')).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_of_a_tool_is_known() {
        for name in ["gcc", "cc", "x86_64-linux-gnu-g++-12", "clang-14", "gcc-ar", "x86_64-linux-gnu-gcc-ar-12", "ar"] {
            assert!(stands_in(name, false), "{name}");
        }
        for name in ["nm", "x86_64-linux-gnu-objcopy", "gcc-ranlib", "ld.gold", "pod2man"] {
            assert!(stands_in(name, true) && !stands_in(name, false), "{name}");
        }
        for name in ["c++filt", "cpp", "c99", "i686-linux-gnu-gcc", "tar", "gcc-11-base", "ld.so"] {
            assert!(!stands_in(name, true), "{name}");
        }
    }

    #[test]
    fn a_placeholder_names_its_records() {
        assert_eq!(records_of(b"#!/stillpoint/bin/realize /stillpoint/records/12+\n"), ["12+"]);
        let two = b"#!/stillpoint/bin/realize /stillpoint/records/1\n#!/stillpoint/bin/realize /stillpoint/records/2\n";
        assert_eq!(records_of(two), ["1", "2"]);
        for other in [&b"\x7fELF"[..], b"", b"#!/stillpoint/bin/realize /stillpoint/records/../x\n", b"#!/bin/sh\n"] {
            assert!(records_of(other).is_empty(), "{other:?}");
        }
    }
}

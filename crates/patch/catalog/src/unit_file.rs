//! Commands that a systemd unit starts, read from its files.
//!
//! The obvious way is to ask `systemctl show`; it reports the loaded unit, with expanded specifiers and without quoting, and only where
//! systemd runs. The files contain the original text, which a drop-in has to repeat (see [`crate::drop_in`]).

use crate::error::Error;
use crate::root::Root;
use std::collections::BTreeMap;
use std::path::PathBuf;
use stillpoint_host::file::{list, read_regular_text};
use stillpoint_host::systemd::ServiceName;

/// Directories of units; an earlier directory hides a later one's file of the same name (systemd.unit(5)).
pub(crate) const UNIT_DIRECTORIES: [&str; 5] = [
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// Name of our drop-in: it sorts late, so that it sees the settings of other drop-ins.
pub(crate) const DROP_IN_NAME: &str = "90-stillpoint.conf";

/// Size limit in bytes of a unit's file.
pub(crate) const UNIT_FILE_LEN_MAX: u64 = 1 << 20;

/// Settings of a unit's main process, from the unit's files.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Service {
    /// Its `ExecStart=` lines, as written.
    pub(crate) exec_start: Vec<String>,
    /// Settings of its sandbox that may keep a helper inside of it from tracing.
    pub confined_by: Vec<String>,
    /// True if it executes only programs that `ExecPaths=` names.
    pub(crate) names_executables: bool,
    pub(crate) families: Families,
}

/// Families of sockets that a unit may make (`RestrictAddressFamilies=`), as far as `AF_UNIX` is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Families {
    #[default]
    All,
    /// Only the named families.
    Named { local: bool },
    /// All but the named families.
    AllBut { local: bool },
}

impl Families {
    /// Adds a line. The first line decides if named families are allowed or denied; later lines of the other kind remove names.
    fn add(self, value: &str) -> Families {
        let (denied, names) = value.strip_prefix('~').map_or((false, value), |names| (true, names));
        let has_local = names.split_whitespace().any(|name| name == "AF_UNIX" || name == "AF_LOCAL");
        match self {
            _ if value.is_empty() => Families::All,
            Families::All if denied => Families::AllBut { local: has_local },
            Families::All => Families::Named { local: has_local },
            Families::Named { local } => Families::Named { local: if has_local { !denied } else { local } },
            Families::AllBut { local } => Families::AllBut { local: if has_local { denied } else { local } },
        }
    }
}

impl Service {
    /// Returns true if the sandbox prevents a connection to the helper outside.
    pub fn lacks_local_sockets(&self) -> bool {
        matches!(self.families, Families::Named { local: false } | Families::AllBut { local: true })
    }

    /// Reads a unit with all its drop-ins but ours.
    ///
    /// # Errors
    /// The unit does not exist or starts no program, or one of its files cannot be read.
    pub fn read(root: &Root, unit: &ServiceName) -> Result<Service, Error> {
        let template = unit.template().map(|template| template.to_string());
        let names: Vec<String> = [Some(unit.to_string()), template].into_iter().flatten().collect();
        let fragment =
            names.iter().flat_map(|name| UNIT_DIRECTORIES.map(|d| root.at(d).join(name))).find(|p| p.is_file());
        let fragment =
            fragment.ok_or_else(|| Error::Refused(format!("no systemd directory contains the unit {unit}")))?;
        let mut files = vec![fragment];
        files.extend(drop_ins(root, &names));
        let mut service = Service::default();
        for file in files {
            let text = read_regular_text(&file, UNIT_FILE_LEN_MAX)?;
            service.add(&text);
        }
        if service.exec_start.is_empty() {
            return Err(Error::Refused(format!("unit {unit} has no ExecStart=")));
        }
        Ok(service)
    }

    /// Returns the programs that are plain paths.
    pub(crate) fn programs(&self) -> impl Iterator<Item = PathBuf> {
        self.exec_start.iter().filter_map(|line| program(line))
    }

    /// Adds the settings of a file.
    pub(crate) fn add(&mut self, text: &str) {
        let mut section = String::new();
        for line in logical_lines(text) {
            if line.starts_with('[') {
                section = line;
                continue;
            }
            let Some((key, value)) = line.split_once('=').map(|(k, v)| (k.trim(), v.trim())) else { continue };
            match (section.as_str(), key) {
                ("[Service]", "ExecStart") if value.is_empty() => self.exec_start.clear(),
                ("[Service]", "ExecStart") => self.exec_start.push(value.to_owned()),
                ("[Service]", "SystemCallFilter") if value.is_empty() => self.confined_by.clear(),
                ("[Service]", "SystemCallFilter") => self.confined_by.push(format!("{key}={value}")),
                ("[Service]", "RestrictAddressFamilies") => self.families = self.families.add(value),
                ("[Service]", "NoExecPaths") => self.names_executables = !value.is_empty(),
                _ => {}
            }
        }
    }
}

/// Returns all drop-ins but ours, in the order of their names; of two with one name the earlier directory's.
fn drop_ins(root: &Root, names: &[String]) -> Vec<PathBuf> {
    let mut found: BTreeMap<String, PathBuf> = BTreeMap::new();
    for directory in UNIT_DIRECTORIES.iter().flat_map(|d| names.iter().map(move |n| root.at(d).join(format!("{n}.d"))))
    {
        for name in list(&directory).unwrap_or_default() {
            if name.ends_with(".conf") && name != DROP_IN_NAME {
                let path = directory.join(&name);
                found.entry(name).or_insert(path);
            }
        }
    }
    found.into_values().collect()
}

/// Returns lines without comments; a line that ends in a backslash is joined with the next.
fn logical_lines(text: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut open: Option<String> = None;
    for line in text.lines() {
        if line.trim_start().starts_with(['#', ';']) {
            continue;
        }
        let so_far = open.take().unwrap_or_default() + line;
        match so_far.strip_suffix('\\') {
            Some(more) => open = Some(format!("{more} ")),
            None => lines.push(so_far.trim().to_owned()),
        }
    }
    lines.extend(open.map(|rest| rest.trim().to_owned()));
    lines
}

/// Splits a command line into its first word, quotes included, and the rest.
pub(crate) fn split_word(line: &str) -> Option<(&str, &str)> {
    let line = line.trim_start();
    let mut quote = None;
    let mut escaped = false;
    for (at, c) in line.char_indices() {
        match (quote, c) {
            _ if escaped => escaped = false,
            (_, '\\') => escaped = true,
            (Some(open), _) if c == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(c),
            (None, _) if c.is_whitespace() => return Some((&line[..at], line[at..].trim_start())),
            _ => {}
        }
    }
    (!line.is_empty()).then_some((line, ""))
}

/// Returns the program of an `ExecStart=` line, if it is a plain path.
fn program(line: &str) -> Option<PathBuf> {
    let (word, _) = split_word(line.trim_start_matches(['-', '@', ':', '+', '!']))?;
    let word = word.trim_matches(['"', '\'']);
    (word.starts_with('/') && !word.contains(['$', '%', '\\'])).then(|| PathBuf::from(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_read_as_systemd_reads_them() {
        let mut service = Service::default();
        service
            .add("[Unit]\nExecStart=/no\n[Service]\n# ExecStart=/no\nExecStart=/bin/a \\\n  -b\\\n;c\n -d\nUser=x\n");
        assert_eq!(service.exec_start, ["/bin/a    -b  -d"]);
        service.add("[Service]\nExecStart=\nExecStart=/bin/b\nSystemCallFilter=~@privileged\n");
        assert_eq!(service.exec_start, ["/bin/b"]);
        assert_eq!(service.confined_by, ["SystemCallFilter=~@privileged"]);
    }

    #[test]
    fn lines_of_address_families_add_up() {
        let lacks = |lines: &[&str]| {
            let mut service = Service::default();
            lines.iter().for_each(|line| service.add(&format!("[Service]\nRestrictAddressFamilies={line}\n")));
            service.lacks_local_sockets()
        };
        for lines in [&[][..], &["AF_INET AF_UNIX"], &["AF_INET", "AF_LOCAL"], &["~AF_PACKET"], &["none", ""]] {
            assert!(!lacks(lines), "{lines:?}");
        }
        assert!(!lacks(&["~AF_UNIX", "AF_UNIX"]));
        for lines in [&["AF_INET"][..], &["none"], &["~AF_UNIX AF_PACKET"], &["AF_UNIX", "~AF_UNIX"], &["", "AF_INET6"]]
        {
            assert!(lacks(lines), "{lines:?}");
        }
    }

    #[test]
    fn programs_are_found_where_they_are_plain() {
        assert_eq!(program("-/usr/bin/redis-server /etc/x"), Some(PathBuf::from("/usr/bin/redis-server")));
        assert_eq!(program("@/usr/bin/$X name"), None);
    }
}

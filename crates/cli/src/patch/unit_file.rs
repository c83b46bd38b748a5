//! Commands that a systemd unit starts, read from its files; and the drop-in that starts them through `stillpoint patch exec`.
//!
//! The obvious way is to ask `systemctl show`; it reports the loaded unit, with expanded specifiers and without quoting, and only where
//! systemd runs. The files contain the original text, which a drop-in has to repeat (see `refresh`).

use super::enabled::Root;
use super::refresh::{Record, Request};
use anyhow::Context;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use stillpoint_host::file::{list, read_regular_text};
use stillpoint_host::systemd::ServiceName;

/// Directories of units; an earlier directory hides a later one's file of the same name (systemd.unit(5)).
const UNIT_DIRECTORIES: [&str; 5] = [
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// Name of our drop-in: it sorts late, so that it sees the settings of other drop-ins.
const DROP_IN_NAME: &str = "90-stillpoint.conf";

/// Size limit in bytes of a unit's file.
pub(crate) const UNIT_FILE_LEN_MAX: u64 = 1 << 20;

/// Groups of system calls that a helper in a unit's sandbox makes: ptrace and kcmp, priorities.
pub(crate) const HELPER_SYSTEM_CALLS: &str = "@debug @resources";

/// Directory of generated units that hide others of their name, also those in /etc.
const GENERATED_UNITS: &str = "/run/systemd/generator.early";

/// Path of a unit's drop-in.
pub(crate) fn drop_in(root: &Root, unit: &ServiceName) -> PathBuf {
    drop_in_below(&root.at(UNIT_DIRECTORIES[0]), unit)
}

/// A unit's drop-in below a directory of units.
pub(crate) fn drop_in_below(directory: &Path, unit: &ServiceName) -> PathBuf {
    directory.join(format!("{unit}.d")).join(DROP_IN_NAME)
}

/// Paths of our drop-ins; an earlier one hides a later one.
pub(crate) fn drop_ins_of_ours(root: &Root, unit: &ServiceName) -> [PathBuf; 2] {
    [drop_in_below(&root.at(GENERATED_UNITS), unit), drop_in(root, unit)]
}

/// Returns every unit that has the drop-in.
///
/// # Errors
/// The directory of units cannot be read.
pub(crate) fn with_drop_in(root: &Root) -> anyhow::Result<Vec<ServiceName>> {
    let directory = root.at(UNIT_DIRECTORIES[0]);
    let entries = match list(&directory) {
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        entries => entries?,
    };
    let unit = |name: &String| {
        let unit = ServiceName::complete(name.strip_suffix(".d")?).ok()?;
        drop_in(root, &unit).exists().then_some(unit)
    };
    let mut units: Vec<ServiceName> = entries.iter().filter_map(unit).collect();
    units.sort();
    Ok(units)
}

/// Settings of a unit's main process, from the unit's files.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Service {
    /// Its `ExecStart=` lines, as written.
    pub(crate) exec_start: Vec<String>,
    /// Settings of its sandbox that may keep a helper inside of it from tracing.
    pub(crate) confined_by: Vec<String>,
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
    pub(crate) fn lacks_local_sockets(&self) -> bool {
        matches!(self.families, Families::Named { local: false } | Families::AllBut { local: true })
    }

    /// Reads a unit with all its drop-ins but ours.
    pub(crate) fn read(root: &Root, unit: &ServiceName) -> anyhow::Result<Service> {
        let template = unit.template().map(|template| template.to_string());
        let names: Vec<String> = [Some(unit.to_string()), template].into_iter().flatten().collect();
        let fragment =
            names.iter().flat_map(|name| UNIT_DIRECTORIES.map(|d| root.at(d).join(name))).find(|p| p.is_file());
        let fragment = fragment.with_context(|| format!("no systemd directory contains the unit {unit}"))?;
        let mut files = vec![fragment];
        files.extend(drop_ins(root, &names));
        let mut service = Service::default();
        for file in files {
            let text = read_regular_text(&file, UNIT_FILE_LEN_MAX)?;
            service.add(&text);
        }
        anyhow::ensure!(!service.exec_start.is_empty(), "unit {unit} has no ExecStart=");
        Ok(service)
    }

    fn add(&mut self, text: &str) {
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

/// Returns an `ExecStart=` line that does the same through `stillpoint patch exec`: the prefixes of systemd stay in front, and `@`, which
/// gives the program's own name, becomes an option. Quoting, `$VARIABLES` and `%specifiers` do not change.
pub(crate) fn prefixed(line: &str, request: &Request) -> anyhow::Result<String> {
    let command = line.trim_start_matches(['-', '@', ':', '+', '!']);
    let marks = &line[..line.len() - command.len()];
    let mut words = vec![request.stillpoint.clone(), "patch".into(), "exec".into()];
    words.extend(request.options.iter().cloned());
    let command = if marks.contains('@') {
        let (program, rest) = split_word(command).with_context(|| format!("no program in ExecStart={line}"))?;
        let (name, rest) = split_word(rest).with_context(|| format!("no name after @ in ExecStart={line}"))?;
        words.extend(["--argv0".to_owned(), name.to_owned()]);
        format!("{program} {rest}")
    } else {
        command.to_owned()
    };
    anyhow::ensure!(!command.trim().is_empty(), "no program in ExecStart={line}");
    words.extend(["--".to_owned(), command.trim().to_owned()]);
    Ok(format!("{}{}", marks.replace('@', ""), words.join(" ")))
}

/// Splits a command line into its first word, quotes included, and the rest.
fn split_word(line: &str) -> Option<(&str, &str)> {
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
pub(crate) fn program(line: &str) -> Option<PathBuf> {
    let (word, _) = split_word(line.trim_start_matches(['-', '@', ':', '+', '!']))?;
    let word = word.trim_matches(['"', '\'']);
    (word.starts_with('/') && !word.contains(['$', '%', '\\'])).then(|| PathBuf::from(word))
}

/// Returns the text of the drop-in.
pub(crate) fn text(service: &Service, request: &Request) -> anyhow::Result<String> {
    let mut text =
        "# Written by `stillpoint patch enable`, removed by `stillpoint patch disable`: the service starts with its\n\
                    # live patches active before its first instruction (stillpoint-patch-exec(1)). When the unit has\n\
                    # changed, `stillpoint patch refresh` updates this file.\n"
            .to_owned();
    text += &Record::of(service, request).line()?;
    text += "[Service]\nExecStart=\n";
    for line in &service.exec_start {
        text += &format!("ExecStart={}\n", prefixed(line, request)?);
    }
    if service.names_executables {
        text += &format!("ExecPaths={}\n", request.stillpoint);
    }
    if request.loosen_sandbox && !service.confined_by.is_empty() {
        text += "# Requested by --loosen-sandbox: the helper runs in the sandbox of the service.\n";
        text += &format!("SystemCallFilter={HELPER_SYSTEM_CALLS}\n");
    }
    if request.loosen_sandbox && service.lacks_local_sockets() {
        text += "# Requested by --loosen-sandbox: a socket connects to the helper outside of the sandbox.\n";
        text += "RestrictAddressFamilies=AF_UNIX\n";
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(options: &[&str], loosen_sandbox: bool) -> Request {
        let options = options.iter().map(ToString::to_string).collect();
        Request { stillpoint: "/usr/bin/stillpoint".into(), options, loosen_sandbox }
    }

    fn line(line: &str) -> String {
        prefixed(line, &request(&["--unit", "x.service"], false)).unwrap()
    }

    #[test]
    fn lines_are_prefixed_and_keep_what_systemd_reads() {
        let exec = "/usr/bin/stillpoint patch exec --unit x.service";
        assert_eq!(
            line("/usr/bin/redis-server a \"b c\" $D %i"),
            format!("{exec} -- /usr/bin/redis-server a \"b c\" $D %i")
        );
        assert_eq!(line("-!!/bin/true"), format!("-!!{exec} -- /bin/true"));
        assert_eq!(line("@/usr/sbin/x \"my name\" -d"), format!("{exec} --argv0 \"my name\" -- /usr/sbin/x -d"));
        assert!(prefixed("-", &request(&[], false)).is_err());
    }

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
    fn a_sandbox_gets_what_it_needs_and_no_more() {
        let mut service = Service::default();
        service.add("[Service]\nExecStart=/bin/a\nNoExecPaths=/\nSystemCallFilter=@system-service\n");
        let of = |service: &Service, loosen| text(service, &request(&[], loosen)).unwrap();
        assert!(of(&service, false).ends_with("\nExecPaths=/usr/bin/stillpoint\n"));
        assert!(of(&service, true).ends_with("\nSystemCallFilter=@debug @resources\n"));
        service.add("[Service]\nNoExecPaths=\nSystemCallFilter=\n");
        assert!(of(&service, true).ends_with("-- /bin/a\n"));
        service.add("[Service]\nRestrictAddressFamilies=AF_INET\n");
        assert!(of(&service, true).ends_with("\nRestrictAddressFamilies=AF_UNIX\n"));
        assert!(of(&service, false).ends_with("-- /bin/a\n"));
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

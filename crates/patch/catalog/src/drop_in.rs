//! Drop-ins that start units through `stillpoint patch exec`.
//!
//! systemd has no setting that puts a program in front of another, so a drop-in has to repeat `ExecStart=`. The obvious way is to write it
//! once; when a package then changes its unit, the service starts by the old line. So each drop-in holds a record of the unit that it was
//! made from.

use crate::error::{Error, Of};
use crate::root::Root;
use crate::unit_file::{DROP_IN_NAME, Service, UNIT_DIRECTORIES, UNIT_FILE_LEN_MAX, split_word};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::Command;
use stillpoint_host::file::{list, read_regular_text};
use stillpoint_host::systemd::ServiceName;
use stillpoint_host::trusted::Directory;

/// Groups of system calls that a helper in a unit's sandbox makes: ptrace and kcmp, priorities.
pub const HELPER_SYSTEM_CALLS: &str = "@debug @resources";

/// Directory of generated units that hide others of their name, also those in /etc.
const GENERATED_UNITS: &str = "/run/systemd/generator.early";

/// Path of a unit's drop-in.
pub fn path(root: &Root, unit: &ServiceName) -> PathBuf {
    path_below(&root.at(UNIT_DIRECTORIES[0]), unit)
}

/// Path of a unit's drop-in below a directory of units.
pub fn path_below(directory: &Path, unit: &ServiceName) -> PathBuf {
    directory.join(format!("{unit}.d")).join(DROP_IN_NAME)
}

/// Returns every unit that has the drop-in.
///
/// # Errors
/// The directory of units cannot be read.
pub fn units(root: &Root) -> Result<Vec<ServiceName>, Error> {
    let directory = root.at(UNIT_DIRECTORIES[0]);
    let entries = match list(&directory) {
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        entries => entries?,
    };
    let unit = |name: &String| {
        let unit = ServiceName::complete(name.strip_suffix(".d")?).ok()?;
        path(root, &unit).exists().then_some(unit)
    };
    let mut units: Vec<ServiceName> = entries.iter().filter_map(unit).collect();
    units.sort();
    Ok(units)
}

/// Arguments of `patch enable` for the start of a unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Program that the drop-in calls.
    pub stillpoint: String,
    /// Options of `patch exec`.
    pub options: Vec<String>,
    /// True if the sandbox allows what the helper needs.
    pub loosen_sandbox: bool,
}

/// Origin of a drop-in, stored as one of its lines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    request: Request,
    exec_start: Vec<String>,
    confined: bool,
    names_executables: bool,
    /// Absent in drop-ins of earlier versions.
    #[serde(default)]
    lacks_local_sockets: bool,
}

const RECORD_PREFIX: &str = "# made-from: ";

impl Record {
    /// Makes the record of the current unit.
    fn of(service: &Service, request: &Request) -> Record {
        Record {
            request: request.clone(),
            exec_start: service.exec_start.clone(),
            confined: !service.confined_by.is_empty(),
            names_executables: service.names_executables,
            lacks_local_sockets: service.lacks_local_sockets(),
        }
    }

    /// Returns the line, with its end.
    fn line(&self) -> Result<String, Error> {
        Ok(format!("{RECORD_PREFIX}{}\n", serde_json::to_string(self).of(|| "the record of a drop-in".into())?))
    }

    fn read(drop_in: &str) -> Result<Record, Error> {
        let line = drop_in.lines().find_map(|line| line.strip_prefix(RECORD_PREFIX));
        let line = line.ok_or_else(|| Error::Refused("it contains no record".into()))?;
        serde_json::from_str(line).of(|| "its record".into())
    }

    /// Describes the difference from the current unit; `None` if there is none.
    fn change(&self, now: &Record) -> Option<String> {
        let one = |lines: &[String]| lines.join("; ");
        if self.exec_start != now.exec_start {
            Some(format!("ExecStart= was {:?} and is {:?}", one(&self.exec_start), one(&now.exec_start)))
        } else {
            (self != now).then(|| "its sandbox settings changed".to_owned())
        }
    }
}

/// Reads the record of the drop-in that is active for a unit; `None` if there is none.
fn recorded(root: &Root, unit: &ServiceName) -> Result<Option<Record>, Error> {
    // the earlier one hides the later one
    let ours = [path_below(&root.at(GENERATED_UNITS), unit), path(root, unit)];
    let Some(path) = ours.into_iter().find(|path| path.exists()) else { return Ok(None) };
    Record::read(&read_regular_text(&path, UNIT_FILE_LEN_MAX)?).of(|| path.display().to_string()).map(Some)
}

/// Reads the request of the drop-in that is active for a unit; `None` if there is none.
///
/// # Errors
/// The drop-in cannot be read.
pub fn request(root: &Root, unit: &ServiceName) -> Result<Option<Request>, Error> {
    Ok(recorded(root, unit)?.map(|record| record.request))
}

/// Describes the changes of a unit since its active drop-in was made; `None` without changes, or without a drop-in.
///
/// # Errors
/// The unit or the drop-in cannot be read.
pub fn change(root: &Root, unit: &ServiceName) -> Result<Option<String>, Error> {
    let Some(record) = recorded(root, unit)? else { return Ok(None) };
    let now = Record::of(&Service::read(root, unit)?, &record.request);
    Ok(record.change(&now))
}

/// Replacement of a drop-in whose unit has changed since it was made.
#[derive(Debug)]
pub struct Replacement {
    /// Text of the new drop-in.
    pub text: String,
    /// Change of the unit.
    pub change: String,
}

/// Makes a unit's drop-in again; `None` if that changes nothing.
///
/// # Errors
/// The unit or the drop-in cannot be read.
pub fn replacement(root: &Root, unit: &ServiceName) -> Result<Option<Replacement>, Error> {
    let path = path(root, unit);
    let old = read_regular_text(&path, UNIT_FILE_LEN_MAX)?;
    let record = Record::read(&old).of(|| path.display().to_string())?;
    let service = Service::read(root, unit)?;
    let text = text(&service, &record.request)?;
    let change = record.change(&Record::of(&service, &record.request)).unwrap_or_else(|| "another version".to_owned());
    Ok((text != old).then_some(Replacement { text, change }))
}

/// Returns true if a drop-in has this text already.
pub fn is_written(path: &Path, text: &str) -> bool {
    read_regular_text(path, UNIT_FILE_LEN_MAX).is_ok_and(|there| there == text)
}

/// Writes a drop-in completely or not at all, in a directory that root alone can change. A service's own user can read both.
///
/// # Errors
/// Users other than root can change the directory, or the file cannot be written.
pub fn write(path: &Path, text: &str) -> Result<(), Error> {
    Directory::make_readable(path.parent().unwrap_or(path))?.write_readable(DROP_IN_NAME, text.as_bytes())?;
    Ok(())
}

/// Removes a unit's drop-in; returns true if there was one.
///
/// # Errors
/// Users other than root can change the directory, or the file cannot be removed.
pub fn remove(root: &Root, unit: &ServiceName) -> Result<bool, Error> {
    let path = path(root, unit);
    let (directory, name) = match Directory::of_file(&path) {
        Err(error) if error.is_not_found() => return Ok(false),
        opened => opened?,
    };
    match directory.remove(name) {
        Err(error) if error.is_not_found() => return Ok(false),
        removed => removed?,
    }
    // The directory may contain other drop-ins.
    let _ = directory.remove_if_empty();
    Ok(true)
}

/// Makes systemd read its units again; returns true if it did.
pub fn reload(root: &Root) -> bool {
    let runs = root.is_machine() && Path::new("/run/systemd/system").is_dir();
    runs && Command::new("systemctl").arg("daemon-reload").status().is_ok_and(|status| status.success())
}

/// Returns an `ExecStart=` line that does the same through `stillpoint patch exec`: the prefixes of systemd stay in front, and `@`, which
/// gives the program's own name, becomes an option. Quoting, `$VARIABLES` and `%specifiers` do not change.
fn prefixed(line: &str, request: &Request) -> Result<String, Error> {
    let lacks = |what: &str| Error::Refused(format!("no {what} in ExecStart={line}"));
    let command = line.trim_start_matches(['-', '@', ':', '+', '!']);
    let marks = &line[..line.len() - command.len()];
    let mut words = vec![request.stillpoint.clone(), "patch".into(), "exec".into()];
    words.extend(request.options.iter().cloned());
    let command = if marks.contains('@') {
        let (program, rest) = split_word(command).ok_or_else(|| lacks("program"))?;
        let (name, rest) = split_word(rest).ok_or_else(|| lacks("name after @"))?;
        words.extend(["--argv0".to_owned(), name.to_owned()]);
        format!("{program} {rest}")
    } else {
        command.to_owned()
    };
    if command.trim().is_empty() {
        return Err(lacks("program"));
    }
    words.extend(["--".to_owned(), command.trim().to_owned()]);
    Ok(format!("{}{}", marks.replace('@', ""), words.join(" ")))
}

/// Returns the text of the drop-in.
///
/// # Errors
/// An `ExecStart=` line of the unit names no program.
pub fn text(service: &Service, request: &Request) -> Result<String, Error> {
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
    fn a_record_survives_its_line_and_tells_what_has_changed() {
        let request = Request {
            stillpoint: "/usr/bin/stillpoint".into(),
            options: vec!["--strict".into()],
            loosen_sandbox: true,
        };
        let service = Service { exec_start: vec!["-/bin/a \"b\\\\\" 'c' %i \\x20".into()], ..Service::default() };
        let record = Record::of(&service, &request);
        let drop_in = format!("# x\n{}[Service]\n", record.line().unwrap());
        assert_eq!(Record::read(&drop_in).unwrap(), record);
        assert_eq!(record.change(&record), None);
        let other = Service { exec_start: vec!["/bin/a --new".into()], ..service.clone() };
        let change = record.change(&Record::of(&other, &request)).unwrap();
        assert!(change.starts_with("ExecStart= was ") && change.ends_with("and is \"/bin/a --new\""), "{change}");
        let other = Service { names_executables: true, ..service };
        assert!(record.change(&Record::of(&other, &request)).unwrap().contains("sandbox"));
        assert!(Record::read("[Service]\n").is_err() && Record::read("# made-from: {}\n").is_err());
    }
}

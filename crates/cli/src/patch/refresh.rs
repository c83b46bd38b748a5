//! `stillpoint patch refresh`: makes drop-ins of `patch enable` again from the current units.
//!
//! systemd has no setting that puts a program in front of another, so a drop-in has to repeat `ExecStart=`. The obvious way is to write it
//! once; when a package then changes its unit, the service starts by the old line. So each drop-in holds a record of the unit that it was
//! made from. A generator of systemd calls this command at boot and at each daemon-reload, when systemd reads units, and replaces the
//! drop-in of each changed unit; `patch exec` compares, too.

use super::enable::reload;
use super::enabled::{self, Root};
use super::unit_file::{self, Service, UNIT_FILE_LEN_MAX};
use crate::output::{Failure, Output};
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use stillpoint_host::file::read_regular_text;
use stillpoint_host::systemd::ServiceName;

/// Arguments of `stillpoint patch refresh`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::of("stillpoint patch refresh"))]
pub(crate) struct Args {
    /// Update only this unit.
    #[arg(long, value_name = "NAME")]
    unit: Option<String>,
    /// Do not change the drop-ins; write their replacements below this directory (of a systemd generator).
    #[arg(long, value_name = "DIR")]
    into: Option<PathBuf>,
    #[command(flatten)]
    root: Root,
    /// Dry run: print the files that would be written.
    #[arg(long)]
    dry_run: bool,
}

/// Arguments of `patch enable` for the start of a unit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Request {
    /// Program that the drop-in calls.
    pub(crate) stillpoint: String,
    /// Options of `patch exec`.
    pub(crate) options: Vec<String>,
    pub(crate) loosen_sandbox: bool,
}

/// Origin of a drop-in, stored as one of its lines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
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
    pub(crate) fn of(service: &Service, request: &Request) -> Record {
        Record {
            request: request.clone(),
            exec_start: service.exec_start.clone(),
            confined: !service.confined_by.is_empty(),
            names_executables: service.names_executables,
            lacks_local_sockets: service.lacks_local_sockets(),
        }
    }

    /// Returns the line, with its end.
    pub(crate) fn line(&self) -> anyhow::Result<String> {
        Ok(format!("{RECORD_PREFIX}{}\n", serde_json::to_string(self)?))
    }

    fn read(drop_in: &str) -> anyhow::Result<Record> {
        let line =
            drop_in.lines().find_map(|line| line.strip_prefix(RECORD_PREFIX)).context("it contains no record")?;
        serde_json::from_str(line).context("its record")
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
fn recorded(root: &Root, unit: &ServiceName) -> anyhow::Result<Option<Record>> {
    let Some(path) = unit_file::drop_ins_of_ours(root, unit).into_iter().find(|path| path.exists()) else {
        return Ok(None);
    };
    let at = || path.display().to_string();
    Record::read(&read_regular_text(&path, UNIT_FILE_LEN_MAX)?).with_context(at).map(Some)
}

/// Reads the request of the drop-in that is active for a unit; `None` if there is none.
///
/// # Errors
/// The drop-in cannot be read.
pub(crate) fn request(root: &Root, unit: &ServiceName) -> anyhow::Result<Option<Request>> {
    Ok(recorded(root, unit)?.map(|record| record.request))
}

/// Describes the changes of a unit since its active drop-in was made; `None` without changes, or without a drop-in.
///
/// # Errors
/// The unit or the drop-in cannot be read.
pub(crate) fn change(root: &Root, unit: &ServiceName) -> anyhow::Result<Option<String>> {
    let Some(record) = recorded(root, unit)? else { return Ok(None) };
    let now = Record::of(&Service::read(root, unit)?, &record.request);
    Ok(record.change(&now))
}

/// Runs `stillpoint patch refresh`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let units = match &args.unit {
        Some(unit) => vec![ServiceName::parse(unit).map_err(Failure::refused)?],
        None => unit_file::with_drop_in(&args.root).map_err(Failure::refused)?,
    };
    let (mut written, mut failed) = (0, 0);
    for unit in &units {
        match refresh(args, unit, output) {
            Ok(changed) => written += usize::from(changed),
            Err(error) => {
                failed += 1;
                output.warn(format_args!("{unit}: {error:#}"));
            }
        }
    }
    // a generator must not reload: systemd waits for it
    if written > 0 && args.into.is_none() && !args.dry_run {
        reload(&args.root, output);
    }
    if failed > 0 {
        let error = anyhow::anyhow!("{failed} of {} drop-ins could not be updated", units.len());
        return Err(Failure::failed(error, "these services start according to their present drop-ins"));
    }
    Ok(())
}

/// Returns true if the drop-in had to be made again.
fn refresh(args: &Args, unit: &ServiceName, output: &Output) -> anyhow::Result<bool> {
    let drop_in = unit_file::drop_in(&args.root, unit);
    let at = || drop_in.display().to_string();
    let old = read_regular_text(&drop_in, UNIT_FILE_LEN_MAX)?;
    let record = Record::read(&old).with_context(at)?;
    let service = Service::read(&args.root, unit)?;
    let text = unit_file::text(&service, &record.request)?;
    if text == old {
        return Ok(false);
    }
    let change = record.change(&Record::of(&service, &record.request)).unwrap_or_else(|| "another version".to_owned());
    let to = match &args.into {
        Some(into) => unit_file::drop_in_below(into, unit),
        None => drop_in.clone(),
    };
    if args.dry_run {
        output.line(format_args!("{unit}: {change}\n{}:\n{text}", to.display()));
        return Ok(true);
    }
    enabled::write(&to, text.as_bytes())?;
    output.line(format_args!("{unit}: {change}: updated {}", to.display()));
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

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

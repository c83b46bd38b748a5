//! Units that stay when the kernel changes. The kexec ends processes that still run, as a power failure would: so
//! services are stopped before, by systemd and in its order.
//!
//! Stopped are the services that systemd starts after its basic units, with the units that trigger them. Not stopped
//! are units that go along and all that these need; units that the network needs, since packets of guarded connections
//! must find this machine; the unit in which this tool runs, or a process above it; and units that could not be started
//! again if the switch fails.

use procfs::process::Process;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;
use stillpoint_host::kernel_files;
use stillpoint_host::systemd::groups_of_systemd;
use stillpoint_kernel_checkpoint::command::{run, run_within};
use stillpoint_kernel_checkpoint::{Error, ErrorContext};

/// Services that systemd starts after this one are ordinary ones; all others belong to the machine itself.
const ORDINARY_TARGET: &str = "basic.target";
/// Units that are ordered before this one make the network.
const NETWORK_TARGET: &str = "network.target";
/// Suffixes of units that start others.
const TRIGGER_SUFFIXES: [&str; 4] = [".socket", ".timer", ".path", ".automount"];
/// Beginning of the control groups of users' processes.
const USER_GROUP_PREFIX: &str = "/user.slice/";
/// The control group of systemd itself.
const INIT_SCOPE: &str = "init.scope";

/// Decision about each unit that stays.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemainingUnits {
    /// Units that are stopped before the others are frozen, each before those that it was started after.
    pub stop: Vec<String>,
    /// Units that run until the kexec and are cut off there, with the reason.
    pub cut_off: Vec<(String, String)>,
    /// Units that the next kernel does not start.
    pub not_started: Vec<String>,
}

/// A unit as systemd describes it.
#[derive(Debug, Default)]
pub(crate) struct UnitProperties {
    properties: BTreeMap<String, Vec<String>>,
}

impl UnitProperties {
    pub(crate) fn list(&self, property: &str) -> impl Iterator<Item = &str> {
        self.properties.get(property).into_iter().flatten().map(String::as_str)
    }

    fn is(&self, property: &str, value: &str) -> bool {
        self.list(property).eq([value])
    }

    fn runs(&self) -> bool {
        self.list("ControlGroup").next().is_some() && !self.is("SubState", "exited")
    }

    fn is_of_users(&self) -> bool {
        self.list("ControlGroup").any(|group| group.starts_with(USER_GROUP_PREFIX))
    }

    fn has(&self, property: &str, value: &str) -> bool {
        self.list(property).any(|one| one == value)
    }
}

/// This process, as units see it.
struct Caller {
    /// Its control group.
    group: String,
    /// Its number, and those of its parents: a terminal that hangs up ends the processes started from it.
    pids: Vec<i32>,
}

impl Caller {
    fn read() -> Result<Self, Error> {
        let path = "/proc/self/cgroup";
        let groups = kernel_files::text(path).at("read", path)?;
        let group = groups_of_systemd(&groups).next().unwrap_or_default().to_owned();
        let parent = |process: &Process| Process::new(process.stat().ok()?.ppid).ok();
        let line = std::iter::successors(Process::myself().ok(), parent);
        Ok(Caller { group, pids: line.map(|process| process.pid).collect() })
    }

    /// Returns true if this process would end with a unit.
    fn is_below(&self, unit: &UnitProperties) -> bool {
        let holds = |group: &str| group != "/" && Path::new(&self.group).starts_with(group);
        let is_main = |pid: &str| pid.parse::<i32>().is_ok_and(|pid| self.pids.contains(&pid));
        unit.list("ControlGroup").any(holds) || unit.list("MainPID").any(is_main)
    }
}

/// Every unit that systemd has loaded.
pub(crate) struct Units {
    /// Units by their names.
    pub(crate) known: BTreeMap<String, UnitProperties>,
    /// Name of the unit that the next boot starts, with all that it wants.
    default: String,
}

/// Properties that are read from systemd, as `systemctl show` expects them.
const PROPERTIES: &str = "Id,ActiveState,SubState,CanStop,RefuseManualStop,Transient,Type,ControlGroup,MainPID,After,\
    Before,Requires,Requisite,BindsTo,PartOf,Wants,Triggers";
/// Properties by which a unit is stopped together with the one that it refers to.
const STOP_DEPENDENCIES: [&str; 4] = ["Requires", "Requisite", "BindsTo", "PartOf"];
/// Properties by which a unit is started together with the one that refers to it.
const START_DEPENDENCIES: [&str; 5] = ["Requires", "Requisite", "BindsTo", "Wants", "Triggers"];

impl Units {
    fn read() -> Result<Self, Error> {
        let properties = format!("--property={PROPERTIES}");
        // the first one is loaded if it is not
        let arguments = ["show", "--all", &properties, "--", "default.target", "*"];
        run("query the units", "systemctl", &arguments, None).map(|text| Units::parse(&text))
    }

    pub(crate) fn parse(text: &str) -> Self {
        let (mut known, mut default) = (BTreeMap::new(), String::new());
        for paragraph in text.split("\n\n") {
            let pairs = paragraph.lines().filter_map(|line| line.split_once('='));
            let words = |value: &str| value.split_whitespace().map(ToOwned::to_owned).collect();
            let properties: BTreeMap<String, Vec<String>> =
                pairs.map(|(key, value)| (key.to_owned(), words(value))).collect();
            let unit = UnitProperties { properties };
            let name = unit.list("Id").next().map(ToOwned::to_owned);
            if let Some(name) = name {
                if default.is_empty() {
                    default.clone_from(&name);
                }
                known.insert(name, unit);
            }
        }
        Units { known, default }
    }

    /// Returns these units, and all that they refer to by these properties, directly or through others.
    fn closure<'u>(&'u self, of: impl Iterator<Item = &'u str>, properties: &[&str]) -> BTreeSet<&'u str> {
        let mut found = BTreeSet::new();
        let mut next: Vec<&str> = of.collect();
        while let Some(name) = next.pop() {
            if let (true, Some(unit)) = (found.insert(name), self.known.get(name)) {
                for property in properties {
                    next.extend(unit.list(property));
                }
            }
        }
        found
    }

    /// Sorts each unit before those that it is started after. Units in a cycle are sorted by name.
    fn last_started_first<'u>(&self, mut units: BTreeSet<&'u str>) -> Vec<&'u str> {
        let follows = |later: &str, name: &str| self.known.get(later).is_some_and(|later| later.has("After", name));
        let mut sorted = Vec::with_capacity(units.len());
        while let Some(first) = units.first().copied() {
            let is_last = |name: &&str| !units.iter().any(|later| later != name && follows(later, name));
            let next = units.iter().copied().find(is_last).unwrap_or(first);
            units.remove(next);
            sorted.push(next);
        }
        sorted
    }

    fn active(&self) -> impl Iterator<Item = (&str, &UnitProperties)> {
        let is_active = |unit: &UnitProperties| unit.is("ActiveState", "active") || unit.is("ActiveState", "reloading");
        self.known.iter().filter(move |(_, unit)| is_active(unit)).map(|(name, unit)| (name.as_str(), unit))
    }

    /// Returns the services that have running processes.
    fn services(&self) -> impl Iterator<Item = (&str, &UnitProperties)> {
        self.active().filter(|(name, unit)| name.ends_with(".service") && unit.runs())
    }

    /// Decides about each unit that runs.
    fn decide(&self, switched: &[String], caller: &Caller) -> RemainingUnits {
        let is_switched = |name: &str| switched.iter().any(|unit| unit == name);
        let is_own = |unit: &UnitProperties| caller.is_below(unit);
        let basic = |name: &str, unit: &UnitProperties| {
            !unit.has("After", ORDINARY_TARGET)
                || unit.has("Before", NETWORK_TARGET)
                || is_switched(name)
                || is_own(unit)
        };
        // a stop of the units that these need would stop these too
        let running = self.services().filter(|(name, unit)| basic(name, unit)).map(|(name, _)| name);
        let needed = self.closure(running, &STOP_DEPENDENCIES);
        let (mut stop, mut cut_off) = (BTreeSet::new(), Vec::new());
        for (name, unit) in self.services().filter(|(name, _)| !needed.contains(name)) {
            if unit.is_of_users() {
                cut_off.push((name.to_owned(), "it contains processes of a user, which systemd cannot restart".into()));
            } else if unit.is("Transient", "yes") {
                cut_off.push((name.to_owned(), "it was made at run time, and systemd cannot restart it".into()));
            } else if unit.is("CanStop", "no") || unit.is("RefuseManualStop", "yes") {
                cut_off.push((name.to_owned(), "systemd does not stop it".into()));
            } else {
                stop.insert(name);
            }
        }
        let scopes =
            self.active().filter(|(name, unit)| name.ends_with(".scope") && *name != INIT_SCOPE && !is_own(unit));
        cut_off.extend(scopes.map(|(name, _)| (name.to_owned(), "systemd did not start its processes".into())));
        // a connection would start it again
        let triggers = self.active().filter(|(name, unit)| {
            !needed.contains(name) && unit.list("Triggers").any(|service| stop.contains(service))
        });
        let triggers: Vec<&str> = triggers.map(|(name, _)| name).collect();
        stop.extend(triggers);
        // and those that systemd stops with them
        loop {
            let with = self.active().filter(|(name, unit)| {
                !stop.contains(name)
                    && STOP_DEPENDENCIES.iter().any(|how| unit.list(how).any(|other| stop.contains(other)))
            });
            let with: Vec<&str> = with.map(|(name, _)| name).collect();
            if with.is_empty() {
                break;
            }
            stop.extend(with);
        }
        let started = self.closure([self.default.as_str()].into_iter(), &START_DEPENDENCIES);
        let on_demand = |unit: &UnitProperties| unit.is("Type", "dbus");
        let not_started = self
            .services()
            .filter(|(name, unit)| !is_switched(name) && !started.contains(name) && !on_demand(unit))
            .map(|(name, _)| name.to_owned());
        RemainingUnits {
            stop: self.last_started_first(stop).into_iter().map(ToOwned::to_owned).collect(),
            not_started: not_started.collect(),
            cut_off,
        }
    }
}

impl RemainingUnits {
    /// Reads the units from systemd, and decides.
    pub(crate) fn of(switched: &[String]) -> Result<Self, Error> {
        let caller = Caller::read()?;
        Units::read().map(|units| units.decide(switched, &caller))
    }

    /// Stops the units, in systemd's order: `systemctl` requests one after the other, and systemd begins with the first
    /// one before it knows of the next. Only units that would start a service again, like its socket, end before that
    /// service.
    pub(crate) fn stop(&self, limit: Duration) -> Result<(), Error> {
        let starts_others = |unit: &&String| TRIGGER_SUFFIXES.iter().any(|kind| unit.ends_with(kind));
        let (triggers, others): (Vec<_>, Vec<_>) = self.stop.iter().partition(starts_others);
        systemctl("stop the remaining units", "stop", triggers.into_iter().chain(others), limit)
    }

    /// Starts the units that were stopped, in systemd's order.
    pub(crate) fn start(&self, limit: Duration) -> Result<(), Error> {
        systemctl("start the remaining units", "start", self.stop.iter().rev(), limit)
    }

    /// Returns sentences about them for the operator, before a switch.
    pub fn descriptions(&self, limit_s: u64) -> Vec<String> {
        let mut lines = Vec::new();
        if !self.stop.is_empty() {
            lines.push(format!(
                "are stopped before the others are frozen, within {limit_s} s: {}",
                self.stop.join(", ")
            ));
        }
        lines.extend(self.cut_off.iter().map(|(unit, why)| format!("is terminated by the kexec: {unit}: {why}")));
        if !self.not_started.is_empty() {
            lines.push(format!(
                "are not started again, because no unit starts them at boot: {}",
                self.not_started.join(", ")
            ));
        }
        lines
    }
}

fn systemctl<'u>(
    what: &'static str,
    verb: &str,
    units: impl Iterator<Item = &'u String>,
    limit: Duration,
) -> Result<(), Error> {
    let units: Vec<&str> = units.map(String::as_str).collect();
    if units.is_empty() {
        return Ok(());
    }
    run_within(what, "systemctl", &[&[verb, "--"][..], &units].concat(), limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Describes a service that runs and that systemd starts after its basic units.
    fn service(name: &str, more: &str) -> String {
        format!(
            "Id={name}\nActiveState=active\nSubState=running\nCanStop=yes\nRefuseManualStop=no\nTransient=no\n\
             ControlGroup=/system.slice/{name}\nAfter=sysinit.target basic.target\n{more}\n"
        )
    }

    fn decide(units: &[String], own: &str) -> RemainingUnits {
        let caller = Caller { group: own.into(), pids: vec![4121, 1] };
        Units::parse(&units.join("\n")).decide(&["db.service".into()], &caller)
    }

    #[test]
    fn ordinary_services_are_stopped_with_what_triggers_them_and_what_needs_them() {
        let units = [
            service("db.service", "Requires=data.service"),
            service("data.service", ""),
            service("web.service", "TriggeredBy=web.socket"),
            "Id=web.socket\nActiveState=active\nSubState=listening\nTriggers=web.service\n".into(),
            service("proxy.service", "Requires=web.service"),
            service("shell.service", ""),
            service("terminal.service", "MainPID=4121"),
            service("net.service", "Before=network.target\nRequires=bus.service"),
            service("bus.service", ""),
            "Id=journal.service\nActiveState=active\nSubState=running\nControlGroup=/system.slice/journal.service\n"
                .into(),
            "Id=once.service\nActiveState=active\nSubState=exited\nControlGroup=\nAfter=basic.target\n".into(),
        ];
        let stays = decide(&units, "/system.slice/shell.service");
        assert_eq!(stays.stop, ["proxy.service", "web.service", "web.socket"]);
        assert!(stays.cut_off.is_empty(), "{stays:?}");
    }

    #[test]
    fn units_are_stopped_in_the_reverse_order_of_their_start() {
        let units = [
            service("a.service", ""),
            service("b.service", "After=basic.target a.service b.socket"),
            service("c.service", "After=basic.target b.service d.service"),
            // these two wait for each other
            service("d.service", "After=basic.target e.service"),
            service("e.service", "After=basic.target d.service"),
            "Id=b.socket\nActiveState=active\nSubState=listening\nTriggers=b.service\n".into(),
        ]
        .map(|unit| unit.replace("After=sysinit.target basic.target\nAfter", "After"));
        let stays = decide(&units, "/system.slice/shell.service");
        assert_eq!(stays.stop, ["c.service", "b.service", "a.service", "b.socket", "d.service", "e.service"]);
    }

    #[test]
    fn units_that_cannot_come_back_are_named() {
        let transient = service("job.service", "").replace("Transient=no", "Transient=yes");
        let units = [
            "Id=graphical.target\nActiveState=active\nWants=db.service web.service\n".into(),
            service("db.service", ""),
            service("web.service", ""),
            service("by-hand.service", ""),
            transient,
            service("bus-name.service", "Type=dbus"),
            service("user@1.service", "").replace("/system.slice/", "/user.slice/user-1.slice/"),
            "Id=session-1.scope\nActiveState=active\nSubState=running\nControlGroup=/user.slice/session-1.scope\n"
                .into(),
            "Id=session-2.scope\nActiveState=active\nSubState=running\nControlGroup=/user.slice/session-2.scope\n"
                .into(),
        ];
        let stays = decide(&units, "/user.slice/session-2.scope");
        assert_eq!(stays.stop, ["bus-name.service", "by-hand.service", "web.service"]);
        assert_eq!(stays.not_started, ["by-hand.service", "job.service", "user@1.service"]);
        let cut_off: Vec<&str> = stays.cut_off.iter().map(|(unit, _)| unit.as_str()).collect();
        assert_eq!(cut_off, ["job.service", "user@1.service", "session-1.scope"]);
        let lines = stays.descriptions(120).join("\n");
        assert!(lines.contains("within 120 s: bus-name.service, by-hand.service, web.service"), "{lines}");
    }
}

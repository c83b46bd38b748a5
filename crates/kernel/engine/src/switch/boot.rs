//! What happens first when a kernel comes up: systemd runs this before it looks at any unit.

use super::journal::{Decision, Journal};
use super::system::{Wall, raise, skip_pids};
use super::unit;
use crate::error::At;
use crate::{Error, host};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Units that are started on an idle machine get ids from here on, so that another kernel's first processes have none of
/// them.
const FIRST_PID: u32 = 1000;
/// The unit that leads a restore.
pub(super) const LEADER: &str = "stillpoint-switch.service";

/// Prepares this boot: nothing but process ids if no switch is under way. `units` is where generated units go.
pub fn boot(state: &Path, units: &Path) -> Result<Decision, Error> {
    let Some(journal) = Journal::read(state)? else {
        skip_pids(FIRST_PID)?;
        return Ok(Decision::Nothing);
    };
    let decision = journal.decide(&host::kernel());
    if decision == Decision::Nothing {
        skip_pids(FIRST_PID)?;
        return Ok(decision);
    }
    let program = std::env::current_exe().doing("find this program")?;
    let names: Vec<String> = journal.units.iter().map(|unit| unit.name.clone()).collect();
    if matches!(decision, Decision::Restore | Decision::Return) {
        skip_pids(journal.pid_max + FIRST_PID)?;
        for name in &names {
            let dir = units.join(format!("{name}.d"));
            fs::create_dir_all(&dir).at("make", &dir)?;
            // the last of all drop-ins
            let path = dir.join("zz-stillpoint.conf");
            fs::write(&path, unit::from_image(&program, state, name)).at("write", path)?;
        }
    }
    if decision == Decision::Restore {
        for name in &journal.held {
            let dir = units.join(format!("{name}.d"));
            fs::create_dir_all(&dir).at("make", &dir)?;
            let path = dir.join("zz-stillpoint.conf");
            fs::write(&path, format!("[Unit]\nAfter={LEADER}\n")).at("write", path)?;
        }
    }
    // on the way back to the old kernel nothing is started here
    let wanted: &[String] = if decision == Decision::Return { &[] } else { &names };
    let path = units.join(LEADER);
    fs::write(&path, unit::leader(&program, state, wanted)).at("write", &path)?;
    let wants = units.join("sysinit.target.wants");
    fs::create_dir_all(&wants).at("make", &wants)?;
    let link = wants.join(LEADER);
    let _ = fs::remove_file(&link);
    symlink(&path, &link).at("link", link)?;
    // Last: without it connections are reset, but without what stands above a unit would start from its files, beside its
    // image. Before a cold start it keeps clients waiting until the units serve, instead of being refused.
    raise(Wall::Outside, &journal.ports())?;
    Ok(decision)
}

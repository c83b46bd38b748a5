//! A command that holds: targets follow until an operator orders the switch with another command.
//!
//! ```text
//!  run --hold     DATABASE.holding   load, and why clients stay      written about every second
//!  switch         DATABASE.order     the order                       written once; removed when it is carried out or vetoed
//! ```
//!
//! Both files are beside the journal. An order outlives a holding command that is killed: the next one carries it out.

use crate::journal::Phase;
use crate::options::Options;
use crate::state_files::{self, HOLDING, ORDER};
use crate::switch_order::{FollowLoad, SwitchOrder};
use jiff::ZonedDateTime;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::process::Stdio;
use std::time::{Duration, Instant};
use stillpoint_migrate_apply::Error;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// Interval between two measurements.
pub(crate) const INTERVAL: Duration = Duration::from_millis(500);
/// Time within which a holding command answers an order.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Time that a hook may take.
const HOOK_TIMEOUT: Duration = Duration::from_secs(60);

/// A command that holds, as it describes itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Holding {
    /// Load, and distance of the target.
    pub load: FollowLoad,
    /// The order, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<SwitchOrder>,
    /// Reason why clients stay.
    pub why_not: String,
}

/// Returns how a command holds; `None` if no command does.
pub(crate) fn holding(options: &Options) -> Option<Holding> {
    state_files::read_beside(&options.state, &options.source.database, HOLDING, true).ok().flatten()
}

/// Orders a holding command to move clients, and waits until it has read the order.
///
/// # Errors
///
/// [`Error::WrongPhase`] if no command holds, [`Error::TimedOut`] if it does not answer.
pub async fn order_switch(options: &Options, order: &SwitchOrder) -> Result<(), Error> {
    let database = &options.source.database;
    let none = || Error::WrongPhase(format!("no command holds a migration of {database}; begin it with `run --hold`"));
    holding(options).ok_or_else(none)?;
    state_files::write_beside(&options.state, database, ORDER, order)?;
    let begun = Instant::now();
    loop {
        let record = state_files::peek(&options.state, database)?.ok_or_else(none)?;
        match holding(options) {
            _ if record.phase > Phase::Following => return Ok(()),
            Some(now) if now.order.as_ref() == Some(order) => return Ok(()),
            // It was carried out, or vetoed.
            _ if !state_files::is_beside(&options.state, database, ORDER)? => return Ok(()),
            _ if begun.elapsed() > ANSWER_TIMEOUT => {
                state_files::remove_beside(&options.state, database, ORDER)?;
                let what = "waiting for the command that holds".into();
                return Err(Error::TimedOut { what, limit: ANSWER_TIMEOUT, who: Vec::new() });
            }
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// The holding side of an order.
pub(crate) struct Gate<'o> {
    options: &'o Options,
    vetoed: Option<String>,
}

impl Gate<'_> {
    pub(crate) fn new(options: &Options) -> Gate<'_> {
        Gate { options, vetoed: None }
    }

    /// Returns true if clients may move now, as the operator ordered and no hook vetoed. Publishes the reason otherwise.
    pub(crate) async fn is_open(&mut self, load: &FollowLoad) -> Result<bool, Error> {
        let Options { state, source, .. } = self.options;
        let order: Option<SwitchOrder> = state_files::read_beside(state, &source.database, ORDER, false)?;
        let why_not = match &order {
            None => Some(self.vetoed.clone().unwrap_or_else(|| "no switch is ordered".into())),
            Some(order) => order.why_not(&ZonedDateTime::now(), load),
        };
        let why_not = match why_not {
            Some(why_not) => why_not,
            None => match before_switch(self.options, load).await {
                Ok(()) => {
                    self.close()?;
                    return Ok(true);
                }
                Err(error) => {
                    state_files::remove_beside(state, &source.database, ORDER)?;
                    self.vetoed = Some(format!("the last order was vetoed: {error}"));
                    error.to_string()
                }
            },
        };
        let holding = Holding { load: *load, order, why_not };
        state_files::write_beside(state, &source.database, HOLDING, &holding)?;
        Ok(false)
    }

    /// Does work that takes time, and publishes meanwhile that clients stay for it.
    pub(crate) async fn beside<T>(&self, load: &FollowLoad, work: impl Future<Output = T>) -> T {
        let Options { state, source, .. } = self.options;
        let publish = || -> Result<(), Error> {
            let order = state_files::read_beside(state, &source.database, ORDER, false)?;
            let why_not = "definitions that changed are being repeated".to_owned();
            state_files::write_beside(state, &source.database, HOLDING, &Holding { load: *load, order, why_not })
        };
        let (mut tick, begun) = (tokio::time::interval(INTERVAL), Instant::now());
        tokio::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                // Of a short look there is nothing to tell; and only `status` needs it.
                _ = tick.tick() => drop((begun.elapsed() > INTERVAL).then(publish)),
            }
        }
    }

    fn close(&self) -> Result<(), Error> {
        let Options { state, source, .. } = self.options;
        [HOLDING, ORDER].iter().try_for_each(|name| state_files::remove_beside(state, &source.database, name))
    }
}

impl Drop for Gate<'_> {
    fn drop(&mut self) {
        // An order stays for the next command that holds.
        let _ = state_files::remove_beside(&self.options.state, &self.options.source.database, HOLDING);
    }
}

/// Runs the hook before clients change sides.
///
/// # Errors
///
/// [`Error::Vetoed`] if it fails or takes too long.
pub(crate) async fn before_switch(options: &Options, load: &FollowLoad) -> Result<(), Error> {
    run_hook(options.hooks.before_switch.as_deref(), "before-switch", options, json!(load)).await
}

/// Runs the hook after clients have changed sides.
///
/// # Errors
///
/// [`Error::Vetoed`] if it fails or takes too long; clients stay where they are.
pub(crate) async fn after_switch(options: &Options, paused: Duration) -> Result<(), Error> {
    let load = json!({"paused_us": paused.as_micros() as u64});
    run_hook(options.hooks.after_switch.as_deref(), "after-switch", options, load).await
}

/// Runs a shell command with a description of the migration on its standard input, one line of JSON.
async fn run_hook(
    command: Option<&str>,
    event: &str,
    options: &Options,
    measured: serde_json::Value,
) -> Result<(), Error> {
    let Some(command) = command else { return Ok(()) };
    let veto = |why: String| Error::Vetoed { hook: event.to_owned(), why };
    let input = json!({
        "v": 1, "event": event, "database": options.source.database, "source": options.source.to_string(),
        "target": options.target.to_string(), "measured": measured,
    });
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", command]).stdin(Stdio::piped()).kill_on_drop(true);
    let mut child = shell.spawn().map_err(|error| veto(error.to_string()))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A command that does not read its input decides without it.
        let _ = stdin.write_all(format!("{input}\n").as_bytes()).await;
    }
    match tokio::time::timeout(HOOK_TIMEOUT, child.wait()).await {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(status)) => Err(veto(status.to_string())),
        Ok(Err(error)) => Err(veto(error.to_string())),
        Err(_) => Err(veto(format!("it took longer than {} s", HOOK_TIMEOUT.as_secs()))),
    }
}

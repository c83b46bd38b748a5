//! A proxy that stands by: it has read and checked its configuration, and serves when the proxy that serves is gone.
//!
//! ```text
//!  standby                                            proxy that serves (holds the lock of the routes file)
//!     lock? ---------- held ---------------------------+
//!     control socket: stand_by, my configuration ----> | another one stands by, or it differs: refused
//!     <--------------- standing_by, configuration ---- |
//!     <--------------- the same after a reload ------- |
//!     <--------------- end of the connection --------- x killed, crashed, or ending
//!     lock? ---------- free: read the routes, listen, serve
//! ```
//!
//! The end of the connection is only the signal to check. The lock decides which proxy serves. The kernel takes it from
//! a process when its last thread is gone, and not before: two proxies never serve together. A proxy that hangs keeps
//! its lock, and is not replaced. The servers end the dead proxy's transactions, as for any client that is gone.

use crate::error::StartError;
use crate::proxy::{Proxy, Settings};
use crate::routes::Lock;
use crate::signals::{SignalRequest, Signals};
use std::time::Duration;
use stillpoint_migrate_control::{Client, Config, ControlError, Reply, Request};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::time::Instant;

/// Interval at which the lock is tried, once it may be free.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Longest time until the end of an earlier standby is noticed.
const STANDBY_END_TIMEOUT: Duration = Duration::from_millis(500);
/// Time in which the proxy with the lock answers; if it does not, it is not the one in the configuration.
const REPLY_TIMEOUT: Duration = Duration::from_secs(10);

/// Keeps a standby informed until it is gone, in the proxy that serves; an error is the reason why it is refused.
pub(crate) async fn keep(stream: &mut BufReader<UnixStream>, proxy: &Proxy, text: &str) -> Result<(), String> {
    let process = stream.get_ref().peer_cred().ok().and_then(|peer| peer.pid()).unwrap_or_default();
    let theirs = Config::parse(text).map_err(|error| format!("cannot parse its configuration: {error}"))?;
    let differs = proxy.settings().config.differences(&theirs);
    if !differs.is_empty() {
        return Err(format!("its configuration differs in `{}`", differs.join("`, `")));
    }
    let begun = Instant::now();
    let _taken = loop {
        match proxy.standby.take(process) {
            // The earlier standby may be gone, and its end not yet noticed.
            Err(_) if begun.elapsed() < STANDBY_END_TIMEOUT => tokio::time::sleep(POLL_INTERVAL).await,
            taken => break taken?,
        }
    };
    tracing::info!(process, "another proxy is on standby");
    let (mut reloads, mut nothing) = (proxy.reloads.subscribe(), String::new());
    loop {
        let reply = Reply::StandingBy { config: proxy.settings().config.text.clone() };
        let mut line = serde_json::to_string(&reply).map_err(|error| error.to_string())?;
        line.push('\n');
        if stream.get_mut().write_all(line.as_bytes()).await.is_err() {
            break;
        }
        tokio::select! {
            changed = reloads.changed() => if changed.is_err() { break },
            // The standby sends nothing more: any read is its end.
            _ = stream.read_line(&mut nothing) => break,
        }
    }
    tracing::warn!(process, "the standby proxy has ended");
    Ok(())
}

/// Waits until no proxy serves, and returns the lock; `None` if a signal ends the wait. Calls `standing_by` once the
/// proxy that serves has accepted this one. Updates `settings` to the latest configuration of that proxy.
pub(crate) async fn wait(
    settings: &mut Settings,
    signals: &mut Signals,
    standing_by: impl FnOnce(&Config),
) -> Result<Option<Lock>, StartError> {
    let (begun, mut on_registered, mut seen) = (Instant::now(), Some(standing_by), None);
    loop {
        let config = &settings.config;
        let served = match Lock::take(&config.routes, &config.control) {
            Err(StartError::Served { routes, control })
                if on_registered.is_some() && control != config.control && !control.as_os_str().is_empty() =>
            {
                return Err(StartError::Served { routes, control });
            }
            Err(served @ StartError::Served { .. }) => served,
            taken => {
                if let Ok(Some(gone)) = taken.as_ref().map(|_| seen) {
                    let after: Duration = Instant::now() - gone;
                    tracing::warn!(?after, "the active proxy has ended: this standby takes over");
                }
                return taken.map(Some);
            }
        };
        let waiting = follow(settings, &mut on_registered);
        let heard = tokio::select! {
            heard = waiting => heard,
            () = wait_for_end_signal(signals) => return Ok(None),
        };
        match heard {
            Ok(()) => {
                seen.get_or_insert_with(Instant::now);
            }
            Err(ControlError::Refused(why)) => {
                return Err(StartError::StandBy { control: settings.config.control.clone(), why });
            }
            Err(_) if on_registered.is_some() && begun.elapsed() >= REPLY_TIMEOUT => return Err(served),
            Err(_) => {}
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Registers with the proxy that serves, and takes over its configuration until the connection ends.
async fn follow(settings: &mut Settings, on_registered: &mut Option<impl FnOnce(&Config)>) -> Result<(), ControlError> {
    let request = Request::StandBy { config: settings.config.text.clone() };
    let answering = async {
        let mut client = Client::connect(&settings.config.control).await?;
        let reply = client.ask(&request).await?;
        Ok::<_, ControlError>((client, reply))
    };
    let (mut client, mut reply) =
        tokio::time::timeout(REPLY_TIMEOUT, answering).await.unwrap_or(Err(ControlError::Closed))?;
    if let Some(standing_by) = on_registered.take() {
        standing_by(&settings.config);
    }
    tracing::info!("on standby");
    loop {
        let Reply::StandingBy { config } = reply else {
            return Err(ControlError::NotUnderstood(format!("{reply:?}")));
        };
        let theirs = Config::parse(&config).map(|theirs| theirs.started_as(&settings.config));
        match theirs.and_then(Settings::new) {
            Ok(theirs) => *settings = theirs,
            Err(error) => tracing::error!(%error, "cannot use the active proxy's configuration here"),
        }
        match client.next().await {
            Ok(next) => reply = next,
            Err(_) => return Ok(()),
        }
    }
}

/// Returns when a signal requests the end.
async fn wait_for_end_signal(signals: &mut Signals) {
    while signals.next().await == SignalRequest::Reload {
        tracing::info!("a standby uses the configuration of the active proxy: send SIGHUP to that process");
    }
}

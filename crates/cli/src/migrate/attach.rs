//! `stillpoint migrate attach` and `detach`: redirect direct connections of a server to the proxy, and undo this.

use super::servers::quietly;
use crate::output::{Exit, Failure, Output};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;
use stillpoint_migrate_engine::{AttachOptions, Attached, DetachOptions, Detached, Error, Server, attach, detach};

/// Server and proxy.
#[derive(clap::Args)]
struct Place {
    /// The server that clients connect to, at the address that they connect to: libpq's connection string. Its database is the
    /// one that is to be moved.
    #[arg(long, value_name = "CONNINFO")]
    source: String,
    /// The configuration file of the proxy that runs.
    #[arg(long, value_name = "FILE", default_value = "/etc/stillpoint/proxy.toml")]
    config: PathBuf,
    /// Tell what would be done.
    #[arg(long)]
    dry_run: bool,
}

impl Place {
    fn source(&self) -> Result<Server, Failure> {
        Server::parse("source", &self.source, None).map_err(|error| Failure::refused(error).hint("--help"))
    }
}

/// Arguments of `stillpoint migrate attach`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::MIGRATE_ATTACH)]
pub(crate) struct AttachArgs {
    #[command(flatten)]
    place: Place,
    /// How long to wait for sessions that are connected directly to end.
    #[arg(long, value_parser = crate::patch::duration, default_value = "60s", value_name = "TIME")]
    wait: Duration,
    /// End direct sessions that are idle, so that they connect anew, through the proxy.
    #[arg(long)]
    end_idle: bool,
}

/// Arguments of `stillpoint migrate detach`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::MIGRATE_DETACH)]
pub(crate) struct DetachArgs {
    #[command(flatten)]
    place: Place,
    /// Where the journal of migrations lies.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/stillpoint/migrate")]
    state: PathBuf,
    /// Clients of databases that have moved connect to their new server by themselves.
    #[arg(long)]
    moved: bool,
}

#[derive(Serialize)]
struct Line<'a, T> {
    v: u32,
    event: &'static str,
    dry_run: bool,
    #[serde(flatten)]
    what: &'a T,
}

/// Runs `stillpoint migrate attach`.
pub(crate) fn run(args: &AttachArgs, output: &Output) -> Result<(), Failure> {
    let (place, wait, end_idle) = (&args.place, args.wait, args.end_idle);
    let (source, config, dry_run) = (place.source()?, place.config.clone(), place.dry_run);
    let options = AttachOptions { source, config, wait, end_idle, dry_run };
    let attached = quietly(attach(&options))?.map_err(failure)?;
    output.json(&Line { v: stillpoint_events::VERSION, event: "attached", dry_run: options.dry_run, what: &attached });
    if !output.is_json() {
        show(&options, &attached, output);
    }
    Ok(())
}

fn show(options: &AttachOptions, attached: &Attached, output: &Output) {
    let (source, to) = (&options.source, &attached.proxy);
    attached.warnings.iter().for_each(|warning| output.warn(warning));
    if options.dry_run {
        if !attached.added.is_empty() {
            output.lines(format_args!("would be added to {}:\n{}", options.config.display(), attached.added));
        }
        output.lines(format_args!("nft would be told:\n{}", attached.rules));
    } else {
        let since = if attached.already { "as before" } else { "from now on" };
        output.line(format_args!(
            "{source}: new connections come to the proxy at {to}, {since}; `detach` leads them back"
        ));
    }
    for session in &attached.direct {
        output.line(format_args!("connected directly, until it ends: {session}"));
    }
}

/// Runs `stillpoint migrate detach`.
pub(crate) fn run_detach(args: &DetachArgs, output: &Output) -> Result<(), Failure> {
    let (place, state, moved) = (&args.place, args.state.clone(), args.moved);
    let (source, config, dry_run) = (place.source()?, place.config.clone(), place.dry_run);
    let options = DetachOptions { source, config, state, moved, dry_run };
    let detached = quietly(detach(&options))?.map_err(failure)?;
    output.json(&Line { v: stillpoint_events::VERSION, event: "detached", dry_run: options.dry_run, what: &detached });
    let Detached { already, led, sessions } = detached;
    let source = &options.source;
    match (already, options.dry_run) {
        (true, _) => output.line(format_args!("{source}: no connection is led to the proxy")),
        (false, true) => {
            output.line(format_args!(
                "{source}: {led} connections were led to the proxy; new ones would go to the server"
            ));
        }
        (false, false) => output.line(format_args!("{source}: new connections go to the server; {led} had been led")),
    }
    if sessions > 0 {
        output.line(format_args!(
            "{sessions} sessions go on through the proxy until they end; `detach` again then removes what carries them"
        ));
    }
    Ok(())
}

fn failure(error: Error) -> Failure {
    let hint = match &error {
        Error::Attach(_) => "mend what is named, then see what would be done with --dry-run",
        Error::Detach(_) => "`fallback` or `finish` ends a migration; --moved says that clients know the new server",
        Error::Proxy(_) | Error::ProxyGone(_) => {
            "see that the proxy of --config runs: stillpoint migrate proxy --config FILE"
        }
        Error::Program { .. } => "rules of nftables take root on the machine where connections arrive",
        _ => "see that the server runs, and that --source says how clients reach it",
    };
    let state = "clients connect as before";
    Failure { exit: Exit::Refused, error: error.into(), state: state.into(), hint: Some(hint.into()) }
}

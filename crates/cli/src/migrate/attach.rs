//! `stillpoint migrate attach` and `detach`: redirect direct connections of a server to the proxy, and undo this.

use super::servers::block_on;
use crate::output::{Exit, Failure, Output};
use serde::Serialize;
use std::path::PathBuf;
use std::time::Duration;
use stillpoint_migrate_attach::{AttachOptions, AttachReport, DetachOptions, DetachReport, Error, attach, detach};
use stillpoint_migrate_engine::{Server, running_migrations};

/// Server and proxy.
#[derive(clap::Args)]
struct ProxyArgs {
    /// The server, at the address that clients connect to, as a libpq connection string. Its database is the one to be
    /// moved.
    #[arg(long, value_name = "CONNINFO")]
    source: String,
    /// Configuration file of the running proxy.
    #[arg(long, value_name = "FILE", default_value = "/etc/stillpoint/proxy.toml")]
    config: PathBuf,
    /// Report what would be done, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

impl ProxyArgs {
    fn source(&self) -> Result<Server, Failure> {
        Server::parse("source", &self.source, None).map_err(|error| Failure::refused(error).hint("--help"))
    }
}

/// Arguments of `stillpoint migrate attach`.
#[derive(clap::Args)]
pub(crate) struct AttachArgs {
    #[command(flatten)]
    place: ProxyArgs,
    /// Time to wait for direct sessions to end.
    #[arg(long, value_parser = crate::patch::duration, default_value = "60s", value_name = "TIME")]
    wait: Duration,
    /// Terminate idle direct sessions, so that their clients connect again through the proxy.
    #[arg(long)]
    end_idle: bool,
}

/// Arguments of `stillpoint migrate detach`.
#[derive(clap::Args)]
pub(crate) struct DetachArgs {
    #[command(flatten)]
    place: ProxyArgs,
    /// Directory of the journals of migrations.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/stillpoint/migrate")]
    state: PathBuf,
    /// Confirm that clients of moved databases connect to the new server's address themselves.
    #[arg(long)]
    moved: bool,
}

#[derive(Serialize)]
struct Line<'a, T> {
    dry_run: bool,
    #[serde(flatten)]
    what: &'a T,
}

/// Runs `stillpoint migrate attach`.
pub(crate) fn run(args: &AttachArgs, output: &Output) -> Result<(), Failure> {
    let (place, wait, end_idle) = (&args.place, args.wait, args.end_idle);
    let (source, config, dry_run) = (place.source()?, place.config.clone(), place.dry_run);
    let options = AttachOptions { source, config, wait, end_idle, dry_run };
    let attached = block_on(attach(&options))?.map_err(failure)?;
    output.result("attached", &Line { dry_run: options.dry_run, what: &attached });
    if !output.is_json() {
        show(&options, &attached, output);
    }
    Ok(())
}

fn show(options: &AttachOptions, attached: &AttachReport, output: &Output) {
    let (source, to) = (&options.source, &attached.proxy);
    attached.warnings.iter().for_each(|warning| output.warn(warning));
    if options.dry_run {
        if !attached.added.is_empty() {
            output.lines(format_args!("would add to {}:\n{}", options.config.display(), attached.added));
        }
        output.lines(format_args!("would pass to nft:\n{}", attached.rules));
    } else {
        let since = if attached.already { "as before" } else { "from now on" };
        output.line(format_args!(
            "{source}: new connections are redirected to the proxy at {to}, {since}; `detach` stops this"
        ));
    }
    for session in &attached.direct {
        output.line(format_args!("direct session, until it ends: {session}"));
    }
}

/// Runs `stillpoint migrate detach`.
pub(crate) fn run_detach(args: &DetachArgs, output: &Output) -> Result<(), Failure> {
    let (place, moved) = (&args.place, args.moved);
    let (source, config, dry_run) = (place.source()?, place.config.clone(), place.dry_run);
    let options = DetachOptions { source, config, moved, dry_run };
    let migrations = || running_migrations(&args.state, &options.source);
    let detached = block_on(detach(&options, migrations))?.map_err(failure)?;
    output.result("detached", &Line { dry_run: options.dry_run, what: &detached });
    let DetachReport { already, led, sessions } = detached;
    let source = &options.source;
    match (already, options.dry_run) {
        (true, _) => output.line(format_args!("{source}: no connection is redirected to the proxy")),
        (false, true) => {
            output.line(format_args!(
                "{source}: {led} connections were redirected to the proxy; new ones would go to the server"
            ));
        }
        (false, false) => {
            output.line(format_args!("{source}: new connections go to the server; {led} had been redirected"))
        }
    }
    if sessions > 0 {
        output.line(format_args!(
            "{sessions} sessions continue through the proxy until they end; then run `detach` again to remove the \
             rest of the rules"
        ));
    }
    Ok(())
}

fn failure(error: Error) -> Failure {
    let hint = match &error {
        Error::Attach(_) => "correct the cause named above, then check with --dry-run",
        Error::Detach(_) => {
            "`fallback` or `finish` ends a migration; --moved confirms that clients connect to the new server"
        }
        Error::Proxy(_) => "check that the proxy of --config runs: stillpoint migrate proxy --config FILE",
        Error::Nft(_) => "rules of nftables require root on the machine where connections arrive",
        _ => "check that the server runs, and that --source has the address that clients use",
    };
    let state = "clients connect as before";
    Failure { exit: Exit::Refused, error: error.into(), state: state.into(), hint: Some(hint.into()) }
}

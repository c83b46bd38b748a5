//! `stillpoint migrate proxy`: the daemon that clients connect to, and that moves their sessions.

use super::servers::block_on;
use crate::output::{Failure, Output};
use std::path::{Path, PathBuf};
use stillpoint_migrate_control::{Config, ConfigError};
use stillpoint_migrate_proxy::{Drained, StartError};

/// Example of a configuration; shown by `--help`.
const EXAMPLE: &str = include_str!("proxy_help.txt");

/// Arguments of `stillpoint migrate proxy`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::of("stillpoint migrate proxy"), after_long_help = [EXAMPLE, "\n", crate::examples::of("stillpoint migrate proxy")].concat())]
pub(crate) struct Args {
    /// Configuration file; `--help` shows an example.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Serve when no other proxy with this configuration serves: immediately, or when that proxy ends. At most one
    /// proxy can wait.
    #[arg(long)]
    standby: bool,
    /// Order the proxy that serves with this configuration to end, and wait for its end: no client connects to it any
    /// more, open transactions may finish within `drain_ms`, and a standby takes over.
    #[arg(long, conflicts_with_all = ["standby", "check_config"])]
    drain: bool,
    /// Check the file and the files that it names, print warnings, and exit.
    #[arg(long, visible_alias = "dry-run")]
    check_config: bool,
}

fn line(config: &Config, warnings: Vec<String>) -> serde_json::Value {
    let listen: Vec<String> = config.listen.iter().map(ToString::to_string).collect();
    let tenants: Vec<&String> = config.tenants.keys().collect();
    let control = config.control.display().to_string();
    serde_json::json!({"listen": listen, "control": control, "tenants": tenants, "warnings": warnings})
}

/// Runs `stillpoint migrate proxy`.
pub(crate) fn run(args: Args, output: &Output) -> Result<(), Failure> {
    if args.check_config {
        let (config, warnings) = stillpoint_migrate_proxy::check(&args.config).map_err(|e| refused(e, &args))?;
        if !output.is_json() {
            warnings.iter().for_each(|warning| output.warn(warning));
        }
        let (tenants, servers) = (config.tenants.len(), config.servers.len());
        let verdict = match warnings.len() {
            0 => "good".to_owned(),
            1 => "usable, 1 warning".to_owned(),
            count => format!("usable, {count} warnings"),
        };
        output.line(format_args!("{}: {verdict}: {tenants} tenants, {servers} servers", args.config.display()));
        output.result("proxy-config-checked", &line(&config, warnings));
        return Ok(());
    }
    if args.drain {
        return drain(&args, output);
    }
    let places = |config: &Config| config.listen.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let standing_by = |config: &Config| {
        let control = config.control.display();
        output.line(format_args!("on standby for the proxy at {control}, to serve at {}", places(config)));
        output.result("proxy-stands-by", &line(config, config.warnings()));
    };
    let started = |config: &Config| {
        output.line(format_args!("serving at {}; control socket {}", places(config), config.control.display()));
        output.result("proxy-started", &line(config, config.warnings()));
    };
    let ended = if args.standby {
        stillpoint_migrate_proxy::stand_by(&args.config, standing_by, started)
    } else {
        stillpoint_migrate_proxy::run(&args.config, started)
    };
    ended.map_err(|error| refused(error, &args))
}

/// Orders the proxy that serves to end.
fn drain(args: &Args, output: &Output) -> Result<(), Failure> {
    let config = Config::load(&args.config).map_err(|error| refused(error.into(), args))?;
    let drained = block_on(stillpoint_migrate_proxy::drain(&config))?.map_err(|why| {
        Failure::refused(anyhow::anyhow!(why)).hint("ss -lxp shows which process listens at the control socket")
    })?;
    let Drained { process, sessions, has_ended } = drained;
    output.result("proxy-drained", &serde_json::json!({"process": process, "sessions": sessions, "ended": has_ended}));
    if !has_ended {
        let error = anyhow::anyhow!("the proxy (process {process}) still runs after its time limit");
        let state = "it accepts no client any more";
        return Err(Failure::failed(error, state).hint(format!("kill -INT {process} ends its sessions")));
    }
    output.line(format_args!("the proxy (process {process}) has ended; it had {sessions} sessions"));
    Ok(())
}

fn refused(error: StartError, args: &Args) -> Failure {
    let file = args.config.display();
    let hint = match &error {
        StartError::Config(ConfigError::Read { .. }) => {
            "--config FILE with a configuration that this user can read; --help shows an example".into()
        }
        StartError::Config(ConfigError::Syntax(_)) => {
            format!(
                "correct the line of {file} that is shown above; `stillpoint migrate proxy --help` has every setting"
            )
        }
        StartError::Config(ConfigError::Invalid(_)) => format!("correct the setting named above in {file}"),
        StartError::Config(ConfigError::Tls { .. }) => {
            format!("name PEM files that this user can read in {file}: see `[tls]` in --help, and `ca` of a server")
        }
        StartError::Taken(_) | StartError::Served { .. } => {
            "stop the other proxy with SIGTERM, or give this one its own `control` and `routes`; --standby waits \
             until the other ends"
                .into()
        }
        StartError::StandBy { .. } => {
            "start only one standby, with the configuration file of the active proxy (send that proxy SIGHUP first \
             if the file was changed)"
                .into()
        }
        StartError::Listen { at, source } if source.kind() == std::io::ErrorKind::NotFound => {
            format!("mkdir -p {}", Path::new(at).parent().unwrap_or(Path::new("/")).display())
        }
        StartError::Listen { .. } => format!("another address in {file}; `ss -lnp` shows what listens at this one"),
        StartError::Routes { .. } => {
            format!("name a file in `routes` of {file} in a directory that exists and that only this user can write to")
        }
        _ => "stillpoint migrate proxy --help".into(),
    };
    Failure::refused(error).hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_the_help_can_be_copied() {
        let long = EXAMPLE.lines().find(|line| line.len() > 80);
        assert_eq!(long, None, "a terminal of 80 columns would wrap it");
        let (_, copied) = EXAMPLE.split_once("\n\n").unwrap();
        let (copied, _) = copied.split_once("\n\nWith --standby").unwrap();
        let config = Config::parse(copied).unwrap();
        assert_eq!(config.server_of("shop").unwrap().host, "10.0.0.7");
    }

    #[test]
    fn a_fault_of_the_file_is_to_be_corrected_there() {
        let args = Args { config: "/etc/p.toml".into(), standby: false, drain: false, check_config: true };
        let error = Config::parse("listen = 1").unwrap_err();
        let hint = refused(error.into(), &args).hint.unwrap();
        assert!(hint.contains("correct the line of /etc/p.toml") && !hint.contains("--check-config"), "{hint}");
    }
}

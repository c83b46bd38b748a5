//! `stillpoint migrate proxy`: the daemon that clients connect to, and that moves their sessions.

use crate::output::{Failure, Output};
use serde::Serialize;
use std::path::PathBuf;
use stillpoint_migrate_control::Config;
use stillpoint_migrate_proxy::StartError;

/// Example of a configuration; shown by `--help`.
const EXAMPLE: &str = r#"The configuration file (TOML):

  listen  = ["0.0.0.0:6432", "/run/stillpoint/.s.PGSQL.6432"]   # where clients connect
  control = "/run/stillpoint/proxy.sock"                        # for `stillpoint migrate ...`; mode 0600
  routes  = "/var/lib/stillpoint/routes.json"                   # servers that tenants have moved to; overrides `server` below
  metrics = "127.0.0.1:9187"                                    # Prometheus, at /metrics
  workers = 2                                                   # pairs of threads; default: one for every two processors
  socket_mode = "0666"                                          # of the sockets in `listen`; default 0600

  [limits]                 # defaults
  connections = 1000       # sessions at a time
  memory_mib  = 256        # must be enough for them: 64 KiB each
  unnamed     = 512        # connections at a time that have not named their user, or wait for a login
  logins_per_tenant  = 64  # unauthenticated clients at a time of one tenant; at most half of its connections
  logins_per_address = 16  # of these from one address; at most a quarter of its connections
  startup_ms  = 10000      # from a client's first byte to its session
  connect_ms  = 5000       # until a server accepts a connection
  drain_ms    = 30000      # time to finish transactions after SIGTERM

  [tls]                    # for clients
  certificate = "/etc/stillpoint/proxy.crt"
  key         = "/etc/stillpoint/proxy.key"

  [servers.old]            # PostgreSQL servers by name
  host = "10.0.0.7"        # or the directory of a socket
  port = 5432
  tls  = "verify-full"     # disable (default), require, verify-full
  ca   = "/etc/stillpoint/ca.crt"

  [tenants.shop]           # databases by the name that clients use; "*" is every other one
  server      = "old"
  database    = "shop_v2"  # its name there, if it differs
  connections = 200
  verifiers   = "/etc/stillpoint/shop.verifiers"   # lines `USER SCRAM-SHA-256$...`: the proxy checks passwords itself

  [[allow]]                # the first rule that matches decides; without rules only this machine may connect
  action = "reject"        # or "allow", the default
  users  = ["postgres"]
  from   = ["0.0.0.0/0", "::/0"]
  [[allow]]
  databases = ["shop"]
  from = ["10.1.0.0/16", "local"]
  tls  = "required"

With --standby, a second proxy with the same configuration waits on the same machine, and takes over when the first one ends.

Signals: SIGHUP reloads the file, SIGTERM lets transactions finish, SIGINT does not.
STILLPOINT_LOG=info (debug, ...) sets the level of the log on stderr, which never contains passwords or keys.
Servers see the proxy's address: add a line for it to pg_hba.conf with scram-sha-256, md5 or trust (not peer, ldap or gss)."#;

/// Arguments of `stillpoint migrate proxy`.
#[derive(clap::Args)]
#[command(after_help = crate::examples::of("stillpoint migrate proxy"), after_long_help = [EXAMPLE, "\n\n", crate::examples::of("stillpoint migrate proxy")].concat())]
pub(crate) struct Args {
    /// Configuration file; `--help` shows an example.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Serve when no other proxy with this configuration serves: immediately, or when that proxy ends. At most one
    /// proxy can wait.
    #[arg(long)]
    standby: bool,
    /// Check the file and the files that it names, print warnings, and exit.
    #[arg(long, visible_alias = "dry-run")]
    check_config: bool,
}

#[derive(Serialize)]
struct Line<'a> {
    listen: Vec<String>,
    control: String,
    tenants: Vec<&'a str>,
    warnings: Vec<String>,
}

fn line(config: &Config, warnings: Vec<String>) -> Line<'_> {
    Line {
        listen: config.listen.iter().map(ToString::to_string).collect(),
        control: config.control.display().to_string(),
        tenants: config.tenants.keys().map(String::as_str).collect(),
        warnings,
    }
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

fn refused(error: StartError, args: &Args) -> Failure {
    let hint = match &error {
        StartError::Config(_) => format!("stillpoint migrate proxy --config {} --check-config", args.config.display()),
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
        _ => "stillpoint migrate proxy --help".into(),
    };
    Failure::refused(error).hint(hint)
}

//! Arguments that all commands of a migration share.

use super::guardian;
use crate::output::{Exit, Failure, Output};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use stillpoint_events::Event;
use stillpoint_migrate_engine::{self as engine, Observer, Options, Server, ServerError, State};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Notify;

/// Hint for a server that cannot be reached.
pub(super) const REACHABILITY_HINT: &str =
    "check that both servers run, and that --source and --target have the correct addresses";

/// Database, source and target.
#[derive(Clone, clap::Args, Serialize, Deserialize)]
pub(super) struct Servers {
    /// The server that holds the database: libpq's connection string, `host=... port=... user=... dbname=...`, with
    /// `sslmode=require` or `verify-full` for TLS. Passwords are better given in PGPASSWORD.
    #[arg(long, value_name = "CONNINFO")]
    source: String,
    /// The server to which the database moves. With several `--target` options all are brought up; a target that fails
    /// is dropped. Clients move to the first one that is left, and the others are restored.
    #[arg(long, value_name = "CONNINFO", required = true)]
    target: Vec<String>,
    /// Shell command that prints the password for the source, called again as passwords expire.
    #[arg(long, value_name = "COMMAND")]
    source_password_command: Option<String>,
    /// Shell command that prints the password for the targets.
    #[arg(long, value_name = "COMMAND")]
    target_password_command: Option<String>,
    /// The database, unless the source's connection string names it.
    #[arg(long, value_name = "NAME")]
    database: Option<String>,
    /// Several databases, by names separated by commas; `all` are those that accept connections, without `postgres` and
    /// templates. `run` and `fallback` move them together, in one pause; other commands do one after another.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', conflicts_with_all = ["database", "tenant"])]
    #[serde(default)]
    databases: Vec<String>,
    /// The proxy's name for the database, if it differs.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// The proxy's control socket.
    #[arg(long, value_name = "SOCKET", default_value = "/run/stillpoint/proxy.sock")]
    proxy: PathBuf,
    /// Directory of the journals of migrations.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/stillpoint/migrate")]
    state: PathBuf,
}

impl Servers {
    /// Converts these arguments to options.
    pub(super) fn options(&self) -> Result<Options, Failure> {
        let refused = |error: ServerError| Failure::refused(error).hint("--help");
        let mut source = Server::parse("source", &self.source, self.database.as_deref()).map_err(refused)?;
        if let Some(command) = &self.source_password_command {
            source = source.with_password_command(command);
        }
        let database = self.database.as_deref().unwrap_or(&source.database);
        // A database keeps its name, so the target's connection string need not repeat it.
        let target = |conninfo: &String| {
            let named = conninfo.contains("dbname") || conninfo.starts_with("postgres");
            let server = Server::parse("target", conninfo, (!named).then_some(database)).map_err(refused)?;
            Ok(match &self.target_password_command {
                Some(command) => server.with_password_command(command),
                None => server,
            })
        };
        let mut targets: VecDeque<Server> = self.target.iter().map(target).collect::<Result<_, _>>()?;
        let first = targets.pop_front().ok_or_else(|| Failure::usage("--target is required"))?;
        let mut options = Options::new(source, first, self.proxy.clone(), self.state.clone());
        options.others = targets.into();
        if let Some(tenant) = &self.tenant {
            options.tenant.clone_from(tenant);
        }
        Ok(options)
    }
}

/// Arguments of a command on servers.
pub(super) trait OnServers: Clone {
    /// The servers.
    fn servers(&mut self) -> &mut Servers;

    /// Returns the same arguments for each database if several are named.
    fn each(&self) -> Result<Vec<Self>, Failure> {
        let mut one = self.clone();
        let names = one.servers().names()?;
        let of = |name: String| {
            let mut one = self.clone();
            let servers = one.servers();
            (servers.databases, servers.database) = (Vec::new(), Some(name));
            one
        };
        Ok(if names.is_empty() { vec![one] } else { names.into_iter().map(of).collect() })
    }

    /// Runs a command for each database. The first failure is the result, and the others are reported before.
    fn run_each(&self, output: &Output, run: impl Fn(&Self) -> Result<(), Failure>) -> Result<(), Failure> {
        first_failure(self.each()?.iter().map(run), output)
    }
}

/// Takes all results. The first failure is the result, and the others are reported before.
pub(super) fn first_failure(
    results: impl Iterator<Item = Result<(), Failure>>,
    output: &Output,
) -> Result<(), Failure> {
    let mut first = None;
    for failed in results.filter_map(Result::err) {
        match &first {
            None => first = Some(failed),
            Some(_) => output.warn(format_args!("{:#}; {}", failed.error, failed.state)),
        }
    }
    first.map_or(Ok(()), Err)
}

impl Servers {
    /// Names of the databases, if several are to be moved; empty for a single one.
    fn names(&self) -> Result<Vec<String>, Failure> {
        if self.databases != ["all"] {
            return Ok(self.databases.clone());
        }
        let source = Servers { databases: Vec::new(), database: Some("postgres".into()), ..self.clone() };
        let names = block_on(engine::databases(&source.options()?.source))?;
        let names = names.map_err(|error| Failure::refused(error).hint(REACHABILITY_HINT))?;
        if names.is_empty() {
            return Err(Failure::refused(anyhow::anyhow!("the source has no database to move")));
        }
        Ok(names)
    }
}

/// Runs `work`, which moves clients of several databases, with a guardian for each; returns its results.
pub(super) fn run_several<F: Future<Output = Vec<Result<engine::Outcome, engine::Failure>>>>(
    servers: &[Servers],
    output: &Output,
    work: impl FnOnce(Arc<Notify>, Observer) -> F + Send,
) -> Result<Vec<Result<engine::Outcome, Failure>>, Failure> {
    let guardians = servers.iter().map(guardian::start).collect::<Result<Vec<_>, _>>()?;
    let interrupt = Arc::<Notify>::default();
    let asked = Arc::clone(&interrupt);
    let ended = run_with_progress(&interrupt, output, |observer| async { Ok(work(asked, observer).await) })?;
    for (guardian, ended) in guardians.into_iter().zip(&ended) {
        match ended {
            Ok(_) => guardian.dismiss(),
            Err(_) => drop(guardian),
        }
    }
    Ok(ended.into_iter().map(|ended| ended.map_err(failure)).collect())
}

/// Runs `work`, which may move clients, on threads of its own while its events are shown; Ctrl-C and SIGTERM request
/// its end. If this process is killed, a guardian enables connections again.
pub(super) fn run_watched<T: Send, F: Future<Output = Result<T, engine::Failure>>>(
    servers: &Servers,
    options: &Options,
    output: &Output,
    work: impl FnOnce(Observer) -> F + Send,
) -> Result<T, Failure> {
    run_guarded(servers, || run_with_progress(&options.interrupt, output, work))
}

/// Runs `work` with a guardian beside it.
pub(super) fn run_guarded<T>(servers: &Servers, work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let guardian = guardian::start(servers)?;
    let result = work();
    // A server may become reachable later: without the dismissal the guardian then enables the connections that are still disabled.
    match result {
        Ok(_) => guardian.dismiss(),
        Err(_) => drop(guardian),
    }
    result
}

fn run_with_progress<T: Send, F: Future<Output = Result<T, engine::Failure>>>(
    interrupt: &Arc<Notify>,
    output: &Output,
    work: impl FnOnce(Observer) -> F + Send,
) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(Failure::refused)?;
    let (sender, receiver) = mpsc::channel::<Event>();
    let observer: Observer = Arc::new(move |event| {
        let _ = sender.send(event);
    });
    let interrupt = Arc::clone(interrupt);
    let mut asked = [SignalKind::interrupt(), SignalKind::terminate()].map(|kind| {
        let _context = runtime.enter();
        signal(kind)
    });
    runtime.spawn(async move {
        let [Ok(interrupted), Ok(terminated)] = &mut asked else { return };
        loop {
            tokio::select! { _ = interrupted.recv() => {}, _ = terminated.recv() => {} }
            interrupt.notify_one();
        }
    });
    let result = std::thread::scope(|scope| {
        let working = scope.spawn(|| runtime.block_on(work(observer)).map_err(Box::new));
        for event in receiver {
            output.event(&event);
        }
        working.join()
    });
    output.progress_done();
    let result = result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    result.map_err(|failed| failure(*failed))
}

/// Runs `work` without any display of progress.
pub(super) fn block_on<T>(work: impl Future<Output = T>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::refused)?;
    Ok(runtime.block_on(work))
}

/// Converts a failure of the engine to that of the command.
pub(super) fn failure(failed: stillpoint_migrate_engine::Failure) -> Failure {
    let hint = failed.hint();
    let exit = match (&failed.state, &failed.error) {
        (State::Untouched, error) if error.is_refusal() => Exit::Refused,
        (State::Untouched, _) => Exit::Failed,
        (State::OnSource | State::OnSourceWithRemains(_) | State::OnTarget | State::OnTargetForGood, _) => {
            Exit::FellBack
        }
        (State::Unknown(_), _) => Exit::Unknown,
    };
    let state = failed.state.to_string();
    Failure { exit, error: failed.error.into(), state, hint: Some(hint.into()) }
}

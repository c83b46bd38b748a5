//! The proxy's process: sockets, threads, signals.

use crate::control;
use crate::descriptors;
use crate::error::StartError;
use crate::http;
use crate::listen::{self, Listener, SocketFile};
use crate::proxy::{Proxy, Settings};
use crate::routes::Lock;
use crate::secret_files;
use crate::signals::{SignalRequest, Signals};
use crate::standby;
use crate::workers::{self, Workers};
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use stillpoint_migrate_control::{Config, Endpoint};
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// Most connections that are accepted and not yet among the unnamed.
const ARRIVALS_MAX: usize = 32;
/// Time until the next try when accepting fails (no more file descriptors).
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Time for which an address may still be in use: the kernel closes a dead process's sockets one after the other, its
/// lock among them.
const BIND_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which pools are looked at.
const POOL_INTERVAL: Duration = Duration::from_millis(100);
const BIND_RETRY_INTERVAL: Duration = Duration::from_millis(5);

/// Serves until a signal ends it: SIGTERM lets transactions end, SIGINT does not. SIGHUP reloads the file. Calls
/// `started` once clients can connect.
///
/// # Errors
///
/// [`StartError`] if the proxy cannot start: the configuration, an address, the routes file or a system resource cannot
/// be used.
pub fn run(path: &Path, started: impl FnOnce(&Config)) -> Result<(), StartError> {
    let settings = Settings::new(Config::load(path)?)?;
    runtime()?.block_on(async {
        let lock = Lock::take(&settings.config.routes, &settings.config.control)?;
        serve(path, settings, lock, Signals::install()?, Duration::ZERO, started).await
    })
}

/// Serves as [`run`] does, as soon as no other proxy serves. Calls `standing_by` if one does and has accepted this one.
///
/// # Errors
///
/// The errors of [`run`], and [`StartError::StandBy`] if the active proxy refuses this one.
pub fn stand_by(
    path: &Path,
    standing_by: impl FnOnce(&Config),
    started: impl FnOnce(&Config),
) -> Result<(), StartError> {
    let mut settings = Settings::new(Config::load(path)?)?;
    runtime()?.block_on(async {
        let mut signals = Signals::install()?;
        match standby::wait(&mut settings, &mut signals, standing_by).await? {
            Some(lock) => serve(path, settings, lock, signals, BIND_TIMEOUT, started).await,
            None => Ok(()),
        }
    })
}

fn runtime() -> Result<Runtime, StartError> {
    let failed = |source| StartError::System { what: "the runtime", source };
    Builder::new_current_thread().enable_all().build().map_err(failed)
}

/// Checks a configuration file and the files that it names; returns it with the warnings about it.
///
/// # Errors
///
/// [`StartError::Config`] if the configuration or a file that it names cannot be used.
pub fn check(path: &Path) -> Result<(Config, Vec<String>), StartError> {
    let settings = Settings::new(Config::load(path)?)?;
    let mut warnings = settings.config.warnings();
    warnings.extend(secret_files::warnings(&settings.config));
    warnings.extend(descriptors::warning(&settings.config));
    Ok((settings.config, warnings))
}

/// Serves; `patience` is the time for which an address may still be in use.
async fn serve(
    path: &Path,
    settings: Settings,
    lock: Lock,
    mut signals: Signals,
    patience: Duration,
    started: impl FnOnce(&Config),
) -> Result<(), StartError> {
    let config = settings.config.clone();
    let surprises =
        config.warnings().into_iter().chain(secret_files::warnings(&config)).chain(descriptors::raise(&config));
    surprises.for_each(|warning| tracing::warn!("{warning}"));
    let proxy = Arc::new(Proxy::new(settings, lock)?);
    let until = Instant::now() + patience;
    let Listeners { control, clients, metrics } = loop {
        match Listeners::bind(&config).await {
            Err(error) if error.is_in_use() && Instant::now() < until => tokio::time::sleep(BIND_RETRY_INTERVAL).await,
            bound => break bound?,
        }
    };
    let count = config.workers.unwrap_or_else(|| workers::default_count(processors()));
    let workers = Arc::new(Workers::start(count, &proxy)?);
    let mut tasks = tokio::task::JoinSet::new();
    if let Some(listener) = metrics {
        tasks.spawn(http::serve(listener, proxy.clone()));
    }
    for listener in clients {
        tasks.spawn(accept(listener, workers.clone()));
    }
    tasks.spawn(accept_control(control, proxy.clone()));
    tasks.spawn(watch_pools(proxy.clone()));
    tracing::info!(listen = ?config.listen.iter().map(Endpoint::to_string).collect::<Vec<_>>(), workers = count, "serving");
    started(&config);

    let patiently = loop {
        let request = tokio::select! {
            request = signals.next() => request,
            () = proxy.drain.notified() => break true,
        };
        match request {
            SignalRequest::Reload => reload(path, &proxy),
            SignalRequest::End { patiently } => break patiently,
        }
    };
    // From here on no client can connect, and no command is answered. Then a successor may serve.
    tasks.shutdown().await;
    proxy.retire();
    if patiently {
        let limit = proxy.settings().config.limits.drain();
        tracing::info!(connections = workers.load(), "shutting down: open transactions may finish");
        proxy.end_sessions();
        let drained = async {
            while workers.load() > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        if tokio::time::timeout(limit, drained).await.is_err() {
            tracing::warn!(
                connections = workers.load(),
                "the time limit is reached: the remaining sessions are terminated"
            );
        }
    }
    tracing::info!("ended");
    if workers.load() == 0
        && let Ok(workers) = Arc::try_unwrap(workers)
    {
        workers.stop();
    }
    Ok(())
}

/// All sockets that clients, commands and scrapers connect to.
struct Listeners {
    control: (UnixListener, SocketFile),
    clients: Vec<Listener>,
    metrics: Option<TcpListener>,
}

impl Listeners {
    async fn bind(config: &Config) -> Result<Listeners, StartError> {
        let control = listen::unix(&config.control, 0o600).map_err(|source| match source.kind() {
            ErrorKind::AddrInUse => StartError::Taken(config.control.clone()),
            _ => StartError::Listen { at: config.control.display().to_string(), source },
        })?;
        let mode = config.socket_mode()?;
        let clients = config.listen.iter().map(|at| Listener::bind(at, mode)).collect::<Result<_, StartError>>()?;
        let metrics = match config.metrics {
            Some(address) => {
                let bound = TcpListener::bind(address).await;
                Some(bound.map_err(|source| StartError::Listen { at: address.to_string(), source })?)
            }
            None => None,
        };
        Ok(Listeners { control, clients, metrics })
    }
}

fn reload(path: &Path, proxy: &Proxy) {
    let loaded = Config::load(path).and_then(Settings::new);
    match loaded {
        Ok(mut settings) => {
            let in_force = settings.config.clone().started_as(&proxy.settings().config);
            let later = in_force.differences(&settings.config);
            if !later.is_empty() {
                tracing::warn!("`{}` takes effect at the next start", later.join("`, `"));
            }
            settings.config = in_force;
            let config = &settings.config;
            let surprises = config.warnings().into_iter().chain(secret_files::warnings(config));
            surprises.for_each(|warning| tracing::warn!("{warning}"));
            proxy.reload(settings);
            tracing::info!("configuration reloaded");
        }
        Err(error) => tracing::error!(%error, "the new configuration is invalid; the old one stays in force"),
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

/// Ends waits for connections at their limit, and closes shared connections that are unused or dead.
async fn watch_pools(proxy: Arc<Proxy>) {
    loop {
        tokio::time::sleep(POOL_INTERVAL).await;
        proxy.tenants().iter().flat_map(|tenant| tenant.pools()).for_each(|pools| pools.tick());
    }
}

/// Accepts no faster than workers take connections over: accepted connections hold open files, and the limit on unnamed
/// connections does not count them yet.
async fn accept(listener: Listener, workers: Arc<Workers>) {
    let arrivals = Arc::new(Semaphore::new(ARRIVALS_MAX));
    // The semaphore is never closed.
    while let Ok(arrival) = arrivals.clone().acquire_owned().await {
        match listener.accept().await {
            Ok((raw, origin)) => workers.serve(raw, origin, arrival),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
            }
        }
    }
}

/// Answers control connections. They end with this task, so no command can ask for what the proxy no longer does.
async fn accept_control((listener, _file): (UnixListener, SocketFile), proxy: Arc<Proxy>) {
    let mut connections = tokio::task::JoinSet::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(connections.spawn(control::serve(stream, proxy.clone()))),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a control connection");
                tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

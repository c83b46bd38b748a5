//! The process: sockets, threads, signals.

use crate::config::{Config, Endpoint};
use crate::control;
use crate::error::StartError;
use crate::listen::{self, Listener};
use crate::metrics;
use crate::proxy::{Proxy, Settings};
use crate::workers::{self, Workers};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::runtime::Builder;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// When accepting fails (no more file descriptors), it is tried again after this time.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until a signal ends it: SIGTERM lets transactions end, SIGINT does not. SIGHUP reads the file anew. `started` is
/// called once clients can connect.
pub fn run(path: &Path, started: impl FnOnce(&Config)) -> Result<(), StartError> {
    let settings = Settings::new(Config::load(path)?)?;
    let failed = |source| StartError::System { what: "the runtime", source };
    let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(serve(path, settings, started))
}

/// Checks a configuration file and the files that it names; returns it with what surprises about it.
pub fn check(path: &Path) -> Result<(Config, Vec<String>), StartError> {
    let settings = Settings::new(Config::load(path)?)?;
    let warnings = settings.config.warnings();
    Ok((settings.config, warnings))
}

async fn serve(path: &Path, settings: Settings, started: impl FnOnce(&Config)) -> Result<(), StartError> {
    let config = settings.config.clone();
    config.warnings().iter().for_each(|warning| tracing::warn!("{warning}"));
    let proxy = Arc::new(Proxy::new(settings)?);
    let control = listen::unix(&config.control, 0o600).map_err(|source| match source.kind() {
        std::io::ErrorKind::AddrInUse => StartError::Taken(config.control.clone()),
        _ => StartError::Listen { at: config.control.display().to_string(), source },
    })?;
    let mode = config.socket_mode()?;
    let listeners: Vec<Listener> =
        config.listen.iter().map(|at| Listener::bind(at, mode)).collect::<Result<_, StartError>>()?;
    let count = config.workers.unwrap_or_else(|| workers::default_count(processors()));
    let workers = Arc::new(Workers::start(count, &proxy)?);
    let mut tasks = tokio::task::JoinSet::new();
    if let Some(address) = config.metrics {
        let listener = TcpListener::bind(address).await;
        let listener = listener.map_err(|source| StartError::Listen { at: address.to_string(), source })?;
        tasks.spawn(metrics::serve(listener, proxy.clone()));
    }
    for listener in listeners {
        tasks.spawn(accept(listener, workers.clone()));
    }
    let (control, control_file) = control;
    let control_task = tokio::spawn(accept_control(control, proxy.clone()));
    tracing::info!(listen = ?config.listen.iter().map(Endpoint::to_string).collect::<Vec<_>>(), workers = count, "serving");
    // Before anybody can know of us: a signal that nobody waits for ends the process.
    let signals = Signals::install()?;
    started(&config);

    let patiently = signals.wait(path, &proxy).await;
    // Nobody connects any more; dropping the listeners lets a successor have the addresses.
    tasks.shutdown().await;
    control_task.abort();
    drop(control_file);
    if patiently {
        let limit = proxy.settings().config.limits.drain();
        tracing::info!(connections = workers.load(), "ending: transactions may finish");
        proxy.end_sessions();
        let drained = async {
            while workers.load() > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        if tokio::time::timeout(limit, drained).await.is_err() {
            tracing::warn!(connections = workers.load(), "the limit is reached: the others are broken off");
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

/// What the process is told from outside.
struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn install() -> Result<Signals, StartError> {
        let handler = |kind: SignalKind| -> Result<Signal, StartError> {
            signal(kind).map_err(|source| StartError::System { what: "a signal handler", source })
        };
        Ok(Signals {
            hangup: handler(SignalKind::hangup())?,
            terminate: handler(SignalKind::terminate())?,
            interrupt: handler(SignalKind::interrupt())?,
        })
    }

    /// Waits for the signal that ends the process: true when it is to be patient.
    async fn wait(mut self, path: &Path, proxy: &Proxy) -> bool {
        loop {
            tokio::select! {
                _ = self.hangup.recv() => reload(path, proxy),
                _ = self.terminate.recv() => return true,
                _ = self.interrupt.recv() => return false,
            }
        }
    }
}

fn reload(path: &Path, proxy: &Proxy) {
    let loaded = Config::load(path).and_then(Settings::new);
    match loaded {
        Ok(settings) => {
            let old = proxy.settings();
            let fixed = |config: &Config| {
                (config.listen.clone(), config.control.clone(), config.routes.clone(), config.workers)
            };
            if fixed(&old.config) != fixed(&settings.config) {
                tracing::warn!("`listen`, `control`, `routes` and `workers` take effect at the next start");
            }
            proxy.reload(settings);
            tracing::info!("configuration read anew");
        }
        Err(error) => tracing::error!(%error, "the configuration cannot be used, the old one stays in force"),
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

async fn accept(listener: Listener, workers: Arc<Workers>) {
    loop {
        match listener.accept().await {
            Ok((raw, origin)) => workers.serve(raw, origin),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn accept_control(listener: UnixListener, proxy: Arc<Proxy>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => drop(tokio::spawn(control::server::serve(stream, proxy.clone()))),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a control connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

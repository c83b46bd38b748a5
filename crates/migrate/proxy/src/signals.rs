//! Requests to the process by signals.

use crate::error::StartError;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Request to the process by a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SignalRequest {
    /// Reload the configuration.
    Reload,
    /// End: patiently, so that transactions may finish, or at once.
    End { patiently: bool },
}

/// Handlers of the signals; a signal without one would end the process.
pub(crate) struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(crate) fn install() -> Result<Signals, StartError> {
        let handler = |kind: SignalKind| -> Result<Signal, StartError> {
            signal(kind).map_err(|source| StartError::System { what: "a signal handler", source })
        };
        Ok(Signals {
            hangup: handler(SignalKind::hangup())?,
            terminate: handler(SignalKind::terminate())?,
            interrupt: handler(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next request.
    pub(crate) async fn next(&mut self) -> SignalRequest {
        tokio::select! {
            _ = self.hangup.recv() => SignalRequest::Reload,
            _ = self.terminate.recv() => SignalRequest::End { patiently: true },
            _ = self.interrupt.recv() => SignalRequest::End { patiently: false },
        }
    }
}

//! The control socket: one JSON object a line, a request and its reply in turn.
//!
//! The connection that asked for a pause holds it: when it ends, or the limit is reached, the sessions go on where they are.

mod client;
pub mod rows;
pub(crate) mod server;

pub use crate::entry::Activity;
pub use client::{Client, ControlError};

use crate::config::Server;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// What the proxy can be asked.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Tenants, sessions, counters.
    Status,
    /// Know a tenant, as if a client of it had come: a database that `*` stands for is among the tenants from then on.
    Know {
        /// The tenant.
        tenant: String,
    },
    /// Open a counterpart at the target for every session of a tenant, and keep it alike.
    Prepare {
        /// The tenant.
        tenant: String,
        /// Where it may go.
        target: TargetSpec,
        /// Stored passwords of roles (`rolname` and `rolpassword` of `pg_authid`), for targets that ask for passwords.
        #[serde(default)]
        verifiers: BTreeMap<String, String>,
        /// Sessions that are not ready by then are reported as waiting.
        #[serde(default = "default_prepare_ms")]
        limit_ms: u64,
        /// It was asked a moment ago: counterparts that are good stay, and only sessions that were not ready are asked.
        #[serde(default)]
        again: bool,
    },
    /// Capture what the sessions of a tenant write. After [`Reply::Capturing`] this connection brings one line for each
    /// committed transaction; when it ends, so does the capture.
    Capture {
        /// The tenant.
        tenant: String,
        /// Sessions whose transaction has not ended by then are named, and nothing is captured.
        #[serde(default = "default_prepare_ms")]
        limit_ms: u64,
        /// Capture the statements that clients send as well, with what their transactions saw.
        #[serde(default)]
        statements: bool,
    },
    /// Stand by: take over when the proxy is gone. This connection brings one more reply whenever the configuration has been
    /// read anew; when it ends, the asker does not stand by any longer, or it is time to look who serves.
    StandBy {
        /// The asker's configuration, as its file has it.
        config: String,
    },
    /// How far the capture of a tenant is.
    Captured {
        /// The tenant.
        tenant: String,
    },
    /// Let no transaction begin, and wait until none is open.
    Pause {
        /// The tenant.
        tenant: String,
        /// After this time everything goes on at the source, whatever has been reached.
        limit_ms: u64,
    },
    /// Put the target in service; only while paused.
    Switch {
        /// The tenant.
        tenant: String,
    },
    /// End the pause: go on at the source.
    Resume {
        /// The tenant.
        tenant: String,
    },
    /// Forget the target and close the counterparts.
    Abandon {
        /// The tenant.
        tenant: String,
    },
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Request::Status => f.write_str("Status"),
            Request::Know { tenant } => write!(f, "Know({tenant})"),
            Request::Prepare { tenant, target, verifiers, limit_ms, again } => {
                let again = if *again { " again" } else { "" };
                write!(f, "Prepare({tenant} to {target:?}{again}, {} verifiers, {limit_ms} ms)", verifiers.len())
            }
            Request::Capture { tenant, limit_ms, statements } => {
                let what = if *statements { " with statements" } else { "" };
                write!(f, "Capture({tenant}{what}, {limit_ms} ms)")
            }
            Request::StandBy { .. } => f.write_str("StandBy"),
            Request::Captured { tenant } => write!(f, "Captured({tenant})"),
            Request::Pause { tenant, limit_ms } => write!(f, "Pause({tenant}, {limit_ms} ms)"),
            Request::Switch { tenant } => write!(f, "Switch({tenant})"),
            Request::Resume { tenant } => write!(f, "Resume({tenant})"),
            Request::Abandon { tenant } => write!(f, "Abandon({tenant})"),
        }
    }
}

/// A server, by its name in the configuration or described.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TargetSpec {
    /// `[servers.NAME]` of the configuration.
    Name(String),
    /// As it would stand there.
    Server(Server),
}

fn default_prepare_ms() -> u64 {
    10_000
}

/// A session and what is to be said of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remark {
    /// Number of the session.
    pub id: u32,
    /// Its user.
    pub user: String,
    /// What is to be said.
    pub why: String,
    /// For how long it has been busy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transaction_ms: Option<u64>,
}

/// What the proxy answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// To [`Request::Status`].
    Status(Status),
    /// To [`Request::Know`]: the configuration has it.
    Known,
    /// To [`Request::Prepare`].
    Prepared {
        /// Sessions whose counterpart carries what they carry.
        sessions: usize,
        /// Busy at the moment; they follow as soon as they are not.
        waiting: Vec<Remark>,
        /// They hold what cannot be taken along.
        pinned: Vec<Remark>,
        /// Their counterpart could not be made.
        failed: Vec<Remark>,
    },
    /// To [`Request::Capture`]: every commit from now on comes on this connection, in order.
    Capturing {
        /// Sessions that there are.
        sessions: usize,
        /// Tables whose rows cannot be captured, and why: a write to one ends the capture. Known once there is a session.
        uncovered: Vec<(String, String)>,
    },
    /// A table, before the first transaction that wrote to it.
    Table(rows::TableShape),
    /// A committed transaction; empty when it was rolled back after its stamp was taken.
    Syncset(rows::Syncset),
    /// Where statements are captured: a transaction's first operation is sent next.
    Begins {
        /// Its number here, used once.
        running: u64,
    },
    /// A transaction has its snapshot.
    Began {
        /// Its number here.
        running: u64,
        /// What it sees, as `pg_current_snapshot()` says it.
        snapshot: String,
    },
    /// A transaction is over and was not committed.
    Ended {
        /// Its number here.
        running: u64,
    },
    /// Nothing more is captured.
    CaptureOver {
        /// Why.
        why: String,
    },
    /// To [`Request::StandBy`].
    StandingBy {
        /// The configuration in force, as its file has it.
        config: String,
    },
    /// To [`Request::Captured`].
    Captured {
        /// The last stamp that was taken. When no transaction is open, nothing later comes than this.
        stamp: u64,
        /// Why it is over.
        over: Option<String>,
    },
    /// To [`Request::Pause`]: no transaction is open.
    Drained {
        /// How long that took.
        waited_us: u64,
    },
    /// To [`Request::Pause`]: these would not stop; all go on.
    Blocked {
        /// Who, and why.
        sessions: Vec<Remark>,
    },
    /// To [`Request::Switch`].
    Switched {
        /// Sessions that there were.
        sessions: usize,
        /// Those that did not come along; they were closed.
        failed: Vec<Remark>,
    },
    /// To [`Request::Resume`].
    Resumed,
    /// To [`Request::Abandon`].
    Abandoned,
    /// The request was refused; nothing has changed.
    Error {
        /// Why.
        message: String,
    },
}

/// What goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Databases that have sessions, are configured, or have moved.
    pub tenants: Vec<TenantStatus>,
    /// Sessions.
    pub sessions: Vec<SessionStatus>,
    /// Sums since the proxy started.
    pub counters: CounterStatus,
    /// Process number of a proxy that stands by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<i32>,
}

/// A tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantStatus {
    /// Name, as clients ask for it.
    pub name: String,
    /// Where it is.
    pub server: Server,
    /// Whether transactions begin.
    pub phase: Phase,
    /// Where it may go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Server>,
    /// How many of its statements took how long: less than so many microseconds, and no less than the entry before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<(u64, u64)>,
}

/// What a tenant is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Nothing special.
    Serving,
    /// Its sessions have counterparts at a target.
    Prepared,
    /// No transaction begins.
    Paused,
}

/// A session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Number, and its process number for the client.
    pub id: u32,
    /// Its tenant.
    pub tenant: String,
    /// Its user.
    pub user: String,
    /// The database that it asked for.
    pub database: String,
    /// Where its client is.
    pub client: String,
    /// What it does.
    pub state: Activity,
    /// What it holds that cannot be taken along.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<String>,
    /// Process number of its server process, once it has logged in there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<u32>,
    /// Whether it has a counterpart at the target that carries the same.
    pub prepared: bool,
    /// For how long it has been busy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transaction_ms: Option<u64>,
    /// Answers of ReadyForQuery that it has had.
    #[serde(default)]
    pub statements: u64,
}

/// Sums since the proxy started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CounterStatus {
    /// Answers of ReadyForQuery.
    pub statements: u64,
    /// Bytes from clients.
    pub bytes_up: u64,
    /// Bytes to clients.
    pub bytes_down: u64,
    /// How often the configuration was read anew.
    #[serde(default)]
    pub reloads: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_written_as_the_contract_says() {
        for (text, request) in [
            (r#"{"request":"status"}"#, Request::Status),
            (
                r#"{"request":"pause","tenant":"t","limit_ms":500}"#,
                Request::Pause { tenant: "t".into(), limit_ms: 500 },
            ),
            (
                r#"{"request":"prepare","tenant":"t","target":"b"}"#,
                Request::Prepare {
                    tenant: "t".into(),
                    target: TargetSpec::Name("b".into()),
                    verifiers: BTreeMap::new(),
                    limit_ms: 10_000,
                    again: false,
                },
            ),
        ] {
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request, "{text}");
        }
        let text = r#"{"request":"prepare","tenant":"t","target":{"host":"/tmp","port":1},"verifiers":{"a":"secret"}}"#;
        let request: Request = serde_json::from_str(text).unwrap();
        assert!(!format!("{request:?}").contains("secret"));
        assert!(serde_json::from_str::<Request>(r#"{"request":"stop"}"#).is_err());
    }

    #[test]
    fn replies_survive_the_way_there_and_back() {
        let remark = Remark { id: 7, user: "u".into(), why: "w".into(), transaction_ms: Some(3) };
        for reply in [
            Reply::Drained { waited_us: 12 },
            Reply::Blocked { sessions: vec![remark] },
            Reply::Resumed,
            Reply::Error { message: "m".into() },
            Reply::Status(Status {
                tenants: vec![],
                sessions: vec![],
                counters: CounterStatus::default(),
                standby: None,
            }),
        ] {
            let text = serde_json::to_string(&reply).unwrap();
            assert_eq!(serde_json::from_str::<Reply>(&text).unwrap(), reply, "{text}");
        }
    }
}

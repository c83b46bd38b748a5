//! Messages of the control socket: one JSON object a line, a request and its reply in turn.
//!
//! The connection that asked for a pause holds it: when it ends, or the limit is reached, the sessions go on at the
//! source.

use crate::mirror::MirrorReport;
use crate::progress::Progress;
use crate::rows;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use stillpoint_migrate_postgres::Server;

/// Request to the proxy.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// Report tenants, sessions and counters.
    Status,
    /// Register a tenant, as if a client of it had connected: a database that `*` stands for is then among the tenants.
    Know {
        /// Name of the tenant.
        tenant: String,
    },
    /// Open a counterpart at the target for every session of a tenant, and keep it alike.
    Prepare {
        /// Name of the tenant.
        tenant: String,
        /// Server that the tenant may move to.
        target: TargetSpec,
        /// Stored passwords of roles (`rolname` and `rolpassword` of `pg_authid`), for targets that ask for passwords.
        #[serde(default)]
        verifiers: BTreeMap<String, String>,
        /// Time limit in milliseconds; sessions that are not ready by then are reported as waiting.
        #[serde(default = "default_prepare_ms")]
        limit_ms: u64,
        /// Set if it was asked a moment ago: good counterparts stay, and only sessions that were not ready are asked.
        #[serde(default)]
        again: bool,
    },
    /// Capture the writes of a tenant's sessions. After [`Reply::Capturing`] this connection gets one line for each
    /// committed transaction; the capture ends with the connection.
    Capture {
        /// Name of the tenant.
        tenant: String,
        /// Time limit in milliseconds; if a transaction has not ended by then, its session is named, and nothing is
        /// captured.
        #[serde(default = "default_prepare_ms")]
        limit_ms: u64,
        /// Capture the statements that clients send as well, with the snapshots of their transactions.
        #[serde(default)]
        statements: bool,
    },
    /// Stand by: take over when the proxy is gone. This connection gets one more reply after each reload of the
    /// configuration. When it ends, the caller no longer stands by, or must check which proxy serves.
    StandBy {
        /// Text of the caller's configuration file.
        config: String,
    },
    /// Run a share of the tenant's reads again on its server and on a target, as their clients may, and compare the
    /// answers. After [`Reply::Mirrored`] this connection gets one each second; the mirror ends with the connection.
    Mirror {
        /// Name of the tenant.
        tenant: String,
        /// Server that the answers are compared with.
        target: TargetSpec,
        /// Stored passwords of roles on the tenant's server and on the target.
        #[serde(default)]
        verifiers: [BTreeMap<String, String>; 2],
        /// Share of the reads, in millionths.
        share_ppm: u32,
        /// Number of statements that are run at the same time; each takes a connection to both servers.
        workers: u32,
    },
    /// Report the progress of a tenant's capture.
    Captured {
        /// Name of the tenant.
        tenant: String,
    },
    /// Let no transaction begin, and wait until none is open.
    Pause {
        /// Name of the tenant.
        tenant: String,
        /// Time limit in milliseconds; after it everything goes on at the source, in any state of the pause.
        limit_ms: u64,
    },
    /// Put the target in service; only while paused.
    Switch {
        /// Name of the tenant.
        tenant: String,
    },
    /// End the pause: go on at the source.
    Resume {
        /// Name of the tenant.
        tenant: String,
    },
    /// Forget the target and close the counterparts.
    Abandon {
        /// Name of the tenant.
        tenant: String,
    },
    /// End as after SIGTERM: no client connects any more, and sessions end when no transaction is open.
    Drain,
    /// Show the progress of the command that moves a tenant. The reply says if the operator has ordered the switch.
    Progress {
        /// Name of the tenant.
        tenant: String,
        /// Present progress.
        progress: Box<Progress>,
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
            Request::Mirror { tenant, target, share_ppm, workers, .. } => {
                write!(f, "Mirror({tenant} to {target:?}, {share_ppm} ppm, {workers} workers)")
            }
            Request::StandBy { .. } => f.write_str("StandBy"),
            Request::Captured { tenant } => write!(f, "Captured({tenant})"),
            Request::Pause { tenant, limit_ms } => write!(f, "Pause({tenant}, {limit_ms} ms)"),
            Request::Switch { tenant } => write!(f, "Switch({tenant})"),
            Request::Resume { tenant } => write!(f, "Resume({tenant})"),
            Request::Abandon { tenant } => write!(f, "Abandon({tenant})"),
            Request::Drain => f.write_str("Drain"),
            Request::Progress { tenant, .. } => write!(f, "Progress({tenant})"),
        }
    }
}

/// A server, by its name in the configuration or described.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum TargetSpec {
    /// Name of a section `[servers.NAME]` of the configuration.
    Name(String),
    /// Values as in such a section.
    Server(Server),
}

fn default_prepare_ms() -> u64 {
    10_000
}

/// A session and a remark about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remark {
    /// Number of the session.
    pub id: u32,
    /// User of the session.
    pub user: String,
    /// Text of the remark.
    pub why: String,
    /// Time for which it has been busy, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transaction_ms: Option<u64>,
}

/// Reply of the proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Reply to [`Request::Status`].
    Status(Status),
    /// Reply to [`Request::Know`]: the configuration has the tenant.
    Known,
    /// Reply to [`Request::Prepare`].
    Prepared {
        /// Number of sessions whose counterpart carries the same state.
        sessions: usize,
        /// Sessions that are busy at the moment; they follow when they are not.
        waiting: Vec<Remark>,
        /// Sessions that hold state that cannot be moved.
        pinned: Vec<Remark>,
        /// Sessions whose counterpart could not be made.
        failed: Vec<Remark>,
    },
    /// Reply to [`Request::Capture`]: from now on this connection gets every commit, in order.
    Capturing {
        /// Number of sessions.
        sessions: usize,
        /// Tables of which not all writes can be captured, and the reasons: such a write ends the capture. Known once
        /// there is a session.
        uncovered: Vec<(String, String)>,
    },
    /// A table, before the first transaction that wrote to it.
    Table(rows::TableShape),
    /// A committed transaction; empty if it was rolled back after its stamp was taken.
    Syncset(rows::Syncset),
    /// A transaction's first operation is sent next; only where statements are captured.
    Begins {
        /// Number of the transaction here, used once.
        running: u64,
    },
    /// A transaction has its snapshot.
    Began {
        /// Number of the transaction here.
        running: u64,
        /// Snapshot in the format of `pg_current_snapshot()`.
        snapshot: String,
    },
    /// A transaction is over and was not committed.
    Ended {
        /// Number of the transaction here.
        running: u64,
    },
    /// Nothing more is captured.
    CaptureOver {
        /// Reason for the end.
        why: String,
    },
    /// Reply to [`Request::Mirror`].
    Mirrored(Box<MirrorReport>),
    /// Nothing more is mirrored.
    MirrorOver {
        /// Reason for the end.
        why: String,
    },
    /// Reply to [`Request::StandBy`].
    StandingBy {
        /// Text of the active configuration file.
        config: String,
    },
    /// Reply to [`Request::Captured`].
    Captured {
        /// The last stamp that was taken. If no transaction is open, no later one follows.
        stamp: u64,
        /// Reason why the capture is over.
        over: Option<String>,
    },
    /// Reply to [`Request::Pause`]: no transaction is open.
    Drained {
        /// Time until then, in microseconds.
        waited_us: u64,
    },
    /// Reply to [`Request::Pause`]: these sessions did not stop; all sessions go on.
    Blocked {
        /// Sessions, with the reasons.
        sessions: Vec<Remark>,
    },
    /// Reply to [`Request::Switch`].
    Switched {
        /// Number of sessions at the switch.
        sessions: usize,
        /// Sessions that could not be moved; they were closed.
        failed: Vec<Remark>,
    },
    /// Reply to [`Request::Resume`].
    Resumed,
    /// Reply to [`Request::Abandon`].
    Abandoned,
    /// Reply to [`Request::Drain`]: the proxy ends.
    Draining {
        /// Number of sessions that it still has.
        sessions: usize,
        /// Longest time until it ends them, in milliseconds.
        limit_ms: u64,
    },
    /// Reply to [`Request::Progress`].
    Shown {
        /// True once for each order to switch that the operator has given at the proxy.
        switch: bool,
    },
    /// The request was refused; nothing has changed.
    Error {
        /// Reason for the refusal.
        message: String,
    },
}

/// State of the proxy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Databases that have sessions, are configured, or have moved.
    pub tenants: Vec<TenantStatus>,
    /// All sessions.
    pub sessions: Vec<SessionStatus>,
    /// Sums since the proxy started.
    pub counters: CounterStatus,
    /// Process number of a proxy that stands by.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<i32>,
}

/// State of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantStatus {
    /// Name, as clients ask for it.
    pub name: String,
    /// Server that it is on.
    pub server: Server,
    /// Phase of a move.
    pub phase: Phase,
    /// Server that it may move to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<Server>,
    /// Pairs of an upper limit in microseconds and a count: that many statements took less, and no less than the limit
    /// before.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waits: Vec<(u64, u64)>,
    /// Reads that are mirrored to a target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<Box<MirrorReport>>,
    /// Server connections that its sessions share, if it has a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolStatus>,
    /// Process ids of its shared connections' server processes, with and without sessions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared_backends: Vec<u32>,
}

/// Server connections that sessions of a tenant share, of all users together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PoolStatus {
    /// Connections that are open, or are being opened.
    pub open: usize,
    /// Connections without a session.
    pub idle: usize,
    /// Sessions that wait for a connection.
    pub waiting: usize,
    /// Sessions that keep a connection of their own.
    pub kept: usize,
}

/// Phase of a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// No move is under way.
    Serving,
    /// Sessions have counterparts at a target.
    Prepared,
    /// No transaction may begin.
    Paused,
}

/// State of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionStatus {
    /// Number in the proxy.
    pub id: u32,
    /// Name of the tenant.
    pub tenant: String,
    /// Name of the user.
    pub user: String,
    /// Name of the database that the client asked for.
    pub database: String,
    /// Address of its client.
    pub client: String,
    /// Current activity.
    pub state: Activity,
    /// State that it holds and that cannot be moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pinned: Option<String>,
    /// Reason why it keeps its server connection, where idle sessions of its tenant share theirs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<String>,
    /// Process id that its client has, once it has logged in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<u32>,
    /// Process id of its server process, which differs after a switch. A session without a connection has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<u32>,
    /// True if it has a counterpart at the target that carries the same state.
    pub prepared: bool,
    /// Time for which it has been busy, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transaction_ms: Option<u64>,
    /// Number of ReadyForQuery messages that it has received.
    #[serde(default)]
    pub statements: u64,
}

/// Activity of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// The client logs in.
    Starting,
    /// No statement or transaction is under way.
    Idle,
    /// A statement runs.
    Active,
    /// A transaction is open.
    InTransaction,
    /// The session waits for a switch-over.
    Parked,
}

impl Activity {
    /// All activities, in the order of their numbers.
    pub const ALL: [Activity; 5] =
        [Activity::Starting, Activity::Idle, Activity::Active, Activity::InTransaction, Activity::Parked];

    /// Reason why others wait for a session with this activity.
    pub fn blocking_reason(self) -> &'static str {
        match self {
            Activity::Starting => "is logging in",
            Activity::InTransaction => "its client holds a transaction open",
            _ => "its statement runs",
        }
    }
}

/// Sums since the proxy started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct CounterStatus {
    /// Number of ReadyForQuery messages.
    pub statements: u64,
    /// Number of bytes received from clients.
    pub bytes_up: u64,
    /// Number of bytes sent to clients.
    pub bytes_down: u64,
    /// Number of times that the configuration was reloaded.
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

//! Decides which statements are mirrored: those that change nothing anywhere when they are run again.
//!
//! A transaction that may not write stops every change of the database. What it does not stop (locks of sessions, signals to
//! other processes, slots, other servers, files) is done by functions, and the server marks all of these as volatile. So
//! the source is asked about each function, operator and relation of a statement, and about what its views and row-level
//! policies use.

use crate::session::session_state::{TEXT_ARRAY_OID, array};
use std::collections::HashMap;
use std::sync::Arc;
use stillpoint_migrate_capture::{ReadStatement, read_statement};
use stillpoint_migrate_postgres::{LinkError, Stream, exchange};
use stillpoint_migrate_wire::frontend::{SYNC, put_bind, put_execute, put_parse};

const NAMES_QUERY: &str = include_str!("names.sql");

/// Most statements whose judgement is kept.
const KNOWN_MAX: usize = 1000;

/// Functions that read a server's own state, which no other one has.
const SERVER_FUNCTIONS: [&str; 17] = [
    "current_setting",
    "inet_client_addr",
    "inet_client_port",
    "inet_server_addr",
    "inet_server_port",
    "pg_backend_pid",
    "pg_conf_load_time",
    "pg_current_snapshot",
    "pg_current_wal_insert_lsn",
    "pg_current_wal_lsn",
    "pg_current_xact_id",
    "pg_current_xact_id_if_assigned",
    "pg_postmaster_start_time",
    "txid_current",
    "txid_current_if_assigned",
    "txid_current_snapshot",
    "version",
];

/// A statement that is mirrored, or the reason why it is not.
pub(super) type Judgement = Result<Arc<ReadStatement>, String>;

/// Judgements of one session's statements, in its present state.
#[derive(Default)]
pub(super) struct Judge {
    known: HashMap<Vec<u8>, Judgement>,
}

impl Judge {
    /// Judges a statement; `source` is a session like the client's.
    pub(super) async fn judge(&mut self, source: &mut Stream, text: &[u8]) -> Result<Judgement, LinkError> {
        if let Some(known) = self.known.get(text) {
            return Ok(known.clone());
        }
        let read = match std::str::from_utf8(text) {
            Ok(text) => read_statement(text),
            Err(_) => Err("a text that is not UTF-8".into()),
        };
        let judgement = match read {
            Ok(read) => match reason_against(source, &read).await? {
                None => Ok(Arc::new(read)),
                Some(why) => Err(why),
            },
            Err(why) => Err(why),
        };
        if self.known.len() >= KNOWN_MAX {
            self.known.clear();
        }
        self.known.insert(text.to_vec(), judgement.clone());
        Ok(judgement)
    }
}

async fn reason_against(source: &mut Stream, read: &ReadStatement) -> Result<Option<String>, LinkError> {
    if let Some(name) = read.functions.iter().find(|name| SERVER_FUNCTIONS.contains(&name.as_str())) {
        return Ok(Some(format!("function {name}, whose value is the server's own")));
    }
    let lists = [&read.relations, &read.functions, &read.operators].map(|names| array(names.iter()));
    let mut question = Vec::new();
    put_parse(&mut question, b"", NAMES_QUERY.as_bytes(), &[TEXT_ARRAY_OID; 3]);
    put_bind(&mut question, b"", b"", &[&lists[0], &lists[1], &lists[2]]);
    put_execute(&mut question, b"");
    question.extend(SYNC);
    let answers = exchange(source, &question, 1).await?;
    let first = answers.rows.into_iter().next().and_then(|row| row.into_iter().next().flatten());
    Ok(match answers.error {
        Some((code, _)) => Some(format!("a statement that the source cannot be asked about ({code})")),
        None => first.map(|why| String::from_utf8_lossy(&why).into_owned()),
    })
}

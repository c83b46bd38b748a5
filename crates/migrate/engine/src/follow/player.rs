//! A player: repeats transactions on one connection to the target, a batch of them under one Sync.
//!
//! A batch is `BEGIN .. COMMIT` of each transaction in turn. When one fails the server skips everything up to the Sync,
//! so that nothing runs behind a failure on which it may depend.

use super::statement::{ONE_ROW, Shape};
use super::transaction::{Transaction, Write};
use crate::link::{Link, Purpose};
use crate::pgoutput::Value;
use crate::{Error, Server};
use bytes::BytesMut;
use postgres_protocol::IsNull;
use postgres_protocol::message::frontend;
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use tokio::sync::mpsc;

/// What a player tells the conductor.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// So many transactions of the batch are committed, and that was all of it.
    Done(usize),
    /// So many are committed; the next failed in a way that a retry can mend, and nothing behind it ran.
    Retry(usize),
    /// The replay cannot go on.
    Fatal(Error),
}

/// Plays until the channel of batches is closed.
pub(crate) struct Player {
    link: Link,
    prepared: HashMap<Shape, String>,
    names: u64,
}

const BEGIN: &str = "begin";
const COMMIT: &str = "commit";
const STAMP: &str = "stamp";

impl Player {
    /// Connects; `search_path` finds the operators of the user's types.
    pub(crate) async fn connect(target: &Server, search_path: &str) -> Result<Player, Error> {
        let settings = [
            ("session_replication_role", "replica"),
            ("synchronous_commit", "off"),
            ("search_path", search_path),
            // A plan for each of many shapes is not worth making anew: keys are unique.
            ("plan_cache_mode", "force_generic_plan"),
        ];
        let mut link = Link::connect(target, Purpose::Statements, &settings).await?;
        let fixed =
            [(BEGIN, "BEGIN"), (COMMIT, "COMMIT"), (STAMP, "INSERT INTO stillpoint.applied (stamp) VALUES ($1)")];
        for (name, sql) in fixed {
            link.sender.put(|buffer| frontend::parse(name, sql, [], buffer))?;
        }
        frontend::sync(&mut link.sender.buffer);
        link.sender.flush().await?;
        loop {
            let frame = link.receiver.frame().await?;
            match frame.tag {
                b'E' => return Err(link.receiver.sql_error(&frame.body, "preparing a player")),
                b'Z' => return Ok(Player { link, prepared: HashMap::new(), names: 0 }),
                _ => {}
            }
        }
    }

    /// Takes batches and reports on each.
    pub(crate) async fn run(
        mut self,
        number: u32,
        mut batches: mpsc::Receiver<Vec<Arc<Transaction>>>,
        reports: mpsc::Sender<(u32, Outcome)>,
    ) {
        while let Some(batch) = batches.recv().await {
            let outcome = self.play(&batch).await.unwrap_or_else(Outcome::Fatal);
            let fatal = matches!(outcome, Outcome::Fatal(_));
            if reports.send((number, outcome)).await.is_err() || fatal {
                return;
            }
        }
    }

    async fn play(&mut self, batch: &[Arc<Transaction>]) -> Result<Outcome, Error> {
        let mut parsed = Vec::new();
        for transaction in batch {
            self.bind(BEGIN, &[])?;
            for write in transaction.writes.iter().filter(|write| write.has_effect()) {
                self.write(write, &mut parsed)?;
            }
            let stamp = Value::Text(transaction.stamp.to_string().into());
            self.bind(STAMP, &[&stamp])?;
            self.bind(COMMIT, &[])?;
        }
        frontend::sync(&mut self.link.sender.buffer);
        // Sending and receiving at once: a batch may be larger than what both sides' buffers hold.
        let Link { sender, receiver, .. } = &mut self.link;
        let (sent, answered) = tokio::join!(sender.flush(), answers(receiver, batch.len()));
        sent?;
        let (committed, failure) = answered?;
        let Some(error) = failure else { return Ok(Outcome::Done(committed)) };
        // What was to be prepared behind the failure was not.
        parsed.into_iter().for_each(|shape| drop(self.prepared.remove(&shape)));
        self.link.query("ROLLBACK").await?;
        match error.sqlstate() {
            Some("23505" | "23P01" | "40P01" | "40001" | "55P03") => {
                tracing::debug!(%error, "a replayed transaction is tried again");
                Ok(Outcome::Retry(committed))
            }
            _ => Err(error),
        }
    }

    fn write(&mut self, write: &Write, parsed: &mut Vec<Shape>) -> Result<(), Error> {
        let parameters = write.parameters();
        let Some(shape) = write.shape() else {
            self.link.sender.put(|buffer| frontend::parse("", &write.sql(), [], buffer))?;
            return self.bind("", &parameters);
        };
        if let Some(name) = self.prepared.get(&shape) {
            let name = name.clone();
            return self.bind(&name, &parameters);
        }
        self.names += 1;
        let name = format!("w{}", self.names);
        self.link.sender.put(|buffer| frontend::parse(&name, &write.sql(), [], buffer))?;
        self.prepared.insert(shape.clone(), name.clone());
        parsed.push(shape);
        self.bind(&name, &parameters)
    }

    fn bind(&mut self, statement: &str, parameters: &[&Value]) -> Result<(), Error> {
        self.link.sender.put(|buffer| {
            let serialise = |value: &&Value, buffer: &mut BytesMut| match value {
                Value::Text(text) => {
                    buffer.extend_from_slice(text);
                    Ok(IsNull::No)
                }
                Value::Null | Value::Unchanged => Ok(IsNull::Yes),
            };
            frontend::bind("", statement, [], parameters, serialise, [], buffer).map_err(|error| match error {
                frontend::BindError::Conversion(error) => io::Error::other(error),
                frontend::BindError::Serialization(error) => error,
            })?;
            frontend::execute("", 0, buffer)
        })
    }
}

/// Reads the answers to a batch up to its Sync: how many transactions were committed, and what failed.
async fn answers(receiver: &mut crate::link::Receiver, expected: usize) -> Result<(usize, Option<Error>), Error> {
    let (mut committed, mut failure, mut missed) = (0, None, None);
    loop {
        let frame = receiver.frame().await?;
        match frame.tag {
            b'C' => match frame.body.as_ref() {
                b"COMMIT\0" => committed += 1,
                b"BEGIN\0" | b"TRUNCATE TABLE\0" => {}
                tag if ONE_ROW.contains(&tag) => {}
                tag => missed = Some(String::from_utf8_lossy(tag).trim_end_matches('\0').to_owned()),
            },
            b'E' => failure = Some(receiver.sql_error(&frame.body, "replaying a transaction")),
            b'Z' => break,
            b'1' | b'2' | b'n' => {}
            tag => return Err(receiver.protocol(format!("`{}` in answer to a batch", char::from(tag)))),
        }
    }
    if let Some(tag) = missed {
        // A blind write that finds no row: the two sides have parted.
        return Err(Error::Differs(vec![format!("a row that a replayed change did not find (`{tag}`)")]));
    }
    if failure.is_none() && committed != expected {
        return Err(receiver.protocol(format!("{committed} commits of {expected}")));
    }
    Ok((committed, failure))
}

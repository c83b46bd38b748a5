//! Converts the proxy's reports to events of the source.

use crate::Error;
use crate::inventory::Inventory;
use crate::pgoutput::Lsn;
use crate::rows::{Tables, Translate, parse_xid, reply, row_bytes, unexpected};
use crate::transaction::{Item, Write};
use std::collections::HashSet;
use std::sync::Arc;
use stillpoint_migrate_control::Reply;
use stillpoint_migrate_control::rows::{Operation, Syncset};
use stillpoint_migrate_postgres::link::{Link, Purpose, Server};
use stillpoint_migrate_replay::{RunningId, Snapshot, Token, Xid};

/// A committed transaction, with its statements and its rows, either of which can repeat it.
#[derive(Debug)]
pub struct Transaction {
    pub(super) stamp: Lsn,
    /// Transaction number; `None` if it wrote nothing.
    pub(super) xid: Option<Xid>,
    pub(super) running: Option<RunningId>,
    pub(super) tokens: Vec<Token>,
    /// Statements of its client, the settings on which their meaning depends, and the role that executed them.
    pub(super) operations: Vec<Operation>,
    pub(super) settings: Arc<str>,
    pub(super) role: Arc<str>,
    /// Rows that it wrote.
    pub(super) rows: Vec<Write>,
    pub(super) bytes: u64,
}

impl Transaction {
    /// Returns true if it wrote any row.
    pub fn wrote(&self) -> bool {
        self.xid.is_some()
    }
}

/// An event that the proxy reports, in the order of its reports.
#[derive(Debug, Clone)]
pub enum SourceEvent {
    /// A transaction is about to send its first operation.
    Begins(RunningId),
    /// A transaction has its snapshot.
    Began(RunningId, Snapshot),
    /// A transaction has ended, and nothing of it is to be repeated.
    Ended(RunningId),
    /// A transaction was committed.
    Committed(Arc<Transaction>),
}

/// Reader of the proxy's reports.
#[derive(Debug)]
pub struct Reader {
    tables: Tables,
    running: HashSet<u64>,
    stamp: Lsn,
    /// Settings and role of the last transaction: those of one session are the same.
    settings: Arc<str>,
    role: Arc<str>,
}

impl Reader {
    /// Makes a reader for a capture on this server.
    ///
    /// # Errors
    /// The definitions of its tables cannot be read.
    pub async fn of(source: &Server) -> Result<Reader, Error> {
        let mut link = Link::connect(source, Purpose::Statements, &[]).await?;
        Ok(Reader::new(&Inventory::read(&mut link).await?))
    }

    fn new(inventory: &Inventory) -> Reader {
        Reader {
            tables: Tables::new(inventory),
            running: HashSet::new(),
            stamp: 0,
            settings: "".into(),
            role: "".into(),
        }
    }

    /// The stamp of the last transaction.
    pub fn stamp(&self) -> u64 {
        self.stamp
    }

    /// Returns true if no transaction is running.
    pub fn is_quiet(&self) -> bool {
        self.running.is_empty()
    }

    /// Takes one report of the proxy; returns an event if the replay needs one.
    ///
    /// # Errors
    /// [`Error::Capture`] if the report does not belong to a capture of statements; [`Error::SchemaChanged`].
    pub fn take(&mut self, reply: Reply) -> Result<Option<SourceEvent>, Error> {
        match reply {
            Reply::Table(shape) => self.tables.register_table(&shape).map(|()| None),
            Reply::Begins { running } => {
                self.running.insert(running);
                Ok(Some(SourceEvent::Begins(RunningId(running))))
            }
            Reply::Began { running, snapshot } => {
                let snapshot = snapshot.parse().map_err(Error::Capture)?;
                Ok(Some(SourceEvent::Began(RunningId(running), snapshot)))
            }
            Reply::Ended { running } => {
                self.running.remove(&running);
                Ok(Some(SourceEvent::Ended(RunningId(running))))
            }
            Reply::Syncset(set) => self.take_commit(set),
            other => Err(unexpected(&other)),
        }
    }

    fn take_commit(&mut self, set: Syncset) -> Result<Option<SourceEvent>, Error> {
        self.stamp = set.stamp;
        let wrote = !set.rows.is_empty();
        let Some(statements) = set.statements else {
            // Its COMMIT was sent, but it was rolled back.
            return if wrote { Err(Error::Capture("rows arrived without their statements".into())) } else { Ok(None) };
        };
        if let Some(running) = statements.running {
            self.running.remove(&running);
        } else if wrote {
            return Err(Error::Capture("a transaction that wrote has no snapshot".into()));
        }
        if *statements.settings != *self.settings {
            self.settings = statements.settings.into();
        }
        if *statements.role != *self.role {
            self.role = statements.role.into();
        }
        let texts: usize = statements.operations.iter().map(|operation| 64 + operation.text.len()).sum();
        let rows: u64 = set.rows.iter().map(row_bytes).sum();
        Ok(Some(SourceEvent::Committed(Arc::new(Transaction {
            stamp: set.stamp,
            xid: if wrote { Some(Xid(parse_xid(&set.xid)?)) } else { None },
            running: statements.running.map(RunningId),
            tokens: set.tokens,
            operations: statements.operations,
            settings: Arc::clone(&self.settings),
            role: Arc::clone(&self.role),
            bytes: rows + texts as u64,
            rows: self.tables.writes(set.rows)?,
        }))))
    }
}

/// Leaves out transactions that the copied snapshot has seen.
pub(crate) struct Translator {
    reader: Reader,
    seen: Snapshot,
}

impl Translator {
    pub(crate) fn new(seen: Snapshot, inventory: &Inventory) -> Translator {
        Translator { reader: Reader::new(inventory), seen }
    }
}

impl Translate for Translator {
    type Transaction = SourceEvent;

    fn take(&mut self, line: &[u8]) -> Result<Option<Item<SourceEvent>>, Error> {
        let event = self.reader.take(reply(line)?)?;
        Ok(event.map(|event| match event {
            SourceEvent::Committed(transaction) if transaction.xid.is_some_and(|xid| self.seen.sees(xid)) => {
                match transaction.running {
                    Some(running) => Item::Transaction(SourceEvent::Ended(running)),
                    None => Item::Position(transaction.stamp),
                }
            }
            event => Item::Transaction(event),
        }))
    }

    fn received(&self) -> Lsn {
        self.reader.stamp
    }
}

//! From what the proxy tells to what happened on the source.

use super::super::rows::{Tables, Translate, reply, size, unexpected, xid_of};
use super::super::transaction::{Item, Write};
use crate::inventory::Inventory;
use crate::link::{Link, Purpose};
use crate::pgoutput::Lsn;
use crate::{Error, Server};
use std::collections::HashSet;
use std::sync::Arc;
use stillpoint_migrate_proxy::control::Reply;
use stillpoint_migrate_proxy::control::rows::{Operation, Syncset};
use stillpoint_migrate_replay::{RunningId, Snapshot, Token, Xid};

/// A committed transaction, with both ways to repeat it.
#[derive(Debug)]
pub struct Transaction {
    pub(super) stamp: Lsn,
    /// None where it wrote nothing.
    pub(super) xid: Option<Xid>,
    pub(super) running: Option<RunningId>,
    pub(super) tokens: Vec<Token>,
    /// What its client sent, the settings on which it depends what that means, and the role that did it.
    pub(super) operations: Vec<Operation>,
    pub(super) settings: Arc<str>,
    pub(super) role: Arc<str>,
    /// What it wrote.
    pub(super) rows: Vec<Write>,
    pub(super) bytes: u64,
}

impl Transaction {
    /// Whether it wrote any row.
    pub fn wrote(&self) -> bool {
        self.xid.is_some()
    }
}

/// Something of which the proxy tells, in the order in which it tells.
#[derive(Debug, Clone)]
pub enum Happened {
    /// A transaction is about to send its first operation.
    Begins(RunningId),
    /// It has its snapshot.
    Began(RunningId, Snapshot),
    /// It is over, and nothing of it is to be repeated.
    Ended(RunningId),
    /// It was committed.
    Committed(Arc<Transaction>),
}

/// Reads what the proxy tells.
#[derive(Debug)]
pub struct Reader {
    tables: Tables,
    running: HashSet<u64>,
    stamp: Lsn,
    /// Of the last transaction: those of one session are the same.
    settings: Arc<str>,
    role: Arc<str>,
}

impl Reader {
    /// For a capture on this server.
    ///
    /// # Errors
    /// What its tables are cannot be read.
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

    /// Whether a transaction runs.
    pub fn is_quiet(&self) -> bool {
        self.running.is_empty()
    }

    /// Takes one thing that the proxy told; what happened, if that is of interest.
    ///
    /// # Errors
    /// [`Error::Capture`], for what is none of a capture of statements; [`Error::SchemaChanged`].
    pub fn take(&mut self, reply: Reply) -> Result<Option<Happened>, Error> {
        match reply {
            Reply::Table(shape) => self.tables.learn(&shape).map(|()| None),
            Reply::Begins { running } => {
                self.running.insert(running);
                Ok(Some(Happened::Begins(RunningId(running))))
            }
            Reply::Began { running, snapshot } => {
                let snapshot = snapshot.parse().map_err(Error::Capture)?;
                Ok(Some(Happened::Began(RunningId(running), snapshot)))
            }
            Reply::Ended { running } => {
                self.running.remove(&running);
                Ok(Some(Happened::Ended(RunningId(running))))
            }
            Reply::Syncset(set) => self.committed(set),
            other => Err(unexpected(&other)),
        }
    }

    fn committed(&mut self, set: Syncset) -> Result<Option<Happened>, Error> {
        self.stamp = set.stamp;
        let wrote = !set.rows.is_empty();
        let Some(said) = set.statements else {
            // Its COMMIT was sent, and it was rolled back.
            return if wrote { Err(Error::Capture("rows came without their statements".into())) } else { Ok(None) };
        };
        if let Some(running) = said.running {
            self.running.remove(&running);
        } else if wrote {
            return Err(Error::Capture("it is not known what a transaction that wrote has seen".into()));
        }
        if *said.settings != *self.settings {
            self.settings = said.settings.into();
        }
        if *said.role != *self.role {
            self.role = said.role.into();
        }
        let texts: usize = said.operations.iter().map(|operation| 64 + operation.text.len()).sum();
        let rows: u64 = set.rows.iter().map(size).sum();
        Ok(Some(Happened::Committed(Arc::new(Transaction {
            stamp: set.stamp,
            xid: if wrote { Some(Xid(xid_of(&set.xid)?)) } else { None },
            running: said.running.map(RunningId),
            tokens: set.tokens.into_iter().map(Token::from).collect(),
            operations: said.operations,
            settings: Arc::clone(&self.settings),
            role: Arc::clone(&self.role),
            bytes: rows + texts as u64,
            rows: self.tables.writes(set.rows)?,
        }))))
    }
}

/// Leaves out what the copied snapshot has seen.
pub(in super::super) struct Translator {
    reader: Reader,
    seen: Snapshot,
}

impl Translator {
    pub(in super::super) fn new(seen: Snapshot, inventory: &Inventory) -> Translator {
        Translator { reader: Reader::new(inventory), seen }
    }
}

impl Translate for Translator {
    type Of = Happened;

    fn take(&mut self, line: &[u8]) -> Result<Option<Item<Happened>>, Error> {
        let happened = self.reader.take(reply(line)?)?;
        Ok(happened.map(|happened| match happened {
            Happened::Committed(transaction) if transaction.xid.is_some_and(|xid| self.seen.sees(xid)) => {
                match transaction.running {
                    Some(running) => Item::Transaction(Happened::Ended(running)),
                    None => Item::Position(transaction.stamp),
                }
            }
            happened => Item::Transaction(happened),
        }))
    }

    fn received(&self) -> Lsn {
        self.reader.stamp
    }
}

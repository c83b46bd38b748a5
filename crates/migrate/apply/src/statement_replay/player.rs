//! A player: one connection to the target that repeats transactions, step by step (Algorithm 5 of the paper). The parts of a
//! step are sent together, under one Sync. After a first read that others may wait for, a Flush is sent, so that its answer
//! arrives before the rest is done.

use super::reader::Transaction;
use crate::Error;
use crate::apply_worker::can_be_retried;
use crate::pgoutput::{Lsn, Value};
use crate::statement::{execute, rows_written};
use crate::throttle::Throttle;
use crate::transaction::Write;
use postgres_protocol::message::frontend;
use std::collections::VecDeque;
use std::sync::Arc;
use stillpoint_migrate_control::rows::Operation;
use stillpoint_migrate_postgres::Frame;
use stillpoint_migrate_postgres::link::{Link, Purpose, Server, ServerError, identifier};
use stillpoint_migrate_replay::mapping::{Kind, map};
use stillpoint_migrate_replay::{Mode, Part, Step};
use tokio::sync::mpsc;

const BEGIN: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ";
/// Blind writes see the latest committed rows.
const BEGIN_BLIND: &str = "BEGIN ISOLATION LEVEL READ COMMITTED";
/// Takes the snapshot if the client's first operation was a write: a write might wait for a transaction whose commit it must
/// precede.
const SNAPSHOT_STATEMENT: &str = "SELECT 1";

/// A transaction; `blind` is true if it is repeated by its rows.
#[derive(Debug)]
pub(super) struct PlayedTransaction {
    pub(super) transaction: Arc<Transaction>,
    pub(super) blind: bool,
}

/// A step of a transaction to be sent.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) step: Step,
    /// True if others may wait for the first read: it is reported before the rest.
    pub(super) awaited: bool,
    pub(super) part: Arc<PlayedTransaction>,
}

/// Progress of a player on its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepProgress {
    /// The first read is done, the rest is not.
    Read,
    Done,
}

/// Number of a player, and its progress or error; after an error the transaction is rolled back.
pub(super) type Report = (u32, Result<StepProgress, Error>);

/// Settings of the players.
#[derive(Debug, Clone)]
pub(super) struct PlayerSettings {
    pub(super) mode: Mode,
    /// True if each commit waits for the disk.
    pub(super) synchronous: bool,
    /// True if each transaction writes its stamp.
    pub(super) stamps: bool,
    /// Expression to SELECT before rows are written.
    pub(super) blind: Arc<str>,
    pub(super) pace: Arc<Throttle>,
}

/// A player: executes jobs on its connection.
pub(super) struct Player {
    link: Link,
    player_settings: PlayerSettings,
    /// Settings that the session has now.
    settings: Arc<str>,
}

/// Request that an answer belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    /// A statement that writes rows of the transaction.
    Rows,
    /// A first read that others may wait for.
    Awaited,
    Other,
}

/// Answers that are expected, and the rows written so far.
#[derive(Debug, Default)]
struct PendingAnswers {
    answers: VecDeque<Answer>,
    written: u64,
}

impl Player {
    /// Connects to the target.
    pub(super) async fn connect(target: &Server, player_settings: PlayerSettings) -> Result<Player, ServerError> {
        let synchronous = if player_settings.synchronous { "on" } else { "off" };
        let settings = [("synchronous_commit", synchronous)];
        let link = Link::connect(target, Purpose::Statements, &settings).await?;
        Ok(Player { link, player_settings, settings: "".into() })
    }

    /// Does its jobs and reports each, until the sender of jobs or the receiver of reports is gone.
    pub(super) async fn run(
        mut self,
        number: u32,
        mut jobs: mpsc::UnboundedReceiver<Job>,
        reports: mpsc::UnboundedSender<Report>,
    ) {
        while let Some(job) = jobs.recv().await {
            if job.step.has(Part::FirstRead) {
                self.player_settings.pace.spend(1).await;
            }
            // If the receiver is gone, that is noticed at the end of the step.
            let read = || drop(reports.send((number, Ok(StepProgress::Read))));
            let done = self.execute_step(&job, read).await.map(|()| StepProgress::Done);
            if reports.send((number, done)).is_err() {
                return;
            }
        }
    }

    /// Does a step; calls `read` when its first read is done, if that is awaited.
    async fn execute_step(&mut self, job: &Job, read: impl Fn()) -> Result<(), Error> {
        let PlayedTransaction { transaction, blind } = &*job.part;
        let operations: Vec<&Operation> =
            if *blind { Vec::new() } else { repeated_operations(self.player_settings.mode, transaction) };
        // In the serial modes, the first statement of any kind takes the snapshot.
        let reads = self.player_settings.mode.needs_snapshots() && !blind;
        let first = operations.first().filter(|operation| reads && !operation.writes);
        let first = first.map(|operation| operation.text.as_str());
        let mut pending = PendingAnswers::default();
        if job.step.has(Part::FirstRead) {
            self.apply_settings(if *blind {
                Arc::clone(&self.player_settings.blind)
            } else {
                Arc::clone(&transaction.settings)
            })
            .await?;
            self.put(if *blind { BEGIN_BLIND } else { BEGIN }, Answer::Other, &mut pending)?;
            if !blind {
                // Not with our rights, because the client defines the meaning of the names in its statements.
                self.put(&format!("SET LOCAL ROLE {}", identifier(&transaction.role)), Answer::Other, &mut pending)?;
            }
            if reads {
                let answer = if job.awaited { Answer::Awaited } else { Answer::Other };
                self.put(first.unwrap_or(SNAPSHOT_STATEMENT), answer, &mut pending)?;
                if job.awaited {
                    frontend::flush(&mut self.link.sender.buffer);
                }
            }
        }
        let writes = job.step.has(Part::Writes);
        if writes {
            for operation in operations.into_iter().skip(usize::from(first.is_some())) {
                let answer = if operation.writes { Answer::Rows } else { Answer::Other };
                self.put(&operation.text, answer, &mut pending)?;
            }
            for write in transaction.rows.iter().filter(|write| *blind && write.has_effect()) {
                self.put_write(write, &mut pending)?;
            }
            if self.player_settings.stamps && transaction.wrote() {
                self.put("SET LOCAL ROLE NONE", Answer::Other, &mut pending)?;
                self.put(&stamp_statement(transaction.stamp), Answer::Other, &mut pending)?;
            }
        }
        if job.step.has(Part::Commit) {
            self.put("COMMIT", Answer::Other, &mut pending)?;
        }
        let failure = self.read_answers(&mut pending, read).await?;
        if let Some(error) = failure {
            self.link.query("ROLLBACK").await?;
            return Err(error);
        }
        let wanted = transaction.rows.iter().filter(|write| !*blind || write.has_effect()).count() as u64;
        if writes && pending.written != wanted {
            let (written, stamp) = (pending.written, transaction.stamp);
            let what =
                format!("transaction {stamp}, which wrote {wanted} rows on the source and {written} on the target");
            return Err(Error::Differs(vec![what]));
        }
        Ok(())
    }

    /// Gives the session the settings of the client whose statements are repeated.
    async fn apply_settings(&mut self, settings: Arc<str>) -> Result<(), ServerError> {
        if *settings != *self.settings {
            if !settings.is_empty() {
                self.link.query(&format!("SELECT {settings}")).await?;
            }
            self.settings = settings;
        }
        Ok(())
    }

    fn put(&mut self, text: &str, answer: Answer, pending: &mut PendingAnswers) -> Result<(), ServerError> {
        self.execute(text, &[], answer, pending)
    }

    fn put_write(&mut self, write: &Write, pending: &mut PendingAnswers) -> Result<(), ServerError> {
        self.execute(&write.sql(), &write.parameters(), Answer::Rows, pending)
    }

    fn execute(
        &mut self,
        text: &str,
        values: &[&Value],
        answer: Answer,
        pending: &mut PendingAnswers,
    ) -> Result<(), ServerError> {
        pending.answers.push_back(answer);
        self.link.sender.put(|buffer| {
            frontend::parse("", text, [], buffer)?;
            execute("", values, buffer)
        })
    }

    /// Sends everything and reads the answers; returns a failure that a retry can resolve; other failures are errors.
    async fn read_answers(&mut self, pending: &mut PendingAnswers, read: impl Fn()) -> Result<Option<Error>, Error> {
        let Link { sender, receiver, .. } = &mut self.link;
        frontend::sync(&mut sender.buffer);
        let answered = async {
            let mut failure = None;
            loop {
                let frame = receiver.frame().await?;
                match frame.tag {
                    b'C' if pending.take_answer(&frame) == Some(Answer::Awaited) => read(),
                    b'C' => {}
                    b'E' => failure = Some(Error::from(receiver.sql_error(&frame.body, "replaying statements"))),
                    b'Z' => return Ok::<_, Error>(failure),
                    b'1' | b'2' | b'D' | b'n' | b'I' => {}
                    tag => return Err(receiver.protocol(format!("`{}` in answer to a step", char::from(tag))).into()),
                }
            }
        };
        let (sent, answered) = tokio::join!(sender.flush(), answered);
        sent?;
        match answered? {
            Some(error) if !can_be_retried(&error) => Err(error),
            failure => Ok(failure),
        }
    }
}

impl PendingAnswers {
    fn take_answer(&mut self, frame: &Frame) -> Option<Answer> {
        let answer = self.answers.pop_front();
        if answer == Some(Answer::Rows) {
            self.written += rows_written(frame).unwrap_or(0);
        }
        answer
    }
}

/// Returns the operations that are repeated (Definition 2 of the paper).
fn repeated_operations(mode: Mode, transaction: &Transaction) -> Vec<&Operation> {
    let kind = |operation: &Operation| if operation.writes { Kind::Write } else { Kind::Read };
    let operations = transaction.operations.iter().map(|operation| (kind(operation), operation)).collect();
    map(operations, mode != Mode::BAll).into_iter().map(|(_, operation)| operation).collect()
}

fn stamp_statement(stamp: Lsn) -> String {
    format!("INSERT INTO stillpoint.applied (stamps) VALUES ('{{{stamp}}}')")
}

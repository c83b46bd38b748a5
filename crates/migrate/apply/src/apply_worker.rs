//! An apply worker (`Player`): repeats transactions on one connection to the target, in batches.
//!
//! A batch is sent first as one transaction with the combined effect of its changes ([`super::bulk`]), because no session reads
//! the target between two transactions of a batch. After a long batch, the next one is sent before the first is answered, so
//! that neither side waits for the other. Only a Flush separates them: after a failure the server skips everything up to the
//! next Sync, and nothing may run after a failure on which it may depend. A batch that fails is repeated as `BEGIN .. COMMIT`
//! of each transaction in turn, under one Sync.
//!
//! ```text
//!  idle --batch, short--> Sync ----------------------------------------answered--> idle
//!    |                                                                              ^
//!    +----batch, long---> Flush --(batch, long: behind it, Flush)--all answered, Sync
//!                           | failure: Sync, ROLLBACK, one by one
//!                           +--> all of them committed: what was behind is sent again
//!                           +--> one fails again: it and all behind it go back to the conductor
//! ```

use super::bulk::{BulkShape, Step, steps};
use super::statement::{Shape, execute, rows_written};
use super::transaction::{Transaction, Write};
use crate::Error;
use crate::pgoutput::Value;
use crate::throttle::Throttle;
use postgres_protocol::message::frontend;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use stillpoint_migrate_postgres::Frame;
use stillpoint_migrate_postgres::link::{Link, Purpose, Receiver, Server, ServerError};
use tokio::sync::mpsc;
use tokio::time::Instant;

/// Report of an apply worker to the conductor.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// All transactions of the batch are committed; holds their number.
    Done(usize),
    /// A part of the batch is committed; holds the number of these transactions. The next one failed with an error that a retry
    /// can resolve, and nothing after it was executed.
    Retry(usize),
    /// The replay cannot continue.
    Fatal(Error),
}

/// Number of transactions in a batch from which on another batch may be sent behind it.
pub(crate) const PIPELINE_MIN: usize = 256;

/// Transactions that the conductor hands to an apply worker together.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) transactions: Vec<Arc<Transaction>>,
    /// Number of this worker's batches that had ended in [`Outcome::Retry`] when the batch was made. A batch that was handed
    /// out before the conductor learned of the last retry has been taken back.
    pub(crate) retries: u64,
}

/// An apply worker; it runs until the channel of batches is closed.
pub(crate) struct ApplyWorker {
    link: Link,
    prepared: HashMap<StatementKey, String>,
    names: u64,
    in_flight: VecDeque<InFlightBatch>,
    /// Number of Syncs that have not been answered.
    syncs: usize,
    retries: u64,
}

/// A batch that was sent and is not answered.
#[derive(Debug)]
struct InFlightBatch {
    batch: Batch,
    pending: PendingAnswers,
}

/// Key of a prepared statement.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum StatementKey {
    One(Shape),
    Many(BulkShape),
}

/// Requests that are not answered, up to the next Sync.
#[derive(Debug, Default)]
struct PendingAnswers {
    /// Number of rows that each statement must write, if known.
    rows: VecDeque<Option<u64>>,
    /// Statements that these requests prepare.
    parsed: Vec<StatementKey>,
}

const BEGIN_NAME: &str = "begin";
const COMMIT_NAME: &str = "commit";
const STAMPS_NAME: &str = "stamps";

/// Key of the lock that each worker's session holds on the database, in two parts.
const WORKERS_LOCK: [u32; 2] = [0x7374_6c70, 0x6170_706c];
/// Time to wait for sessions of earlier workers, in milliseconds; then they are terminated.
const EARLIER_WORKERS_TIMEOUT_MS: u32 = 5000;

/// Waits until no worker of an earlier replay has a session on this database: it may commit after its client is gone.
pub(crate) async fn wait_for_earlier_workers(link: &mut Link) -> Result<(), Error> {
    let [class, object] = WORKERS_LOCK;
    let lock = format!(
        "BEGIN; SET LOCAL lock_timeout = {EARLIER_WORKERS_TIMEOUT_MS}; SELECT pg_advisory_xact_lock({class}, {object}); COMMIT"
    );
    match link.query(&lock).await {
        Err(ServerError::Sql { code, .. }) if code == "55P03" => {}
        waited => return Ok(waited.map(drop)?),
    }
    link.query("ROLLBACK").await?;
    link.query(&format!(
        "SELECT pg_terminate_backend(l.pid, {EARLIER_WORKERS_TIMEOUT_MS}) FROM pg_locks l JOIN pg_database d ON d.oid = l.database \
         WHERE l.locktype = 'advisory' AND l.classid = {class} AND l.objid = {object} AND d.datname = current_database()"
    ))
    .await?;
    link.query(&lock).await.map(drop)?;
    Ok(())
}

impl ApplyWorker {
    /// Connects; with `search_path` the server finds the operators of the user's types.
    pub(crate) async fn connect(target: &Server, search_path: &str) -> Result<ApplyWorker, Error> {
        let settings = [
            ("synchronous_commit", "off"),
            ("search_path", search_path),
            // Planning again for each of many shapes is not worthwhile, because keys are unique.
            ("plan_cache_mode", "force_generic_plan"),
        ];
        let mut link = Link::connect(target, Purpose::Statements, &settings).await?;
        let [class, object] = WORKERS_LOCK;
        link.query(&format!("SELECT pg_advisory_lock_shared({class}, {object})")).await?;
        let stamps = "INSERT INTO stillpoint.applied (stamps) VALUES ($1::bigint[])";
        let fixed = [(BEGIN_NAME, "BEGIN"), (COMMIT_NAME, "COMMIT"), (STAMPS_NAME, stamps)];
        for (name, sql) in fixed {
            link.sender.put(|buffer| frontend::parse(name, sql, [], buffer))?;
        }
        frontend::sync(&mut link.sender.buffer);
        link.sender.flush().await?;
        loop {
            let frame = link.receiver.frame().await?;
            match frame.tag {
                b'E' => return Err(link.receiver.sql_error(&frame.body, "preparing an apply worker").into()),
                b'Z' => break,
                _ => {}
            }
        }
        Ok(ApplyWorker { link, prepared: HashMap::new(), names: 0, in_flight: VecDeque::new(), syncs: 0, retries: 0 })
    }

    /// Takes batches and reports each.
    pub(crate) async fn run(
        mut self,
        number: u32,
        batches: mpsc::Receiver<Batch>,
        reports: mpsc::Sender<(u32, Outcome)>,
        pace: Arc<Throttle>,
    ) {
        if let Err(error) = self.run_batches(number, batches, &reports, &pace).await {
            // If the receiver is gone, the error is not needed.
            let _ = reports.send((number, Outcome::Fatal(error))).await;
        }
    }

    async fn run_batches(
        &mut self,
        number: u32,
        mut batches: mpsc::Receiver<Batch>,
        reports: &mpsc::Sender<(u32, Outcome)>,
        pace: &Throttle,
    ) -> Result<(), Error> {
        // A batch that was taken, and the time before which it must not be sent.
        let mut next: Option<(Batch, Instant)> = None;
        loop {
            let Link { sender, receiver, .. } = &mut self.link;
            let due = next.as_ref().map_or_else(Instant::now, |(_, due)| *due);
            // Sends and receives at the same time: a batch may be larger than the buffers of both sides.
            let outcome = tokio::select! {
                biased;
                frame = receiver.frame(), if !self.in_flight.is_empty() || self.syncs > 0 => self.answer(&frame?).await?,
                sent = sender.flush(), if sender.has_unsent() => sent.map(|()| None)?,
                () = tokio::time::sleep_until(due), if next.is_some() => {
                    if let Some((batch, _)) = next.take() {
                        self.send(batch)?;
                    }
                    None
                }
                batch = batches.recv(), if next.is_none() => match batch {
                    None => return Ok(()),
                    Some(batch) if batch.retries < self.retries => None,
                    Some(batch) => {
                        match pace.charge(batch.transactions.len() as u64).await {
                            Some(due) => next = Some((batch, due)),
                            None => self.send(batch)?,
                        }
                        None
                    }
                },
            };
            let Some(outcome) = outcome else { continue };
            next.take_if(|(batch, _)| batch.retries < self.retries);
            if reports.send((number, outcome)).await.is_err() {
                return Ok(());
            }
        }
    }

    /// Buffers a batch as one transaction.
    fn send(&mut self, batch: Batch) -> Result<(), ServerError> {
        let mut pending = PendingAnswers::default();
        self.buffer_group(&batch.transactions, &mut pending)?;
        if batch.transactions.len() < PIPELINE_MIN {
            self.sync();
        } else {
            frontend::flush(&mut self.link.sender.buffer);
        }
        self.in_flight.push_back(InFlightBatch { batch, pending });
        Ok(())
    }

    fn sync(&mut self) {
        frontend::sync(&mut self.link.sender.buffer);
        self.syncs += 1;
    }

    /// Takes the next answer; returns an outcome if it was the last of a batch.
    async fn answer(&mut self, frame: &Frame) -> Result<Option<Outcome>, Error> {
        let receiver = &self.link.receiver;
        match (frame.tag, self.in_flight.front_mut()) {
            (b'C', Some(first)) => {
                first.pending.take_answer(frame)?;
                if !first.pending.rows.is_empty() {
                    return Ok(None);
                }
                let done = first.batch.transactions.len();
                self.in_flight.pop_front();
                if self.in_flight.is_empty() && self.syncs == 0 {
                    // A Sync lets the server process do here what it does between transactions, such as reporting its
                    // statistics.
                    self.sync();
                }
                Ok(Some(Outcome::Done(done)))
            }
            (b'E', Some(_)) => {
                let error = receiver.sql_error(&frame.body, "replaying transactions");
                self.replay_one_by_one(error.into()).await.map(Some)
            }
            (b'E', None) => Err(receiver.sql_error(&frame.body, "waiting for transactions to replay").into()),
            (b'Z', _) => {
                self.syncs = self.syncs.saturating_sub(1);
                Ok(None)
            }
            (b'1' | b'2' | b'n', _) => Ok(None),
            (tag, _) => Err(receiver.protocol(format!("`{}` in answer to a batch", char::from(tag))).into()),
        }
    }

    /// Handles a failure of the first batch under way, after which the server skips everything sent behind it: repeats the
    /// batch's transactions in turn, and then sends the later batches again.
    async fn replay_one_by_one(&mut self, error: Error) -> Result<Outcome, Error> {
        if self.syncs == 0 {
            self.sync();
        }
        self.flush_until_ready().await?;
        let mut failed = std::mem::take(&mut self.in_flight);
        // Statements that were to be prepared after the failure were not.
        failed
            .iter_mut()
            .flat_map(|each| each.pending.parsed.drain(..))
            .for_each(|shape| drop(self.prepared.remove(&shape)));
        self.link.query("ROLLBACK").await?;
        if !can_be_retried(&error) {
            return Err(error);
        }
        let Some(InFlightBatch { batch: Batch { transactions, .. }, .. }) = failed.pop_front() else {
            return Err(error);
        };
        let (committed, failure) =
            if transactions.len() == 1 { (0, Some(error)) } else { self.replay_each(&transactions).await? };
        if let Some(error) = failure {
            tracing::debug!(%error, "retrying a replayed transaction");
            self.retries += 1;
            return Ok(Outcome::Retry(committed));
        }
        for behind in failed {
            self.send(behind.batch)?;
        }
        Ok(Outcome::Done(committed))
    }

    /// Sends the buffered requests, and reads until all are answered; the contents of the answers are known.
    async fn flush_until_ready(&mut self) -> Result<(), ServerError> {
        let Link { sender, receiver, .. } = &mut self.link;
        let syncs = &mut self.syncs;
        let answers = async {
            while *syncs > 0 {
                *syncs -= usize::from(receiver.frame().await?.tag == b'Z');
            }
            Ok(())
        };
        let (sent, answered) = tokio::join!(sender.flush(), answers);
        sent.and(answered)
    }

    /// Sends transactions one after another under one Sync. Returns how many were committed, and the failure after them if a
    /// retry can resolve it; other failures are errors.
    async fn replay_each(&mut self, transactions: &[Arc<Transaction>]) -> Result<(usize, Option<Error>), Error> {
        let mut pending = PendingAnswers::default();
        for one in transactions {
            self.buffer_group(std::slice::from_ref(one), &mut pending)?;
        }
        frontend::sync(&mut self.link.sender.buffer);
        let Link { sender, receiver, .. } = &mut self.link;
        let (sent, answered) = tokio::join!(sender.flush(), read_answers(receiver, &mut pending, transactions.len()));
        sent?;
        let (committed, failure) = answered?;
        let Some(error) = failure else { return Ok((committed, None)) };
        pending.parsed.into_iter().for_each(|shape| drop(self.prepared.remove(&shape)));
        self.link.query("ROLLBACK").await?;
        if can_be_retried(&error) { Ok((committed, Some(error))) } else { Err(error) }
    }

    /// Buffers transactions that are to be committed together, with their stamps.
    fn buffer_group(&mut self, group: &[Arc<Transaction>], pending: &mut PendingAnswers) -> Result<(), ServerError> {
        self.bind(BEGIN_NAME, &[])?;
        pending.rows.push_back(None);
        let early = group.iter().any(|transaction| transaction.early);
        for step in steps(group) {
            self.buffer_step(&step, early, pending)?;
        }
        let mut stamps = String::with_capacity(2 + 21 * group.len());
        for transaction in group {
            stamps.push(if stamps.is_empty() { '{' } else { ',' });
            stamps.push_str(&transaction.stamp.to_string());
        }
        stamps.push('}');
        self.bind(STAMPS_NAME, &[&Value::Text(stamps.into())])?;
        pending.rows.push_back(Some(1));
        self.bind(COMMIT_NAME, &[])?;
        pending.rows.push_back(None);
        Ok(())
    }

    fn buffer_step(&mut self, step: &Step<'_>, early: bool, pending: &mut PendingAnswers) -> Result<(), ServerError> {
        match step {
            Step::One(write) => {
                let (shape, parameters) = (write.shape().map(StatementKey::One), write.parameters());
                let sure = !matches!(write, Write::Delete { table, .. } if early && table.can_upsert());
                // TRUNCATE reports no number.
                pending.rows.push_back((shape.is_some() && sure).then_some(1));
                self.execute(shape, || write.sql(), &parameters, pending)
            }
            Step::Many(many) => {
                pending.rows.push_back(many.has_known_row_count(early).then_some(many.rows));
                let parameters: Vec<&Value> = many.arrays.iter().collect();
                self.execute(Some(StatementKey::Many(many.shape.clone())), || many.sql(), &parameters, pending)
            }
        }
    }

    fn execute(
        &mut self,
        shape: Option<StatementKey>,
        sql: impl Fn() -> String,
        parameters: &[&Value],
        pending: &mut PendingAnswers,
    ) -> Result<(), ServerError> {
        let Some(shape) = shape else {
            self.link.sender.put(|buffer| frontend::parse("", &sql(), [], buffer))?;
            return self.bind("", parameters);
        };
        if let Some(name) = self.prepared.get(&shape) {
            let name = name.clone();
            return self.bind(&name, parameters);
        }
        self.names += 1;
        let name = format!("w{}", self.names);
        self.link.sender.put(|buffer| frontend::parse(&name, &sql(), [], buffer))?;
        self.prepared.insert(shape.clone(), name.clone());
        pending.parsed.push(shape);
        self.bind(&name, parameters)
    }

    fn bind(&mut self, statement: &str, parameters: &[&Value]) -> Result<(), ServerError> {
        self.link.sender.put(|buffer| execute(statement, parameters, buffer))
    }
}

impl PendingAnswers {
    /// Takes the answer to a statement.
    fn take_answer(&mut self, frame: &Frame) -> Result<(), Error> {
        let wanted = self.rows.pop_front().flatten();
        if wanted.is_some() && wanted != rows_written(frame) {
            let tag = String::from_utf8_lossy(&frame.body);
            let tag = tag.trim_end_matches('\0');
            // A blind write that finds no row: the two sides differ.
            return Err(Error::Differs(vec![format!(
                "a row that a replayed change did not find on the target (`{tag}`)"
            )]));
        }
        Ok(())
    }
}

/// Returns true if a retry can help, once everything before the transaction is applied.
pub(super) fn can_be_retried(error: &Error) -> bool {
    matches!(error.sqlstate(), Some("23505" | "23P01" | "40P01" | "40001" | "55P03"))
}

/// Reads the answers up to a Sync; returns how many transactions were committed, and the failure if there was one.
async fn read_answers(
    receiver: &mut Receiver,
    pending: &mut PendingAnswers,
    expected: usize,
) -> Result<(usize, Option<Error>), Error> {
    let (mut committed, mut failure, mut missed) = (0, None, Ok(()));
    loop {
        let frame = receiver.frame().await?;
        match frame.tag {
            b'C' => {
                committed += usize::from(&frame.body[..] == b"COMMIT\0");
                missed = missed.and(pending.take_answer(&frame));
            }
            b'E' => failure = Some(receiver.sql_error(&frame.body, "replaying a transaction").into()),
            b'Z' => break,
            b'1' | b'2' | b'n' => {}
            tag => return Err(receiver.protocol(format!("`{}` in answer to a batch", char::from(tag))).into()),
        }
    }
    missed?;
    if failure.is_none() && committed != expected {
        return Err(receiver.protocol(format!("{committed} commits of {expected}")).into());
    }
    Ok((committed, failure))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transaction::Table;
    use crate::transaction::tests::table_def;
    use std::time::Duration;
    use stillpoint_testing::postgresql::{Cluster, available};

    /// An apply worker at a server with a table `t` that has a unique index unknown to the source, so that the target rejects
    /// some rows.
    struct Target {
        cluster: Cluster,
        table: Arc<Table>,
        batches: mpsc::Sender<Batch>,
        reports: mpsc::Receiver<(u32, Outcome)>,
        stamp: u64,
    }

    impl Target {
        async fn with(rows: &str) -> Target {
            let cluster = Cluster::start(&[]);
            cluster.sql("postgres", "CREATE DATABASE shop");
            cluster.sql("shop", "CREATE TABLE t (id text PRIMARY KEY, mail text UNIQUE, note text)");
            cluster.sql("shop", rows);
            let target = Server::parse("target", &cluster.conninfo("shop"), None).unwrap();
            crate::replication_objects::install(
                &mut Link::connect(&target, Purpose::Statements, &[]).await.unwrap(),
                0,
            )
            .await
            .unwrap();
            let worker = ApplyWorker::connect(&target, "pg_catalog").await.unwrap();
            let ((batches, receiver), (report, reports)) = (mpsc::channel(4), mpsc::channel(4));
            tokio::spawn(worker.run(0, receiver, report, Arc::new(Throttle::unlimited())));
            let mut def = table_def(true);
            def.uniques.clear();
            let table = Arc::new(Table { key: def.key.clone(), def, version: 0 });
            Target { cluster, table, batches, reports, stamp: 0 }
        }

        fn transaction(&mut self, write: impl Fn(Arc<Table>) -> Write) -> Arc<Transaction> {
            self.stamp += 1;
            let writes = vec![write(Arc::clone(&self.table))];
            Arc::new(Transaction { stamp: self.stamp, xid: 1, writes, bytes: 1, told: None, early: false })
        }

        fn insert(&mut self, mail: &str) -> Arc<Transaction> {
            let new = row(&format!("new {}", self.stamp + 1), mail);
            self.transaction(|table| Write::Insert { table, new: new.clone() })
        }

        fn update(&mut self, id: &str, mail: &str) -> Arc<Transaction> {
            self.transaction(|table| Write::Update { table, old: None, new: row(id, mail) })
        }

        /// Makes a batch long enough that others are sent behind it.
        fn inserts(&mut self) -> Vec<Arc<Transaction>> {
            (0..PIPELINE_MIN).map(|_| self.insert(&format!("mail {}", self.stamp))).collect()
        }

        async fn send(&self, transactions: &[Arc<Transaction>], retries: u64) {
            self.batches.send(Batch { transactions: transactions.to_vec(), retries }).await.unwrap();
        }

        async fn report(&mut self) -> Outcome {
            let report = tokio::time::timeout(Duration::from_secs(120), self.reports.recv()).await;
            report.expect("a report").expect("a player").1
        }

        /// Asserts that each stamp and each row is present exactly once.
        fn is_complete(&self, rows: u64) {
            let stamps = "SELECT count(*) || ' ' || count(DISTINCT s) FROM stillpoint.applied, unnest(stamps) s";
            assert_eq!(self.cluster.sql("shop", stamps), format!("{0} {0}", self.stamp));
            assert_eq!(self.cluster.sql("shop", "SELECT count(*) FROM t"), rows.to_string());
        }
    }

    fn row(id: &str, mail: &str) -> Vec<Value> {
        [id, mail, "x"].into_iter().map(|text| Value::Text(text.to_owned().into())).collect()
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_behind_a_failure_goes_back() {
        if !available() {
            return;
        }
        let mut target = Target::with("INSERT INTO t VALUES ('strange', 'taken', 'x')").await;
        let (first, mut second, third) = (target.inserts(), target.inserts(), target.inserts());
        let Write::Insert { new, .. } = &second[9].writes[0] else { panic!("an insert") };
        let Value::Text(id) = &new[0] else { panic!("a text") };
        let new = row(std::str::from_utf8(id).unwrap(), "taken");
        let writes = vec![Write::Insert { table: Arc::clone(&target.table), new }];
        second[9] =
            Arc::new(Transaction { stamp: second[9].stamp, xid: 1, writes, bytes: 1, told: None, early: false });
        for batch in [&first, &second, &third] {
            target.send(batch, 0).await;
        }
        let outcome = target.report().await;
        assert!(matches!(outcome, Outcome::Done(PIPELINE_MIN)), "{outcome:?}");
        let outcome = target.report().await;
        assert!(matches!(outcome, Outcome::Retry(9)), "{outcome:?}");
        target.cluster.sql("shop", "DELETE FROM t WHERE id = 'strange'");
        target.send(&second[9..], 1).await;
        target.send(&third, 1).await;
        for expected in [PIPELINE_MIN - 9, PIPELINE_MIN] {
            let outcome = target.report().await;
            assert!(matches!(outcome, Outcome::Done(done) if done == expected), "{outcome:?}");
        }
        target.is_complete(3 * PIPELINE_MIN as u64);
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_fails_as_a_whole_is_repeated_in_turn() {
        if !available() {
            return;
        }
        let mut target = Target::with("INSERT INTO t VALUES ('1', 'a', 'x'), ('2', 'b', 'x')").await;
        // In one statement, row 1 is written first, and conflicts with the value that row 2 still has.
        let mut first = vec![target.update("2", "c"), target.update("1", "b")];
        first.extend(target.inserts());
        let second = target.inserts();
        for batch in [&first, &second] {
            target.send(batch, 0).await;
        }
        for expected in [PIPELINE_MIN + 2, PIPELINE_MIN] {
            let outcome = target.report().await;
            assert!(matches!(outcome, Outcome::Done(done) if done == expected), "{outcome:?}");
        }
        target.is_complete(2 * PIPELINE_MIN as u64 + 2);
        assert_eq!(target.cluster.sql("shop", "SELECT string_agg(mail, ' ' ORDER BY id) FROM t WHERE id < '3'"), "b c");
    }
}

//! Clients of the load: each is a task with its own connection and its own schedule.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use stillpoint_host::clock::since_1970;
use stillpoint_host::file::write_named;
use tokio_postgres::Config;

use super::recorder::Recorder;
use super::session::{Failure, Session, is_worth_retrying, retry_pause};
use super::{
    PostgresFinished, PostgresPlan, ServerAddress, Verdict, Work, consistency_workload, ordering, postgres_error,
};
use crate::clock::{now_ns, ns};
use crate::error::{Error, Result};
use crate::history::{self, History, Operation, Transaction};
use crate::load::{Counters, Finished, Sink, Weights};
use crate::record::{Header, MarkKind, Outcome, Sample};
use stillpoint_base::Random;

/// Pause between attempts to reconnect.
const RECONNECT_INTERVAL: Duration = Duration::from_millis(20);
/// Interval at which the record is written to its file.
const FLUSH_INTERVAL: Duration = Duration::from_secs(1);

type Shared = Rc<RefCell<Recorder>>;

pub(super) async fn drive(
    plan: PostgresPlan,
    config: Config,
    counters: Arc<Counters>,
    ready: SyncSender<Header>,
) -> Result<PostgresFinished> {
    let target = ServerAddress(&config).to_string();
    let mut sessions = Vec::new();
    for _ in 0..plan.clients {
        let session = Session::open(&config).await;
        sessions.push(session.map_err(|source| postgres_error(&target, "connecting", source))?);
        counters.opened();
    }
    let before = match plan.work {
        Work::Checked { .. } => Some(consistency_workload::read_contents(&mut sessions[0]).await),
        Work::Ordering { .. } => None,
    };
    let before = before.transpose().map_err(|source| postgres_error(&target, "reading the tables", source))?;
    let header = header(&plan, target.clone());
    let sink = plan.record.as_deref().map(|path| Sink::create(path, &header)).transpose()?;
    let recorder = Rc::new(RefCell::new(Recorder::new(&header, Arc::clone(&counters), sink)));
    let _ = ready.send(header.clone());

    let plan = Rc::new(plan);
    let lists = Rc::new(consistency_workload::Lists::new(before.as_ref()));
    let start = |(number, session)| {
        let client = Client {
            number,
            // Drawn, not counted: seeds at the generator's own increment would give the same sequence, shifted.
            random: Random::new(Random::new(plan.seed ^ u64::from(number) << 32).number()),
            session: Some(session),
            config: config.clone(),
            plan: Rc::clone(&plan),
            recorder: Rc::clone(&recorder),
            lists: Rc::clone(&lists),
            weights: plan.weights(),
            started_ns: header.started_ns,
        };
        tokio::task::spawn_local(client.run())
    };
    let tasks: Vec<_> = (0u32..).zip(sessions).map(start).collect();
    let flusher = tokio::task::spawn_local(flush(Rc::clone(&recorder)));
    for task in tasks {
        task.await.map_err(|error| Error::Panicked(error.to_string()))?;
    }
    flusher.abort();
    let _ = flusher.await;
    drop(lists);
    let recorder = Rc::into_inner(recorder).ok_or_else(|| Error::Panicked("a client is left".into()))?.into_inner();
    finish(&plan, &config, recorder.into_finished(header)?, before).await
}

async fn flush(recorder: Shared) {
    loop {
        tokio::time::sleep(FLUSH_INTERVAL).await;
        recorder.borrow_mut().flush();
    }
}

fn header(plan: &PostgresPlan, target: String) -> Header {
    let (Work::Ordering { items: keys } | Work::Checked { rows: keys, .. }) = plan.work;
    Header {
        protocol: "postgres".into(),
        target,
        started_ns: now_ns(),
        started_unix_s: since_1970().as_secs(),
        kinds: plan.weights().names().to_vec(),
        rate: f64::from(plan.clients) / plan.think.as_secs_f64().max(1e-6),
        arrivals: "poisson".into(),
        connections: plan.clients,
        pipeline: 1,
        keys: keys.into(),
        ..Header::default()
    }
}

impl Recorder {
    fn into_finished(mut self, header: Header) -> Result<(Finished, u64, Vec<Transaction>)> {
        self.end.ended_ns = now_ns();
        if let Some(sink) = self.sink.take() {
            sink.end(&self.end)?;
        }
        if let Some(error) = self.broken {
            return Err(error);
        }
        let summary = self.builder.finish(self.end.ended_ns);
        let finished = Finished { header, summary, end: self.end, complaints: self.complaints };
        Ok((finished, self.retries, self.history))
    }
}

/// Reads checked data at the end, and returns the verdict.
async fn finish(
    plan: &PostgresPlan,
    config: &Config,
    (finished, retries, transactions): (Finished, u64, Vec<Transaction>),
    before: Option<history::Final>,
) -> Result<PostgresFinished> {
    let Some(before) = before else { return Ok(PostgresFinished { finished, retries, verdict: None }) };
    let fail = |source| postgres_error(&finished.header.target, "reading the tables", source);
    let mut session = Session::open(config).await.map_err(fail)?;
    let last = consistency_workload::read_contents(&mut session).await.map_err(fail)?;
    let history = consistency_workload::history(before, transactions, last);
    if let Some(path) = &plan.history {
        write_named(path, history.to_lines().as_bytes()).map_err(Error::file("write", path))?;
    }
    let verdict = verdict(&history, plan.isolation.level());
    Ok(PostgresFinished { finished, retries, verdict: Some(verdict) })
}

/// Checks a history.
pub(super) fn verdict(history: &History, level: history::Level) -> Verdict {
    let count = |outcome| history.transactions.iter().filter(|transaction| transaction.outcome == outcome).count();
    Verdict {
        transactions: history.transactions.len(),
        committed: count(history::Outcome::Committed),
        unknown: count(history::Outcome::Unknown),
        anomalies: history::check(history, level),
    }
}

struct Client {
    number: u32,
    random: Random,
    session: Option<Session>,
    config: Config,
    plan: Rc<PostgresPlan>,
    recorder: Shared,
    lists: Rc<consistency_workload::Lists>,
    weights: Weights,
    started_ns: u64,
}

impl Client {
    async fn run(mut self) {
        let end_ns = self.started_ns + ns(self.plan.duration);
        let mut due_ns = self.started_ns;
        loop {
            due_ns += (-self.random.unit().ln() * ns(self.plan.think) as f64) as u64;
            if due_ns >= end_ns || !self.sleep_until(due_ns).await {
                return;
            }
            self.recorder.borrow_mut().due(due_ns);
            let kind = self.weights.draw(&mut self.random);
            // Lateness is the client's own delay in noticing, without the delay of its last answer.
            let late_ns = now_ns().saturating_sub(due_ns);
            let outcome = self.transaction(kind).await;
            let latency_ns = now_ns() - due_ns;
            let late_us = if late_ns > 1_000_000_000 { 0 } else { (late_ns / 1_000) as u32 };
            let sample = Sample { scheduled_ns: due_ns, latency_ns, late_us, connection: self.number, kind, outcome };
            self.recorder.borrow_mut().ended(&sample);
        }
    }

    /// Sleeps; returns false if the load was stopped meanwhile.
    async fn sleep_until(&self, due_ns: u64) -> bool {
        let stopped = || self.recorder.borrow().counters.stop.load(std::sync::atomic::Ordering::Relaxed);
        loop {
            let left = Duration::from_nanos(due_ns.saturating_sub(now_ns()));
            if left.is_zero() || stopped() {
                return !stopped();
            }
            tokio::time::sleep(left.min(Duration::from_millis(100))).await;
        }
    }

    /// Runs one transaction of this kind, with retries until the plan's time-out.
    async fn transaction(&mut self, kind: u8) -> Outcome {
        let (mut attempts, give_up_ns) = (0, now_ns() + ns(self.plan.timeout));
        // A retry is the same transaction.
        let seed = self.random.number();
        loop {
            if let Err(outcome) = self.connect().await {
                return outcome;
            }
            let (text, outcome) = match self.attempt(kind, seed).await {
                Ok(()) => return Outcome::Ok,
                Err(None) => {
                    self.disconnect("no answer in time");
                    (format!("no answer in {} s", self.plan.timeout.as_secs_f64()), Outcome::Timeout)
                }
                Err(Some(Failure::Lost(error, _))) => {
                    self.disconnect(&error.to_string());
                    (error_text(&error), Outcome::Lost)
                }
                Err(Some(Failure::RolledBack(error))) if is_worth_retrying(&error) && now_ns() < give_up_ns => {
                    attempts += 1;
                    self.recorder.borrow_mut().retries += 1;
                    let pause = retry_pause(attempts, &mut self.random);
                    // The runtime's clock ticks in milliseconds: a short pause is longer than none.
                    if !pause.is_zero() {
                        tokio::time::sleep(pause).await;
                    }
                    continue;
                }
                Err(Some(Failure::RolledBack(error))) => (error_text(&error), Outcome::ErrorReply),
            };
            self.recorder.borrow_mut().describe_error(self.number, outcome, text);
            return outcome;
        }
    }

    fn disconnect(&mut self, why: &str) {
        self.session = None;
        self.recorder.borrow_mut().mark(self.number, MarkKind::Dropped, why.to_owned());
    }

    async fn connect(&mut self) -> std::result::Result<(), Outcome> {
        let give_up_ns = now_ns() + ns(self.plan.timeout);
        while self.session.is_none() {
            match tokio::time::timeout(self.plan.timeout, Session::open(&self.config)).await {
                Ok(Ok(session)) => {
                    self.session = Some(session);
                    self.recorder.borrow_mut().mark(self.number, MarkKind::Reconnected, "connected again".into());
                }
                _ if now_ns() > give_up_ns => return Err(Outcome::Timeout),
                _ => {
                    self.recorder.borrow_mut().reconnect_failed();
                    tokio::time::sleep(RECONNECT_INTERVAL).await;
                }
            }
        }
        Ok(())
    }

    /// Makes one attempt, and adds it to the history; `None` if it took too long.
    async fn attempt(&mut self, kind: u8, seed: u64) -> std::result::Result<(), Option<Failure>> {
        let Some(session) = self.session.as_mut() else { return Ok(()) };
        let began_ns = now_ns();
        let (plan, number) = (Rc::clone(&self.plan), self.number);
        let mut random = Random::new(seed);
        let (mut done, mut committing) = (Vec::new(), false);
        let work = async {
            session.begin(plan.isolation.begin()).await?;
            let worked = match &plan.work {
                Work::Ordering { items } => {
                    let browser = ordering::Browser { number, items: *items };
                    browser.interact(kind, session, &mut random).await
                }
                Work::Checked { mix, rows } => {
                    let kind = &mix.0[usize::from(kind)].0;
                    self.lists.work(kind, *rows, session, &mut random, &mut done).await
                }
            };
            if let Err(error) = worked {
                return Err(session.failed(error).await);
            }
            committing = true;
            session.commit().await
        };
        let ended = tokio::time::timeout(plan.timeout, work).await;
        let outcome = match &ended {
            Ok(Ok(())) => history::Outcome::Committed,
            Ok(Err(Failure::Lost(_, true))) => history::Outcome::Unknown,
            Err(_) if committing => history::Outcome::Unknown,
            _ => history::Outcome::Aborted,
        };
        if matches!(plan.work, Work::Checked { .. }) {
            let transaction = Transaction { client: number, began_ns, ended_ns: now_ns(), outcome, operations: done };
            self.recorder.borrow_mut().history.push(transaction);
        }
        match ended {
            Ok(done) => done.map_err(Some),
            Err(_) => Err(None),
        }
    }
}

/// Returns the server's message, which tokio-postgres keeps as the source of its own error.
fn error_text(error: &tokio_postgres::Error) -> String {
    error.as_db_error().map_or_else(|| error.to_string(), |db| format!("{}: {}", db.code().code(), db.message()))
}

/// Operations that a transaction of the history has executed so far.
pub(super) type Operations = Vec<Operation>;

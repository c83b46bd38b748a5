//! A player: one connection to the target that sends what it is given, operation by operation, and waits for each answer
//! (Algorithm 5 of the paper).

use super::record::Transaction;
use std::sync::Arc;
use stillpoint_migrate_replay::mapping::{End, Kind, map};
use stillpoint_migrate_replay::{Mode, Step};
use tokio::sync::mpsc;
use tokio_postgres::{Client, NoTls};

const BEGIN: &str = "BEGIN ISOLATION LEVEL REPEATABLE READ";
/// Takes the snapshot where the client's first operation wrote: a write might wait for one whose commit it must precede.
const LOOK: &str = "SELECT 1";

/// A part of a transaction to be sent.
pub(super) struct Job {
    pub(super) step: Step,
    pub(super) transaction: Arc<Transaction>,
}

/// Who has done it, and why not, as an SQLSTATE; the transaction is rolled back then.
pub(super) type Report = (u32, Result<(), String>);

/// Connects a player; jobs sent to it are reported one by one. It ends when nobody can send it any.
pub(super) async fn start(
    conninfo: &str,
    settings: &str,
    mode: Mode,
    number: u32,
    reports: mpsc::UnboundedSender<Report>,
) -> mpsc::UnboundedSender<Job> {
    let (client, connection) = tokio_postgres::connect(conninfo, NoTls).await.expect("connect a player");
    tokio::spawn(connection);
    client.batch_execute(settings).await.expect("settings of a player");
    let (jobs, mut given) = mpsc::unbounded_channel::<Job>();
    tokio::spawn(async move {
        while let Some(job) = given.recv().await {
            let texts = texts(mode, &job);
            let done = play(&client, &texts).await;
            if reports.send((number, done)).is_err() {
                return;
            }
        }
    });
    jobs
}

async fn play(client: &Client, texts: &[&str]) -> Result<(), String> {
    for text in texts {
        if let Err(error) = client.simple_query(text).await {
            let Some(code) = error.code().map(|code| code.code().to_owned()) else { panic!("{text}: {error:?}") };
            client.batch_execute("ROLLBACK").await.expect("roll back");
            return Err(code);
        }
    }
    Ok(())
}

/// What is sent, one answer after another.
fn texts<'a>(mode: Mode, job: &'a Job) -> Vec<&'a str> {
    let Transaction { operations, rows, .. } = &*job.transaction;
    if mode == Mode::Rows {
        let rows = rows.iter().map(String::as_str);
        return std::iter::once(BEGIN).chain(rows).chain(["COMMIT"]).collect();
    }
    let kind = |writes| if writes { Kind::Write } else { Kind::Read };
    let operations: Vec<_> =
        operations.iter().map(|operation| (kind(operation.writes), operation.text.as_str())).collect();
    let operations = map(operations, End::Committed, mode != Mode::BAll);
    let text = |(_, text): &(Kind, &'a str)| *text;
    let reads_first = operations.first().is_some_and(|(kind, _)| *kind == Kind::Read);
    match job.step {
        Step::Whole => std::iter::once(BEGIN).chain(operations.iter().map(text)).chain(["COMMIT"]).collect(),
        Step::FirstRead => vec![BEGIN, if reads_first { text(&operations[0]) } else { LOOK }],
        Step::Writes => operations.iter().skip(usize::from(reads_first)).map(text).collect(),
        Step::Commit => vec!["COMMIT"],
    }
}

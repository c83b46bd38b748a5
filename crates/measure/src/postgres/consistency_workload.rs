//! Counters, transfers and append lists, and their contents at the end.

use std::cell::Cell;
use std::collections::BTreeMap;

use tokio_postgres::Error;

use super::clients::Operations;
use super::session::Session;
use crate::history::{Final, History, Operation, Transaction};
use stillpoint_base::Random;

/// Kinds of transactions in the mix.
pub(super) const KINDS: [&str; 3] = ["counter", "transfer", "list"];

/// Initial balance of an account.
const INITIAL_BALANCE: i64 = 1_000;
/// Number of lists that are appended to at the same time.
const LISTS: u64 = 6;
/// Appends after which clients use new lists, so that reads stay short.
const APPENDS_PER_LISTS: u64 = 40 * LISTS;

pub(super) fn tables(rows: u32) -> Vec<String> {
    vec![
        "DROP TABLE IF EXISTS sp_counter, sp_account, sp_list".into(),
        "CREATE TABLE sp_counter (id bigint PRIMARY KEY, value bigint NOT NULL)".into(),
        "CREATE TABLE sp_account (id bigint PRIMARY KEY, balance bigint NOT NULL)".into(),
        "CREATE TABLE sp_list (id bigint PRIMARY KEY, numbers bigint[] NOT NULL)".into(),
        format!("INSERT INTO sp_counter SELECT i, 0 FROM generate_series(1, {rows}) i"),
        format!("INSERT INTO sp_account SELECT i, {INITIAL_BALANCE} FROM generate_series(1, {rows}) i"),
    ]
}

/// Reads all counters, accounts and lists.
pub(super) async fn read_contents(session: &mut Session) -> Result<Final, Error> {
    let mut pairs = BTreeMap::new();
    for (name, text) in
        [("counter", "SELECT id, value FROM sp_counter"), ("account", "SELECT id, balance FROM sp_account")]
    {
        let rows = session.query(text, &[]).await?;
        let values: BTreeMap<u64, i64> = rows.iter().map(|row| (row.get::<_, i64>(0) as u64, row.get(1))).collect();
        pairs.insert(name, values);
    }
    let rows = session.query("SELECT id, numbers FROM sp_list", &[]).await?;
    let lists = rows.iter().map(|row| (row.get::<_, i64>(0) as u64, numbers(row.get(1))));
    Ok(Final {
        lists: lists.collect(),
        counters: pairs.remove("counter").unwrap_or_default(),
        accounts: pairs.remove("account").unwrap_or_default(),
    })
}

fn numbers(values: Vec<i64>) -> Vec<u64> {
    values.into_iter().map(|value| value as u64).collect()
}

/// Makes the history: counters relative to their values before, without lists of earlier loads.
pub(super) fn history(before: Final, mut transactions: Vec<Transaction>, mut last: Final) -> History {
    for (counter, value) in &mut last.counters {
        *value -= before.counters.get(counter).copied().unwrap_or(0);
    }
    for operation in transactions.iter_mut().flat_map(|transaction| &mut transaction.operations) {
        if let Operation::Increment { counter, became } = operation {
            *became -= before.counters.get(counter).copied().unwrap_or(0);
        }
    }
    last.lists.retain(|list, _| !before.lists.contains_key(list));
    transactions.sort_by_key(|transaction| transaction.began_ns);
    History { transactions, accounts: before.accounts, last: Some(last) }
}

/// Lists in use, and numbers used so far.
pub(super) struct Lists {
    first: u64,
    appended: Cell<u64>,
}

impl Lists {
    /// Starts after the existing lists.
    pub(super) fn new(before: Option<&Final>) -> Lists {
        let last = before.and_then(|before| before.lists.keys().max().copied()).unwrap_or(0);
        Lists { first: last + 1, appended: Cell::new(0) }
    }

    /// Runs the statements of one transaction; `done` holds its operations, also when it fails.
    pub(super) async fn work(
        &self,
        kind: &str,
        rows: u32,
        session: &mut Session,
        random: &mut Random,
        done: &mut Operations,
    ) -> Result<(), Error> {
        match kind {
            "counter" => increment(rows, session, random, done).await,
            "transfer" => transfer(rows, session, random, done).await,
            _ => self.append_and_read(session, random, done).await,
        }
    }

    async fn append_and_read(
        &self,
        session: &mut Session,
        random: &mut Random,
        done: &mut Operations,
    ) -> Result<(), Error> {
        let epoch = self.appended.get() / APPENDS_PER_LISTS;
        let list = |random: &mut Random| self.first + epoch * LISTS + random.below(LISTS);
        let mut steps: Vec<(u64, bool)> = (0..=random.below(4)).map(|_| (list(random), random.below(2) == 0)).collect();
        // In a fixed order: a deadlock costs the server's deadlock time-out, and gives no information about isolation.
        steps.sort_by_key(|(list, _)| *list);
        for (list, read) in steps {
            let id = list as i64;
            if read {
                let rows = session.query("SELECT numbers FROM sp_list WHERE id = $1", &[&id]).await?;
                let values = rows.first().map(|row| numbers(row.get(0))).unwrap_or_default();
                done.push(Operation::ReadList { list, values });
                continue;
            }
            // A number is used only once, also when its transaction is retried.
            self.appended.set(self.appended.get() + 1);
            let value = self.appended.get();
            // Recorded before it is sent: without an answer it may have been executed.
            done.push(Operation::Append { list, value });
            let text = "INSERT INTO sp_list VALUES ($1, ARRAY[$2::bigint]) \
                        ON CONFLICT (id) DO UPDATE SET numbers = sp_list.numbers || excluded.numbers";
            session.query(text, &[&id, &(value as i64)]).await?;
        }
        Ok(())
    }
}

async fn increment(rows: u32, session: &mut Session, random: &mut Random, done: &mut Operations) -> Result<(), Error> {
    let counter = 1 + random.below(rows.into());
    let text = "UPDATE sp_counter SET value = value + 1 WHERE id = $1 RETURNING value";
    let answer = session.query(text, &[&(counter as i64)]).await?;
    // A missing counter gets no value: the check counts it as lost.
    let became = answer.first().map_or(i64::MIN, |row| row.get(0));
    done.push(Operation::Increment { counter, became });
    Ok(())
}

async fn transfer(rows: u32, session: &mut Session, random: &mut Random, done: &mut Operations) -> Result<(), Error> {
    if random.below(4) == 0 {
        let answer = session.query("SELECT sum(balance)::bigint FROM sp_account", &[]).await?;
        let sum = answer.first().map_or(0, |row| row.get::<_, Option<i64>>(0).unwrap_or(0));
        done.push(Operation::ReadSum { sum });
        return Ok(());
    }
    let from = 1 + random.below(rows.into());
    let to = 1 + (from + random.below(u64::from(rows) - 1)) % u64::from(rows);
    let amount = 1 + random.below(20) as i64;
    done.push(Operation::Transfer { from, to, amount });
    let text = "UPDATE sp_account SET balance = balance + $2 WHERE id = $1";
    let mut changes = [(from as i64, -amount), (to as i64, amount)];
    changes.sort_unstable();
    for (account, change) in &changes {
        session.query(text, &[account, change]).await?;
    }
    Ok(())
}

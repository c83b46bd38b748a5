//! A session that writes all the time and uses what it holds: prepared statements of both kinds, settings, a role, a
//! channel, advisory locks. Sessions form a ring, and each notifies the next one of its transactions.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio_postgres::{AsyncMessage, Client, Error, NoTls, Statement};

const ACCOUNTS: i32 = 16;
/// Last payload on each channel.
const END_PAYLOAD: &str = "end";
/// Time until all notifications must have arrived.
const NOTIFICATION_TIMEOUT: Duration = Duration::from_secs(30);

/// Tables that sessions write to; the role `teller` must exist.
pub const TABLES: &str = "
    CREATE SCHEMA bank;
    CREATE TABLE bank.account (id int PRIMARY KEY, balance bigint NOT NULL);
    INSERT INTO bank.account SELECT i, 0 FROM generate_series(0, 15) i;
    CREATE TABLE bank.history (session int, n int, account int, delta int, PRIMARY KEY (session, n));
    GRANT USAGE ON SCHEMA bank TO teller;
    GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA bank TO teller;
";

/// Commits in [`TABLES`], and the number of different ones.
pub const COMMITS: &str = "SELECT count(*), count(DISTINCT (session, n)) FROM bank.history";

/// Number of accounts of [`TABLES`] whose balance differs from their history.
pub const WRONG_BALANCES: &str = "SELECT count(*) FROM bank.account a WHERE balance <> \
    (SELECT coalesce(sum(delta), 0) FROM bank.history h WHERE h.account = a.id)";

/// Channel and payload, in the order of arrival.
#[derive(Debug, Clone, Default)]
pub struct Notifications(Arc<Mutex<Vec<(String, String)>>>);

impl Notifications {
    fn on(&self, channel: &str) -> Vec<String> {
        let heard = self.0.lock().expect("no thread panics with it");
        heard.iter().filter(|(on, _)| on == channel).map(|(_, what)| what.clone()).collect()
    }
}

/// Opens a session, and records its notifications.
///
/// # Errors
/// Fails if the server or the network does.
pub async fn connect(conninfo: &str) -> Result<(Client, Notifications), Error> {
    let (client, mut connection) = tokio_postgres::connect(conninfo, NoTls).await?;
    let heard = Notifications::default();
    let hears = heard.clone();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(told) = message {
                hears
                    .0
                    .lock()
                    .expect("no thread panics with it")
                    .push((told.channel().to_owned(), told.payload().to_owned()));
            }
        }
    });
    Ok((client, heard))
}

/// A session that writes, with the state that it holds.
pub struct RingSession {
    /// Place in the ring.
    pub number: usize,
    of: usize,
    client: Client,
    heard: Notifications,
    insert: Statement,
    tell: Statement,
    look: Statement,
    /// Number of its committed transactions.
    pub commits: i32,
    /// Longest time of a transaction.
    pub longest: Duration,
}

impl RingSession {
    /// Opens the session in place `number` of a ring of `of`, and sets up its whole state.
    ///
    /// # Errors
    /// Fails if the server or the network does.
    pub async fn open(conninfo: &str, number: usize, of: usize) -> Result<RingSession, Error> {
        let (client, heard) = connect(conninfo).await?;
        let holds = format!(
            "SET search_path = bank; SET work_mem = '{}kB'; SET TimeZone = 'Asia/Tokyo'; \
             SELECT set_config('app.teller', '{number}', false); LISTEN \"{}\"; \
             SELECT pg_advisory_lock(1, {number}); SELECT pg_advisory_lock_shared(2, 0); \
             PREPARE pay(int, int) AS UPDATE account SET balance = balance + $2 WHERE id = $1; SET ROLE teller",
            4000 + number,
            channel(number)
        );
        client.batch_execute(&holds).await?;
        let insert = client.prepare("INSERT INTO history VALUES ($1, $2, $3, $4)").await?;
        let tell = client.prepare("SELECT pg_notify($1, $2)").await?;
        let look = "SELECT concat_ws(' ', current_setting('app.teller'), current_setting('work_mem'), \
                    current_setting('TimeZone'), current_user, current_setting('search_path'))";
        let look = client.prepare(look).await?;
        Ok(RingSession { number, of, client, heard, insert, tell, look, commits: 0, longest: Duration::ZERO })
    }

    /// Executes one transaction, which uses the session's state and notifies the next session.
    ///
    /// # Errors
    /// Fails with a text about the error, or about the state that was lost.
    pub async fn transact(&mut self) -> Result<(), String> {
        let n = self.commits + 1;
        let (account, delta, begun) = ((n * 7 + self.number as i32) % ACCOUNTS, n % 11 - 5, Instant::now());
        let holds =
            self.write(n, account, delta).await.map_err(|error| format!("session {}: {error:?}", self.number))?;
        if holds != format!("{} {}kB Asia/Tokyo teller bank", self.number, 4000 + self.number) {
            return Err(format!("session {} holds {holds}", self.number));
        }
        self.commits = n;
        self.longest = self.longest.max(begun.elapsed());
        Ok(())
    }

    /// Executes the transaction; returns the state that the session holds.
    async fn write(&self, n: i32, account: i32, delta: i32) -> Result<String, Error> {
        self.client.batch_execute("BEGIN").await?;
        let holds = self.client.query_one(&self.look, &[]).await?.get(0);
        self.client.execute(&self.insert, &[&(self.number as i32), &n, &account, &delta]).await?;
        self.send(&n.to_string()).await?;
        self.client.batch_execute(&format!("EXECUTE pay({account}, {delta})")).await?;
        self.client.batch_execute("COMMIT").await?;
        Ok(holds)
    }

    async fn send(&self, what: &str) -> Result<(), Error> {
        self.client.query(&self.tell, &[&channel((self.number + 1) % self.of), &what]).await.map(drop)
    }
}

/// Checks that each session of a ring, and every other listener, has received all notifications once and in order.
///
/// # Errors
/// Fails with a text about the first difference.
pub async fn check_notifications(tellers: &[RingSession], others: &[&Notifications]) -> Result<(), String> {
    for teller in tellers {
        teller.send(END_PAYLOAD).await.map_err(|error| format!("session {}: {error:?}", teller.number))?;
    }
    for teller in tellers {
        let next = (teller.number + 1) % teller.of;
        let told: Vec<String> = (1..=teller.commits).map(|n| n.to_string()).chain([END_PAYLOAD.to_owned()]).collect();
        let listeners = tellers.iter().filter(|other| other.number == next).map(|other| &other.heard);
        for heard in listeners.chain(others.iter().copied()) {
            let begun = Instant::now();
            while heard.on(&channel(next)).last().is_none_or(|last| last != END_PAYLOAD)
                && begun.elapsed() < NOTIFICATION_TIMEOUT
            {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let heard = heard.on(&channel(next));
            if heard != told {
                let same = heard.iter().zip(&told).take_while(|(heard, told)| heard == told).count();
                let (number, heard) = (teller.number, heard.get(same));
                return Err(format!("session {number} told {:?}, and heard was {heard:?}", told.get(same)));
            }
        }
    }
    Ok(())
}

/// Channel that the session in a place of the ring listens to.
pub fn channel(number: usize) -> String {
    format!("To {number}")
}

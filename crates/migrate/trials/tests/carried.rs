//! 64 sessions that write all the time, and one that is silent, change servers with all that a session can hold, there and
//! back: nobody sees an error, every commit counts once, every notification comes once and in order, and at no moment does
//! anybody else get a lock that is held.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_testbed::{available, until};
use stillpoint_migrate_trials::Stage;
use tokio::task::JoinSet;
use tokio_postgres::{AsyncMessage, Client, Error, NoTls, Statement};

const SESSIONS: usize = 64;
const ACCOUNTS: i32 = 16;
/// Transactions of each session before, between and after both moves.
const EACH: u32 = 10;
/// 64 sessions come to 320 transactions a second.
const THINK: Duration = Duration::from_millis(200);
/// What is told last on each channel.
const END: &str = "end";

const TABLES: &str = "
    CREATE SCHEMA bank;
    CREATE TABLE bank.account (id int PRIMARY KEY, balance bigint NOT NULL);
    INSERT INTO bank.account SELECT i, 0 FROM generate_series(0, 15) i;
    CREATE TABLE bank.history (session int, n int, account int, delta int, PRIMARY KEY (session, n));
    GRANT USAGE ON SCHEMA bank TO teller;
    GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA bank TO teller;
    CREATE TABLE ballast AS SELECT i AS id, repeat(md5(i::text), 10) AS v FROM generate_series(1, 20000) i;
    ALTER TABLE ballast ADD PRIMARY KEY (id);
";

/// What all sessions share.
struct Shared {
    stop: AtomicBool,
    /// Commits by session, and last how often somebody tried for all their locks.
    done: [AtomicU32; SESSIONS + 1],
}

impl Shared {
    fn new() -> Shared {
        Shared { stop: AtomicBool::new(false), done: std::array::from_fn(|_| AtomicU32::new(0)) }
    }

    /// Waits until each has done some more, or one has failed.
    fn more(&self) {
        let before: Vec<u32> = self.done.iter().map(|done| done.load(Ordering::Relaxed)).collect();
        until("every session to do some more", || {
            let further = |(done, before): (&AtomicU32, &u32)| done.load(Ordering::Relaxed) >= before + EACH;
            (self.stop.load(Ordering::Relaxed) || self.done.iter().zip(&before).all(further)).then_some(())
        });
    }

    /// Whether it goes on after what was done by one; a failure ends it for all.
    async fn goes_on(&self, number: usize, done: Result<(), String>, pause: Duration) -> Result<bool, String> {
        done.inspect_err(|_| self.stop.store(true, Ordering::Relaxed))?;
        self.done[number].fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(pause).await;
        Ok(!self.stop.load(Ordering::Relaxed))
    }
}

/// Channel and payload, in the order in which they came.
#[derive(Clone, Default)]
struct Heard(Arc<Mutex<Vec<(String, String)>>>);

impl Heard {
    fn on(&self, channel: &str) -> Vec<String> {
        let heard = self.0.lock().unwrap();
        heard.iter().filter(|(on, _)| on == channel).map(|(_, what)| what.clone()).collect()
    }
}

async fn connect(conninfo: &str) -> (Client, Heard) {
    let (client, mut connection) = tokio_postgres::connect(conninfo, NoTls).await.expect("connect");
    let heard = Heard::default();
    let hears = heard.clone();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(told) = message {
                hears.0.lock().unwrap().push((told.channel().to_owned(), told.payload().to_owned()));
            }
        }
    });
    (client, heard)
}

/// A session that writes, and what it holds.
struct Teller {
    number: usize,
    client: Client,
    heard: Heard,
    insert: Statement,
    tell: Statement,
    look: Statement,
    commits: i32,
    /// What a transaction took at most.
    longest: Duration,
}

impl Teller {
    async fn open(conninfo: &str, number: usize) -> Result<Teller, Error> {
        let (client, heard) = connect(conninfo).await;
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
        Ok(Teller { number, client, heard, insert, tell, look, commits: 0, longest: Duration::ZERO })
    }

    /// One transaction, which uses what the session holds, and tells the next session of itself. What went wrong.
    async fn transact(&mut self) -> Result<(), String> {
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

    /// What the session holds.
    async fn write(&self, n: i32, account: i32, delta: i32) -> Result<String, Error> {
        self.client.batch_execute("BEGIN").await?;
        let holds = self.client.query_one(&self.look, &[]).await?.get(0);
        self.client.execute(&self.insert, &[&(self.number as i32), &n, &account, &delta]).await?;
        self.tell(&n.to_string()).await?;
        self.client.batch_execute(&format!("EXECUTE pay({account}, {delta})")).await?;
        self.client.batch_execute("COMMIT").await?;
        Ok(holds)
    }

    async fn tell(&self, what: &str) -> Result<(), Error> {
        self.client.query(&self.tell, &[&channel((self.number + 1) % SESSIONS), &what]).await.map(drop)
    }
}

fn channel(number: usize) -> String {
    format!("To {number}")
}

#[test]
fn everything_that_sessions_hold_goes_along_under_load() {
    if !available() {
        return;
    }
    let stage = Stage::start();
    for cluster in [&stage.source, &stage.target] {
        cluster.sql("postgres", "CREATE ROLE teller");
    }
    stage.source.sql("shop", TABLES);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (conninfo, shared) = (stage.conninfo(), Arc::new(Shared::new()));
    let (mut work, silent, hears) = runtime.block_on(async {
        let (silent, hears) = connect(&conninfo).await;
        let listens: String = (0..SESSIONS).map(|number| format!("LISTEN \"{}\";", channel(number))).collect();
        silent.batch_execute(&listens).await.expect("listen to all");
        let mut tellers = Vec::new();
        for number in 0..SESSIONS {
            tellers.push(Teller::open(&conninfo, number).await.expect("open a session"));
        }
        let mut work: JoinSet<Result<Option<Teller>, String>> = JoinSet::new();
        for mut teller in tellers {
            let shared = Arc::clone(&shared);
            work.spawn(async move {
                loop {
                    let done = teller.transact().await;
                    if !shared.goes_on(teller.number, done, THINK).await? {
                        return Ok(Some(teller));
                    }
                }
            });
        }
        let (envious, shared) = (connect(&conninfo).await.0, Arc::clone(&shared));
        work.spawn(async move {
            let all = format!("generate_series(0, {}) i WHERE pg_try_advisory_lock(1, i)", SESSIONS - 1);
            let try_all = format!("SELECT count(*) FROM {all}");
            loop {
                let got = envious.query_one(&try_all, &[]).await.map(|row| row.get(0));
                let done = match got {
                    Ok(0i64) => Ok(()),
                    got => Err(format!("tried for locks that others hold: {got:?}")),
                };
                if !shared.goes_on(SESSIONS, done, Duration::from_millis(5)).await? {
                    return Ok(None);
                }
            }
        });
        (work, silent, hears)
    });

    shared.more();
    for way in [&["run", "--share", "0", "--snapshot-timeout", "20s"][..], &["fallback"]] {
        let ended = stage.run(&[way, &["--pause-timeout", "3s"]].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let attempts =
            |event: &&Event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "switch-over");
        println!("{}: paused {} times", way[0], ended.events.iter().filter(attempts).count());
        shared.more();
        let serves = if way[0] == "run" { &stage.target } else { &stage.source };
        let held =
            "SELECT classid, count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted GROUP BY 1 ORDER BY 1";
        assert_eq!(serves.sql("shop", held), format!("1|{SESSIONS}\n2|{SESSIONS}"));
    }
    shared.stop.store(true, Ordering::Relaxed);
    let tellers: Vec<Teller> = runtime.block_on(async {
        let ended = std::mem::take(&mut work).join_all().await;
        let ended = ended.into_iter().map(|ended| ended.unwrap_or_else(|error| panic!("{error}")));
        let mut tellers: Vec<Teller> = ended.flatten().collect();
        for teller in &tellers {
            teller.tell(END).await.expect("tell the end");
        }
        tellers.sort_by_key(|teller| teller.number);
        tellers
    });
    println!("longest transaction of any session: {:?}", tellers.iter().map(|teller| teller.longest).max());

    for teller in &tellers {
        let (to, listener) = (channel((teller.number + 1) % SESSIONS), &tellers[(teller.number + 1) % SESSIONS]);
        let told: Vec<String> = (1..=teller.commits).map(|n| n.to_string()).chain([END.to_owned()]).collect();
        for heard in [&listener.heard, &hears] {
            until("the end to be heard", || heard.on(&to).last().is_some_and(|last| last == END).then_some(()));
            assert_eq!(heard.on(&to), told, "what session {} told", teller.number);
        }
    }
    drop(silent);
    let commits: i32 = tellers.iter().map(|teller| teller.commits).sum();
    println!("{commits} commits of {SESSIONS} sessions");
    let each = "SELECT count(*), count(DISTINCT (session, n)) FROM bank.history";
    assert_eq!(stage.source.sql("shop", each), format!("{commits}|{commits}"), "every commit exactly once");
    let of_session = "SELECT string_agg(n::text, ' ' ORDER BY session) FROM (SELECT session, max(n) AS n FROM bank.history GROUP BY 1) h";
    let last: Vec<String> = tellers.iter().map(|teller| teller.commits.to_string()).collect();
    assert_eq!(stage.source.sql("shop", of_session), last.join(" "));
    let balances = "SELECT count(*) FROM bank.account a WHERE balance <> (SELECT coalesce(sum(delta), 0) FROM bank.history h \
                    WHERE h.account = a.id)";
    assert_eq!(stage.source.sql("shop", balances), "0");
    stage.assert_clean();
}

//! 64 sessions that write all the time, and one that is silent, change servers with all that a session can hold, there
//! and back. No client sees an error, every commit counts once, every notification arrives once and in order, and no
//! other session ever gets a lock that is held.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;
use stillpoint_events::{Event, EventKind};
use stillpoint_migrate_tests::Testbed;
use stillpoint_migrate_tests::ring_session::{
    COMMITS, RingSession, TABLES, WRONG_BALANCES, channel, check_notifications, connect,
};
use stillpoint_testing::{postgresql::available, wait::until};
use tokio::task::JoinSet;

const SESSIONS: usize = 64;
/// Transactions of each session before, between and after both moves.
const EACH: u32 = 10;
/// Pause after each transaction; 64 sessions make 320 transactions a second.
const THINK: Duration = Duration::from_millis(200);

/// A table whose copy takes a while.
const BALLAST: &str = "
    CREATE TABLE ballast AS SELECT i AS id, repeat(md5(i::text), 10) AS v FROM generate_series(1, 20000) i;
    ALTER TABLE ballast ADD PRIMARY KEY (id);
";

/// State that all sessions share.
struct Shared {
    stop: AtomicBool,
    /// Commits by session; the last entry counts the tries to take all their locks.
    done: [AtomicU32; SESSIONS + 1],
}

impl Shared {
    fn new() -> Shared {
        Shared { stop: AtomicBool::new(false), done: std::array::from_fn(|_| AtomicU32::new(0)) }
    }

    /// Waits until each session has committed some more, or one has failed.
    fn more(&self) {
        let before: Vec<u32> = self.done.iter().map(|done| done.load(Ordering::Relaxed)).collect();
        until("every session to do some more", || {
            let further = |(done, before): (&AtomicU32, &u32)| done.load(Ordering::Relaxed) >= before + EACH;
            (self.stop.load(Ordering::Relaxed) || self.done.iter().zip(&before).all(further)).then_some(())
        });
    }

    /// Counts one session's transaction, and returns true if it goes on; a failure ends all sessions.
    async fn goes_on(&self, number: usize, done: Result<(), String>, pause: Duration) -> Result<bool, String> {
        done.inspect_err(|_| self.stop.store(true, Ordering::Relaxed))?;
        self.done[number].fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(pause).await;
        Ok(!self.stop.load(Ordering::Relaxed))
    }
}

#[test]
fn everything_that_sessions_hold_goes_along_under_load() {
    if !available() {
        return;
    }
    let testbed = Testbed::start();
    for cluster in [&testbed.source, &testbed.target] {
        cluster.sql("postgres", "CREATE ROLE teller");
    }
    testbed.source.sql("shop", TABLES);
    testbed.source.sql("shop", BALLAST);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (conninfo, shared) = (testbed.conninfo(), Arc::new(Shared::new()));
    let (mut work, silent, hears) = runtime.block_on(async {
        let (silent, hears) = connect(&conninfo).await.expect("connect");
        let listens: String = (0..SESSIONS).map(|number| format!("LISTEN \"{}\";", channel(number))).collect();
        silent.batch_execute(&listens).await.expect("listen to all");
        let mut tellers = Vec::new();
        for number in 0..SESSIONS {
            tellers.push(RingSession::open(&conninfo, number, SESSIONS).await.expect("open a session"));
        }
        let mut work: JoinSet<Result<Option<RingSession>, String>> = JoinSet::new();
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
        let (envious, shared) = (connect(&conninfo).await.expect("connect").0, Arc::clone(&shared));
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
        let ended = testbed.run(&[way, &["--pause-timeout", "3s"]].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let attempts =
            |event: &&Event| matches!(&event.kind, EventKind::PhaseStarted { phase, .. } if phase == "switch-over");
        println!("{}: paused {} times", way[0], ended.events.iter().filter(attempts).count());
        shared.more();
        let serves = if way[0] == "run" { &testbed.target } else { &testbed.source };
        let held =
            "SELECT classid, count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted GROUP BY 1 ORDER BY 1";
        assert_eq!(serves.sql("shop", held), format!("1|{SESSIONS}\n2|{SESSIONS}"));
    }
    shared.stop.store(true, Ordering::Relaxed);
    let tellers: Vec<RingSession> = runtime.block_on(async {
        let ended = std::mem::take(&mut work).join_all().await;
        let ended = ended.into_iter().map(|ended| ended.unwrap_or_else(|error| panic!("{error}")));
        let mut tellers: Vec<RingSession> = ended.flatten().collect();
        tellers.sort_by_key(|teller| teller.number);
        tellers
    });
    println!("longest transaction of any session: {:?}", tellers.iter().map(|teller| teller.longest).max());

    runtime.block_on(check_notifications(&tellers, &[&hears])).unwrap_or_else(|wrong| panic!("{wrong}"));
    drop(silent);
    let commits: i32 = tellers.iter().map(|teller| teller.commits).sum();
    println!("{commits} commits of {SESSIONS} sessions");
    assert_eq!(testbed.source.sql("shop", COMMITS), format!("{commits}|{commits}"), "every commit exactly once");
    let of_session = "SELECT string_agg(n::text, ' ' ORDER BY session) FROM (SELECT session, max(n) AS n FROM bank.history GROUP BY 1) h";
    let last: Vec<String> = tellers.iter().map(|teller| teller.commits.to_string()).collect();
    assert_eq!(testbed.source.sql("shop", of_session), last.join(" "));
    assert_eq!(testbed.source.sql("shop", WRONG_BALANCES), "0");
    testbed.assert_clean();
}

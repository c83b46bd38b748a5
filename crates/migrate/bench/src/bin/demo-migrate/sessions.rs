//! Sessions that hold all that a session can hold, and use all of it in each of their transactions.

use crate::record::now_ns;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use stillpoint_measure::record::{Outcome, Sample};
use stillpoint_migrate_tests::ring_session::{Notifications, RingSession, channel, check_notifications, connect};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio_postgres::Client;

pub(crate) const SESSIONS: usize = 8;
/// Think time of one session; all sessions together make some 80 transactions a second.
const THINK: Duration = Duration::from_millis(100);
/// Objects that the sessions hold, as text for the output.
pub(crate) const SESSION_CONTENTS: &str = "prepared statements, settings, a role, a channel and advisory locks";

/// Sessions that execute transactions.
pub(crate) struct Sessions {
    runtime: Runtime,
    stop: Arc<AtomicBool>,
    work: JoinSet<Result<(RingSession, Vec<Sample>), String>>,
    /// Writes nothing, and listens to all channels.
    silent: (Client, Notifications),
}

/// Result of all sessions.
pub(crate) struct SessionReport {
    pub(crate) commits: u64,
    pub(crate) samples: Vec<Sample>,
    /// First thing that was lost, or received twice.
    pub(crate) wrong: Option<String>,
}

impl Sessions {
    pub(crate) fn open(port: u16) -> Sessions {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.expect("start a runtime");
        let conninfo = format!("host=127.0.0.1 port={port} user=postgres dbname=shop");
        let stop = Arc::<AtomicBool>::default();
        let (work, silent) = runtime.block_on(async {
            let silent = connect(&conninfo).await.expect("connect");
            let listens: String = (0..SESSIONS).map(|number| format!("LISTEN \"{}\";", channel(number))).collect();
            silent.0.batch_execute(&listens).await.expect("listen to all");
            let mut tellers = Vec::new();
            for number in 0..SESSIONS {
                tellers.push(RingSession::open(&conninfo, number, SESSIONS).await.expect("open a session"));
            }
            // From here on every session listens.
            let mut work = JoinSet::new();
            for teller in tellers {
                work.spawn(transact(teller, Arc::clone(&stop)));
            }
            (work, silent)
        });
        Sessions { runtime, stop, work, silent }
    }

    /// Stops the sessions after their current transactions, and checks the notifications that they received.
    pub(crate) fn finish(self) -> SessionReport {
        let Sessions { runtime, stop, work, silent } = self;
        stop.store(true, Ordering::Relaxed);
        let (mut tellers, mut samples, mut wrong) = (Vec::new(), Vec::new(), None);
        for ended in runtime.block_on(work.join_all()) {
            match ended {
                Ok((teller, of_one)) => {
                    tellers.push(teller);
                    samples.extend(of_one);
                }
                Err(what) => wrong = Some(what),
            }
        }
        if wrong.is_none() {
            wrong = runtime.block_on(check_notifications(&tellers, &[&silent.1])).err();
        }
        let commits = tellers.iter().map(|teller| teller.commits as u64).sum();
        SessionReport { commits, samples, wrong }
    }
}

async fn transact(mut teller: RingSession, stop: Arc<AtomicBool>) -> Result<(RingSession, Vec<Sample>), String> {
    let mut samples = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let scheduled_ns = now_ns();
        teller.transact().await?;
        let latency_ns = now_ns() - scheduled_ns;
        let connection = teller.number as u32;
        samples.push(Sample { scheduled_ns, latency_ns, late_us: 0, connection, kind: 0, outcome: Outcome::Ok });
        tokio::time::sleep(THINK).await;
    }
    Ok((teller, samples))
}

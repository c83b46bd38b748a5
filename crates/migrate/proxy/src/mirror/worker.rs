//! A worker of a mirror: runs one statement after the other on the source and on the target, and compares the answers.

use super::answer::{Answer, CANCELED, LOCKED, NoAnswer};
use super::judge::Judge;
use super::tally::{Compared, Verdict};
use super::{Mirror, MirrorOrder, MirroredSession, Sample};
use crate::session::counterpart::{self, TargetLogin};
use crate::tenant::Tenant;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_migrate_capture::{ReadStatement, without_literals};
use stillpoint_migrate_postgres::Ready;
use stillpoint_migrate_wire::frontend::put_query;
use tokio::sync::Mutex;
use tokio::sync::mpsc::Receiver;

/// Begins a transaction that cannot change the database, and that neither a lock nor a long statement holds up.
const BEGIN: &str = "BEGIN TRANSACTION READ ONLY; SET LOCAL statement_timeout = '10s'; SET LOCAL lock_timeout = '1s'";
/// Time limit of an answer, longer than the server's.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// Shortest and longest wait until different answers are compared again.
const SETTLE_WAITS: [Duration; 2] = [Duration::from_millis(100), Duration::from_secs(1)];
/// Time for which the source's answer must have been the same before another one of the target is a difference, beside
/// twice the target's lag.
const SETTLED: Duration = Duration::from_secs(1);
/// Lag that is assumed if no command reports one.
const LAG_UNKNOWN: Duration = Duration::from_secs(2);
/// Largest lag with which answers are compared.
const LAG_MAX: Duration = Duration::from_secs(10);
/// Time after which an answer that keeps changing is given up.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(30);
/// Age at which a report about the lag does not count any more.
const LAG_AGE_MAX: Duration = Duration::from_secs(5);

/// Sessions on the source and on the target, both like a client's.
struct Pair {
    session: Arc<MirroredSession>,
    logins: [TargetLogin; 2],
    sides: [Box<Ready>; 2],
    judge: Judge,
    mirror: Arc<Mirror>,
    /// The target is asked first at every other statement.
    target_first: bool,
}

/// Mirrors statements until there are no more.
pub(super) async fn run(
    mirror: Arc<Mirror>,
    order: Arc<MirrorOrder>,
    samples: Arc<Mutex<Receiver<Sample>>>,
    tenant: Arc<Tenant>,
) {
    let mut pair: Option<Pair> = None;
    loop {
        let next = samples.lock().await.recv().await;
        let Some(sample) = next else { return };
        let ready = match pair.take() {
            Some(known) if Arc::ptr_eq(&known.session, &sample.session) => Ok(known),
            Some(known) if known.is_same_login(&sample.session) => known.carry(sample.session.clone()).await,
            _ => Pair::open(&mirror, &order, sample.session.clone()).await,
        };
        match ready {
            Ok(mut ready) => match ready.mirror(&sample, &tenant).await {
                Ok(()) => pair = Some(ready),
                Err(why) => mirror.tally.leave_out(why),
            },
            Err(why) => mirror.tally.leave_out(&why),
        }
    }
}

impl Pair {
    async fn open(mirror: &Arc<Mirror>, order: &MirrorOrder, session: Arc<MirroredSession>) -> Result<Pair, String> {
        let MirroredSession { startup, user, credential, .. } = &*session;
        let logins = order
            .servers
            .each_ref()
            .map(|server| TargetLogin::new(server.clone(), startup, user, credential.clone(), order.connect_limit));
        let on = |side: &str, why: String| format!("no session on the {side}: {why}");
        let source = counterpart::log_in(&logins[0]).await.map_err(|why| on("source", why))?;
        mirror.tally.source_processes.enter(source.key.pid);
        let target = counterpart::log_in(&logins[1]).await;
        let target = target.map_err(|why| {
            mirror.tally.source_processes.leave(source.key.pid);
            on("target", why)
        })?;
        let judge = Judge::default();
        let mirror = mirror.clone();
        let mut pair = Pair { session, logins, sides: [source, target], judge, mirror, target_first: false };
        pair.carry_state(false).await?;
        Ok(pair)
    }

    fn is_same_login(&self, session: &MirroredSession) -> bool {
        self.session.user == session.user && self.session.startup == session.startup
    }

    /// Becomes like another session of the same login, or like the same session in another state.
    async fn carry(mut self, session: Arc<MirroredSession>) -> Result<Pair, String> {
        self.session = session;
        self.judge = Judge::default();
        self.carry_state(true).await?;
        Ok(self)
    }

    async fn carry_state(&mut self, has_state: bool) -> Result<(), String> {
        for (side, login) in self.sides.iter_mut().zip(&self.logins) {
            counterpart::carry_settings(side, login, &self.session.state, has_state).await?;
        }
        Ok(())
    }

    /// Runs a statement on both sides and counts the result. After an error the sessions are of no use.
    async fn mirror(&mut self, sample: &Sample, tenant: &Tenant) -> Result<(), &'static str> {
        const LOST: &str = "a session of the mirror that ended";
        let judging = self.judge.judge(&mut self.sides[0].stream, &sample.text);
        let judged = tokio::time::timeout(ANSWER_TIMEOUT, judging).await.ok().and_then(Result::ok).ok_or(LOST)?;
        let read = match judged {
            Ok(read) => read,
            Err(why) => {
                self.mirror.tally.leave_out(&why);
                return Ok(());
            }
        };
        let first = self.target_first;
        self.target_first = !first;
        let mut answers = [Answer::default(), Answer::default()];
        for side in if first { [1, 0] } else { [0, 1] } {
            answers[side] = self.ask(side, sample).await?;
        }
        if answers.iter().any(Answer::was_stopped) {
            self.mirror.tally.leave_out("longer than 10 s, or a lock for longer than 1 s");
            return Ok(());
        }
        self.mirror.tally.time([&answers[0], &answers[1]]);
        let verdict = match answers[0].difference(&answers[1], &read) {
            None => Verdict::Equal,
            Some(_) => match self.settle(sample, &read, &mut answers, tenant).await? {
                Some(verdict) => verdict,
                None => {
                    self.mirror.tally.leave_out("different, with a target that is too far behind to say more");
                    return Ok(());
                }
            },
        };
        // Only differences show the text.
        let statement = match verdict {
            Verdict::Differs(_) => String::from_utf8(sample.text.clone()).ok().and_then(|text| without_literals(&text)),
            _ => Some(String::new()),
        };
        let statement = statement.unwrap_or_else(|| "a text that cannot be shown without its values".into());
        let [source, target] = &answers;
        let compared = Compared { statement, user: &self.session.user, answers: [source, target] };
        self.mirror.tally.count(verdict, &compared);
        Ok(())
    }

    /// Compares different answers again until they are the same, or the source's has been the same for so long that the
    /// target has everything it depends on. `None` if the target is too far behind.
    async fn settle(
        &mut self,
        sample: &Sample,
        read: &ReadStatement,
        answers: &mut [Answer; 2],
        tenant: &Tenant,
    ) -> Result<Option<Verdict>, &'static str> {
        let (begun, mut same_since, mut wait) = (Instant::now(), Instant::now(), SETTLE_WAITS[0]);
        loop {
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(SETTLE_WAITS[1]);
            let before = self.ask(0, sample).await?;
            let target = self.ask(1, sample).await?;
            let after_at = Instant::now();
            let after = self.ask(0, sample).await?;
            if !(answers[0].is_like(&before) && before.is_like(&after)) {
                same_since = after_at;
            }
            let is_same = [&before, &after].into_iter().any(|source| source.difference(&target, read).is_none());
            *answers = [after, target];
            if is_same || answers.iter().any(Answer::was_stopped) {
                return Ok(Some(if is_same { Verdict::Equal } else { Verdict::Unsettled }));
            }
            let lag = lag(tenant);
            if same_since.elapsed() > SETTLED + 2 * lag {
                return Ok(answers[0].difference(&answers[1], read).map(Verdict::Differs).or(Some(Verdict::Equal)));
            }
            if lag > LAG_MAX {
                return Ok(None);
            }
            if begun.elapsed() > SETTLE_TIMEOUT {
                return Ok(Some(Verdict::Unsettled));
            }
        }
    }

    /// Runs a statement on one side.
    async fn ask(&mut self, side: usize, sample: &Sample) -> Result<Answer, &'static str> {
        const LOST: &str = "a session of the mirror that ended, or gave no answer in time";
        let stream = &mut self.sides[side].stream;
        let asking = async {
            simple(stream, BEGIN).await.ok_or(LOST)?;
            let answer = Answer::read(stream, &sample.messages).await.map_err(|none| match none {
                NoAnswer::Lost(error) => {
                    tracing::debug!(%error, "a session of the mirror is lost");
                    LOST
                }
                NoAnswer::TooLarge => "an answer of more than 32 MiB",
                NoAnswer::NotRead => "a statement that turned out to be no SELECT",
            })?;
            simple(stream, "ROLLBACK").await.ok_or(LOST)?;
            Ok(answer)
        };
        tokio::time::timeout(ANSWER_TIMEOUT, asking).await.unwrap_or(Err(LOST))
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.mirror.tally.source_processes.leave(self.sides[0].key.pid);
    }
}

impl Answer {
    /// Returns true if a time limit of the mirror stopped it.
    fn was_stopped(&self) -> bool {
        self.error.as_deref().is_some_and(|code| [CANCELED, LOCKED].contains(&code))
    }
}

/// Time until a commit is on the target, as the command that moves the tenant reports it.
fn lag(tenant: &Tenant) -> Duration {
    let reported = tenant.migration().filter(|view| view.age <= LAG_AGE_MAX);
    let following = reported.and_then(|view| view.progress.following);
    following.map_or(LAG_UNKNOWN, |following| Duration::from_millis(following.lag_ms))
}

/// Runs statements without rows; `None` if they fail.
async fn simple(stream: &mut stillpoint_migrate_postgres::Stream, sql: &str) -> Option<()> {
    let mut question = Vec::new();
    put_query(&mut question, sql);
    let answers = stillpoint_migrate_postgres::exchange(stream, &question, 1).await.ok()?;
    answers.error.is_none().then_some(())
}

//! One move of the database under load, with a fault, and the checks after it.

use crate::Random;
use crate::fault::{Fault, Moment};
use crate::is_soak;
use crate::testbed::{CommandResult, Testbed, Tool};
use std::time::Duration;
use stillpoint_measure::postgres::{Isolation, PostgresFinished, PostgresLoad, PostgresPlan, prepare};

/// Moves after a fault before the database counts as immovable.
const ATTEMPTS: usize = 8;
/// Limit for a pause of clients, on a machine that others use too.
const PAUSE: &str = "3s";

/// All isolation levels of PostgreSQL.
pub const LEVELS: [Isolation; 3] = [Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable];

/// A move there (`run`) or back (`fallback`).
#[derive(Debug, Clone, Copy)]
pub struct Trial {
    /// True for a move back to the source.
    pub back: bool,
    /// Fault that happens.
    pub fault: Fault,
    /// Moment of the fault.
    pub moment: Moment,
    /// The isolation level of all clients.
    pub isolation: Isolation,
    /// Seed of all random choices.
    pub seed: u64,
}

impl Trial {
    /// A trial with everything chosen by its seed.
    pub fn any(back: bool, seed: u64) -> Trial {
        let mut random = Random::new(seed);
        let (fault, isolation) = (random.pick(&Fault::ALL), random.pick(&LEVELS));
        Trial { back, fault, moment: Moment::any(back, &mut random), isolation, seed }
    }

    /// Makes the tables that clients use.
    #[track_caller]
    pub fn prepare(testbed: &Testbed) {
        prepare(&PostgresPlan::checked(testbed.conninfo())).unwrap_or_else(|error| panic!("make the tables: {error}"));
        // A table to copy.
        testbed.source.sql(
            "shop",
            "CREATE TABLE ballast (id int PRIMARY KEY, v text); \
             INSERT INTO ballast SELECT i, repeat(md5(i::text), 10) FROM generate_series(1, 20000) i",
        );
    }

    /// Moves the database, and panics unless all guarantees hold. Returns the events of the first attempt.
    #[track_caller]
    pub fn run(self, testbed: &mut Testbed) -> CommandResult {
        let mut random = Random::new(self.seed ^ 1);
        self.under_load(testbed, |testbed| self.move_it(testbed, &mut random))
    }

    /// Runs `work` while clients record their writes and reads, and panics unless the records are possible.
    #[track_caller]
    pub fn under_load<T>(self, testbed: &mut Testbed, work: impl FnOnce(&mut Testbed) -> T) -> T {
        println!("{self:?}");
        let load = self.load(testbed);
        let done = work(testbed);
        load.stop();
        let finished = load.wait().unwrap_or_else(|error| panic!("{self:?}: the load: {error}"));
        self.judge(&finished);
        done
    }

    #[track_caller]
    fn move_it(self, testbed: &mut Testbed, random: &mut Random) -> CommandResult {
        let mut tool = self.tool(testbed);
        self.moment.wait(&mut tool);
        self.fault.strike(testbed, &tool, random);
        let first = tool.end();
        println!("  ended with {:?} {}", first.code, first.complaints.trim());
        if self.fault == Fault::None {
            assert_eq!(first.code, Some(0), "{self:?}: {first:?}");
        }
        self.conclude(testbed, &first, random);
        first
    }

    #[track_caller]
    fn load(&self, testbed: &Testbed) -> PostgresLoad {
        let plan = PostgresPlan {
            clients: 8,
            think: Duration::from_millis(if is_soak() { 25 } else { 60 }),
            isolation: self.isolation,
            duration: Duration::from_secs(600),
            timeout: Duration::from_secs(20),
            seed: self.seed,
            ..PostgresPlan::checked(testbed.conninfo())
        };
        PostgresLoad::start(plan).unwrap_or_else(|error| panic!("{self:?}: start the load: {error}"))
    }

    #[track_caller]
    fn tool(&self, testbed: &Testbed) -> Tool {
        if self.back {
            testbed.tool(&["fallback", "--pause-timeout", PAUSE])
        } else {
            testbed.tool(&["run", "--pause-timeout", PAUSE, "--share", "0", "--snapshot-timeout", "20s"])
        }
    }

    /// Asserts that the database can be moved by further calls of the tool, in any state that the fault left.
    #[track_caller]
    fn conclude(&self, testbed: &Testbed, first: &CommandResult, random: &mut Random) {
        let there = |standing: &(Option<String>, Option<String>)| match self.back {
            false => standing.0.as_deref() == Some("switched") && standing.1.as_deref() == Some("target"),
            true => standing.0.is_none() && standing.1.as_deref() == Some("source"),
        };
        if !self.back && first.code != Some(0) && random.below(3) == 0 {
            let aborted = testbed.run(&["abort"]);
            println!("  abort: {:?} {}", aborted.code, aborted.complaints.trim());
            let (phase, serving) = testbed.standing();
            if aborted.code == Some(0) {
                assert_eq!((phase, serving.as_deref()), (None, Some("source")), "{self:?}: {aborted:?}");
                testbed.assert_clean();
            }
        }
        let mut code = first.code;
        for _ in 0..ATTEMPTS {
            let standing = testbed.standing();
            if there(&standing) && (self.back || code == Some(0)) {
                break;
            }
            let again = self.tool(testbed).end();
            println!("  {standing:?}; again: {:?} {}", again.code, again.complaints.trim());
            code = again.code;
        }
        let standing = testbed.standing();
        assert!(there(&standing), "{self:?}: the database cannot be moved any more: {standing:?}");
        if self.back {
            testbed.assert_clean();
        }
    }

    #[track_caller]
    fn judge(&self, finished: &PostgresFinished) {
        let verdict = finished.verdict.as_ref().expect("a checked load has a verdict");
        println!(
            "  {} transactions, {} committed, {} of unknown end; {:?}, {} dropped",
            verdict.transactions,
            verdict.committed,
            verdict.unknown,
            finished.finished.summary.counts,
            finished.finished.end.dropped
        );
        assert!(verdict.anomalies.is_empty(), "{self:?}: {:#?}", verdict.anomalies);
        assert!(verdict.committed > 0, "{self:?}: nothing was committed");
        if self.fault.spares_clients() {
            let (counts, complaints) = (finished.finished.summary.counts, &finished.finished.complaints);
            // Hot rows: at this level a transaction may fail after any number of tries.
            let errors = if self.isolation == Isolation::Serializable { 0 } else { counts.errors };
            let noticed = errors + counts.wrong + counts.timeouts + counts.lost + finished.finished.end.dropped;
            assert_eq!(noticed, 0, "{self:?}: clients noticed: {complaints:?} {counts:?}");
        }
    }
}

//! Measures how many syncsets the scheduler orders a second, and how the replay scales with players in simulated time.
//!
//! `cargo run --release -p stillpoint-migrate-bench --bin replay-schedule` prints two tables. The first is measured on this
//! machine, one thread. The second is computed: each operation takes a fixed time on a target with as many processors as
//! players, commits that fall into one flush of the log share it, and the scheduler decides what may run.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::time::Instant;

use stillpoint_base::Random;
use stillpoint_migrate_replay::{
    Limits, Mode, Part, Player, RunningId, Scheduler, Snapshot, Stamp, Statement, Syncset, Token, Xid,
};

/// Rows that a transaction touches.
#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    /// Number of rows in the table.
    rows: u64,
    writes: usize,
    /// Every nth write goes to one of six hot rows; 0: none.
    hot_every: u64,
}

const LOADS: [Load; 4] = [
    Load { name: "one write, a million rows", rows: 1_000_000, writes: 1, hot_every: 0 },
    Load { name: "four writes, a million rows", rows: 1_000_000, writes: 4, hot_every: 0 },
    Load { name: "four writes, every 8th hot", rows: 1_000_000, writes: 4, hot_every: 8 },
    Load { name: "one write, six rows", rows: 6, writes: 1, hot_every: 0 },
];

fn keys(load: &Load, random: &mut Random) -> Vec<u64> {
    let key = |random: &mut Random| match load.hot_every {
        0 => random.below(load.rows),
        every if random.below(every) == 0 => random.below(6),
        _ => random.below(load.rows),
    };
    (0..load.writes).map(|_| key(random)).collect()
}

/// Tokens of rows, and of a value of a second unique index for each row.
fn tokens(keys: &[u64]) -> Vec<Token> {
    let of = |key: u64| {
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        [Token::Row(1, hash), Token::Parent(2, 3, hash >> 40)]
    };
    keys.iter().flat_map(|key| of(*key)).collect()
}

fn measure(load: &Load, batch: usize) -> f64 {
    const COUNT: u64 = 400_000;
    let mut random = Random::new(1);
    let sets: Vec<Vec<Token>> = (0..COUNT).map(|_| tokens(&keys(load, &mut random))).collect();
    let mut scheduler: Scheduler<u64> = Scheduler::new(Mode::Rows, 4, Limits::default());
    let begin = Instant::now();
    let mut done = 0;
    let mut sets = sets.into_iter();
    let mut stamp = 0;
    while done < COUNT {
        // A backlog of some thousand syncsets, as during catch-up.
        while scheduler.progress().pending < 4_000 {
            let Some(tokens) = sets.next() else { break };
            stamp += 1;
            let syncset = Syncset { stamp: Stamp(stamp), tokens, statement: None, bytes: 100, payload: stamp };
            scheduler.push_next(syncset).expect("there is room");
        }
        for player in (0..4).map(Player) {
            let mut given = 0;
            while given < batch && scheduler.next(player).expect("a player").is_some() {
                given += 1;
            }
            for _ in 0..given {
                scheduler.done(player).expect("it was given");
                done += 1;
            }
        }
    }
    COUNT as f64 / begin.elapsed().as_secs_f64()
}

/// Transactions that ran at the same time on the source, and commits that one flush of its log made visible together. A client
/// begins its next transaction when its last one is committed.
const SESSIONS: u64 = 64;
const GROUP: u64 = 8;

/// Microseconds that each operation takes on the simulated target.
const READ_US: u64 = 60;
const WRITE_US: u64 = 80;
const COMMIT_US: u64 = 20;

/// Report of a player.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Report {
    Read,
    Done,
}

/// Simulated seconds for a backlog of transactions that ran on the source at the load's concurrency.
struct Simulation {
    scheduler: Scheduler<u64>,
    /// Time of each player's next report, and its kind.
    busy: BTreeSet<(u64, u32, Report)>,
    free: BTreeSet<u32>,
    now: u64,
    flush_us: u64,
    /// Time of the next flush of the log.
    flush_at: u64,
    writes: u64,
}

impl Simulation {
    /// Returns transactions a second, and the number of players at the end.
    fn run(mode: Mode, load: &Load, players: u32, flush_us: u64) -> (f64, u32) {
        const COUNT: u64 = 4_000;
        let mut simulation = Simulation {
            scheduler: Scheduler::new(mode, players, Limits::default()),
            busy: BTreeSet::new(),
            free: (0..players).collect(),
            now: 0,
            flush_us,
            flush_at: 0,
            writes: load.writes as u64,
        };
        let mut random = Random::new(7);
        for number in 1..=COUNT {
            simulation.hand_in(load, number, &mut random);
        }
        while !simulation.scheduler.is_drained() {
            simulation.give();
            simulation.wait();
        }
        (COUNT as f64 * 1e6 / simulation.now as f64, simulation.scheduler.players())
    }

    fn hand_in(&mut self, load: &Load, number: u64, random: &mut Random) {
        let keys = keys(load, random);
        // It sees the group that its client's last transaction was committed with, and all groups before.
        let seen = (number.saturating_sub(SESSIONS) / GROUP + 1) * GROUP;
        let running = RunningId(number);
        self.scheduler.begins(running);
        self.scheduler.record_snapshot(running, Snapshot::at_clock(seen.min(number)));
        let statement = Some(Statement { running, xid: Xid(number) });
        let syncset = Syncset { stamp: Stamp(number), tokens: tokens(&keys), statement, bytes: 100, payload: number };
        self.scheduler.push_next(syncset).expect("there is room");
    }

    fn give(&mut self) {
        // Every free player takes the operation that it may send; a transaction of statements continues on the player where it
        // is open.
        for player in self.free.clone() {
            let Some(operation) = self.scheduler.next(Player(player)).expect("a player") else { continue };
            let took = |part, us| if operation.step.has(part) { us } else { 0 };
            let read = self.now + took(Part::FirstRead, READ_US);
            let end = read + took(Part::Writes, self.writes * WRITE_US) + took(Part::Commit, COMMIT_US);
            let end = if operation.step.has(Part::Commit) { self.flushed(end) } else { end };
            self.free.remove(&player);
            if operation.awaited {
                self.busy.insert((read, player, Report::Read));
            }
            self.busy.insert((end, player, Report::Done));
        }
    }

    /// Commits that are ready before a flush begins share that flush.
    fn flushed(&mut self, ready: u64) -> u64 {
        if self.flush_us == 0 {
            return ready;
        }
        while self.flush_at < ready {
            self.flush_at += self.flush_us;
        }
        self.flush_at + self.flush_us
    }

    fn wait(&mut self) {
        let Some(&(first, ..)) = self.busy.first() else {
            assert!(self.scheduler.is_starved(), "nothing goes on: {:?}", self.scheduler.progress());
            let player = self.scheduler.add_player();
            self.free.insert(player.0);
            return;
        };
        self.now = self.now.max(first);
        while let Some(&(at, player, report)) = self.busy.first().filter(|(at, ..)| *at <= self.now) {
            self.busy.remove(&(at, player, report));
            match report {
                Report::Read => self.scheduler.read_done(Player(player)).expect("it was given"),
                Report::Done => {
                    self.scheduler.done(Player(player)).expect("it was given");
                    self.free.insert(player);
                }
            }
        }
    }
}

fn main() {
    println!("syncsets a second, one thread, measured:\n");
    println!("| load | one at a time | batches of 16 |\n|---|---|---|");
    for load in &LOADS {
        println!("| {} | {:.0} | {:.0} |", load.name, measure(load, 1), measure(load, 16));
    }
    for flush_us in [0, 5_000] {
        println!("\ntransactions a second, computed, flush of the log {flush_us} us:\n");
        println!("| load | mode | 1 | 2 | 4 | 8 | 16 | 32 |\n|---|---|---|---|---|---|---|---|");
        for load in &LOADS[1..] {
            // Under snapshot isolation, concurrent transactions did not write the same row.
            let all = [Mode::BMin, Mode::BCon, Mode::Lsir, Mode::Rows];
            let modes = if load.rows > SESSIONS && load.hot_every == 0 { &all[..] } else { &all[3..] };
            for mode in modes {
                let rates = [1, 2, 4, 8, 16, 32].map(|players| Simulation::run(*mode, load, players, flush_us));
                let cell = |(players, (rate, used)): (u32, (f64, u32))| {
                    if used > players { format!("{rate:.0} ({used})") } else { format!("{rate:.0}") }
                };
                let cells: Vec<String> = [1, 2, 4, 8, 16, 32].into_iter().zip(rates).map(cell).collect();
                println!("| {} | {} | {} |", load.name, mode.name(), cells.join(" | "));
            }
        }
    }
    println!("\nIn brackets: players in the end, when all wait for a first read that none has begun.");
}

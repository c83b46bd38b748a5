//! Step 4: clients change sides. Everything that takes time is done before the pause; in it only what must be.
//!
//! ```text
//!  Prepared --pause--> (clients wait) --fence, drain, sequences, flush--> --switch--> Switched
//!     ^                     |  time-out or failure: lift the fence, resume      |
//!     +---------------------+                                    no way back but `fallback`
//! ```

use crate::fault::{FaultPoint, reach};
use crate::front::Front;
use crate::inventory::text;
use crate::journal::{Journal, Phase};
use crate::link::{Link, Purpose, literal};
use crate::options::Options;
use crate::outfit::{self, PUBLICATIONS};
use crate::progress::Teller;
use crate::run::{Following, fingerprint, sequences};
use crate::{Error, Server, fence};
use std::time::{Duration, Instant};
use stillpoint_events::EventKind;

/// Between two pauses clients get this long to work off what has queued.
const BETWEEN_PAUSES: Duration = Duration::from_millis(500);

/// From where to where, and what the journal says before and after.
pub(crate) struct Direction {
    pub(crate) from: Server,
    pub(crate) to: Server,
    /// While clients are where they were.
    pub(crate) before: Phase,
    /// While it is for the proxy to say where they are.
    pub(crate) during: Phase,
    /// Once they have changed sides.
    pub(crate) after: Phase,
    /// Whether a way back is to be opened.
    pub(crate) open_way_back: bool,
}

impl Direction {
    pub(crate) fn forward(options: &Options) -> Direction {
        Direction {
            from: options.source.clone(),
            to: options.target.clone(),
            before: Phase::Following,
            during: Phase::Switching,
            after: Phase::Switched,
            open_way_back: !options.accepted.no_fallback,
        }
    }

    pub(crate) fn back(options: &Options) -> Direction {
        Direction {
            from: options.target.clone(),
            to: options.source.clone(),
            before: Phase::Switched,
            during: Phase::Returning,
            after: Phase::Returned,
            open_way_back: false,
        }
    }
}

/// Sessions are ready on the other side; nothing has been decided.
pub(crate) struct Prepared {
    following: Following,
    front: Front,
    from: Link,
    /// Asks for the fingerprint while the other one drains.
    looking: Link,
    to: Link,
    grantees: Vec<String>,
    sessions: u64,
}

/// Opens all that the pause needs.
pub(crate) async fn prepare(
    options: &Options,
    journal: &mut Journal,
    following: Following,
    direction: &Direction,
) -> Result<Prepared, Error> {
    let durable = [("synchronous_commit", "on")];
    let mut from = Link::connect(&direction.from, Purpose::Statements, &durable).await?;
    let looking = Link::connect(&direction.from, Purpose::Statements, &[]).await?;
    let mut to = Link::connect(&direction.to, Purpose::Statements, &durable).await?;
    if direction.open_way_back {
        outfit::publish(&mut to, &following.inventory).await?;
        outfit::drop_slot(&mut to, &journal.record.back_slot()).await?;
        drop(outfit::create_slot(&direction.to, &journal.record.back_slot(), false, options.snapshot_limit).await?);
    }
    let mut front = Front::connect(&options.proxy, &options.tenant).await?;
    let stored = "SELECT rolname, rolpassword FROM pg_authid WHERE rolcanlogin AND rolpassword IS NOT NULL";
    let stored = to.query(stored).await?;
    let verifiers = stored.iter().map(|row| (text(row, 0), text(row, 1))).collect();
    let ready = front.prepare(&direction.to, &verifiers, options.prepare_limit).await?;
    let grantees = fence::grantees(&mut from).await?;
    reach(&options.faults, FaultPoint::Prepared)?;
    Ok(Prepared { following, front, from, looking, to, grantees, sessions: ready.sessions })
}

/// Pauses clients and sends them on to the other side, several times if need be.
pub(crate) async fn switch(
    options: &Options,
    journal: &mut Journal,
    mut prepared: Prepared,
    direction: &Direction,
    teller: &Teller,
) -> Result<Duration, Error> {
    let mut attempt = 1;
    let (begun, drained) = loop {
        let grantees = prepared.grantees.clone();
        journal.update(|record| (record.phase, record.fenced) = (direction.during, grantees))?;
        let begun = Instant::now();
        match prepared.front.pause(options.pause_limit).await {
            Ok(()) => break (begun, begun.elapsed()),
            Err(error @ Error::TimedOut { .. }) if attempt < options.pause_attempts => {
                teller.warn(format!("pause {attempt} of {}: {error}; clients go on", options.pause_attempts));
            }
            Err(error) => {
                journal.update(|record| record.phase = direction.before)?;
                return Err(error);
            }
        }
        attempt += 1;
        tokio::time::sleep(BETWEEN_PAUSES).await;
    };
    if let Err(error) = in_pause(options, journal, &mut prepared, direction, begun).await {
        back_to_work(journal, &mut prepared, direction).await?;
        return Err(error);
    }
    let switched = prepared.front.switch().await;
    let paused = begun.elapsed();
    if let Err(error) = switched {
        // It may have come to pass before the connection broke: the proxy knows.
        if !serves(options, &direction.to).await? {
            back_to_work(journal, &mut prepared, direction).await?;
            return Err(error);
        }
    }
    journal.update(|record| record.phase = direction.after)?;
    teller.tell(EventKind::SwitchedOver {
        paused_us: paused.as_micros() as u64,
        drained_us: drained.as_micros() as u64,
        sessions: prepared.sessions,
    });
    fence::clear(&mut prepared.from).await?;
    Ok(paused)
}

/// What cannot be done before clients stand: fence, last changes, sequences, and that all of it is on disk.
async fn in_pause(
    options: &Options,
    journal: &mut Journal,
    prepared: &mut Prepared,
    direction: &Direction,
    begun: Instant,
) -> Result<(), Error> {
    let left = || options.pause_limit.saturating_sub(begun.elapsed());
    let Prepared { following, from, looking, to, grantees, .. } = prepared;
    let Following { follower, inventory, fingerprint: before, .. } = following;
    let (drained, now) = tokio::join!(follower.drain(left()), fingerprint(looking));
    drained?;
    if now? != *before {
        return Err(Error::SchemaChanged("something was created, altered or dropped".into()));
    }
    reach(&options.faults, FaultPoint::Drained)?;
    fence::raise(from, &direction.from.database, grantees).await?;
    sequences(from, to, inventory).await?;
    // This commit is synchronous: with it all that the players wrote is on disk.
    let migration = literal(&journal.record.migration);
    to.query(&format!("DELETE FROM stillpoint.epoch; INSERT INTO stillpoint.epoch VALUES ({migration}, 1, true)"))
        .await?;
    if direction.open_way_back {
        let rows = to.query("SELECT pg_current_wal_insert_lsn()").await?;
        let position = outfit::lsn(&rows.first().map_or_else(String::new, |row| text(row, 0)));
        journal.update(|record| record.back_from = position)?;
    }
    reach(&options.faults, FaultPoint::Fenced)
}

/// Undoes what was done in the pause; clients go on where they were.
async fn back_to_work(journal: &mut Journal, prepared: &mut Prepared, direction: &Direction) -> Result<(), Error> {
    // Sessions that exist are not fenced: clients need not wait for this.
    let resumed = prepared.front.resume().await;
    fence::lift(&mut prepared.from, &direction.from.database, &prepared.grantees).await?;
    journal.update(|record| record.phase = direction.before)?;
    resumed
}

/// Whether the proxy serves the tenant from `server`.
pub(crate) async fn serves(options: &Options, server: &Server) -> Result<bool, Error> {
    let mut front = Front::connect(&options.proxy, &options.tenant).await?;
    Ok(front.serving().await? == Some(server.host_and_port()))
}

/// [`settle`], when it was cut off: the slot on the source tells.
pub(crate) async fn settle_again(options: &Options) -> Result<(), Error> {
    let mut journal = Journal::open(&options.state, &options.source.database)?;
    let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    let slots = outfit::our_slots(&mut source, &options.source.database).await?;
    if slots.contains(&journal.record.slot()) { settle(options, &mut journal).await } else { Ok(()) }
}

/// After the switch: the way out is closed, the way back is open.
pub(crate) async fn settle(options: &Options, journal: &mut Journal) -> Result<(), Error> {
    reach(&options.faults, FaultPoint::Switched)?;
    let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    if journal.record.way_back {
        outfit::install(&mut source, journal.record.back_from).await?;
        let mut target = Link::connect(&options.target, Purpose::Statements, &[]).await?;
        let position = journal.record.back_from;
        // The log before the switch is of no use to the way back.
        let sql = format!(
            "SELECT pg_replication_slot_advance({}, '{:X}/{:X}')",
            literal(&journal.record.back_slot()),
            position >> 32,
            position & 0xffff_ffff
        );
        target.query(&sql).await?;
    }
    for publication in PUBLICATIONS {
        source.query(&format!("SET client_min_messages = error; DROP PUBLICATION IF EXISTS {publication}")).await?;
    }
    // Last: it tells that all of this is done.
    outfit::drop_slot(&mut source, &journal.record.slot()).await
}

//! Step 4: clients change sides. Everything that takes time is done before the pause; in it only what must be.
//!
//! ```text
//!  Prepared --pause--> (clients stand) --fence, drain, sequences, definitions, flush--> --switch--> Switched
//!     ^                     |  time-out or failure: lift the fence, resume      |
//!     +---------------------+                                    no way back but `fallback`
//! ```
//!
//! Definitions are compared as a whole before each pause, and in it, once the door is shut and sessions that bypass the proxy
//! are gone, only whether a row of a catalog came, went or changed meanwhile: then clients go on, and the next look tells what it
//! was. With 10,000 tables of ten columns, each with a sequence and large values, the look in the pause takes a processor 0.2 to 0.4 s
//! (of two with other work to do), beside the drain. Where roles are brought over, so are their changes before each pause, and in it they
//! are looked at in the same way.

use crate::catalogs::{self, Look};
use crate::fault::{FaultPoint, reach};
use crate::fence::Grant;
use crate::front::{Front, patiently};
use crate::inventory::{Inventory, text};
use crate::journal::{Capture, Journal, Phase, Record};
use crate::link::{Link, Purpose, Row, identifier, literal};
use crate::options::Options;
use crate::outfit;
use crate::progress::Teller;
use crate::run::{Following, catch_up, sequences};
use crate::{Error, Roles, Server, fence, roles, several};
use std::time::{Duration, Instant};
use stillpoint_events::EventKind;

/// Between two pauses clients get this long to work off what has queued.
const BETWEEN_PAUSES: Duration = Duration::from_millis(500);

/// One of the two servers of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Target,
}

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
            // The source is open from here on.
            before: Phase::Returning,
            during: Phase::Returning,
            after: Phase::Returned,
            open_way_back: false,
        }
    }

    /// Returns true if roles that the target lacks are made there.
    fn brings_roles(&self, options: &Options) -> bool {
        self.side() == Side::Target && options.roles == Roles::Create
    }

    /// Where clients are led.
    fn side(&self) -> Side {
        if self.after == Phase::Returned { Side::Source } else { Side::Target }
    }

    /// Where the journal keeps who could connect to the side that is left.
    fn fenced<'r>(&self, record: &'r mut Record) -> &'r mut Option<Vec<Grant>> {
        if self.side() == Side::Source { &mut record.fenced_target } else { &mut record.fenced }
    }
}

/// Sessions are ready on the other side; nothing has been decided.
pub(crate) struct Prepared {
    following: Following,
    front: Front,
    grants: Vec<Grant>,
    sessions: u64,
}

/// The connections that a pause needs: opened before it, and used once, since a limit may cut off an answer.
struct Hands {
    /// Beside the database that is left.
    beside: Link,
    from: Link,
    /// Looks at definitions while the others are busy.
    looking: Link,
    look: Look,
    /// Marks of roles; none where they are not brought over.
    roles: Vec<Row>,
    to: Link,
}

impl Hands {
    async fn open(direction: &Direction, inventory: &Inventory, with_roles: bool) -> Result<Hands, Error> {
        // A session of a parallel plan would have to pass the door.
        let settings = [("synchronous_commit", "on"), ("max_parallel_workers_per_gather", "0")];
        let mut looking = Link::connect(&direction.from, Purpose::Statements, &settings).await?;
        let look = Look::take(&mut looking).await?;
        let roles = if with_roles { roles::marks(&mut looking).await? } else { Vec::new() };
        let mut hands = Hands {
            beside: fence::at_the_door(&direction.from).await?,
            from: Link::connect(&direction.from, Purpose::Statements, &settings).await?,
            looking,
            look,
            roles,
            to: Link::connect(&direction.to, Purpose::Statements, &settings).await?,
        };
        // Once for nothing: a server process that does it again has read its catalogues.
        hands.beside.query(&fence::strangers(&direction.from.database, &[])).await?;
        // What it finds now may be decided by then.
        let _ = fence::undecided(&mut hands.beside, &direction.from.database, Duration::ZERO).await;
        sequences(&mut hands.from, inventory).await?;
        hands.to.query("SELECT FROM stillpoint.epoch").await?;
        Ok(hands)
    }
}

/// Opens what takes time: the way back, and sessions on the other side.
pub(crate) async fn prepare(
    options: &Options,
    journal: &mut Journal,
    mut following: Following,
    direction: &Direction,
) -> Result<Prepared, Error> {
    // From here on every moment of delay is one of the pause.
    following.guide = None;
    let mut to = Link::connect(&direction.to, Purpose::Statements, &[]).await?;
    if direction.open_way_back {
        outfit::publish(&mut to, &following.inventory).await?;
        outfit::drop_slot(&mut to, &journal.record.back_slot()).await?;
        let slot = &journal.record.back_slot();
        let position = outfit::create_slot(&direction.to, slot, false, options.snapshot_limit).await?.position;
        // What is repeated from here to the switch carries our stamps, and is not brought back.
        journal.update(|record| record.back_from = position)?;
        journal.keep_definitions(&catalogs::read(&mut to).await?)?;
    }
    if direction.brings_roles(options) {
        bring_roles(options, journal).await?;
    }
    let mut front = Front::connect(&options.proxy, &options.tenant).await?;
    let stored = "SELECT rolname, rolpassword FROM pg_authid WHERE rolcanlogin AND rolpassword IS NOT NULL";
    let stored = to.query(stored).await?;
    let verifiers = stored.iter().map(|row| (text(row, 0), text(row, 1))).collect();
    let ready = front.prepare(&direction.to, &verifiers, options.prepare_limit).await?;
    let grants = fence::grants(&mut fence::beside(&direction.from).await?, &direction.from.database).await?;
    reach(&options.faults, FaultPoint::Prepared)?;
    Ok(Prepared { following, front, grants, sessions: ready.sessions })
}

/// Has the target have the roles of the source as they are now.
async fn bring_roles(options: &Options, journal: &mut Journal) -> Result<(), Error> {
    let (number, made) = (journal.record.number, journal.record.made_roles.clone());
    roles::bring(&options.source, &options.target, &made, |made| journal.makes_roles(number, made)).await
}

/// Pauses clients and sends them on to the other side, several times if need be. How long they stood, and a connection to
/// the side that they have left: it was made before the door was shut, which nobody passes from now on.
pub(crate) async fn switch(
    options: &Options,
    journal: &mut Journal,
    mut prepared: Prepared,
    direction: &Direction,
    teller: &Teller,
) -> Result<(Duration, Link), Error> {
    let mut attempt = 1;
    let (begun, drained, left) = loop {
        match stand_still(options, journal, &mut prepared, direction, teller).await {
            Ok(standing) => break standing,
            Err(error @ (Error::TimedOut { .. } | Error::CatalogsChanged(_) | Error::LockLost { .. }))
                if attempt < options.pause_attempts =>
            {
                teller.warn(format!("pause {attempt} of {}: {error}; clients go on", options.pause_attempts));
            }
            Err(error) => return Err(error),
        }
        attempt += 1;
        tokio::time::sleep(BETWEEN_PAUSES).await;
        let mut link = Link::connect(&direction.from, Purpose::Statements, &[]).await?;
        catch_up(&mut prepared.following, &mut link, teller).await?;
    };
    let switched = prepared.front.switch().await;
    let paused = begun.elapsed();
    if let Err(error) = switched {
        // It may have come to pass before the connection broke: the proxy knows.
        if !serves(options, &journal.record, direction.side()).await? {
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
    fence::leave(&direction.from).await?;
    Ok((paused, left))
}

/// One pause. When it succeeds clients stand, the other side holds all that was ever committed here, and nobody can add to
/// it; when it does not, clients go on where they were. When it began, and how long transactions took to end.
async fn stand_still(
    options: &Options,
    journal: &mut Journal,
    prepared: &mut Prepared,
    direction: &Direction,
    teller: &Teller,
) -> Result<(Instant, Duration, Link), Error> {
    let brings_roles = direction.brings_roles(options);
    let mut hands = Hands::open(direction, &prepared.following.inventory, brings_roles).await?;
    let mut changes = catalogs::changes(&prepared.following.definitions, &hands.look.definitions);
    if brings_roles {
        bring_roles(options, journal).await?;
        let brought = journal.record.made_roles.iter().flat_map(|role| [role.clone(), identifier(role)]);
        let brought: Vec<String> = brought.map(|role| format!("changed role {role}")).collect();
        changes.retain(|change| !brought.contains(change));
    }
    catalogs::changed(changes)?;
    // What the pause would refuse is refused before it; and it asks a server process that has read its catalogues.
    let backends = prepared.front.backends().await?;
    prepared.front.are_at(&backends, &mut hands.beside, &direction.from).await?;
    let grants = prepared.grants.clone();
    journal.update(|record| {
        record.phase = direction.during;
        *direction.fenced(record) = Some(grants);
        if direction.side() == Side::Target {
            record.leads_to = Some(direction.to.host_and_port());
        }
    })?;
    let begun = Instant::now();
    if let Err(error) = prepared.front.pause(options.pause_limit).await {
        journal.update(|record| record.phase = direction.before)?;
        return Err(error);
    }
    let drained = begun.elapsed();
    // The rest of the limit is for lifting the fence before the proxy lets clients go on by itself.
    let limit = options.pause_limit.mul_f64(0.8).saturating_sub(drained);
    let work = in_pause(options, journal, prepared, &mut hands, direction, teller, limit);
    let done = tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
        Err(Error::TimedOut { what: "the pause".into(), limit: options.pause_limit, who: Vec::new() })
    });
    if let Err(error) = done {
        back_to_work(journal, prepared, direction).await?;
        return Err(error);
    }
    Ok((begun, drained, hands.from))
}

/// Does all that cannot be done before clients stand: fence, last changes, sequences, a last look at definitions, and that all of it is
/// on disk.
async fn in_pause(
    options: &Options,
    journal: &Journal,
    prepared: &mut Prepared,
    hands: &mut Hands,
    direction: &Direction,
    teller: &Teller,
    limit: Duration,
) -> Result<(), Error> {
    let Hands { beside, from, looking, look, roles, to } = hands;
    let Prepared { following: Following { follower, inventory, .. }, front, grants, .. } = prepared;
    let database = &direction.from.database;
    let begun = Instant::now();
    let (found, proxied) = tokio::join!(fence::shut_unless_changed(beside, database, grants), front.backends());
    if let Some(found) = found? {
        *grants = found;
        return Err(Error::CatalogsChanged(vec!["pg_database".into()]));
    }
    let proxied = proxied?;
    front.are_at(&proxied, beside, &direction.from).await?;
    let shut = begun.elapsed();
    for who in fence::empty(beside, database, &proxied, limit).await? {
        if follower.is_of_proxy() {
            return Err(Error::Capture(format!("{who} does not come through the proxy: what it wrote is not seen")));
        }
        teller.warn(format!("{who} does not come through the proxy, and was ended"));
    }
    let emptied = begun.elapsed();
    reach(&options.faults, FaultPoint::Fenced)?;
    // No session is left that could draw a number from a sequence, decide a transaction or define something.
    let outdated = async {
        let mut outdated = look.outdated(looking).await?;
        if !roles.is_empty() {
            outdated.extend(roles::outdated(roles, &roles::marks(looking).await?));
        }
        Ok::<_, Error>((outdated, begun.elapsed()))
    };
    let (drained, numbers, undecided, outdated) = tokio::join!(
        follower.drain(limit),
        sequences(from, inventory),
        fence::undecided(beside, database, limit),
        outdated
    );
    let looked = outdated.as_ref().map(|(_, looked)| *looked).ok();
    tracing::debug!(?shut, ?emptied, ?looked, drained = ?begun.elapsed(), "fenced and drained");
    undecided?;
    drained?;
    let numbers = numbers?;
    let (outdated, _) = outdated?;
    if !outdated.is_empty() {
        return Err(Error::CatalogsChanged(outdated));
    }
    // This commit is synchronous: with it all that the players wrote is on disk.
    let migration = literal(&journal.record.migration);
    let epoch = format!("DELETE FROM stillpoint.epoch; INSERT INTO stillpoint.epoch VALUES ({migration}, 1, true)");
    to.query(&(numbers + &epoch)).await?;
    // Behind all that takes time: from here on it is the proxy alone that decides, and clients of one pause go one way.
    if let Some(witness) = &journal.witness {
        witness.holds(if direction.side() == Side::Target { beside } else { to }).await?;
    }
    tracing::debug!(flushed = ?begun.elapsed(), "all of it is on the other side");
    reach(&options.faults, FaultPoint::Drained)
}

/// Undoes what was done in the pause; clients go on where they were.
async fn back_to_work(journal: &mut Journal, prepared: &mut Prepared, direction: &Direction) -> Result<(), Error> {
    // First: a client that connects when the pause is over must be let in.
    let lifted = fence::lift(&direction.from, &prepared.grants).await;
    // The proxy may have reached the limit itself, or be gone; then clients have gone on without us.
    let _ = prepared.front.resume().await;
    lifted?;
    let grants = prepared.grants.clone();
    journal.update(|record| {
        record.phase = direction.before;
        *direction.fenced(record) = Some(grants);
    })
}

/// Whether the proxy serves the tenant from this side. An address that is neither side's, as it was told or as the journal
/// has it, is an error: nothing may be concluded from how an address is written.
pub(crate) async fn serves(options: &Options, record: &Record, side: Side) -> Result<bool, Error> {
    let serving = || async { Front::connect(&options.proxy, &options.tenant).await?.settled().await };
    let Some(now) = patiently(serving).await? else {
        return Err(Error::Proxy(format!("tenant {} is not known to it", options.tenant)));
    };
    match side_of(options, record, &now) {
        Some(found) => Ok(found == side),
        None => Err(Error::Proxy(format!(
            "it serves tenant {} from {}:{}, which is neither {} nor {}: name the servers as the proxy knows them",
            options.tenant, now.0, now.1, options.source, options.target
        ))),
    }
}

/// Which side an address is of, in what the proxy says.
pub(crate) fn side_of(options: &Options, record: &Record, at: &(String, u16)) -> Option<Side> {
    let is =
        |server: &Server, known: &Option<(String, u16)>| server.host_and_port() == *at || known.as_ref() == Some(at);
    match (is(&options.source, &record.served_from), is(&options.target, &record.leads_to)) {
        (true, false) => Some(Side::Source),
        (false, true) => Some(Side::Target),
        _ => None,
    }
}

/// [`settle`], when it was cut off: the slot on the source tells, or the journal where there is none.
pub(crate) async fn settle_again(options: &Options, teller: &Teller) -> Result<(), Error> {
    let mut journal = Journal::open(&options.state, &options.source.database)?;
    let settled = match journal.record.capture {
        Capture::Rows | Capture::Statements => journal.record.settled,
        Capture::Log => {
            let mut beside = fence::beside(&options.source).await?;
            let slots = outfit::our_slots(&mut beside, &options.source.database).await?;
            !slots.contains(&journal.record.slot())
        }
    };
    if settled { Ok(()) } else { settle(options, &mut journal, None, teller).await }
}

/// After the switch: the way out is closed, the way back is open, and other targets are as they were.
pub(crate) async fn settle(
    options: &Options,
    journal: &mut Journal,
    left: Option<Link>,
    teller: &Teller,
) -> Result<(), Error> {
    reach(&options.faults, FaultPoint::Switched)?;
    let mut source = match left {
        Some(link) => link,
        None => fence::enter(&options.source).await?,
    };
    if journal.record.way_back {
        outfit::install(&mut source, journal.record.back_from).await?;
    }
    outfit::withdraw(&mut source).await?;
    several::leave_others(options, journal, &mut source).await?.into_iter().for_each(|left| teller.warn(left));
    // Last: it tells that all of this is done.
    outfit::drop_slot(&mut source, &journal.record.slot()).await?;
    journal.update(|record| record.settled = true)
}

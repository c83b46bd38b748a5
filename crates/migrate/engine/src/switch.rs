//! Step 4: clients change sides. Everything that takes time is done before the pause, and in the pause only what is
//! unavoidable.
//!
//! ```text
//!  Prepared --pause--> (clients wait) ---fence, drain, sequences, definitions, flush--> --switch--> Switched
//!     ^                     |  time-out or failure: lift the fence, resume      |
//!     +---------------------+                                    no way back but `fallback`
//! ```
//!
//! All definitions are compared before each pause. In the pause, after connections are disabled and direct sessions are
//! terminated, only the catalogs are checked for rows that were added, removed or changed meanwhile. If there are any, clients
//! continue on their side, and the next look reports the difference. With 10,000 tables of ten columns, each with a sequence
//! and large values, the check in the pause takes 0.2 to 0.4 s of one processor (of two with other work to do), beside the
//! drain. If roles are moved, their changes are moved before each pause too, and checked in the pause in the same way.

use crate::catalogs::{self, CatalogState};
use crate::fence::Grant;
use crate::follow_state::{FollowState, catch_up};
use crate::journal::{Phase, Record, SharedJournal};
use crate::materialized_views::{self, MaterializedView};
use crate::options::Options;
use crate::owner::Witness;
use crate::progress::Reporter;
use crate::proxy_client::{ProxyClient, retry_until_takeover};
use crate::reactions::Reactions;
use crate::selection::Selection;
use crate::{Roles, Settings, copied_settings, fence, moved_slots, roles};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use stillpoint_events::migrate;
use stillpoint_migrate_apply::inventory::Inventory;
use stillpoint_migrate_apply::{Error, replication_objects};
use stillpoint_migrate_postgres::link::{Link, Purpose, Row, Server, identifier, literal, number, text};
use stillpoint_operation::Side as FaultSide;

/// Time between two pauses for clients to work off their queued statements.
const PAUSE_INTERVAL: Duration = Duration::from_millis(500);

/// One of the two servers of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Source,
    Target,
}

/// Servers of a switch from one side to the other, and the journal's phases before and after it.
pub(crate) struct Direction {
    pub(crate) from: Server,
    pub(crate) to: Server,
    /// Part of the database of the side that clients leave; the target has nothing else.
    pub(crate) selection: Selection,
    /// Phase while clients are on the side they leave.
    pub(crate) before: Phase,
    /// Phase while only the proxy knows which side clients are on.
    pub(crate) during: Phase,
    /// Phase after clients have changed sides.
    pub(crate) after: Phase,
    /// True if a way back is to be opened.
    pub(crate) open_way_back: bool,
}

impl Direction {
    pub(crate) fn forward(options: &Options) -> Direction {
        Direction {
            from: options.source.clone(),
            to: options.target.clone(),
            selection: options.selection.clone(),
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
            selection: Selection::default(),
            // The source accepts connections from here on.
            before: Phase::Returning,
            during: Phase::Returning,
            after: Phase::Returned,
            open_way_back: false,
        }
    }

    /// Returns true if roles that the target lacks are created there.
    fn creates_roles(&self, options: &Options) -> bool {
        self.side() == Side::Target && options.roles == Roles::Create
    }

    /// Side to which clients are redirected.
    fn side(&self) -> Side {
        if self.after == Phase::Returned { Side::Source } else { Side::Target }
    }

    /// Field of the journal that keeps the connect privileges of the side that clients leave.
    fn fenced<'r>(&self, record: &'r mut Record) -> &'r mut Option<Vec<Grant>> {
        if self.side() == Side::Source { &mut record.fenced_target } else { &mut record.fenced }
    }
}

/// State after sessions are ready on the other side, and before anything has been decided.
pub(crate) struct Prepared {
    following: FollowState,
    proxy: ProxyClient,
    grants: Vec<Grant>,
    sessions: u64,
    /// Reports if the command still holds its lock; `None` if the source could not be asked.
    witness: Option<Witness>,
}

/// Connections that a pause needs. They are opened before it and used only once, because a limit may cut off an answer.
struct PauseConnections {
    /// Connection to another database of the server that clients leave.
    beside: Link,
    from: Link,
    /// Connection that checks definitions while the others are busy.
    checker: Link,
    catalog_state: CatalogState,
    /// Marks of roles; empty if roles are not moved.
    roles: Vec<Row>,
    reactions: Reactions,
    to: Link,
}

impl PauseConnections {
    async fn open(direction: &Direction, inventory: &Inventory, with_roles: bool) -> Result<PauseConnections, Error> {
        // A parallel worker would count as a new session, and connections are disabled then.
        // A vacuum by the server gives way to who waits for its lock for this long.
        let settings =
            [("synchronous_commit", "on"), ("max_parallel_workers_per_gather", "0"), ("deadlock_timeout", "10ms")];
        let mut checker = Link::connect(&direction.from, Purpose::Statements, &settings).await?;
        let catalog_state = CatalogState::take(&mut checker, &direction.selection).await?;
        let roles = if with_roles { roles::marks(&mut checker).await? } else { Vec::new() };
        let to = Link::connect(&direction.to, Purpose::Statements, &settings).await?;
        let mut connections = PauseConnections {
            beside: fence::connect_for_fencing(&direction.from).await?,
            from: Link::connect(&direction.from, Purpose::Statements, &settings).await?,
            reactions: Reactions::read(&mut checker, &direction.selection, to.rights).await?,
            checker,
            catalog_state,
            roles,
            to,
        };
        // Run once without use: a server process that runs it again has its catalog cache filled.
        connections.beside.query(&fence::direct_sessions_sql(&direction.from.database, &[])).await?;
        // Transactions that it finds now may be decided by the time of the pause.
        let _ =
            fence::check_prepared_transactions(&mut connections.beside, &direction.from.database, Duration::ZERO).await;
        sequences(&mut connections.from, inventory).await?;
        connections.to.query("SELECT FROM stillpoint.epoch").await?;
        Ok(connections)
    }
}

/// Opens what takes time: the way back, and sessions on the other side.
pub(crate) async fn prepare(
    options: &Options,
    journal: &SharedJournal<'_>,
    mut following: FollowState,
    direction: &Direction,
    witness: Option<Witness>,
    reporter: &Reporter,
) -> Result<Prepared, Error> {
    // From here on, every delay would be part of the pause.
    following.controller = None;
    let mut to = Link::connect(&direction.to, Purpose::Statements, &[]).await?;
    let mut from = Link::connect(&direction.from, Purpose::Statements, &[]).await?;
    following.large_objects.bring(&mut from, &mut to).await?;
    if direction.open_way_back {
        replication_objects::publish(&mut to, &following.inventory).await?;
        let slot = journal.record().back_slot();
        replication_objects::drop_slot(&mut to, &slot).await?;
        let position =
            replication_objects::create_slot(&direction.to, &slot, false, options.snapshot_limit).await?.position;
        // Changes that are repeated from here to the switch carry our stamps, and are not sent back.
        journal.lock().update(|record| record.back_from = position)?;
        let reactions = Reactions::read(&mut from, &direction.selection, to.rights).await?;
        let definitions =
            reactions.look_enabled(&mut to, async |to| catalogs::read(to, &Selection::default()).await).await?;
        journal.lock().keep_definitions(&definitions)?;
    }
    if direction.creates_roles(options) {
        create_roles(options, journal).await?;
    }
    if options.settings == Settings::Copy && direction.side() == Side::Target {
        copied_settings::write(options, journal, &mut from, reporter).await?;
    }
    if options.move_slots && direction.side() == Side::Target {
        moved_slots::make(options, journal, &mut from, &mut to, reporter).await?;
    }
    let left_out = direction.selection.left_out(&mut from).await?;
    if !left_out.is_empty() {
        reporter.warn(format!("not moved, and not found by clients from the switch on: {}", left_out.names()));
    }
    if direction.side() == Side::Target {
        // Sessions that the proxy opens from here on are those of clients.
        fence::lift_read_only(&direction.to).await?;
    }
    let mut proxy = ProxyClient::connect(&options.proxy, &options.tenant).await?;
    let verifiers = stored_passwords(&mut to, options).await?;
    let sessions = proxy.prepare(&direction.to, &verifiers, options.prepare_limit).await?;
    let grants = fence::grants(&mut fence::connect_beside(&direction.from).await?, &direction.from.database).await?;
    Ok(Prepared { following, proxy, grants, sessions, witness })
}

/// Passwords of clients' roles as a server stores them, and those of the options.
pub(crate) async fn stored_passwords(link: &mut Link, options: &Options) -> Result<BTreeMap<String, String>, Error> {
    let stored = "SELECT rolname, rolpassword FROM pg_authid WHERE rolcanlogin AND rolpassword IS NOT NULL";
    // Without the right to read them there are those of the options.
    let stored = if link.rights.is_superuser { link.query(stored).await? } else { Vec::new() };
    let mut verifiers = stored.iter().map(|row| (text(row, 0), text(row, 1))).collect();
    options.client_passwords.add_to(&mut verifiers);
    Ok(verifiers)
}

/// Creates or updates the source's present roles on the target.
async fn create_roles(options: &Options, journal: &SharedJournal<'_>) -> Result<(), Error> {
    let Record { number, made_roles, .. } = journal.record();
    roles::create_and_update(&options.source, &options.target, &made_roles, |made| {
        journal.lock().record_roles(number, made)
    })
    .await
}

/// Pauses clients and moves them to the other side, with several attempts if necessary. Returns how long they were paused, and
/// a connection to the side that they left, made before connections were disabled there; no new session can connect from now
/// on.
pub(crate) async fn switch(
    options: &Options,
    journal: &SharedJournal<'_>,
    mut prepared: Prepared,
    direction: &Direction,
    reporter: &Reporter,
) -> Result<(Duration, Link), Error> {
    let mut attempt = 1;
    let (begun, drained, left) = loop {
        if let Some(together) = &options.together {
            together.meet_before_pause().await?;
        }
        let paused = pause_and_fence(options, journal, &mut prepared, direction, reporter).await;
        if let (Some(together), Err(_)) = (&options.together, &paused) {
            together.give_up_pause();
        }
        match paused {
            Ok(status) => break status,
            Err(error)
                if attempt < options.pause_attempts
                    && (error.is_time_out() || matches!(error, Error::CatalogsChanged(_) | Error::LockLost { .. })) =>
            {
                reporter.warn(format!("pause {attempt} of {}: {error}; clients continue", options.pause_attempts));
            }
            Err(error) => return Err(error),
        }
        attempt += 1;
        tokio::time::sleep(PAUSE_INTERVAL).await;
        let mut link = Link::connect(&direction.from, Purpose::Statements, &[]).await?;
        catch_up(&mut prepared.following, &mut link, reporter).await?;
    };
    let switched = prepared.proxy.switch().await;
    let paused = begun.elapsed();
    if let Err(error) = switched {
        // The switch may have happened before the connection broke: the proxy knows.
        if !serves(options, &journal.record(), direction.side()).await? {
            resume_clients(journal, &mut prepared, direction).await?;
            return Err(error);
        }
    }
    journal.lock().update(|record| record.phase = direction.after)?;
    reporter.report(migrate::Event::SwitchedOver {
        paused_us: paused.as_micros() as u64,
        drained_us: drained.as_micros() as u64,
        sessions: prepared.sessions,
    });
    fence::wait_and_terminate_sessions(&direction.from).await?;
    Ok((paused, left))
}

/// Statements that set every sequence to its value on this side; empty if there are no sequences.
async fn sequences(from: &mut Link, inventory: &Inventory) -> Result<String, Error> {
    if inventory.sequences.is_empty() {
        return Ok(String::new());
    }
    let each = inventory.sequences.iter();
    let reads: Vec<String> =
        each.map(|name| format!("SELECT {} AS name, last_value, is_called FROM {name}", literal(name))).collect();
    let rows = from.query(&reads.join(" UNION ALL ")).await?;
    let writes = rows.iter().map(|row| {
        format!("SELECT setval({}, {}, {}); ", literal(&text(row, 0)), number::<i64>(row, 1), text(row, 2) == "t")
    });
    Ok(writes.collect())
}

/// Does one pause. If it succeeds, clients are paused, and the other side holds every commit of this side, where no session can
/// write any more. If it fails, clients continue where they were. Returns its start, how long transactions took to end, and a
/// connection.
async fn pause_and_fence(
    options: &Options,
    journal: &SharedJournal<'_>,
    prepared: &mut Prepared,
    direction: &Direction,
    reporter: &Reporter,
) -> Result<(Instant, Duration, Link), Error> {
    let brings_roles = direction.creates_roles(options);
    let mut connections = PauseConnections::open(direction, &prepared.following.inventory, brings_roles).await?;
    let mut changes = catalogs::changes(&prepared.following.definitions, &connections.catalog_state.definitions);
    if brings_roles {
        create_roles(options, journal).await?;
        let roles = journal.record().made_roles;
        let brought = roles.iter().flat_map(|role| [role.clone(), identifier(role)]);
        let brought: Vec<String> = brought.map(|role| format!("changed role {role}")).collect();
        changes.retain(|change| !brought.contains(change));
    }
    catalogs::fail_if_changed(changes)?;
    // Refusals of the pause are found before it. This also fills the catalog cache of the server process that it asks.
    let backends = prepared.proxy.backends().await?;
    prepared.proxy.check_backends_at(&backends, &mut connections.beside, &direction.from).await?;
    let grants = prepared.grants.clone();
    journal.lock().update(|record| {
        record.phase = direction.during;
        *direction.fenced(record) = Some(grants);
        if direction.side() == Side::Target {
            record.leads_to = Some(direction.to.host_and_port());
        }
    })?;
    let begun = Instant::now();
    if let Err(error) = prepared.proxy.pause(options.pause_limit).await {
        journal.lock().update(|record| record.phase = direction.before)?;
        return Err(error);
    }
    let drained = begun.elapsed();
    // The rest of the limit is for lifting the fence before the proxy resumes clients by itself.
    let limit = options.pause_limit.mul_f64(0.8).saturating_sub(drained);
    let work = work_in_pause(options, journal, prepared, &mut connections, direction, reporter, limit);
    let done = tokio::time::timeout(limit, work).await.unwrap_or_else(|_| {
        Err(Error::TimedOut { what: "the pause".into(), limit: options.pause_limit, who: Vec::new() })
    });
    if let Err(error) = done {
        resume_clients(journal, prepared, direction).await?;
        return Err(error);
    }
    Ok((begun, drained, connections.from))
}

/// Does everything that is possible only while clients are paused: fence, last changes, sequences, a last check of definitions,
/// and the flush of all of it to disk. Its parts are `fence` and `drain`.
async fn work_in_pause(
    options: &Options,
    journal: &SharedJournal<'_>,
    prepared: &mut Prepared,
    connections: &mut PauseConnections,
    direction: &Direction,
    reporter: &Reporter,
    limit: Duration,
) -> Result<(), Error> {
    let PauseConnections { beside, from, checker, catalog_state, roles, reactions, to } = connections;
    let Prepared { following, proxy, grants, witness, .. } = prepared;
    let FollowState { follower, inventory, large_objects, .. } = following;
    let database = &direction.from.database;
    let begun = Instant::now();
    let (found, proxied) =
        tokio::join!(fence::disable_connections_unless_changed(beside, database, grants), proxy.backends());
    if let Some(found) = found? {
        *grants = found;
        return Err(Error::CatalogsChanged(vec!["pg_database".into()]));
    }
    let proxied = proxied?;
    proxy.check_backends_at(&proxied, beside, &direction.from).await?;
    let shut = begun.elapsed();
    for who in fence::terminate_direct_sessions(beside, database, &proxied, limit).await? {
        if follower.is_by_proxy() {
            return Err(Error::Capture(format!("{who} is a direct session: its writes were not captured")));
        }
        reporter.warn(format!("{who} is a direct session, and was terminated"));
    }
    let emptied = begun.elapsed();
    options.faults.reach("fence", FaultSide::After)?;
    // No session is left that could use a sequence, decide a transaction or define an object.
    let outdated = async {
        let mut outdated = catalog_state.outdated(checker).await?;
        if !roles.is_empty() {
            outdated.extend(roles::outdated(roles, &roles::marks(checker).await?));
        }
        Ok::<_, Error>((outdated, begun.elapsed()))
    };
    let (drained, numbers, undecided, outdated) = tokio::join!(
        follower.drain(limit),
        sequences(from, inventory),
        fence::check_prepared_transactions(beside, database, limit),
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
    large_objects.bring(from, to).await?;
    if options.refresh_at_switch {
        materialized_views::refresh(&direction.to, &MaterializedView::all(from, &direction.selection).await?).await?;
    }
    // This commit is synchronous: after it, everything that the apply workers wrote is on disk.
    let migration = literal(&journal.record().migration);
    let epoch = format!("DELETE FROM stillpoint.epoch; INSERT INTO stillpoint.epoch VALUES ({migration}, 1, true)");
    to.query(&(numbers + &reactions.enable_sql() + &epoch)).await?;
    if let Some(together) = &options.together {
        together.meet_in_pause(options.pause_limit).await?;
    }
    // After all work that takes time: from here on only the proxy decides, and all clients of one pause go to the same side.
    if let Some(witness) = witness {
        witness.check_held(if direction.side() == Side::Target { beside } else { to }).await?;
    }
    tracing::debug!(flushed = ?begun.elapsed(), "all of it is on the other side");
    Ok(options.faults.reach("drain", FaultSide::After)?)
}

/// Undoes the work of the pause; clients continue where they were.
async fn resume_clients(
    journal: &SharedJournal<'_>,
    prepared: &mut Prepared,
    direction: &Direction,
) -> Result<(), Error> {
    // This comes first: a client that connects when the pause is over must be able to.
    let lifted = fence::lift(&direction.from, &prepared.grants).await;
    // The proxy may have reached the limit itself, or be gone; then clients have continued already.
    let _ = prepared.proxy.resume().await;
    lifted?;
    let grants = prepared.grants.clone();
    journal.lock().update(|record| {
        record.phase = direction.before;
        *direction.fenced(record) = Some(grants);
    })
}

/// Returns true if the proxy serves the tenant from this side. It is an error if the address is neither side's, as given in the
/// options or recorded in the journal: no conclusion is drawn from the spelling of an address.
pub(crate) async fn serves(options: &Options, record: &Record, side: Side) -> Result<bool, Error> {
    let serving = || async { ProxyClient::connect(&options.proxy, &options.tenant).await?.serving_after_pause().await };
    let Some(now) = retry_until_takeover(serving).await? else {
        return Err(Error::Proxy(format!("it has no tenant {}", options.tenant)));
    };
    match side_of(options, record, &now) {
        Some(found) => Ok(found == side),
        None => Err(Error::Proxy(format!(
            "it serves tenant {} from {}:{}, which is neither {} nor {}: give the addresses that the proxy's \
             configuration uses",
            options.tenant, now.0, now.1, options.source, options.target
        ))),
    }
}

/// The side that an address reported by the proxy belongs to.
pub(crate) fn side_of(options: &Options, record: &Record, at: &(String, u16)) -> Option<Side> {
    let is =
        |server: &Server, known: &Option<(String, u16)>| server.host_and_port() == *at || known.as_ref() == Some(at);
    match (is(&options.source, &record.served_from), is(&options.target, &record.leads_to)) {
        (true, false) => Some(Side::Source),
        (false, true) => Some(Side::Target),
        _ => None,
    }
}

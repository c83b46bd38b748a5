//! Step 3 of the paper: the target follows the source, until the lag is short and both hold the same rows.

use crate::catalogs::Definitions;
use crate::checksum::Comparison;
use crate::clients::{Clients, SpeedController};
use crate::large_objects::LargeObjects;
use crate::options::Options;
use crate::progress::{PROGRESS_INTERVAL, Reporter};
use crate::selection::Selection;
use crate::switch_order::FollowLoad;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stillpoint_events::migrate;
use stillpoint_migrate_apply::inventory::Inventory;
use stillpoint_migrate_apply::throttle::{Bounds, Throttle};
use stillpoint_migrate_apply::{Error, Feed, Follower, Plan};
use stillpoint_migrate_postgres::link::{Link, Purpose, Server};

/// Lag at which a replay has caught up.
const CAUGHT_UP_LAG: Duration = Duration::from_millis(200);
/// Time over which transactions are counted, and after which a lag counts as at least that long.
const LOAD_MEASURED_MIN: Duration = Duration::from_millis(500);
const LAG_MEASURED_MAX: Duration = Duration::from_secs(5);
/// Limits of repeated transactions a second, within what clients tolerate.
const REPLAY_BOUNDS: Bounds = Bounds::of_rate(100, 4000);

/// State of a side that follows the other.
pub(crate) struct FollowState {
    pub(crate) follower: Follower,
    pub(crate) inventory: Inventory,
    /// Definitions of which the following side was made.
    pub(crate) definitions: Definitions,
    /// Large objects that the following side has.
    pub(crate) large_objects: LargeObjects,
    /// Throttles the replay for clients.
    pub(crate) controller: Option<SpeedController>,
}

/// Repeats what was committed since the snapshot, until the lag is short.
pub(crate) async fn follow(
    options: &Options,
    feed: Feed<'_>,
    inventory: Inventory,
    definitions: Definitions,
    clients: Option<Clients>,
    reporter: &Reporter,
) -> Result<FollowState, Error> {
    let clients = clients.filter(Clients::is_significant);
    let pace = Arc::new(if clients.is_some() { Throttle::new(REPLAY_BOUNDS) } else { Throttle::unlimited() });
    let follower = Follower::start(Plan {
        source: &options.source,
        target: &options.target,
        feed,
        inventory: &inventory,
        players: options.players,
        pace: Arc::clone(&pace),
    })
    .await?;
    let controller = match clients {
        Some(clients) => {
            let status = (!follower.is_by_proxy()).then(|| follower.watch());
            Some(SpeedController::start(clients, options, pace, status, reporter.clone()).await?)
        }
        None => None,
    };
    let mut link = Link::connect(&options.source, Purpose::Statements, &[]).await?;
    let mut to = Link::connect(&options.target, Purpose::Statements, &[]).await?;
    let large_objects = LargeObjects::present(&mut to).await?;
    let mut following = FollowState { follower, inventory, definitions, large_objects, controller };
    catch_up(&mut following, &mut link, reporter).await?;
    following.large_objects.bring(&mut link, &mut to).await?;
    Ok(following)
}

/// Waits until the replay's lag is short, and reports its progress.
pub(crate) async fn catch_up(following: &mut FollowState, source: &mut Link, reporter: &Reporter) -> Result<(), Error> {
    let mut told = (Instant::now(), following.follower.status().applied, 0.0);
    let mut warned = false;
    loop {
        let (begun, wanted) = (Instant::now(), following.follower.mark().await?);
        while following.follower.status().position < wanted && begun.elapsed() < CAUGHT_UP_LAG {
            if let Some(error) = following.follower.failure().await {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let status = following.follower.status();
        let caught_up = status.position >= wanted;
        if told.0.elapsed() >= PROGRESS_INTERVAL || caught_up {
            let lag_bytes = following.follower.lag_bytes(source).await?;
            let seconds = told.0.elapsed().as_secs_f64().max(0.001);
            let tps = ((status.applied - told.1) as f64 / seconds) as u64;
            let gained = (told.2 - lag_bytes as f64) / seconds;
            let estimate_s = (gained > 0.0 && told.2 > 0.0).then(|| (lag_bytes as f64 / gained) as u64);
            let lag_ms = begun.elapsed().as_millis() as u64;
            reporter.report(migrate::Event::Following { lag_ms, lag_bytes, tps, estimate_s });
            if gained < 0.0 && told.2 > 64e6 && !warned {
                warned = true;
                reporter.warn(format!(
                    "the source outruns the target: {lag_bytes} bytes behind, {tps} transactions a second applied"
                ));
            }
            told = (Instant::now(), status.applied, lag_bytes as f64);
        }
        if caught_up {
            return Ok(());
        }
    }
}

/// Measures how far the replay is behind, for a few seconds at most.
pub(crate) async fn load(following: &mut FollowState, source: &mut Link) -> Result<FollowLoad, Error> {
    let (begun, applied) = (Instant::now(), following.follower.status().applied);
    let wanted = following.follower.mark().await?;
    let mut lag = None;
    while begun.elapsed() < LOAD_MEASURED_MIN || lag.is_none() && begun.elapsed() < LAG_MEASURED_MAX {
        if let Some(error) = following.follower.failure().await {
            return Err(error);
        }
        if lag.is_none() && following.follower.status().position >= wanted {
            lag = Some(begun.elapsed());
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let tps = (following.follower.status().applied - applied) as f64 / begun.elapsed().as_secs_f64();
    Ok(FollowLoad::new(lag.unwrap_or(begun.elapsed()), following.follower.lag_bytes(source).await?, tps))
}

/// Compares the tables of `from` that are selected with those of `to`, each part at one moment, while clients continue.
pub(crate) async fn compare_between(
    options: &Options,
    following: &mut FollowState,
    from: &Server,
    to: &Server,
    selection: &Selection,
    reporter: &Reporter,
) -> Result<(), Error> {
    if !options.compare {
        return Ok(());
    }
    let mut link = Link::connect(from, Purpose::Statements, &[]).await?;
    // Changes since it had caught up may be more than a barrier waits for.
    catch_up(following, &mut link, reporter).await?;
    let reading = following
        .controller
        .as_ref()
        .map_or_else(|| Arc::new(Throttle::unlimited()), |controller| Arc::clone(&controller.reading));
    let in_turn = following.controller.is_some() && from.shares_machine_with(to);
    let comparison = Comparison::between(from, to, &mut following.follower, &reading, in_turn).await?;
    let compared = comparison.run(&following.inventory).await.map_err(|error| match error.sqlstate() {
        // No table, or no column, has that name.
        Some("42P01" | "42703") => Error::SchemaChanged(error.to_string()),
        _ => error,
    })?;
    let not_compared = selection.left_out(&mut link).await?.table_count();
    let (tables, rows) = (compared.tables as u64, compared.rows);
    reporter.report(migrate::Event::Compared { tables, rows, not_compared });
    catch_up(following, &mut link, reporter).await
}

//! Several targets: each is brought up until it follows and has been compared, one after the other, so that clients bear one
//! copy at a time. One that fails is dropped (section 4.3 of the paper), and clients go to the first that is left.
//!
//! ```text
//!  target 1   copy  catch-up  compare  follows ........................ prepare --> switch-over
//!  target 2                            copy  catch-up  compare  follows ....| taken away
//!  target 3                                                     copy  x dropped
//! ```
//!
//! Each has a slot, and so a snapshot and a stream of changes, of its own: what one needs does not depend on another.

use crate::clients::Clients;
use crate::front::Front;
use crate::journal::{Journal, Other, Phase};
use crate::link::{Link, Purpose};
use crate::options::Options;
use crate::progress::Teller;
use crate::run::{Following, bring_up};
use crate::switch::{self, Direction, Prepared};
use crate::{Error, outfit, undo};
use std::collections::VecDeque;
use stillpoint_events::EventKind;

/// A target that follows and holds what the source does.
struct Ready {
    number: usize,
    options: Options,
    following: Following,
}

/// Brings all targets up and prepares sessions at the first that is fit: where clients go, and what is prepared there.
pub(crate) async fn prepare(
    options: &Options,
    journal: &mut Journal,
    mut clients: Option<Clients>,
    teller: &Teller,
) -> Result<(Options, Prepared), Error> {
    let mut waiting = candidates(options, journal, teller).await?;
    let mut ready: VecDeque<Ready> = VecDeque::new();
    while let Some((number, of)) = waiting.pop_front() {
        let clients = match clients.take() {
            Some(clients) => Some(clients),
            None => Clients::look(options).await?,
        };
        match bring_up(&of, number, journal, clients, &teller.of_target(number)).await {
            Ok(following) => ready.push_back(Ready { number, options: of, following }),
            Err(error) => {
                let alone = ready.is_empty() && waiting.is_empty();
                let general = ready.is_empty() && !error.is_of_target();
                if alone || general || matches!(error, Error::Interrupted | Error::Fault(_)) {
                    return Err(error);
                }
                let next = waiting.front().map(|(number, _)| (*number, Phase::Begun, String::new()));
                drop_target(&of, number, &error, next, journal, teller).await?;
            }
        }
    }
    loop {
        let Some(Ready { number, options: of, mut following }) = ready.pop_front() else {
            return Err(Error::WrongPhase("no target is left".into()));
        };
        let prepared = match following.follower.failure().await {
            Some(error) => Err(error),
            None => {
                let (direction, teller) = (Direction::forward(&of), teller.of_target(number));
                teller.phase("prepare", switch::prepare(&of, journal, following, &direction)).await
            }
        };
        match prepared {
            Ok(prepared) => {
                for other in ready {
                    drop(other.following);
                    take_away(&other.options, other.number, journal, teller).await?;
                }
                return Ok((of, prepared));
            }
            Err(error) if error.is_of_target() && !ready.is_empty() => {
                let next = ready.front();
                let next = next.map(|next| (next.number, Phase::Following, next.following.fingerprint.clone()));
                drop_target(&of, number, &error, next, journal, teller).await?;
            }
            Err(error) => return Err(error),
        }
    }
}

/// The targets in order: that of the journal first, which may follow already. Of the others nothing is left that an
/// earlier command may have begun.
async fn candidates(
    options: &Options,
    journal: &mut Journal,
    teller: &Teller,
) -> Result<VecDeque<(usize, Options)>, Error> {
    let mut candidates = VecDeque::from([(journal.record.number, options.to(&options.target))]);
    for other in journal.record.others.clone().into_iter().filter(|other| other.dropped.is_none()) {
        if let Some(server) = options.others.iter().find(|server| server.to_string() == other.server) {
            let of = options.to(server);
            take_away(&of, other.number, journal, teller).await?;
            candidates.push_back((other.number, of));
            continue;
        }
        let mut source = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        outfit::drop_slot(&mut source, &journal.record.slot_of(other.number)).await?;
        let reason = "it is not named with --target any more; a database of its own it keeps".to_owned();
        teller.tell(EventKind::TargetDropped { target: other.server, reason: reason.clone() });
        journal.drop_target(other.number, reason, None)?;
    }
    for server in &options.others {
        let (known, server_name) = (&journal.record.others, server.to_string());
        if known.iter().all(|other| other.server != server_name) {
            let highest = known.iter().map(|other| other.number).max().unwrap_or(0).max(journal.record.number);
            let other = Other { number: highest + 1, server: server_name, made_database: false, dropped: None };
            candidates.push_back((other.number, options.to(server)));
            journal.update(|record| record.others.push(other))?;
        }
    }
    Ok(candidates)
}

/// Says that a target is dropped, and takes away what can be.
async fn drop_target(
    of: &Options,
    number: usize,
    error: &Error,
    next: Option<(usize, Phase, String)>,
    journal: &mut Journal,
    teller: &Teller,
) -> Result<(), Error> {
    let reason = error.to_string();
    teller.tell(EventKind::TargetDropped { target: of.target.to_string(), reason: reason.clone() });
    journal.drop_target(number, reason, next)?;
    if let Ok(mut front) = Front::connect(&of.proxy, &of.tenant).await {
        // Nothing prepared is no problem.
        let _ = front.abandon().await;
    }
    take_away(of, number, journal, teller).await
}

/// Takes away what was made for a target to which clients do not go. A server that cannot be reached keeps it, which is
/// said; the source keeps nothing for it, or that is an error.
async fn take_away(of: &Options, number: usize, journal: &mut Journal, teller: &Teller) -> Result<(), Error> {
    let mut source = Link::connect(&of.source, Purpose::Statements, &[]).await?;
    outfit::drop_slot(&mut source, &journal.record.slot_of(number)).await?;
    if !journal.record.others.iter().any(|other| other.number == number && other.made_database) {
        return Ok(());
    }
    match undo::drop_database(&of.target, &journal.record).await {
        Ok(()) => journal.update(|record| {
            let other = record.others.iter_mut().find(|other| other.number == number);
            other.into_iter().for_each(|other| other.made_database = false);
        }),
        Err(error) => {
            teller.warn(format!("the database is left at {}, to be dropped by hand: {error}", of.target));
            Ok(())
        }
    }
}

//! Writing of function entries: single bytes at once, longer changes while all threads are stopped and none is inside.
//!
//! The obvious way without a stop is an `int3` in the first byte meanwhile. An `int3` whose tracer dies kills the program, and a handler
//! for it inside the target is more foreign code than the stop is worth.

use super::Trampolines;
use super::migrate::{RETRY_INTERVAL_MAX, RETRY_INTERVAL_MIN};
use crate::error::Busy;
use crate::ledger::{Site, Transition};
use crate::probe::Verdict;
use crate::scan::Forbidden;
use crate::{Error, lookup_redirect};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use stillpoint_base::Backoff;
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::JUMP_LEN;
use stillpoint_patch_tracee::StoppedThread;

/// Time limit for threads to leave a dispatcher or displaced code when entries are restored.
const LEAVE_TIMEOUT: Duration = Duration::from_millis(20);

/// Changes to entries.
#[derive(Debug, Default)]
struct Changes {
    /// Entries that change in a single byte.
    bytes: Vec<(Avma, u8)>,
    /// All other entries, as a whole.
    pieces: Vec<(Avma, [u8; JUMP_LEN])>,
    /// Addresses of instructions inside the overwritten bytes; no thread may be stopped at one of them.
    boundaries: Vec<u64>,
}

impl Trampolines<'_, '_, '_> {
    /// Checks that every entry holds bytes that the transition wrote; another program wrote any other bytes.
    pub(super) fn check_entries(&self, transition: &Transition) -> Result<(), Error> {
        for site in &transition.sites {
            let now = self.entry_bytes(site)?;
            if ![site.from.bytes, site.armed, site.to.bytes].contains(&now) {
                return Err(Error::BytesDiffer { function: site.name.clone(), at: site.entry, offset: 0 });
            }
        }
        Ok(())
    }

    fn entry_bytes(&self, site: &Site) -> Result<[u8; JUMP_LEN], Error> {
        Ok(self.memory().read_array(site.entry)?)
    }

    /// Writes entries, and removes the lookup redirect last: while entries jump to dispatchers, threads execute code that only the lookup
    /// redirect knows, and an unwinder may walk back from there.
    pub(super) fn write_entries(
        &mut self,
        entries: &[(&Site, [u8; JUMP_LEN])],
        reason: &str,
        deadline: Instant,
    ) -> Result<(), Error> {
        let (redirect, others): (Vec<_>, Vec<_>) =
            entries.iter().partition(|(site, bytes)| lookup_redirect::removes_redirect(site, *bytes));
        let left = Forbidden::new(&[], &self.trampolines, &[]);
        let (mut all, mut last) = (self.changes(&others)?, self.changes(&redirect)?);
        if !all.pieces.is_empty() && !last.pieces.is_empty() {
            // mostly no thread is in that code, and the threads need be stopped only once
            self.write_bytes(&all)?;
            all.pieces.append(&mut last.pieces);
            all.boundaries.append(&mut last.boundaries);
            if self.write_frozen(&all, &left, reason)?.is_none() {
                return Ok(());
            }
        }
        self.write_some(&others, reason, deadline, &Forbidden::default())?;
        let soon = deadline.min(Instant::now() + LEAVE_TIMEOUT);
        match self.write_some(&redirect, reason, soon, &left) {
            // threads that wait in a function called from displaced code are not waited for
            Err(Error::TimedOut(_)) => self.write_some(&redirect, reason, deadline, &Forbidden::default()),
            other => other,
        }
    }

    /// Returns the changes after which these entries hold these bytes.
    fn changes(&self, entries: &[&(&Site, [u8; JUMP_LEN])]) -> Result<Changes, Error> {
        let mut changes = Changes::default();
        for (site, bytes) in entries {
            let now = self.entry_bytes(site)?;
            let differ: Vec<usize> = (0..JUMP_LEN).filter(|i| now[*i] != bytes[*i]).collect();
            match differ[..] {
                [] => {}
                [one] => changes.bytes.push((Avma(site.entry.0 + one as u64), bytes[one])),
                _ => {
                    changes.pieces.push((site.entry, *bytes));
                    if now == site.from.bytes {
                        let inner = site.inner_boundaries.iter().map(|b| site.entry.0 + u64::from(*b));
                        changes.boundaries.extend(inner);
                    }
                }
            }
        }
        Ok(changes)
    }

    /// Writes the changes of a single byte, at once: a byte cannot tear.
    fn write_bytes(&self, changes: &Changes) -> Result<(), Error> {
        changes.bytes.iter().try_for_each(|(at, byte)| Ok(self.memory().write(*at, &[*byte])?))
    }

    /// Writes single bytes at once, and the others while all threads are stopped, none of them inside an entry or in `forbidden` code.
    fn write_some(
        &mut self,
        entries: &[&(&Site, [u8; JUMP_LEN])],
        reason: &str,
        deadline: Instant,
        forbidden: &Forbidden,
    ) -> Result<(), Error> {
        let changes = self.changes(entries)?;
        self.write_bytes(&changes)?;
        if changes.pieces.is_empty() {
            return Ok(());
        }
        let mut wait = Backoff::new(RETRY_INTERVAL_MIN, RETRY_INTERVAL_MAX);
        loop {
            match self.write_frozen(&changes, forbidden, reason)? {
                None => return Ok(()),
                Some(busy) if Instant::now() > deadline => return Err(Error::TimedOut(vec![busy])),
                Some(_) => self.serve(Instant::now() + wait.next_wait())?,
            }
        }
    }

    /// Freezes all threads, writes if none is inside, thaws. Returns the thread that prevents the write, if there is one.
    fn write_frozen(&mut self, changes: &Changes, forbidden: &Forbidden, reason: &str) -> Result<Option<Busy>, Error> {
        let matters = !changes.boundaries.is_empty() || !forbidden.is_empty();
        let (process, prober) = (self.cx.process, &mut self.prober);
        let mut inside = |held: &mut StoppedThread<'_>| -> Result<Option<Busy>, Error> {
            let tid = held.tid();
            let snapshot = prober.snapshot(process, held)?;
            if snapshot.is_inside(&changes.boundaries) {
                return Ok(Some(Busy { tid, function: "the first bytes of a function".into() }));
            }
            match snapshot.verdict(forbidden) {
                Verdict::Busy(finding) => Ok(Some(Busy { tid, function: finding.name.to_string() })),
                _ => Ok(None),
            }
        };
        let unstoppable = |error| match error {
            stillpoint_patch_tracee::Error::Unstoppable { tid, why } => Ok(Some(Busy { tid, function: why })),
            other => Err(other.into()),
        };
        // most stacks are read before any busy thread is stopped
        let mut freezing = match self.cx.session.begin_freeze() {
            Err(error) => return unstoppable(error),
            Ok(freezing) => freezing,
        };
        let mut checked = BTreeSet::new();
        for tid in freezing.threads().to_vec().into_iter().filter(|_| matters) {
            if let Some(busy) = inside(&mut freezing.thread(tid)?)? {
                return Ok(Some(busy));
            }
            checked.insert(tid);
        }
        let mut frozen = match freezing.complete() {
            Err(error) => return unstoppable(error),
            Ok(frozen) => frozen,
        };
        let mut found = None;
        for tid in frozen.threads().into_iter().filter(|tid| matters && !checked.contains(tid)) {
            found = inside(&mut frozen.thread(tid)?)?;
            if found.is_some() {
                break;
            }
        }
        if found.is_none() {
            let pieces: Vec<(Avma, &[u8])> = changes.pieces.iter().map(|(at, bytes)| (*at, &bytes[..])).collect();
            frozen.write_text(&pieces)?;
        }
        for (tid, stopped_ns) in frozen.thaw()? {
            self.cx.report.stopped(tid, &format!("freeze: {reason}"), stopped_ns);
        }
        Ok(found)
    }
}

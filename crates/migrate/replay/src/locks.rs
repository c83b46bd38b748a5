//! The table of granules: the holders of each, and the queue of syncsets that wait for it.
//!
//! A syncset asks for all its granules at once and in stamp order, so each queue is in stamp order and no deadlock is possible.
//! A granted granule stays granted until the commit.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use crate::token::{Access, Granule};

/// Index of a syncset in the scheduler's memory.
pub(crate) type Slot = u32;

/// Index of a granule in the table while it is held or waited for, so that it is looked up only once.
pub(crate) type Place = u32;

/// Syncsets that may hold a granule at the same time.
#[derive(Debug)]
struct Group {
    access: Access,
    first: Slot,
    more: Vec<Slot>,
}

impl Group {
    fn members(&self) -> impl Iterator<Item = Slot> {
        std::iter::once(self.first).chain(self.more.iter().copied())
    }

    /// Removes `slot`; returns true if the group still has members.
    fn leave(&mut self, slot: Slot) -> bool {
        if self.first != slot {
            self.more.retain(|member| *member != slot);
            return true;
        }
        let next = (!self.more.is_empty()).then(|| self.more.remove(0));
        self.first = next.unwrap_or(slot);
        next.is_some()
    }
}

#[derive(Debug)]
struct Lock {
    granule: Granule,
    access: Access,
    holders: u32,
    /// The syncset that holds it if the access is exclusive.
    holder: Slot,
    waiting: VecDeque<Group>,
    /// Number of groups at the front that were already handed out behind the holder; they are not examined again.
    given: usize,
}

/// Hasher that only folds values together, because the values in granules are hashes already.
#[derive(Default)]
pub(crate) struct Fold(u64);

impl Hasher for Fold {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }

    fn write_u64(&mut self, value: u64) {
        let product = u128::from(self.0 ^ value ^ 0x9e37_79b9_7f4a_7c15) * 0xa076_1d64_78bd_642f;
        self.0 = (product as u64) ^ (product >> 64) as u64;
    }
}

/// The lock table: all granules that are held, with their queues.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    places: HashMap<Granule, Place, BuildHasherDefault<Fold>>,
    /// All entries; those without a holder are in `free`.
    locks: Vec<Lock>,
    free: Vec<Place>,
}

impl Locks {
    /// Asks for a granule. Returns its index, and true if it was granted immediately.
    pub(crate) fn acquire(&mut self, granule: Granule, access: Access, slot: Slot) -> (Place, bool) {
        use std::collections::hash_map::Entry;
        let place = match self.places.entry(granule) {
            Entry::Vacant(entry) => {
                let place = match self.free.pop() {
                    Some(place) => {
                        let lock = &mut self.locks[place as usize];
                        (lock.granule, lock.access, lock.holders, lock.holder) = (granule, access, 1, slot);
                        place
                    }
                    None => {
                        let waiting = VecDeque::new();
                        self.locks.push(Lock { granule, access, holders: 1, holder: slot, waiting, given: 0 });
                        self.locks.len() as Place - 1
                    }
                };
                entry.insert(place);
                return (place, true);
            }
            Entry::Occupied(entry) => *entry.get(),
        };
        let lock = &mut self.locks[place as usize];
        let shares = |other: Access| access == Access::Shared && other == Access::Shared;
        match lock.waiting.back_mut() {
            None if shares(lock.access) => {
                lock.holders += 1;
                return (place, true);
            }
            Some(last) if shares(last.access) => last.more.push(slot),
            _ => lock.waiting.push_back(Group { access, first: slot, more: Vec::new() }),
        }
        (place, false)
    }

    /// Gives back a granted granule; syncsets that get it now are appended to `granted`.
    pub(crate) fn release(&mut self, place: Place, granted: &mut Vec<Slot>) {
        let lock = &mut self.locks[place as usize];
        lock.holders -= 1;
        if lock.holders > 0 {
            return;
        }
        lock.given = lock.given.saturating_sub(1);
        match lock.waiting.pop_front() {
            Some(next) => {
                (lock.access, lock.holders, lock.holder) = (next.access, 1 + next.more.len() as u32, next.first);
                granted.extend(next.members());
            }
            None => {
                self.places.remove(&lock.granule);
                self.free.push(place);
            }
        }
    }

    /// Gives back a granule that may not have been granted.
    pub(crate) fn leave(&mut self, place: Place, slot: Slot, granted: &mut Vec<Slot>) {
        let lock = &mut self.locks[place as usize];
        match lock.waiting.iter().position(|group| group.members().any(|member| member == slot)) {
            Some(at) => {
                if !lock.waiting[at].leave(slot) {
                    lock.waiting.remove(at);
                    lock.given -= usize::from(at < lock.given);
                }
            }
            None => self.release(place, granted),
        }
    }

    /// Returns true if `slot` waits for the granule behind syncsets of `inside` alone. Always false for a granule that is held
    /// shared, because its holders are not recorded.
    pub(crate) fn waits_behind(&self, place: Place, slot: Slot, inside: impl Fn(Slot) -> bool) -> bool {
        let lock = &self.locks[place as usize];
        if lock.access == Access::Shared || !inside(lock.holder) {
            return false;
        }
        for group in lock.waiting.iter().skip(lock.given) {
            if group.members().any(|member| member == slot) {
                return true;
            }
            if !group.members().all(&inside) {
                return false;
            }
        }
        false
    }

    /// The first syncset that waits for a granule behind syncsets of `inside` alone and is not one of them.
    pub(crate) fn first_behind(&self, place: Place, inside: impl Fn(Slot) -> bool) -> Option<Slot> {
        let lock = &self.locks[place as usize];
        if lock.access == Access::Shared || !inside(lock.holder) {
            return None;
        }
        let waiting = lock.waiting.iter().skip(lock.given);
        waiting.flat_map(Group::members).find(|&member| !inside(member))
    }

    /// The syncset that holds it exclusively.
    pub(crate) fn holder(&self, place: Place) -> Option<Slot> {
        let lock = &self.locks[place as usize];
        (lock.access == Access::Exclusive).then_some(lock.holder)
    }

    /// Records that a syncset was handed out behind the holder. Groups at the front that are handed out completely are not
    /// examined again; otherwise a batch on one row would take quadratic time.
    pub(crate) fn hand_out(&mut self, place: Place, inside: impl Fn(Slot) -> bool) {
        let lock = &mut self.locks[place as usize];
        if inside(lock.holder) {
            let given = lock.waiting.iter().skip(lock.given).take_while(|group| group.members().all(&inside));
            lock.given += given.count();
        }
    }

    /// Records that syncsets handed out behind the holder were given back.
    pub(crate) fn take_back(&mut self, place: Place) {
        self.locks[place as usize].given = 0;
    }

    /// Number of granules that are held.
    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }
}

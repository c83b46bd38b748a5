//! The table of granules: who holds one, and who waits for it in which order.
//!
//! Syncsets ask for all their granules at once and in stamp order, so each queue is in stamp order and no circle can
//! close. What is granted is granted until the commit.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};

use crate::token::{Access, Granule};

/// Place of a syncset in the scheduler's memory.
pub(crate) type Slot = u32;

/// Those that may hold a granule at the same time.
#[derive(Debug)]
struct Group {
    access: Access,
    members: Vec<Slot>,
}

#[derive(Debug)]
struct Lock {
    access: Access,
    holders: u32,
    /// Who holds it, when the access is exclusive.
    holder: Slot,
    waiting: VecDeque<Group>,
    /// So many groups at the front have been handed out behind the holder: they need not be looked at again.
    given: usize,
}

/// The values in granules are hashes already: folding them together is enough.
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

/// The lock table.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    table: HashMap<Granule, Lock, BuildHasherDefault<Fold>>,
}

impl Locks {
    /// Asks for a granule; whether it was granted at once.
    pub(crate) fn acquire(&mut self, granule: Granule, access: Access, slot: Slot) -> bool {
        use std::collections::hash_map::Entry;
        let lock = match self.table.entry(granule) {
            Entry::Vacant(entry) => {
                entry.insert(Lock { access, holders: 1, holder: slot, waiting: VecDeque::new(), given: 0 });
                return true;
            }
            Entry::Occupied(entry) => entry.into_mut(),
        };
        let shares = |other: Access| access == Access::Shared && other == Access::Shared;
        match lock.waiting.back_mut() {
            None if shares(lock.access) => {
                lock.holders += 1;
                return true;
            }
            Some(last) if shares(last.access) => last.members.push(slot),
            _ => lock.waiting.push_back(Group { access, members: vec![slot] }),
        }
        false
    }

    /// Gives a granted granule back; those to whom it is granted now are appended to `granted`.
    pub(crate) fn release(&mut self, granule: Granule, granted: &mut Vec<Slot>) {
        let Some(lock) = self.table.get_mut(&granule) else { return };
        lock.holders -= 1;
        if lock.holders > 0 {
            return;
        }
        match lock.waiting.pop_front() {
            Some(next) => {
                (lock.access, lock.holders, lock.holder) = (next.access, next.members.len() as u32, next.members[0]);
                lock.given = lock.given.saturating_sub(1);
                granted.extend(next.members);
            }
            None => {
                self.table.remove(&granule);
            }
        }
    }

    /// Gives a granule back that may not have been granted.
    pub(crate) fn leave(&mut self, granule: Granule, slot: Slot, granted: &mut Vec<Slot>) {
        let Some(lock) = self.table.get_mut(&granule) else { return };
        match lock.waiting.iter().position(|group| group.members.contains(&slot)) {
            Some(at) => {
                lock.waiting[at].members.retain(|member| *member != slot);
                if lock.waiting[at].members.is_empty() {
                    lock.waiting.remove(at);
                    lock.given -= usize::from(at < lock.given);
                }
            }
            None => self.release(granule, granted),
        }
    }

    /// Whether `slot` waits for the granule behind syncsets of `inside` alone. Of granules that are held shared the
    /// holders are not known, so the answer there is no.
    pub(crate) fn waits_behind(&self, granule: Granule, slot: Slot, inside: impl Fn(Slot) -> bool) -> bool {
        let Some(lock) = self.table.get(&granule) else { return false };
        if lock.access == Access::Shared || !inside(lock.holder) {
            return false;
        }
        for group in lock.waiting.iter().skip(lock.given) {
            if group.members.contains(&slot) {
                return true;
            }
            if !group.members.iter().all(|&member| inside(member)) {
                return false;
            }
        }
        false
    }

    /// The first who waits for a granule behind syncsets of `inside` alone and is not one of them.
    pub(crate) fn first_behind(&self, granule: Granule, inside: impl Fn(Slot) -> bool) -> Option<Slot> {
        let lock = self.table.get(&granule)?;
        if lock.access == Access::Shared || !inside(lock.holder) {
            return None;
        }
        let waiting = lock.waiting.iter().skip(lock.given);
        waiting.flat_map(|group| &group.members).copied().find(|&member| !inside(member))
    }

    /// Who holds it exclusively.
    pub(crate) fn holder(&self, granule: Granule) -> Option<Slot> {
        self.table.get(&granule).filter(|lock| lock.access == Access::Exclusive).map(|lock| lock.holder)
    }

    /// Somebody was handed out behind the holder: those at the front of whom all were need not be looked at again, or a
    /// batch on one row would cost its square.
    pub(crate) fn give(&mut self, granule: Granule, inside: impl Fn(Slot) -> bool) {
        let Some(lock) = self.table.get_mut(&granule).filter(|lock| inside(lock.holder)) else { return };
        let given = lock.waiting.iter().skip(lock.given).take_while(|group| group.members.iter().all(|&m| inside(m)));
        lock.given += given.count();
    }

    /// What was handed out behind the holder has been given back.
    pub(crate) fn take_back(&mut self, granule: Granule) {
        if let Some(lock) = self.table.get_mut(&granule) {
            lock.given = 0;
        }
    }

    /// Granules that anybody holds.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }
}

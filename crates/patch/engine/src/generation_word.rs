//! Generation word: four bytes of every thread's control block, in eight aligned bytes that glibc keeps free. All eight bytes must be free,
//! because the search compares words of 64 bits; the transition is stored in the lower four.
//!
//! A library in the target could hold the word for versions of glibc that are not listed here. That library does not exist: these versions
//! are refused.

use crate::{Error, event_pump};
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Libc, Mapping, Process, Session, Stopped};

/// Offsets of the free part. Bytes 0x80 to 0x27f of glibc's control block were room for vector registers of the loader and are unused since
/// glibc 2.23; those before belong to shadow stacks, transactional memory and split stacks.
const FREE_START: usize = 0x80;
const FREE_END: usize = 0x280;
/// Versions of glibc whose control block was examined.
const KNOWN_GLIBC: std::ops::RangeInclusive<(u32, u32)> = (2, 28)..=(2, 43);

/// Value of the word before the first transition.
const WORD_BASE: u32 = 0x5350_0000;

/// Returns the word of a thread that has migrated in transition `number`.
pub(crate) fn word_value(number: u32) -> u32 {
    WORD_BASE + number
}

/// Returns the transition that a word names, if any; any other value except zero means that the word is not free.
pub(crate) fn transition_of_word(word: u32) -> Option<u32> {
    (WORD_BASE + 1..WORD_BASE + (1 << 20)).contains(&word).then(|| word - WORD_BASE)
}

/// Refuses C libraries whose control block is unknown.
pub(crate) fn check_libc(process: &Process, mappings: &[Mapping]) -> Result<(), Error> {
    let unsuitable = |what: String| Err(Error::Unsuitable { pid: process.pid(), what });
    match process.libc_among(mappings) {
        Libc::Glibc { version, .. } if KNOWN_GLIBC.contains(&version) => Ok(()),
        Libc::Glibc { version: (major, minor), .. } => {
            unsuitable(format!("uses glibc {major}.{minor}, whose thread control block this program does not know"))
        }
        Libc::Musl => unsuitable("uses musl, whose threads have no free word for a generation".into()),
        Libc::Unknown => unsuitable("uses a C library that this program does not know".into()),
    }
}

/// Finds a word that is zero, or holds a transition of ours, in all threads; returns its offset.
pub(crate) fn choose(
    process: &Process,
    session: &mut Session<'_>,
    stopped: &mut dyn FnMut(stillpoint_patch_tracee::Tid, u64),
) -> Result<i32, Error> {
    let mut free = [true; (FREE_END - FREE_START) / 8];
    let read_block = |thread: &mut Stopped<'_>| {
        if thread.registers()?.has_no_user_side() {
            return Ok(());
        }
        let base = thread.fs_base()?;
        if base.0 == 0 {
            let what = format!("has a thread ({}) without thread-local storage", thread.tid());
            return Err(Error::Unsuitable { pid: process.pid(), what });
        }
        exclude(&process.memory().read_array(Avma(base.0 + FREE_START as u64))?, &mut free);
        Ok(())
    };
    event_pump::each_thread(process, session, read_block, stopped)?;
    let index = free.iter().rposition(|free| *free).ok_or(Error::NoWord(process.pid()))?;
    Ok((FREE_START + index * 8) as i32)
}

fn exclude(block: &[u8; FREE_END - FREE_START], free: &mut [bool; (FREE_END - FREE_START) / 8]) {
    for (word, free) in block.as_chunks::<8>().0.iter().zip(free) {
        let value = u64::from_le_bytes(*word);
        let ours = u32::try_from(value).is_ok_and(|low| transition_of_word(low).is_some());
        *free &= value == 0 || ours;
    }
}

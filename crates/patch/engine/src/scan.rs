//! Activeness safety: checks if some code is, or may be, on a thread's stack. Pure: takes registers and words, returns a finding.
//!
//! Every word of the live stack and every register that could be a return address into the code counts. An error is possible only towards
//! "not yet": a stale word makes a thread wait, and never lets it migrate too early.

use crate::ledger::{NamedSpan, Span};
use std::sync::Arc;
use stillpoint_patch_format::Avma;

/// Code that must not be on the stack.
#[derive(Debug, Clone, Default)]
pub(crate) struct Forbidden {
    /// Sorted by start; ranges do not overlap.
    code: Vec<Range>,
    /// Dispatchers and displaced code: a thread in one of them has not decided yet.
    pending: Vec<Range>,
    /// Entries at which a stopped thread may be inside a loop.
    loops: Vec<u64>,
    lowest: u64,
    highest: u64,
}

#[derive(Debug, Clone)]
struct Range {
    start: u64,
    end: u64,
    name: Arc<str>,
}

/// Forbidden code, and the word that points to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Name of the code.
    pub(crate) name: Arc<str>,
    /// The word, from the stack or a register.
    pub(crate) address: Avma,
    /// True if the thread is stopped there; a stack walk cannot disprove it.
    pub(crate) executing: bool,
}

fn sorted(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_by_key(|r| (r.start, r.end));
    let mut out: Vec<Range> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match out.last_mut() {
            Some(last) if range.start < last.end => last.end = last.end.max(range.end),
            _ => out.push(range),
        }
    }
    out
}

impl Forbidden {
    pub(crate) fn new(code: &[NamedSpan], pending: &[Span], loops: &[Avma]) -> Self {
        let range = |span: Span, name: &str| Range { start: span.start.0, end: span.end().0, name: name.into() };
        let code = sorted(code.iter().map(|c| range(c.span, &c.name)).collect());
        let pending = sorted(pending.iter().map(|s| range(*s, "a dispatcher")).collect());
        let all = || code.iter().chain(&pending);
        let lowest = all().map(|r| r.start).min().unwrap_or(u64::MAX);
        let highest = all().map(|r| r.end).max().unwrap_or(0);
        let loops = loops.iter().map(|l| l.0).collect();
        Forbidden { code, pending, loops, lowest, highest }
    }

    /// Returns true if no code is forbidden.
    pub(crate) fn is_empty(&self) -> bool {
        self.code.is_empty() && self.pending.is_empty()
    }

    /// Returns the forbidden code for a word of the stack or a register, if it may be a return address into the code. The entry itself is a
    /// function pointer, not a frame; a final call that does not return leaves the end as return address.
    pub(crate) fn word(&self, word: u64) -> Option<&Arc<str>> {
        if word < self.lowest || word > self.highest {
            return None;
        }
        let within = |ranges: &'_ [Range]| {
            let index = ranges.partition_point(|r| r.start < word).checked_sub(1)?;
            (word <= ranges[index].end).then_some(index)
        };
        let code = within(&self.code).map(|i| &self.code[i].name);
        code.or_else(|| within(&self.pending).map(|i| &self.pending[i].name)).or_else(|| self.loop_head(word))
    }

    /// Returns the code into which a word of memory points, for memory that holds other pointers than return addresses. Neither the entry
    /// nor the end, where the next function begins, counts.
    pub(crate) fn within(&self, word: u64) -> Option<&Arc<str>> {
        if word < self.lowest || word > self.highest {
            return None;
        }
        let index = self.code.partition_point(|r| r.start < word).checked_sub(1)?;
        (word < self.code[index].end).then_some(&self.code[index].name)
    }

    /// Returns the forbidden code at which a thread is stopped. At an entry it has not begun, unless that entry is also a loop head.
    pub(crate) fn executing(&self, pc: u64) -> Option<&Arc<str>> {
        let pending = |r: &&Range| r.start <= pc && pc < r.end;
        if let Some(range) = self.pending.iter().find(pending) {
            return Some(&range.name);
        }
        self.word(pc)
    }

    /// Returns the code of an entry that is a loop head: a signal frame may hold its address.
    fn loop_head(&self, word: u64) -> Option<&Arc<str>> {
        if !self.loops.contains(&word) {
            return None;
        }
        self.code.iter().find(|r| r.start <= word && word < r.end).map(|r| &r.name)
    }

    /// Searches a whole thread; `registers` begins with the program counter.
    pub(crate) fn find(&self, registers: &[u64], stack: &[u8]) -> Option<Finding> {
        let (pc, others) = registers.split_first()?;
        if let Some(name) = self.executing(*pc) {
            return Some(Finding { name: name.clone(), address: Avma(*pc), executing: true });
        }
        let words = stack.as_chunks::<8>().0.iter().map(|w| u64::from_le_bytes(*w));
        let hit = others.iter().copied().chain(words).find_map(|word| Some((self.word(word)?, word)));
        hit.map(|(name, word)| Finding { name: name.clone(), address: Avma(word), executing: false })
    }

    /// Returns the forbidden code of one frame of a stack walk.
    pub(crate) fn frame(&self, address: Avma, executing: bool) -> Option<&Arc<str>> {
        if executing { self.executing(address.0) } else { self.word(address.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forbidden() -> Forbidden {
        let code = |name: &str, start, len| NamedSpan { name: name.into(), span: Span::new(Avma(start), len) };
        let pending = [Span::new(Avma(0x9000), 0x40)];
        Forbidden::new(&[code("f", 0x1000, 0x20), code("g", 0x2000, 0x10)], &pending, &[Avma(0x2000)])
    }

    fn found(registers: &[u64], stack: &[u64]) -> Option<String> {
        let bytes: Vec<u8> = stack.iter().flat_map(|w| w.to_le_bytes()).collect();
        forbidden().find(registers, &bytes).map(|f| f.name.to_string())
    }

    #[test]
    fn the_entry_is_no_frame_and_the_end_is_one() {
        assert_eq!(found(&[0], &[0x1000, 0x1021, 0xfff]), None);
        assert_eq!(found(&[0], &[0x1001]).as_deref(), Some("f"));
        assert_eq!(found(&[0], &[7, 0x1020]).as_deref(), Some("f"));
        assert_eq!(found(&[0, 0x2001], &[]).as_deref(), Some("g"));
    }

    #[test]
    fn standing_at_the_entry_is_safe_unless_a_loop_leads_there() {
        assert_eq!(found(&[0x1000], &[]), None);
        assert_eq!(found(&[0x1001], &[]).as_deref(), Some("f"));
        assert_eq!(found(&[0x2000], &[]).as_deref(), Some("g"));
    }

    #[test]
    fn a_thread_in_a_dispatcher_has_a_decision_pending() {
        assert_eq!(found(&[0x9000], &[]).as_deref(), Some("a dispatcher"));
        assert_eq!(found(&[0x9040], &[]).as_deref(), Some("a dispatcher"));
        assert_eq!(found(&[0x9041], &[]), None);
    }

    #[test]
    fn nothing_forbidden_is_never_found() {
        assert_eq!(Forbidden::default().find(&[0, 1, u64::MAX], &[0xff; 64]), None);
    }
}

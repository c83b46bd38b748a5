//! Bytes under way in one direction of a session.
//!
//! ```text
//! ├── gone ──┼── looked at, to be sent ──┼── not looked at ──┼── room ──┤
//! 0        start                      scanned               end        len
//! ```
//!
//! No message causes an allocation. An idle session holds no buffer at all: an empty one goes back to its thread's
//! pool.

use std::cell::RefCell;
use stillpoint_migrate_control::SESSION_BYTES;

/// Length of a buffer in bytes: the most that one read returns.
pub(crate) const LEN: usize = 16 << 10;
// A session has two buffers, and as much for its notes.
const _: () = assert!(4 * LEN <= SESSION_BYTES);
/// Most buffers that a thread keeps for sessions that wake up.
pub(crate) const KEPT_MAX: usize = 64;

thread_local! {
    static POOL: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Bytes of one direction.
#[derive(Debug, Default)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    start: usize,
    scanned: usize,
    end: usize,
}

impl Buffer {
    /// Room for the next read; empty if there is none before something has been sent.
    #[inline]
    pub(crate) fn room(&mut self) -> &mut [u8] {
        if self.bytes.is_empty() {
            self.bytes = POOL.with_borrow_mut(Vec::pop).unwrap_or_else(|| vec![0; LEN]);
        } else if self.end == self.bytes.len() && self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.scanned, self.end) = (self.scanned - self.start, self.end - self.start);
            self.start = 0;
        }
        &mut self.bytes[self.end..]
    }

    /// Returns true if there is room for a read.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        self.bytes.is_empty() || self.end < self.bytes.len() || self.start > 0
    }

    /// Records that a read returned `n` bytes.
    #[inline]
    pub(crate) fn filled(&mut self, n: usize) {
        self.end += n;
    }

    /// Bytes that have not been looked at.
    #[inline]
    pub(crate) fn unscanned(&self) -> &[u8] {
        &self.bytes[self.scanned..self.end]
    }

    /// Bytes that have not been looked at, for a change of the same length.
    pub(crate) fn unscanned_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.scanned..self.end]
    }

    /// Marks `n` more bytes as looked at: they may be sent.
    #[inline]
    pub(crate) fn scan(&mut self, n: usize) {
        self.scanned += n;
    }

    /// Bytes that may be sent.
    #[inline]
    pub(crate) fn sendable(&self) -> &[u8] {
        &self.bytes[self.start..self.scanned]
    }

    /// Records that `n` bytes were sent.
    #[inline]
    pub(crate) fn sent(&mut self, n: usize) {
        self.start += n;
        if self.start == self.end {
            (self.start, self.scanned, self.end) = (0, 0, 0);
        }
    }

    /// Returns true if all bytes that were looked at have been sent.
    #[inline]
    pub(crate) fn all_sent(&self) -> bool {
        self.start == self.scanned
    }

    /// Returns true if the buffer holds no bytes.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.end == 0
    }

    /// Appends bytes that did not come from the connection. They are few; the buffer grows if needed.
    pub(crate) fn append(&mut self, more: &[u8]) {
        if more.is_empty() {
            return;
        }
        self.room();
        let needed = self.end + more.len();
        if needed > self.bytes.len() {
            self.bytes.resize(needed, 0);
        }
        self.bytes[self.end..needed].copy_from_slice(more);
        self.end = needed;
    }

    /// Gives the memory back if it holds nothing; call it when a session has nothing more to do for now.
    #[inline]
    pub(crate) fn release_memory(&mut self) {
        if self.end == 0 && !self.bytes.is_empty() {
            let bytes = std::mem::take(&mut self.bytes);
            POOL.with_borrow_mut(|pool| {
                if bytes.len() == LEN && pool.len() < KEPT_MAX {
                    pool.push(bytes);
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(buffer: &mut Buffer, bytes: &[u8]) {
        buffer.room()[..bytes.len()].copy_from_slice(bytes);
        buffer.filled(bytes.len());
    }

    #[test]
    fn bytes_come_out_as_they_went_in() {
        let mut buffer = Buffer::default();
        put(&mut buffer, b"abcdef");
        assert_eq!((buffer.unscanned(), buffer.sendable()), (&b"abcdef"[..], &b""[..]));
        buffer.scan(4);
        buffer.sent(3);
        assert_eq!((buffer.unscanned(), buffer.sendable(), buffer.all_sent()), (&b"ef"[..], &b"d"[..], false));
        buffer.append(b"gh");
        assert_eq!(buffer.unscanned(), b"efgh");
        buffer.scan(4);
        buffer.sent(5);
        assert!(buffer.is_empty() && buffer.all_sent());
    }

    #[test]
    fn a_full_buffer_makes_room_once_something_was_sent() {
        let mut buffer = Buffer::default();
        put(&mut buffer, &[7; LEN]);
        assert!(!buffer.has_room() && buffer.room().is_empty());
        buffer.scan(10);
        buffer.sent(10);
        assert!(buffer.has_room());
        assert_eq!(buffer.room().len(), 10);
        assert_eq!(buffer.unscanned().len(), LEN - 10);
    }

    #[test]
    fn an_empty_buffer_holds_no_memory_and_a_long_insert_finds_room() {
        let mut buffer = Buffer::default();
        buffer.append(&[1; LEN + 1]);
        buffer.scan(LEN + 1);
        buffer.sent(LEN + 1);
        buffer.release_memory();
        assert_eq!(buffer.bytes.capacity(), 0);
        assert_eq!(buffer.room().len(), LEN);
    }
}

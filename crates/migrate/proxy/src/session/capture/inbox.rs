//! Whole messages from a stream.

use crate::capture::{Capture, MemoryShare};
use stillpoint_migrate_wire::WireError;
use stillpoint_migrate_wire::frame::{HEADER_LEN, Scanner, Step};
use stillpoint_migrate_wire::frontend;

/// Longest message in bytes; the limit of the server.
const MESSAGE_MAX: u32 = (1 << 30) - 1;
/// A message up to this length is always held whole, no matter how much others hold: each session's own memory is for
/// that.
pub(super) const SMALL_MESSAGE_BYTES: usize = 64 << 10;
/// Copies of a message: it is received, rewritten and sent; a text is also parsed.
const MESSAGE_COPIES: usize = 4;
const TEXT_COPIES: usize = 16;

/// Bytes that have arrived and were not looked at.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) bytes: Vec<u8>,
    start: usize,
    /// Memory reserved for the message that has begun.
    held: Option<MemoryShare>,
}

/// A whole message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) tag: u8,
    /// Header and body.
    pub(super) bytes: Vec<u8>,
    /// Memory reserved for it.
    pub(super) held: Option<MemoryShare>,
}

impl Message {
    pub(super) fn body(&self) -> &[u8] {
        &self.bytes[HEADER_LEN..]
    }
}

impl Inbox {
    /// Takes a client's next message if all of it is here; a message that no client may send is refused at its
    /// beginning.
    pub(super) fn request(&mut self) -> Result<Option<Message>, WireError> {
        if let Step::Message(message) = Scanner::new(MESSAGE_MAX).peek(&self.bytes[self.start..])? {
            frontend::check(&message)?;
        }
        self.take()
    }

    /// Takes the next message if all of it is here.
    pub(super) fn take(&mut self) -> Result<Option<Message>, WireError> {
        match Scanner::new(MESSAGE_MAX).peek(&self.bytes[self.start..])? {
            Step::Message(message) if message.is_whole() => {
                let (tag, total) = (message.tag, message.total());
                let bytes = self.piece(total);
                Ok(Some(Message { tag, bytes, held: self.held.take() }))
            }
            _ => {
                self.bytes.drain(..self.start);
                self.start = 0;
                Ok(None)
            }
        }
    }

    /// Takes up to `max_bytes` bytes. A large message does not leave its memory behind.
    pub(super) fn piece(&mut self, max_bytes: usize) -> Vec<u8> {
        if self.start == 0 && self.bytes.len() <= max_bytes && self.bytes.len() > SMALL_MESSAGE_BYTES {
            return std::mem::take(&mut self.bytes);
        }
        let end = self.bytes.len().min(self.start + max_bytes);
        let piece = self.bytes[self.start..end].to_vec();
        self.start = end;
        piece
    }

    /// Type and length of a message that has begun, is not all here, and is large.
    pub(super) fn large(&self) -> Option<(u8, usize)> {
        match Scanner::new(MESSAGE_MAX).peek(&self.bytes[self.start..]) {
            Ok(Step::Message(message)) if message.total() > SMALL_MESSAGE_BYTES && !message.is_whole() => {
                Some((message.tag, message.total()))
            }
            _ => None,
        }
    }

    /// Returns true if the large message that has begun may be held whole: the capture still runs, and there is memory.
    pub(super) fn may_buffer(&mut self, capture: &Capture) -> bool {
        let Some((tag, total)) = self.large() else { return true };
        if !capture.is_live() {
            self.held = None;
        } else if self.held.is_none() {
            let copies = if matches!(tag, b'Q' | b'P') { TEXT_COPIES } else { MESSAGE_COPIES };
            self.held = capture.reserve(total * copies);
        }
        self.held.is_some()
    }

    /// Bytes of the next message's body that are here.
    pub(super) fn beginning(&self) -> &[u8] {
        self.bytes.get(self.start + HEADER_LEN..).unwrap_or_default()
    }

    /// Type of the next message, if it has begun.
    pub(super) fn next_tag(&self) -> Option<u8> {
        self.bytes.get(self.start).copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.start == self.bytes.len()
    }

    /// Takes all bytes that are left.
    pub(super) fn take_rest(&mut self) -> Vec<u8> {
        let rest = self.bytes.split_off(self.start);
        *self = Inbox::default();
        rest
    }
}

//! Whole messages out of a stream.

use crate::capture::{Capture, Held};
use stillpoint_migrate_wire::WireError;
use stillpoint_migrate_wire::frame::{HEADER_LEN, Scanner, Step};
use stillpoint_migrate_wire::frontend;

/// As the server: no message is longer.
const MESSAGE_MAX: u32 = (1 << 30) - 1;
/// A message that is no longer is held whole whatever others hold: that is what each session's own memory is for.
pub(super) const SMALL: usize = 64 << 10;
/// A message is received, rewritten and sent; a text is also taken apart.
const COPIES: usize = 4;
const COPIES_OF_TEXT: usize = 16;

/// What has come and was not looked at.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) bytes: Vec<u8>,
    start: usize,
    /// The room that the message takes which has begun.
    held: Option<Held>,
}

/// A whole message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) tag: u8,
    /// With its header.
    pub(super) bytes: Vec<u8>,
    /// The room that it takes.
    pub(super) held: Option<Held>,
}

impl Message {
    pub(super) fn body(&self) -> &[u8] {
        &self.bytes[HEADER_LEN..]
    }
}

impl Inbox {
    /// The next message of a client, when all of it is here; one that nobody sends is not waited for.
    pub(super) fn request(&mut self) -> Result<Option<Message>, WireError> {
        if let Step::Message(message) = Scanner::new(MESSAGE_MAX).peek(&self.bytes[self.start..])? {
            frontend::check(&message)?;
        }
        self.take()
    }

    /// The next message, when all of it is here.
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

    /// Up to so many bytes, taken away. A large message does not leave its room behind.
    pub(super) fn piece(&mut self, most: usize) -> Vec<u8> {
        if self.start == 0 && self.bytes.len() <= most && self.bytes.len() > SMALL {
            return std::mem::take(&mut self.bytes);
        }
        let end = self.bytes.len().min(self.start + most);
        let piece = self.bytes[self.start..end].to_vec();
        self.start = end;
        piece
    }

    /// Type and length of a message that has begun, is not all here, and is a large one.
    pub(super) fn large(&self) -> Option<(u8, usize)> {
        match Scanner::new(MESSAGE_MAX).peek(&self.bytes[self.start..]) {
            Ok(Step::Message(message)) if message.total() > SMALL && !message.is_whole() => {
                Some((message.tag, message.total()))
            }
            _ => None,
        }
    }

    /// Whether the large message that has begun may be held whole: while somebody wants to know what is in it, and there is
    /// room.
    pub(super) fn may_hold(&mut self, capture: &Capture) -> bool {
        let Some((tag, total)) = self.large() else { return true };
        if !capture.is_live() {
            self.held = None;
        } else if self.held.is_none() {
            let copies = if matches!(tag, b'Q' | b'P') { COPIES_OF_TEXT } else { COPIES };
            self.held = capture.room_for(total * copies);
        }
        self.held.is_some()
    }

    /// What there is of the body of the next message.
    pub(super) fn beginning(&self) -> &[u8] {
        self.bytes.get(self.start + HEADER_LEN..).unwrap_or_default()
    }

    /// The type of the next message, when it has begun.
    pub(super) fn next_tag(&self) -> Option<u8> {
        self.bytes.get(self.start).copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.start == self.bytes.len()
    }

    /// What is left, taken away.
    pub(super) fn rest(&mut self) -> Vec<u8> {
        let rest = self.bytes.split_off(self.start);
        *self = Inbox::default();
        rest
    }
}

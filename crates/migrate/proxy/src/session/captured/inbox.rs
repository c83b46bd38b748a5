//! Whole messages out of a stream.

use stillpoint_migrate_wire::WireError;
use stillpoint_migrate_wire::frame::{HEADER_LEN, Scanner, Step};

/// As the server: no message is longer.
const MESSAGE_MAX: u32 = (1 << 30) - 1;

/// What has come and was not looked at.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub(super) bytes: Vec<u8>,
    start: usize,
}

/// A whole message.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) tag: u8,
    /// With its header.
    pub(super) bytes: Vec<u8>,
}

impl Message {
    pub(super) fn body(&self) -> &[u8] {
        &self.bytes[HEADER_LEN..]
    }
}

impl Inbox {
    /// The next message, when all of it is here.
    pub(super) fn take(&mut self) -> Result<Option<Message>, WireError> {
        match Scanner::new(MESSAGE_MAX).peek(&self.bytes[self.start..])? {
            Step::Message(message) if message.is_whole() => {
                let (tag, total) = (message.tag, message.total());
                let bytes = self.bytes[self.start..self.start + total].to_vec();
                self.start += total;
                Ok(Some(Message { tag, bytes }))
            }
            _ => {
                self.bytes.drain(..self.start);
                self.start = 0;
                Ok(None)
            }
        }
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

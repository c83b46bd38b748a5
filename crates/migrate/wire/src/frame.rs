//! Boundaries of messages in a stream of bytes, without copying any.
//!
//! A proxy forwards whole buffers and need not understand most messages: it reads their headers. A [`Scanner`] is at a
//! place in the stream, gets the bytes that follow, and returns what they are. A message whose body has not arrived
//! yet, or is larger than any buffer, is returned with the part that is there. A caller that needs the whole message
//! waits; another takes the part and lets the rest pass.

use crate::WireError;

/// Length of a header in bytes: type and length.
pub const HEADER_LEN: usize = 5;

/// A message, or the beginning of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message<'a> {
    /// Type of the message.
    pub tag: u8,
    /// The part of its body that is there.
    pub body: &'a [u8],
    /// Length of the whole body in bytes.
    pub len: usize,
}

impl Message<'_> {
    /// Returns true if all of the body is there.
    pub fn is_whole(&self) -> bool {
        self.body.len() == self.len
    }

    /// Bytes of the stream up to the end of the part that is there, header included.
    pub fn present(&self) -> usize {
        HEADER_LEN + self.body.len()
    }

    /// Bytes of the stream that the whole message takes, header included.
    pub fn total(&self) -> usize {
        HEADER_LEN + self.len
    }
}

/// Meaning of the next bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step<'a> {
    /// A message begins; [`Scanner::take`] moves past it.
    Message(Message<'a>),
    /// This many bytes belong to a message that began before; the scanner has moved past them.
    Rest(usize),
    /// Too few bytes to decide.
    Starved,
}

/// A place in a stream of messages.
#[derive(Debug, Clone)]
pub struct Scanner {
    rest: usize,
    len_max: u32,
}

impl Scanner {
    /// Creates a scanner at the first message; a length beyond `len_max` is an error.
    pub fn new(len_max: u32) -> Self {
        Scanner { rest: 0, len_max }
    }

    /// Returns true if the scanner is between two messages.
    pub fn at_edge(&self) -> bool {
        self.rest == 0
    }

    /// Returns what `bytes`, which follow the scanner's place, begin with.
    ///
    /// # Errors
    ///
    /// [`WireError::Length`] if the length of the next message is not valid.
    #[inline]
    pub fn peek<'a>(&mut self, bytes: &'a [u8]) -> Result<Step<'a>, WireError> {
        if self.rest > 0 {
            let n = self.rest.min(bytes.len());
            self.rest -= n;
            return Ok(if n == 0 { Step::Starved } else { Step::Rest(n) });
        }
        let [tag, a, b, c, d, after @ ..] = bytes else { return Ok(Step::Starved) };
        let (tag, len) = (*tag, u32::from_be_bytes([*a, *b, *c, *d]));
        if len < 4 || len > self.len_max {
            return Err(WireError::Length { tag, len });
        }
        let len = len as usize - 4;
        Ok(Step::Message(Message { tag, body: &after[..len.min(after.len())], len }))
    }

    /// Moves past the part of `message` that is there; returns the number of bytes.
    #[inline]
    pub fn take(&mut self, message: &Message<'_>) -> usize {
        self.rest = message.len - message.body.len();
        message.present()
    }
}

/// Appends a message of type `tag`, with the body that the function `body` writes.
pub fn put(into: &mut Vec<u8>, tag: u8, body: impl FnOnce(&mut Vec<u8>)) {
    into.push(tag);
    put_packet(into, body);
}

/// Appends a packet without a type, as at the beginning of a connection.
pub fn put_packet(into: &mut Vec<u8>, body: impl FnOnce(&mut Vec<u8>)) {
    let at = into.len();
    into.extend([0; 4]);
    body(into);
    let len = u32::try_from(into.len() - at).unwrap_or(u32::MAX);
    into[at..at + 4].copy_from_slice(&len.to_be_bytes());
}

/// Appends text and a terminating zero; a zero inside the text ends it earlier.
pub fn put_cstr(into: &mut Vec<u8>, text: &[u8]) {
    into.extend(text.iter().take_while(|b| **b != 0));
    into.push(0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_below_its_own_or_beyond_the_limit_is_an_error() {
        let mut scanner = Scanner::new(100);
        assert_eq!(scanner.peek(b"Q\0\0\0\x03"), Err(WireError::Length { tag: b'Q', len: 3 }));
        assert_eq!(scanner.peek(b"Q\0\0\0\x65"), Err(WireError::Length { tag: b'Q', len: 101 }));
        assert_eq!(scanner.peek(b"Q\xff\xff\xff\xff"), Err(WireError::Length { tag: b'Q', len: u32::MAX }));
    }

    #[test]
    fn a_body_that_is_not_there_yet_passes_by() {
        let mut scanner = Scanner::new(100);
        let Ok(Step::Message(message)) = scanner.peek(b"d\0\0\0\x08ab") else { panic!("a beginning") };
        assert_eq!((message.len, message.body, message.is_whole(), message.total()), (4, &b"ab"[..], false, 9));
        assert_eq!(scanner.take(&message), 7);
        assert!(!scanner.at_edge());
        assert_eq!(scanner.peek(b""), Ok(Step::Starved));
        assert_eq!(scanner.peek(b"cdS\0"), Ok(Step::Rest(2)));
        assert!(scanner.at_edge());
        assert_eq!(scanner.peek(b"S\0"), Ok(Step::Starved));
    }

    #[test]
    fn what_is_put_is_found() {
        let mut bytes = Vec::new();
        put(&mut bytes, b'Q', |body| put_cstr(body, b"select 1"));
        let Ok(Step::Message(message)) = Scanner::new(100).peek(&bytes) else { panic!("a message") };
        assert_eq!((message.tag, message.body), (b'Q', &b"select 1\0"[..]));
        assert_eq!(message.total(), bytes.len());
    }
}

//! Whole messages of a server, without copies of their contents.

use crate::error::LinkError;
use bytes::{Buf, Bytes, BytesMut};
use stillpoint_migrate_wire::frame::{self, HEADER_LEN, Scanner, Step};
use tokio::io::{AsyncRead, AsyncReadExt};

/// Limits of a message's length in bytes: of one that the caller waits for, and of the protocol.
const ANSWER_MAX: u32 = 16 << 20;
const MESSAGE_MAX: u32 = (1 << 30) - 1;
/// Room in bytes for one read of answers, and of many rows.
const ANSWER_READ_BYTES: usize = 4 << 10;
const BULK_READ_BYTES: usize = 64 << 10;

/// A message of the server: its type, and its contents after the length.
#[derive(Debug)]
pub struct Frame {
    /// Type of the message.
    pub tag: u8,
    /// Contents of the message.
    pub body: Bytes,
}

impl Frame {
    /// Appends the message with its header, to be passed on.
    pub fn put(&self, into: &mut Vec<u8>) {
        frame::put(into, self.tag, |body| body.extend_from_slice(&self.body));
    }
}

/// Reads whole messages; bytes that it read ahead are in [`Reader::leftover`].
#[derive(Debug)]
pub struct Reader {
    buffer: BytesMut,
    message_max: u32,
    read_bytes: usize,
}

impl Default for Reader {
    /// Creates a reader of short answers.
    fn default() -> Self {
        Reader { buffer: BytesMut::new(), message_max: ANSWER_MAX, read_bytes: ANSWER_READ_BYTES }
    }
}

impl Reader {
    /// Creates a reader of many rows, in messages as long as the protocol allows; `leftover` has been read before.
    pub fn for_bulk(leftover: &[u8]) -> Reader {
        let mut buffer = BytesMut::with_capacity(BULK_READ_BYTES);
        buffer.extend_from_slice(leftover);
        Reader { buffer, message_max: MESSAGE_MAX, read_bytes: BULK_READ_BYTES }
    }

    /// Reads the next message. Nothing is lost if the future is dropped early.
    ///
    /// # Errors
    ///
    /// [`LinkError`] if the connection ends, or a length is not valid.
    pub async fn next(&mut self, stream: &mut (impl AsyncRead + Unpin + ?Sized)) -> Result<Frame, LinkError> {
        loop {
            if let Some(frame) = self.buffered()? {
                return Ok(frame);
            }
            self.buffer.reserve(self.read_bytes);
            if stream.read_buf(&mut self.buffer).await.map_err(LinkError::Io)? == 0 {
                return Err(LinkError::Closed);
            }
        }
    }

    /// Returns the next message if it has been read already.
    ///
    /// # Errors
    ///
    /// [`LinkError::Protocol`] if its length is not valid.
    pub fn buffered(&mut self) -> Result<Option<Frame>, LinkError> {
        let step = Scanner::new(self.message_max).peek(&self.buffer).map_err(LinkError::Protocol)?;
        let Step::Message(message) = step else { return Ok(None) };
        let (tag, total) = (message.tag, message.total());
        if !message.is_whole() {
            self.buffer.reserve(total - self.buffer.len());
            return Ok(None);
        }
        let mut body = self.buffer.split_to(total).freeze();
        body.advance(HEADER_LEN);
        Ok(Some(Frame { tag, body }))
    }

    /// Returns true if the next message has not been read completely.
    pub fn needs_read(&self) -> bool {
        match Scanner::new(u32::MAX).peek(&self.buffer) {
            Ok(Step::Message(message)) => !message.is_whole(),
            Ok(Step::Rest(_) | Step::Starved) => true,
            Err(_) => false,
        }
    }

    /// Bytes that were read and not taken.
    pub fn leftover(&self) -> &[u8] {
        &self.buffer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_message_need_not_be_waited_for() {
        let message = b"Z\0\0\0\x05I";
        for end in 0..=message.len() {
            let mut reader = Reader::for_bulk(&message[..end]);
            assert_eq!(reader.needs_read(), end < message.len(), "{end} bytes");
            assert_eq!(reader.buffered().unwrap().is_none(), end < message.len(), "{end} bytes");
        }
    }

    #[tokio::test]
    async fn messages_come_out_as_they_went_in() {
        let bytes = b"T\0\0\0\x06abZ\0\0\0\x05IS\0\0\0";
        let (mut reader, mut stream, mut copy) = (Reader::default(), &bytes[..], Vec::new());
        for tag in [b'T', b'Z'] {
            let frame = reader.next(&mut stream).await.unwrap();
            assert_eq!(frame.tag, tag);
            frame.put(&mut copy);
        }
        copy.extend_from_slice(reader.leftover());
        assert_eq!(copy, bytes);
        assert!(matches!(reader.next(&mut stream).await, Err(LinkError::Closed)));
    }

    #[test]
    fn a_length_that_no_message_has_is_refused() {
        for (mut reader, length) in [(Reader::for_bulk(b"D\0\0\0\x03"), 3), (Reader::for_bulk(b"D\x40\0\0\0"), 1 << 30)]
        {
            let Err(LinkError::Protocol(error)) = reader.buffered() else { panic!("{length} bytes") };
            assert!(error.to_string().contains(&length.to_string()), "{error}");
        }
    }
}

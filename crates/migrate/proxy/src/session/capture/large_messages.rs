//! Messages for which there is no memory: they are passed on as they arrive, and their contents are not captured.

use super::{CapturedSession, ExpectedReply, QueryProtocol, SEND_THRESHOLD_BYTES};
use crate::counters::Counters;
use crate::error::SessionError;
use crate::session::pump::Pump;
use stillpoint_migrate_wire::frame::{self, HEADER_LEN};
use stillpoint_migrate_wire::hidden_column::put_beginning_without_first;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

impl CapturedSession {
    /// Ends the capture, if it runs, for lack of memory.
    fn too_large(&self, pump: &Pump, total: usize) {
        if self.capture.is_live() {
            self.break_off(pump, &format!("a message of {} MiB exceeds the available memory", total >> 20));
        }
    }

    /// Returns the type and length of a client's message that must be passed on as it arrives; the capture is then
    /// over.
    pub(super) fn passes_large(&mut self, pump: &Pump) -> Option<(u8, usize)> {
        let large = self.from_client.large()?;
        if self.from_client.may_buffer(&self.capture) {
            return None;
        }
        self.too_large(pump, large.1);
        Some(large)
    }

    /// Passes a client's message on as it arrives. From here on nothing is captured.
    pub(super) async fn large_request(&mut self, pump: &mut Pump, tag: u8, total: usize) -> Result<(), SessionError> {
        self.protocol = QueryProtocol::Extended;
        // The server reads a whole message before it answers, if the proxy takes its earlier answers first.
        if !self.expected.is_empty() {
            self.flush(pump).await?;
        }
        let body = self.from_client.beginning();
        let name = body.split(|b| *b == 0).next().unwrap_or_default().to_vec();
        pump.note_captured(&frame::Message { tag, body, len: total - HEADER_LEN });
        pump.conversation.frontend(tag);
        let skipped = self.skipping;
        self.pass_up(pump, total, !skipped).await?;
        match tag {
            _ if skipped => {}
            b'P' => {
                self.statements.remove(&name);
                self.expected.push_back(ExpectedReply::Complete);
            }
            b'B' => {
                self.portals.remove(&name);
                self.bound.remove(&name);
                self.expected.push_back(ExpectedReply::Complete);
            }
            b'Q' | b'F' => {
                self.statements.remove(&b""[..]);
                self.expected.push_back(ExpectedReply::Query { mute: false });
                self.drain(pump).await?;
                if !self.block {
                    self.transaction_over();
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Sends `left` bytes of the client to the server, or drops them.
    pub(super) async fn pass_up(&mut self, pump: &mut Pump, mut left: usize, on: bool) -> Result<(), SessionError> {
        self.flush_server(pump).await?;
        self.flush_client(pump).await?;
        loop {
            let piece = self.from_client.piece(left);
            left -= piece.len();
            if on {
                pump.server.write_all(&piece).await.map_err(SessionError::Server)?;
            }
            if left == 0 {
                return pump.server.flush().await.map_err(SessionError::Server);
            }
            self.from_client.take_rest();
            self.from_client.bytes.reserve(SEND_THRESHOLD_BYTES);
            let n = pump.client.read_buf(&mut self.from_client.bytes).await.map_err(SessionError::Client)?;
            Counters::add(&pump.entry.counters.bytes_up, n as u64);
            if n == 0 {
                return Err(SessionError::Client(std::io::ErrorKind::UnexpectedEof.into()));
            }
        }
    }

    /// Passes a row of the server on as it arrives, if it need not be held whole. Returns true if it passed the row on.
    pub(super) async fn large_reply(&mut self, pump: &mut Pump) -> Result<bool, SessionError> {
        let Some((tag @ (b'D' | b'd'), total)) = self.from_server.large() else { return Ok(false) };
        let seen = match self.expected.front() {
            Some(ExpectedReply::Own) => return Ok(false),
            Some(ExpectedReply::Execute(Some(rewritten))) if tag == b'D' => Some(rewritten.client_sees_rows),
            _ => None,
        };
        let Some(seen) = seen else { return self.pass_down(pump, total, true).await.map(|()| true) };
        if self.from_server.may_buffer(&self.capture) {
            return Ok(false);
        }
        let mut hidden = total;
        if seen {
            let (to, beginning) = (&mut self.to_client, self.from_server.beginning());
            let before = put_beginning_without_first(to, beginning, total - HEADER_LEN);
            let Some(before) = before.map_err(SessionError::ServerProtocol)? else { return Ok(false) };
            hidden = HEADER_LEN + before;
        }
        self.too_large(pump, total);
        self.transaction.forget();
        self.pass_down(pump, hidden, false).await?;
        if hidden < total {
            self.pass_down(pump, total - hidden, true).await?;
        }
        Ok(true)
    }

    /// Sends `left` bytes of the server to the client, or drops them.
    async fn pass_down(&mut self, pump: &mut Pump, mut left: usize, on: bool) -> Result<(), SessionError> {
        self.flush_client(pump).await?;
        loop {
            let piece = self.from_server.piece(left);
            left -= piece.len();
            if on {
                pump.client.write_all(&piece).await.map_err(SessionError::Client)?;
            }
            if left == 0 {
                return pump.client.flush().await.map_err(SessionError::Client);
            }
            self.from_server.take_rest();
            self.from_server.bytes.reserve(SEND_THRESHOLD_BYTES);
            let n = pump.server.read_buf(&mut self.from_server.bytes).await.map_err(SessionError::Server)?;
            self.count_down(pump, n)?;
        }
    }
}

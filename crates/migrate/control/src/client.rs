//! Client side of the control socket.

use crate::message::{Reply, Request};
use std::path::{Path, PathBuf};
use thiserror::Error;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

/// A request to the proxy failed.
#[derive(Debug, Error)]
pub enum ControlError {
    /// The connection failed: no proxy listens, or the caller has no permission.
    #[error("cannot reach the proxy at {}", path.display())]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// Cause of the failure.
        source: std::io::Error,
    },
    /// The proxy closed the connection.
    #[error("the proxy closed the control connection")]
    Closed,
    /// The connection broke.
    #[error("control connection")]
    Io(#[from] std::io::Error),
    /// The proxy is of another version.
    #[error("cannot parse the proxy's reply: {0}")]
    NotUnderstood(String),
    /// The proxy refused the request; nothing has changed.
    #[error("{0}")]
    Refused(String),
}

/// A connection to a proxy. Dropping it ends a pause that it asked for.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
    /// Received part of a line.
    line: Vec<u8>,
    /// Requests whose replies were not waited for to the end.
    owed: usize,
    /// True if a request was sent only in part.
    broken: bool,
}

impl Client {
    /// Connects to the control socket of a proxy.
    ///
    /// # Errors
    ///
    /// [`ControlError::Connect`] if no proxy accepts the connection.
    pub async fn connect(path: &Path) -> Result<Client, ControlError> {
        let stream = UnixStream::connect(path).await;
        let stream = stream.map_err(|source| ControlError::Connect { path: path.into(), source })?;
        Ok(Client { stream: BufReader::new(stream), line: Vec::new(), owed: 0, broken: false })
    }

    /// Process id of the proxy, if the kernel knows it.
    pub fn process(&self) -> Option<i32> {
        self.stream.get_ref().peer_cred().ok().and_then(|peer| peer.pid())
    }

    /// Returns the next line of a capture. Nothing is lost if the future is dropped before the line is complete.
    ///
    /// # Errors
    ///
    /// [`ControlError::Closed`] or [`ControlError::Io`] if the connection ends, [`ControlError::NotUnderstood`] if the
    /// line is not a reply.
    pub async fn next(&mut self) -> Result<Reply, ControlError> {
        Reply::of_line(&self.line().await?)
    }

    /// Returns the next line unchanged, with its newline, for [`Reply::of_line`].
    ///
    /// # Errors
    ///
    /// [`ControlError::Closed`] or [`ControlError::Io`] if the connection ends.
    pub async fn line(&mut self) -> Result<Vec<u8>, ControlError> {
        self.stream.read_until(b'\n', &mut self.line).await?;
        if !self.line.ends_with(b"\n") {
            return Err(ControlError::Closed);
        }
        Ok(std::mem::take(&mut self.line))
    }

    /// Sends a request and waits for the reply; a refusal is an error. If the future is dropped before the reply
    /// arrives, the next request waits for both replies and returns its own.
    ///
    /// # Errors
    ///
    /// [`ControlError::Refused`] if the proxy refuses the request, [`ControlError::NotUnderstood`] if its line is not a
    /// reply, [`ControlError::Closed`] or [`ControlError::Io`] if the connection ends.
    pub async fn ask(&mut self, request: &Request) -> Result<Reply, ControlError> {
        let mut line =
            serde_json::to_string(request).map_err(|error| ControlError::NotUnderstood(error.to_string()))?;
        line.push('\n');
        if std::mem::replace(&mut self.broken, true) {
            return Err(ControlError::Closed);
        }
        self.stream.get_mut().write_all(line.as_bytes()).await?;
        (self.broken, self.owed) = (false, self.owed + 1);
        let reply = loop {
            let reply = self.next().await?;
            self.owed -= 1;
            if self.owed == 0 {
                break reply;
            }
        };
        match reply {
            Reply::Error { message } => Err(ControlError::Refused(message)),
            reply => Ok(reply),
        }
    }
}

impl Reply {
    /// Parses a line of a control connection.
    ///
    /// # Errors
    ///
    /// [`ControlError::NotUnderstood`] if the line is not a reply.
    pub fn of_line(line: &[u8]) -> Result<Reply, ControlError> {
        serde_json::from_slice(line)
            .map_err(|_| ControlError::NotUnderstood(String::from_utf8_lossy(line).trim_end().to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test]
    async fn an_answer_that_no_caller_waited_for_is_not_taken_for_the_next() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut client = Client { stream: BufReader::new(ours), line: Vec::new(), owed: 0, broken: false };
        let pause = Request::Pause { tenant: "t".into(), limit_ms: 1 };
        let resume = Request::Resume { tenant: "t".into() };
        let asking = client.ask(&pause);
        tokio::time::timeout(Duration::from_millis(20), asking).await.unwrap_err();
        let (mut lines, answers) =
            (BufReader::new(theirs), [r#"{"reply":"drained","waited_us":1}"#, r#"{"reply":"resumed"}"#]);
        let answering = async {
            for answer in answers {
                lines.read_line(&mut String::new()).await.unwrap();
                lines.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            }
        };
        let (reply, ()) = tokio::join!(client.ask(&resume), answering);
        assert_eq!(reply.unwrap(), Reply::Resumed);
    }
}

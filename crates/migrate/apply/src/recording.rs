//! Changes of a database's clients that the proxy captures, stored until they are replayed: for a source whose log has no rows.
//!
//! ```text
//! proxy --a line for each commit--> taker --> file without a name --> rows --> conductor
//! ```
//!
//! The copy may take hours, and commits in that time are replayed after it. They are stored in a file beside the journal, which
//! is truncated whenever the replay has read it completely. The file holds rows of the user; it has no name, so no other
//! process can open it, and it is removed when this process ends.

use crate::Error;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use stillpoint_migrate_control::{Client, Reply, Request};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// Maximum bytes read from the file at once.
const READ_BYTES_MAX: u64 = 1 << 20;
/// Beginning of the last line of a capture.
const END_PREFIX: &[u8] = br#"{"reply":"capture_over""#;

/// A running capture. Dropping it ends it.
#[derive(Debug)]
pub struct Recording {
    spool: Arc<Spool>,
    tasks: [JoinHandle<()>; 2],
    proxy: PathBuf,
    tenant: String,
}

/// Captured lines that wait to be replayed.
#[derive(Debug)]
pub(crate) struct Spool {
    file: File,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    read: u64,
    written: u64,
    end: Option<CaptureEnd>,
}

/// Reason why the capture has ended.
#[derive(Debug, Clone)]
enum CaptureEnd {
    /// Something was not captured or not seen.
    Missed(String),
    /// The proxy is gone.
    Gone(String),
}

impl CaptureEnd {
    fn error(&self) -> Error {
        match self.clone() {
            CaptureEnd::Missed(why) => Error::Capture(why),
            CaptureEnd::Gone(why) => Error::ProxyGone(why),
        }
    }
}

impl From<Error> for CaptureEnd {
    fn from(error: Error) -> CaptureEnd {
        match error {
            Error::ProxyGone(why) => CaptureEnd::Gone(why),
            Error::Capture(why) => CaptureEnd::Missed(why),
            other => CaptureEnd::Missed(other.to_string()),
        }
    }
}

impl Recording {
    /// Makes the proxy capture everything that a tenant's clients commit from now on, with the statements if `statements` is
    /// true. Lines are stored in a file in `directory`; `watch` returns when something bypasses the proxy.
    ///
    /// # Errors
    ///
    /// [`Error::Proxy`], [`Error::ProxyGone`], and [`Error::Journal`] if no file can be made.
    pub async fn begin(
        directory: &Path,
        proxy: &Path,
        tenant: &str,
        limit: Duration,
        statements: bool,
        watch: impl Future<Output = Error> + Send + 'static,
    ) -> Result<Recording, Error> {
        let journal = |source| Error::Journal { path: directory.into(), source };
        let spool = Arc::new(Spool {
            file: tempfile::tempfile_in(directory).map_err(journal)?,
            state: Mutex::default(),
            changed: Notify::new(),
        });
        let mut client = Client::connect(proxy).await?;
        let request = Request::Capture { tenant: tenant.into(), limit_ms: limit.as_millis() as u64, statements };
        match client.ask(&request).await? {
            Reply::Capturing { .. } => {}
            reply => return Err(Error::Proxy(format!("unexpected reply {reply:?} to a capture request"))),
        }
        let (taking, watching) = (Arc::clone(&spool), Arc::clone(&spool));
        let tasks = [
            tokio::spawn(async move { taking.end(store_lines(client, &taking).await) }),
            tokio::spawn(async move { watching.end(watch.await.into()) }),
        ];
        Ok(Recording { spool, tasks, proxy: proxy.into(), tenant: tenant.into() })
    }

    /// The spool from which the lines are read.
    pub(crate) fn spool(&self) -> Arc<Spool> {
        Arc::clone(&self.spool)
    }

    /// The error that made the recording unusable, if there is one.
    pub fn failure(&self) -> Option<Error> {
        self.spool.lock().end.as_ref().map(CaptureEnd::error)
    }

    /// Number of bytes that wait to be replayed.
    pub(crate) fn unread(&self) -> u64 {
        let state = self.spool.lock();
        state.written - state.read
    }

    /// Opens a connection to ask for stamps.
    pub(crate) async fn stamps(&self) -> Result<Stamps, Error> {
        let client = Client::connect(&self.proxy).await?;
        Ok(Stamps { client, tenant: self.tenant.clone() })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// A connection on which the proxy reports the last stamp.
#[derive(Debug)]
pub(crate) struct Stamps {
    client: Client,
    tenant: String,
}

impl Stamps {
    /// Returns the last stamp that was taken: everything that a snapshot taken before sees has this stamp or a lower one.
    pub(crate) async fn last(&mut self) -> Result<u64, Error> {
        let request = Request::Captured { tenant: self.tenant.clone() };
        match self.client.ask(&request).await? {
            Reply::Captured { stamp, over: None } => Ok(stamp),
            Reply::Captured { over: Some(why), .. } => Err(Error::Capture(why)),
            reply => Err(Error::Proxy(format!("unexpected reply {reply:?} to a request for the last stamp"))),
        }
    }
}

/// Stores the lines that arrive; returns the reason why they end.
async fn store_lines(mut client: Client, spool: &Spool) -> CaptureEnd {
    loop {
        let line = match client.line().await {
            Ok(line) => line,
            Err(error) => return Error::from(error).into(),
        };
        if line.starts_with(END_PREFIX) {
            return CaptureEnd::Missed(match Reply::of_line(&line) {
                Ok(Reply::CaptureOver { why }) => why,
                Ok(reply) => format!("the proxy replied {reply:?}"),
                Err(error) => error.to_string(),
            });
        }
        if let Err(error) = spool.put(&line) {
            return CaptureEnd::Missed(format!("cannot store captured changes: {error}"));
        }
    }
}

impl Spool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, line: &[u8]) -> io::Result<()> {
        let mut state = self.lock();
        self.file.write_all_at(line, state.written)?;
        state.written += line.len() as u64;
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// Ends the spool; only the first reason is reported.
    fn end(&self, why: CaptureEnd) {
        self.lock().end.get_or_insert(why);
        self.changed.notify_one();
    }

    /// Appends the next bytes to `into`. Only one reader at a time is allowed; if the future is dropped early, no bytes are
    /// lost.
    pub(crate) async fn take(&self, into: &mut Vec<u8>) -> Result<(), Error> {
        loop {
            let changed = self.changed.notified();
            let (from, length) = {
                let state = self.lock();
                if let Some(end) = &state.end {
                    return Err(end.error());
                }
                (state.read, (state.written - state.read).min(READ_BYTES_MAX) as usize)
            };
            if length > 0 {
                let wrong = |error: io::Error| Error::Capture(format!("cannot read stored changes: {error}"));
                let at = into.len();
                into.resize(at + length, 0);
                self.file.read_exact_at(&mut into[at..], from).map_err(wrong)?;
                let mut state = self.lock();
                state.read += length as u64;
                if state.read == state.written {
                    self.file.set_len(0).map_err(wrong)?;
                    (state.read, state.written) = (0, 0);
                }
                return Ok(());
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spool() -> Spool {
        Spool { file: tempfile::tempfile().unwrap(), state: Mutex::default(), changed: Notify::new() }
    }

    #[tokio::test]
    async fn what_is_written_down_comes_back_in_its_order_and_leaves_no_file_behind() {
        let spool = Arc::new(spool());
        let lines: Vec<String> =
            (0..5000).map(|number| format!("line {number} {}\n", "x".repeat(number % 700))).collect();
        let (writer, whole) = (Arc::clone(&spool), lines.concat());
        let writing = tokio::spawn(async move {
            for line in lines {
                writer.put(line.as_bytes()).unwrap();
                tokio::task::yield_now().await;
            }
        });
        let mut read = Vec::new();
        while read.len() < whole.len() {
            spool.take(&mut read).await.unwrap();
        }
        writing.await.unwrap();
        assert!(read == whole.as_bytes());
        assert_eq!(spool.file.metadata().unwrap().len(), 0);
        spool.put(b"more\n").unwrap();
        read.clear();
        spool.take(&mut read).await.unwrap();
        assert_eq!(read, b"more\n");
    }

    #[tokio::test]
    async fn the_first_reason_is_told_and_nothing_more_comes() {
        let spool = spool();
        spool.put(b"line\n").unwrap();
        spool.end(CaptureEnd::Missed("a TRUNCATE".into()));
        spool.end(CaptureEnd::Gone("the proxy is gone".into()));
        let Error::Capture(why) = spool.take(&mut Vec::new()).await.unwrap_err() else { panic!("another error") };
        assert_eq!(why, "a TRUNCATE");
    }
}

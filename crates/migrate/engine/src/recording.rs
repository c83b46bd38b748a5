//! What the proxy captures of a database's clients, kept until it is repeated: for a source whose log does not tell of rows.
//!
//! ```text
//! proxy --a line for each commit--> taker --> file without a name --> follow::rows --> conductor
//! ```
//!
//! The copy may take hours, and what is committed meanwhile is repeated behind it: it lies in a file beside the journal,
//! which is empty again whenever the replay has read it to its end. It holds rows of the user: nobody else can open it, as
//! it has no name, and it is gone with the process.
//!
//! The proxy sees what comes through it. Sessions that bypass it are looked for all the time; one that is found ends the
//! recording, and with it the migration. One that comes, writes and leaves between two looks is not found: the comparison
//! of both sides before the switch-over finds what it wrote, if it came before that.

use crate::front::{Front, broken};
use crate::inventory::text;
use crate::link::Link;
use crate::options::Options;
use crate::{Error, fence};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use stillpoint_migrate_proxy::control::{Client, Reply, Request};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// How often sessions that bypass the proxy are looked for.
const LOOKING: Duration = Duration::from_millis(500);
/// What is read of the file at once.
const CHUNK: u64 = 1 << 20;
/// How the last line of a capture begins.
const LAST_LINE: &[u8] = br#"{"reply":"capture_over""#;

/// A capture that runs. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Recording {
    spool: Arc<Spool>,
    tasks: [JoinHandle<()>; 2],
    proxy: PathBuf,
    tenant: String,
}

/// Lines that wait to be repeated.
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
    over: Option<Over>,
}

/// Why nothing more comes.
#[derive(Debug, Clone)]
enum Over {
    /// Something is not captured, or not seen.
    Missed(String),
    /// There is no proxy any more.
    Gone(String),
}

impl Over {
    fn error(&self) -> Error {
        match self.clone() {
            Over::Missed(why) => Error::Capture(why),
            Over::Gone(why) => Error::ProxyGone(why),
        }
    }
}

impl From<Error> for Over {
    fn from(error: Error) -> Over {
        match error {
            Error::ProxyGone(why) => Over::Gone(why),
            other => Over::Missed(other.to_string()),
        }
    }
}

impl Recording {
    /// Has the proxy capture everything that its clients commit from now on, with their statements if these are wanted.
    pub(crate) async fn begin(options: &Options, statements: bool) -> Result<Recording, Error> {
        let journal = |source| Error::Journal { path: options.state.clone(), source };
        let spool = Arc::new(Spool {
            file: tempfile::tempfile_in(&options.state).map_err(journal)?,
            state: Mutex::default(),
            changed: Notify::new(),
        });
        let watch = Watch::begin(options).await?;
        let mut client = Client::connect(&options.proxy).await.map_err(|error| broken(&error))?;
        let limit_ms = options.snapshot_limit.as_millis() as u64;
        let request = Request::Capture { tenant: options.tenant.clone(), limit_ms, statements };
        match client.ask(&request).await.map_err(|error| broken(&error))? {
            Reply::Capturing { .. } => {}
            reply => return Err(Error::Proxy(format!("answered {reply:?} to a request to capture"))),
        }
        let (taking, watching) = (Arc::clone(&spool), Arc::clone(&spool));
        let tasks = [
            tokio::spawn(async move { taking.end(take(client, &taking).await) }),
            tokio::spawn(async move { watching.end(watch.find().await) }),
        ];
        Ok(Recording { spool, tasks, proxy: options.proxy.clone(), tenant: options.tenant.clone() })
    }

    /// Where it is read.
    pub(crate) fn spool(&self) -> Arc<Spool> {
        Arc::clone(&self.spool)
    }

    /// Why it is of no use any more.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.spool.lock().over.as_ref().map(Over::error)
    }

    /// Bytes that wait to be repeated.
    pub(crate) fn unread(&self) -> u64 {
        let state = self.spool.lock();
        state.written - state.read
    }

    /// Asks for stamps.
    pub(crate) async fn stamps(&self) -> Result<Stamps, Error> {
        let client = Client::connect(&self.proxy).await.map_err(|error| broken(&error))?;
        Ok(Stamps { client, tenant: self.tenant.clone() })
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// A connection on which the proxy tells the last stamp.
#[derive(Debug)]
pub(crate) struct Stamps {
    client: Client,
    tenant: String,
}

impl Stamps {
    /// The last stamp that was taken: whatever a snapshot sees that was taken before has this one or a lower.
    pub(crate) async fn last(&mut self) -> Result<u64, Error> {
        let request = Request::Captured { tenant: self.tenant.clone() };
        match self.client.ask(&request).await.map_err(|error| broken(&error))? {
            Reply::Captured { stamp, over: None } => Ok(stamp),
            Reply::Captured { over: Some(why), .. } => Err(Error::Capture(why)),
            reply => Err(Error::Proxy(format!("answered {reply:?} when asked for the last stamp"))),
        }
    }
}

/// Writes down what comes; why nothing more does.
async fn take(mut client: Client, spool: &Spool) -> Over {
    loop {
        let line = match client.line().await {
            Ok(line) => line,
            Err(error) => return broken(&error).into(),
        };
        if line.starts_with(LAST_LINE) {
            return Over::Missed(match Reply::of_line(&line) {
                Ok(Reply::CaptureOver { why }) => why,
                Ok(reply) => format!("the proxy said {reply:?}"),
                Err(error) => error.to_string(),
            });
        }
        if let Err(error) = spool.put(&line) {
            return Over::Missed(format!("what is captured cannot be written down: {error}"));
        }
    }
}

/// Looks for sessions that bypass the proxy.
struct Watch {
    beside: Link,
    front: Front,
    database: String,
}

impl Watch {
    async fn begin(options: &Options) -> Result<Watch, Error> {
        let beside = fence::beside(&options.source).await?;
        let front = Front::connect(&options.proxy, &options.tenant).await?;
        Ok(Watch { beside, front, database: options.source.database.clone() })
    }

    /// Returns when it has found one, or cannot look any more.
    async fn find(mut self) -> Over {
        let mut tick = tokio::time::interval(LOOKING);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            match self.look().await {
                Ok(None) => {}
                Ok(Some(who)) => {
                    return Over::Missed(format!("{who} does not come through the proxy: what it writes is not seen"));
                }
                Err(error) => return error.into(),
            }
        }
    }

    async fn look(&mut self) -> Result<Option<String>, Error> {
        let found = fence::bypassing(&mut self.beside, &mut self.front, &self.database).await?;
        Ok(found.first().map(|row| text(row, 1)))
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

    /// The first reason is the one that is told.
    fn end(&self, why: Over) {
        self.lock().over.get_or_insert(why);
        self.changed.notify_one();
    }

    /// Adds what comes next to `into`. One reader at a time; nothing is lost when this is dropped before it is there.
    pub(crate) async fn take(&self, into: &mut Vec<u8>) -> Result<(), Error> {
        loop {
            let changed = self.changed.notified();
            let (from, length) = {
                let state = self.lock();
                if let Some(over) = &state.over {
                    return Err(over.error());
                }
                (state.read, (state.written - state.read).min(CHUNK) as usize)
            };
            if length > 0 {
                let wrong = |error: io::Error| Error::Capture(format!("what was written down cannot be read: {error}"));
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
        spool.end(Over::Missed("a TRUNCATE".into()));
        spool.end(Over::Gone("the proxy is gone".into()));
        let Error::Capture(why) = spool.take(&mut Vec::new()).await.unwrap_err() else { panic!("another error") };
        assert_eq!(why, "a TRUNCATE");
    }
}

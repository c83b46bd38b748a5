//! Output of the record by a thread of its own: a slow disk must not show as a latency.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use crate::error::{Error, Result};
use crate::record::{End, Header, Mark, Sample, Writer};

/// Sends blocks to the writing thread.
#[derive(Debug)]
struct ThreadWriter(Sender<Vec<u8>>);

impl Write for ThreadWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.send(bytes.to_vec()).map_err(|_| io::Error::other("the writing thread has ended"))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Record in progress, or nothing.
#[derive(Debug)]
pub(crate) struct Sink {
    writer: Writer<ThreadWriter>,
    thread: JoinHandle<io::Result<()>>,
    path: PathBuf,
}

impl Sink {
    pub(crate) fn create(path: &Path, header: &Header) -> Result<Sink> {
        let file =
            File::create(path).map_err(|source| Error::File { action: "create", path: path.to_owned(), source })?;
        let (sender, blocks) = channel();
        let thread = std::thread::Builder::new()
            .name("record".into())
            .spawn(move || write_blocks(file, &blocks))
            .map_err(|source| Error::System { call: "clone", source })?;
        match Writer::new(ThreadWriter(sender), header) {
            Ok(writer) => Ok(Sink { writer, thread, path: path.to_owned() }),
            Err(source) => Err(Error::File { action: "write", path: path.to_owned(), source }),
        }
    }

    pub(crate) fn sample(&mut self, sample: &Sample) -> Result<()> {
        self.writer.sample(sample).map_err(|source| self.failed(source))
    }

    pub(crate) fn mark(&mut self, mark: &Mark) -> Result<()> {
        self.writer.mark(mark).map_err(|source| self.failed(source))
    }

    /// Sends the collected samples, so that a crash loses only later ones.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.writer.flush().map_err(|source| self.failed(source))
    }

    pub(crate) fn end(self, end: &End) -> Result<()> {
        let Sink { writer, thread, path } = self;
        let sent = writer.end(end).map(drop);
        let written = thread.join().unwrap_or_else(|_| Err(io::Error::other("the writing thread panicked")));
        // If both failed, the thread's own error is the cause.
        written.and(sent).map_err(|source| Error::File { action: "write", path, source })
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::File { action: "write", path: self.path.clone(), source }
    }
}

fn write_blocks(mut file: File, blocks: &Receiver<Vec<u8>>) -> io::Result<()> {
    for block in blocks {
        file.write_all(&block)?;
    }
    Ok(())
}

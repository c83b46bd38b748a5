//! Reads the next part out of the image while the previous one is copied into the process: to read and compare a chunk
//! takes about as long as to copy it.

use crate::{Error, Image};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, Scope, ScopedJoinHandle};
use stillpoint_kernel_foam::Object;

/// A range of a memory, by its address in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MemoryRange {
    pub(super) object: Object,
    pub(super) address: u64,
    pub(super) bytes: u64,
}

impl MemoryRange {
    /// Reads the part; the buffer is valid only if there was no error.
    pub(super) fn read(self, image: &Image, into: &mut Vec<u8>) -> Result<(), Error> {
        into.resize(self.bytes as usize, 0);
        image.read(self.object, self.address, into)
    }
}

/// Thread that reads one part at a time.
pub(super) struct Prefetcher<'s> {
    thread: ScopedJoinHandle<'s, ()>,
    requests: SyncSender<(MemoryRange, Vec<u8>)>,
    results: Receiver<(Vec<u8>, Result<(), Error>)>,
    /// The part that was requested, and not taken yet.
    pending: Option<MemoryRange>,
    spare: Vec<u8>,
}

impl<'s> Prefetcher<'s> {
    /// Starts the thread; without one everything is read when it is needed.
    pub(super) fn start(scope: &'s Scope<'s, '_>, image: &'s Image) -> Option<Self> {
        let (requests, pending) = sync_channel::<(MemoryRange, Vec<u8>)>(1);
        let (result, results) = sync_channel(1);
        let reading = move || {
            for (range, mut buffer) in pending {
                let read = range.read(image, &mut buffer);
                if result.send((buffer, read)).is_err() {
                    return;
                }
            }
        };
        match Builder::new().name("ahead".into()).spawn_scoped(scope, reading) {
            Ok(thread) => Some(Prefetcher { thread, requests, results, pending: None, spare: Vec::new() }),
            Err(error) => {
                tracing::warn!("no memory is prefetched: {error}");
                None
            }
        }
    }

    /// Ends the thread. The end of its scope waits only for the thread's closure, not for the thread itself.
    pub(super) fn end(self) {
        let Prefetcher { thread, requests, results, .. } = self;
        drop((requests, results));
        // it has nothing to report, not even a panic: what it should have read is read when it is needed
        let _ = thread.join();
    }

    /// Requests a part, if no other one is being read.
    pub(super) fn request(&mut self, range: MemoryRange) {
        if self.pending.is_none() && self.requests.send((range, std::mem::take(&mut self.spare))).is_ok() {
            self.pending = Some(range);
        }
    }

    /// Takes a part, if it is the one requested last; no request is pending afterwards.
    pub(super) fn take(&mut self, range: MemoryRange, into: &mut Vec<u8>) -> Option<Result<(), Error>> {
        let pending = self.pending.take()?;
        let (mut buffer, read) = self.results.recv().ok()?;
        if pending == range {
            std::mem::swap(into, &mut buffer);
        }
        self.spare = buffer;
        (pending == range).then_some(read)
    }
}

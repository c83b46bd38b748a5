//! Server of pages: it fetches faulted pages immediately, the others in the background.

use super::fill::{FetchCounts, Fill, ProgressFile, State};
use super::huge::{CollapseCounts, RestoredProcess};
use super::prefetch::{MemoryRange, Prefetcher};
use super::rate_limit::RateLimiter;
use crate::error::ErrorContext;
use crate::{Error, Image};
use rustix::event::{Timespec, epoll};
use rustix::fd::{AsFd, OwnedFd};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::time::{Duration, Instant};
use stillpoint_base::{PAGE, page_start};
use stillpoint_kernel_criu::lazy::Message;
use stillpoint_kernel_foam::{Object, Pending, Run};
use stillpoint_kernel_sys::uffd::{Event, Log, Memory, PutOutcome, Record};

/// Bytes fetched for one fault: the neighbours of a page are likely to be touched next.
const FAULT_BYTES: u64 = 16 * PAGE;
/// Maximum of bytes fetched at once in the background; a thread that faults meanwhile waits for so long.
const CHUNK_BYTES_MAX: u64 = 256 * PAGE;
/// Bytes fetched at once in the background while threads fault.
const BUSY_CHUNK_BYTES: u64 = 16 * PAGE;
/// Time after a fault in which another one is likely.
const BUSY_PERIOD: Duration = Duration::from_millis(5);
/// Number of events of one memory before the others are served.
const EVENTS_PER_TURN_MAX: usize = 64;

/// Kinds of notes in the log.
pub(super) const NOTE_FINISHED: u32 = 1;
pub(super) const NOTE_DONE: u32 = 2;
pub(super) const NOTE_FAILED: u32 = 3;

/// Ways in which a server ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ServerEnd {
    /// Every page is resident.
    Done(FetchCounts),
    /// criu ended before it had restored everything.
    Abandoned,
    /// The keeper of this process has died.
    KeeperDied,
}

struct ServedMemory {
    number: u32,
    object: Object,
    memory: Memory,
    pending: Pending,
    cursor: u64,
    /// Bytes fetched at once in the background: few if an earlier server has fetched pages already.
    chunk: u64,
    /// Pages that wait until the process has finished a change of its memory.
    deferred: Vec<u64>,
    closed: bool,
    /// A process that criu restored, and a page of it; `None` for one that was forked since.
    root: Option<(u32, u64)>,
}

/// State of one server process. All of it comes from the log and the image.
pub(super) struct Server<'i> {
    image: &'i Image,
    log: &'i Log,
    served: Vec<ServedMemory>,
    finished: bool,
    counts: FetchCounts,
    /// Bytes that all memories were to get.
    total: u64,
    limiter: RateLimiter,
    /// Time of the last fault.
    last_fault: Option<Instant>,
    buffer: Vec<u8>,
    report: ProgressFile,
    /// Processes whose memory is all resident.
    restored: Vec<RestoredProcess>,
}

/// First number in epoll that does not belong to a memory.
const CRIU: u64 = 1 << 32;
const KEEPER: u64 = CRIU + 1;

impl<'i> Server<'i> {
    /// Takes over the state in the log.
    pub(super) fn new(image: &'i Image, log: &'i Log, rate: Option<u64>) -> Result<Self, Error> {
        let limiter = RateLimiter::new(rate, Instant::now());
        let (counts, buffer) = (FetchCounts::default(), Vec::new());
        let (served, report, restored) = (Vec::new(), ProgressFile::of(image.dir()), Vec::new());
        let mut server = Server {
            image,
            log,
            served,
            finished: false,
            counts,
            total: 0,
            limiter,
            last_fault: None,
            buffer,
            report,
            restored,
        };
        let records = log.records()?;
        for record in &records {
            server.replay(*record)?;
        }
        if let Some((number, event)) = log.uncommitted()? {
            // the last server has read it, and the process continues as if it had been handled
            if matches!(event, Event::Fault(_)) {
                log.discard()?;
            } else {
                server.apply_event(number, event)?;
                log.commit();
            }
        }
        // A close that was begun and not recorded: nothing was opened since, so the number still means the same, or
        // nothing.
        if let Some(Record::Closing(memory)) = records.last() {
            server.close(*memory as usize)?;
        }
        // Faults that were read and not answered are lost; the waiting threads fault again.
        for served in server.served.iter().filter(|served| !served.closed) {
            served.memory.wake_all()?;
        }
        Ok(server)
    }

    fn replay(&mut self, record: Record) -> Result<(), Error> {
        match record {
            Record::Memory { pid, memory } => self.begin(pid, memory),
            Record::Event { memory, event } => self.apply_event(memory, event)?,
            Record::Closing(_) => {}
            Record::Closed(memory) => {
                if let Some(served) = self.served.get_mut(memory as usize) {
                    served.closed = true;
                }
            }
            Record::Note { kind, .. } => self.finished |= kind == NOTE_FINISHED,
        }
        Ok(())
    }

    fn begin(&mut self, pid: u32, memory: Memory) {
        let object = Object::Task(pid);
        let recorded = self.image.index().memory(object);
        let pending = recorded.map(|recorded| Pending::of(&recorded.extents)).unwrap_or_default();
        let page = pending.next(0).map(|run| run.address);
        self.push(object, memory, pending, page.map(|page| (pid, page)));
    }

    fn push(&mut self, object: Object, memory: Memory, pending: Pending, root: Option<(u32, u64)>) {
        let number = self.served.len() as u32;
        let (cursor, chunk, deferred, closed) = (0, CHUNK_BYTES_MAX, Vec::new(), false);
        self.total += pending.bytes();
        self.served.push(ServedMemory { number, object, memory, pending, cursor, chunk, deferred, closed, root });
    }

    /// Applies an event to the state; the same when it happens and when it is replayed from the log.
    fn apply_event(&mut self, number: u32, event: Event) -> Result<(), Error> {
        let Some(served) = self.served.get_mut(number as usize) else {
            return Err(Error::Daemon(format!("an event of memory {number}, which is unknown")));
        };
        match event {
            Event::Fault(_) => {}
            Event::Remove { start, end } => served.pending.remove(start, end),
            Event::Remap { from, to, bytes } => served.pending.remap(from, to, bytes),
            Event::Fork(descriptor) => {
                let (object, pending) = (served.object, served.pending.clone());
                self.push(object, Memory::of(descriptor), pending, None);
            }
        }
        Ok(())
    }

    /// Serves until nothing is left to serve. The process has one thread again when this returns.
    pub(super) fn run(&mut self, criu: BorrowedFd<'_>, keeper: &OwnedFd) -> Result<ServerEnd, Error> {
        let image = self.image;
        std::thread::scope(|scope| {
            let mut prefetcher = Prefetcher::start(scope, image);
            let end = self.run_with(&mut prefetcher, criu, keeper);
            prefetcher.into_iter().for_each(Prefetcher::end);
            end
        })
    }

    fn run_with(
        &mut self,
        prefetcher: &mut Option<Prefetcher<'_>>,
        criu: BorrowedFd<'_>,
        keeper: &OwnedFd,
    ) -> Result<ServerEnd, Error> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).with_action("make an epoll set")?;
        let watch = |what: BorrowedFd<'_>, number| {
            epoll::add(&poll, what, epoll::EventData::new_u64(number), epoll::EventFlags::IN)
                .with_action("watch a descriptor")
        };
        watch(keeper.as_fd(), KEEPER)?;
        if !self.finished {
            watch(criu, CRIU)?;
        }
        let mut watched = 0;
        loop {
            for served in self.served.iter().skip(watched).filter(|served| !served.closed) {
                watch(served.memory.as_fd(), u64::from(served.number))?;
            }
            watched = self.served.len();
            self.report(false);
            if self.finished && self.close_finished()? {
                self.image.drop_all_cached();
                self.report(true);
                return Ok(ServerEnd::Done(self.counts));
            }
            let mut events = Vec::with_capacity(64);
            let timeout = self.poll_timeout()?;
            match epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).with_action("wait for events"),
            }
            for event in &events {
                match event.data.u64() {
                    KEEPER => return Ok(ServerEnd::KeeperDied),
                    CRIU if !self.receive_message(criu)? => return Ok(ServerEnd::Abandoned),
                    CRIU if self.finished => {
                        epoll::delete(&poll, criu).with_action("remove criu from the epoll set")?
                    }
                    CRIU => {}
                    number => self.handle_events(number as usize)?,
                }
            }
            self.retry_deferred()?;
            self.fetch_chunk(prefetcher)?;
        }
    }

    /// Gives huge pages to processes whose memory is all resident. They need nothing of this process any more.
    ///
    /// # Errors
    ///
    /// [`Error`] if a process's page map cannot be opened.
    pub(super) fn collapse(&self, rate: Option<u64>) -> Result<CollapseCounts, Error> {
        self.restored.iter().try_fold(CollapseCounts::default(), |sum, process| {
            let CollapseCounts { made, left } = process.collapse(rate)?;
            Ok(CollapseCounts { made: sum.made + made, left: sum.left + left })
        })
    }

    /// Writes the progress file.
    fn report(&mut self, done: bool) {
        if !self.report.is_due() && !done {
            return;
        }
        let open = self.served.iter().filter(|served| !served.closed);
        let left = open.map(|served| served.pending.bytes()).sum();
        let state = if done { State::Done } else { State::Filling };
        self.report.write(&Fill { state, total: self.total, left, counts: self.counts });
    }

    /// Reads one message of criu; returns false if criu has ended too early.
    fn receive_message(&mut self, criu: BorrowedFd<'_>) -> Result<bool, Error> {
        let mut bytes = [0; 4];
        let read = match rustix::io::read(criu, &mut bytes) {
            // it ended before it read the last message
            Err(rustix::io::Errno::CONNRESET) => 0,
            read => read.with_action("receive from criu")?,
        };
        if read != 4 {
            return Ok(false);
        }
        match Message::decode(bytes)? {
            Message::Process(pid) => {
                let memory = Memory::of(descriptor(criu)?.into_raw_fd());
                self.log.append(Record::Memory { pid, memory })?;
                self.begin(pid, memory);
            }
            Message::Zombie(_) => {}
            Message::Finished => {
                self.log.append(Record::Note { kind: NOTE_FINISHED, value: 0 })?;
                self.finished = true;
            }
        }
        Ok(true)
    }

    /// Handles the events of one memory, one at a time: each is completely handled before the next is read, as the
    /// process continues once its event is read.
    fn handle_events(&mut self, at: usize) -> Result<(), Error> {
        for _ in 0..EVENTS_PER_TURN_MAX {
            let Some((number, memory)) = self.served.get(at).filter(|s| !s.closed).map(|s| (s.number, s.memory)) else {
                return Ok(());
            };
            // Without room for it no event can be read: first everything is fetched, and the memory closed.
            if self.is_full() {
                return Ok(());
            }
            let Some(event) = self.log.read(number, memory)? else { return Ok(()) };
            match event {
                Event::Fault(address) => {
                    self.counts.faults += 1;
                    self.last_fault = Some(Instant::now());
                    self.fetch_page(at, page_start(address))?;
                    self.log.discard()?;
                }
                event => {
                    self.apply_event(number, event)?;
                    self.log.commit();
                }
            }
        }
        Ok(())
    }

    /// Fetches the page that a thread waits for, and its neighbours.
    fn fetch_page(&mut self, at: usize, page: u64) -> Result<(), Error> {
        let put = match self.served[at].pending.at(page) {
            Some(run) => {
                let range = self.front(at, run, FAULT_BYTES);
                range.read(self.image, &mut self.buffer)?;
                let (put, bytes) = self.copy_front(at, run)?;
                self.counts.asked += bytes;
                put
            }
            None => {
                let put = self.served[at].memory.zero(page, PAGE)?;
                if let PutOutcome::Done(bytes) = put {
                    self.log.add_resident(bytes);
                }
                put
            }
        };
        match put {
            PutOutcome::LayoutChanging => self.served[at].deferred.push(page),
            PutOutcome::ProcessEnded => self.handle_exit(at)?,
            PutOutcome::Done(_) | PutOutcome::AlreadyResident | PutOutcome::Unmapped => {}
        }
        Ok(())
    }

    /// Returns the front of a run, at most `most` bytes of it.
    fn front(&self, at: usize, run: Run, most: u64) -> MemoryRange {
        MemoryRange { object: self.served[at].object, address: run.image, bytes: run.bytes.min(most) }
    }

    /// Copies the front of a run, which has been read, into the process.
    fn copy_front(&mut self, at: usize, run: Run) -> Result<(PutOutcome, u64), Error> {
        let (served, pages) = (&mut self.served[at], &self.buffer);
        let mut put = served.memory.copy(run.address, pages)?;
        let mut length = pages.len() as u64;
        while put == PutOutcome::Unmapped && length > PAGE {
            // the run extends over the end of a mapping: halve it, as to copy page by page up to the end would take
            // long
            length = (length / 2).next_multiple_of(PAGE);
            put = served.memory.copy(run.address, &pages[..length as usize])?;
        }
        let removed = match put {
            PutOutcome::Done(bytes) => bytes,
            PutOutcome::AlreadyResident | PutOutcome::Unmapped => PAGE,
            PutOutcome::LayoutChanging | PutOutcome::ProcessEnded => 0,
        };
        served.pending.remove(run.address, run.address + removed);
        let resident = if let PutOutcome::Done(bytes) = put { bytes } else { 0 };
        self.log.add_resident(resident);
        Ok((put, resident))
    }

    /// Retries pages that had to wait for events.
    fn retry_deferred(&mut self) -> Result<(), Error> {
        for at in 0..self.served.len() {
            for page in std::mem::take(&mut self.served[at].deferred) {
                self.fetch_page(at, page)?;
            }
        }
        Ok(())
    }

    /// Fetches one chunk in the background; the next one is read meanwhile.
    fn fetch_chunk(&mut self, prefetcher: &mut Option<Prefetcher<'_>>) -> Result<(), Error> {
        if !self.finished || self.pause().is_some() {
            return Ok(());
        }
        let Some(at) =
            (0..self.served.len()).find(|at| !self.served[*at].pending.is_empty() && !self.served[*at].closed)
        else {
            return Ok(());
        };
        let Some(run) = self.served[at].pending.next(self.served[at].cursor) else { return Ok(()) };
        let chunk = self.served[at].chunk;
        let step = self.chunk_bytes();
        let range = self.front(at, run, chunk.min(step));
        let read = prefetcher.as_mut().and_then(|prefetcher| prefetcher.take(range, &mut self.buffer));
        read.unwrap_or_else(|| range.read(self.image, &mut self.buffer))?;
        let next = self.served[at].pending.next(run.address + range.bytes).filter(|next| next.address != run.address);
        if let (Some(next), Some(prefetcher)) = (next, prefetcher.as_mut()) {
            prefetcher.request(self.front(at, next, (chunk * 2).min(CHUNK_BYTES_MAX).min(step)));
        }
        let (put, bytes) = self.copy_front(at, run)?;
        self.served[at].chunk =
            if put == PutOutcome::AlreadyResident { PAGE } else { (chunk * 2).min(CHUNK_BYTES_MAX) };
        self.served[at].cursor = run.address + bytes;
        self.counts.filled += bytes;
        self.limiter.consume(bytes);
        if !self.is_shared(at) {
            self.image.drop_cached_pages(range.object, range.address, bytes);
        }
        match put {
            PutOutcome::ProcessEnded => self.handle_exit(at)?,
            // the event that reports the change is in the queue; it is read before anything else is tried
            PutOutcome::LayoutChanging => self.handle_events(at)?,
            _ => {}
        }
        Ok(())
    }

    /// Returns true if another memory needs the same pages: that of a process that was forked meanwhile.
    fn is_shared(&self, at: usize) -> bool {
        self.served.iter().filter(|served| !served.closed && served.object == self.served[at].object).count() > 1
    }

    fn pause(&mut self) -> Option<Duration> {
        // with a full log processes wait until everything is resident
        let step = self.chunk_bytes();
        if self.is_full() { None } else { self.limiter.wait(step, Instant::now()) }
    }

    /// Returns the bytes to fetch at once in the background: few while another fault is likely.
    fn chunk_bytes(&self) -> u64 {
        let is_busy = self.last_fault.is_some_and(|fault| fault.elapsed() < BUSY_PERIOD);
        if is_busy { BUSY_CHUNK_BYTES } else { self.limiter.step_bytes(CHUNK_BYTES_MAX).next_multiple_of(PAGE) }
    }

    /// Returns true if the log only has room for the records that close all memories.
    fn is_full(&self) -> bool {
        self.log.free_records() < 16 + 2 * self.served.len()
    }

    /// Returns the time to wait for events: none while there is other work.
    fn poll_timeout(&mut self) -> Result<Option<Timespec>, Error> {
        let idle = |duration: Duration| {
            Timespec::try_from(duration).map_err(|_| Error::Daemon("the time to wait is out of range".into()))
        };
        if self.served.iter().any(|served| !served.deferred.is_empty()) {
            return idle(Duration::ZERO).map(Some);
        }
        if !self.finished {
            return Ok(None);
        }
        idle(self.pause().unwrap_or_default()).map(Some)
    }

    /// Closes memories that are all resident; returns true if all are closed.
    fn close_finished(&mut self) -> Result<bool, Error> {
        for at in 0..self.served.len() {
            let served = &self.served[at];
            if !served.closed && served.pending.is_empty() && served.deferred.is_empty() {
                self.handle_events(at)?;
                let served = &self.served[at];
                if served.pending.is_empty() {
                    self.restored
                        .extend(served.root.and_then(|(pid, page)| RestoredProcess::of(pid, served.memory, page)));
                    self.close(at)?;
                }
            }
        }
        Ok(self.served.iter().all(|served| served.closed))
    }

    /// Handles a process that ended and needs no memory any more: logs it, and continues with the others.
    fn handle_exit(&mut self, at: usize) -> Result<(), Error> {
        let Some(served) = self.served.get(at).filter(|served| !served.closed) else { return Ok(()) };
        tracing::warn!(
            bytes_left = served.pending.bytes(),
            "{} ended before all of its memory was resident",
            served.object
        );
        self.counts.ended += 1;
        self.close(at)
    }

    fn close(&mut self, at: usize) -> Result<(), Error> {
        let Some(served) = self.served.get_mut(at).filter(|served| !served.closed) else { return Ok(()) };
        let memory = served.number;
        self.log.append(Record::Closing(memory))?;
        served.memory.close();
        served.closed = true;
        self.log.append(Record::Closed(memory))?;
        Ok(())
    }
}

/// Receives the descriptor that comes with the next byte.
fn descriptor(criu: BorrowedFd<'_>) -> Result<OwnedFd, Error> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(criu, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)
        .with_action("receive a userfaultfd")?;
    let first = |message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    };
    ancillary.drain().find_map(first).ok_or_else(|| Error::Daemon("criu sent a process without its userfaultfd".into()))
}

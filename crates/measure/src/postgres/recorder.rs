//! Common output of all clients of a load: samples, marks, history.

use std::sync::Arc;

use crate::clock::now_ns;
use crate::error::Result;
use crate::history::Transaction;
use crate::load::{Counters, Sink};
use crate::record::{End, Header, Mark, MarkKind, Outcome, Sample};
use crate::summary::SummaryBuilder;

/// Limit of complaints that are kept as text.
const COMPLAINTS_MAX: usize = 10;

pub(super) struct Recorder {
    pub(super) counters: Arc<Counters>,
    pub(super) sink: Option<Sink>,
    pub(super) builder: SummaryBuilder,
    pub(super) end: End,
    pub(super) complaints: Vec<String>,
    pub(super) retries: u64,
    pub(super) history: Vec<Transaction>,
    /// First error of the record's file.
    pub(super) broken: Option<crate::error::Error>,
    waiting: usize,
}

impl Recorder {
    pub(super) fn new(header: &Header, counters: Arc<Counters>, sink: Option<Sink>) -> Recorder {
        Recorder {
            counters,
            sink,
            builder: SummaryBuilder::new(&header.kinds, header.started_ns),
            end: End::default(),
            complaints: Vec::new(),
            retries: 0,
            history: Vec::new(),
            broken: None,
            waiting: 0,
        }
    }

    /// Counts a transaction that has become due.
    pub(super) fn due(&mut self, due_ns: u64) {
        self.waiting += 1;
        self.builder.waiting_since(due_ns);
    }

    /// Records a transaction that has ended.
    pub(super) fn ended(&mut self, sample: &Sample) {
        self.waiting -= 1;
        self.counters.sample(sample);
        self.builder.add(sample, self.waiting > 0);
        self.write(|sink| sink.sample(sample));
    }

    pub(super) fn describe_error(&mut self, connection: u32, outcome: Outcome, text: String) {
        if self.complaints.len() < COMPLAINTS_MAX {
            self.mark(connection, MarkKind::Complaint, text.clone());
            self.complaints.push(format!("client {connection}: {outcome:?}: {text}"));
        }
    }

    pub(super) fn mark(&mut self, connection: u32, what: MarkKind, text: String) {
        match what {
            MarkKind::Dropped => {
                self.end.dropped += 1;
                self.counters.dropped();
            }
            MarkKind::Reconnected => self.counters.opened(),
            MarkKind::Complaint => {}
        }
        self.write(|sink| sink.mark(&Mark { t_ns: now_ns(), connection, what, text }));
    }

    pub(super) fn reconnect_failed(&mut self) {
        self.end.reconnect_failures += 1;
        self.counters.reconnect_failed();
    }

    /// Writes the collected samples to the file.
    pub(super) fn flush(&mut self) {
        self.write(Sink::flush);
    }

    fn write(&mut self, what: impl FnOnce(&mut Sink) -> Result<()>) {
        let Some(sink) = &mut self.sink else { return };
        if let Err(error) = what(sink) {
            self.broken.get_or_insert(error);
            self.sink = None;
        }
    }
}

//! Notes on possible changes to a session's state, taken while its statements pass.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use stillpoint_migrate_wire::frame::Message;
use stillpoint_migrate_wire::{custom_settings, frontend, touch};

/// Longest unnamed statement that is kept, in bytes; after a longer one a switch-over waits for the next.
const UNNAMED_MAX: usize = 1 << 20;
/// Most names of custom settings; no real client uses more.
pub(crate) const CUSTOM_MAX: usize = 1000;

/// Names of settings that no catalogue lists, found in statements of a tenant's sessions.
pub(crate) type CustomNames = Arc<Mutex<BTreeSet<String>>>;

/// Notes on one session.
#[derive(Debug)]
pub(crate) struct StateTracker {
    /// The session's state may differ from its state when this was last cleared.
    pub(crate) dirty: bool,
    /// A prepared statement exists that changes the session's state at each execution.
    changing_prepared: bool,
    /// Body of the Parse that made the unnamed statement; empty if there is none.
    pub(crate) unnamed: Vec<u8>,
    /// The unnamed statement is too long to be kept.
    pub(crate) unnamed_lost: bool,
    custom: CustomNames,
}

impl StateTracker {
    pub(crate) fn new(custom: CustomNames) -> StateTracker {
        StateTracker { dirty: false, changing_prepared: false, unnamed: Vec::new(), unnamed_lost: false, custom }
    }

    /// Records a client's message that passes.
    #[inline]
    pub(crate) fn frontend(&mut self, message: &Message<'_>) {
        match message.tag {
            b'Q' => {
                self.forget_unnamed();
                self.dirty |= self.judge(message.body.strip_suffix(&[0]).unwrap_or(message.body)) | !message.is_whole();
            }
            b'P' => self.parse(message),
            b'B' if self.changing_prepared && !self.dirty => {
                self.dirty = frontend::bind_statement(message.body) != Some(b"");
            }
            // Closing the unnamed statement is rare and does no harm.
            b'C' if message.body.first() == Some(&b'S') => self.dirty = true,
            b'F' => self.dirty = true,
            _ => {}
        }
    }

    fn forget_unnamed(&mut self) {
        self.unnamed.clear();
        self.unnamed_lost = false;
    }

    fn parse(&mut self, message: &Message<'_>) {
        let Some((name, text)) = frontend::parse_text(message.body) else {
            self.dirty = true;
            return;
        };
        let (named, changes) = (!name.is_empty(), self.judge(text) | !message.is_whole());
        self.dirty |= named | changes;
        self.changing_prepared |= named && changes;
        if !named {
            self.forget_unnamed();
            self.unnamed_lost = !message.is_whole() || message.len > UNNAMED_MAX;
            if !self.unnamed_lost {
                self.unnamed.extend_from_slice(message.body);
            }
        }
    }

    fn judge(&mut self, text: &[u8]) -> bool {
        let touch = touch(text);
        if touch.custom {
            let names = custom_settings(&String::from_utf8_lossy(text));
            if !names.is_empty() {
                let mut known = crate::mutex::lock(&self.custom);
                let room = CUSTOM_MAX.saturating_sub(known.len());
                known.extend(names.into_iter().take(room));
            }
        }
        touch.state
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_migrate_wire::frame::{HEADER_LEN, Scanner, Step};

    fn after(write: impl FnOnce(&mut Vec<u8>)) -> StateTracker {
        let mut tracker = StateTracker::new(CustomNames::default());
        feed(&mut tracker, write);
        tracker
    }

    fn feed(tracker: &mut StateTracker, write: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = Vec::new();
        write(&mut bytes);
        let (mut scanner, mut at) = (Scanner::new(1 << 20), 0);
        while let Ok(Step::Message(message)) = scanner.peek(&bytes[at..]) {
            tracker.frontend(&message);
            at += scanner.take(&message);
        }
        assert!(at == bytes.len() && at > HEADER_LEN);
    }

    #[test]
    fn reading_and_writing_rows_changes_nothing_that_a_session_carries() {
        assert!(!after(|to| frontend::put_query(to, "update t set a = 1")).dirty);
        assert!(!after(|to| frontend::put_parse(to, b"", b"select 1", &[])).dirty);
        assert!(!after(|to| frontend::put_bind(to, b"", b"s", &[])).dirty);
    }

    #[test]
    fn settings_and_named_statements_do() {
        assert!(after(|to| frontend::put_query(to, "set work_mem = 1")).dirty);
        assert!(after(|to| frontend::put_parse(to, b"s", b"select 1", &[])).dirty);
        assert!(after(|to| frontend::put_close_statement(to, b"s")).dirty);
        let mut tracker = after(|to| frontend::put_parse(to, b"s", b"set work_mem = 1", &[]));
        tracker.dirty = false;
        feed(&mut tracker, |to| frontend::put_bind(to, b"", b"", &[]));
        assert!(!tracker.dirty);
        feed(&mut tracker, |to| frontend::put_bind(to, b"", b"s", &[]));
        assert!(tracker.dirty);
    }

    #[test]
    fn the_unnamed_statement_lives_until_the_next_query() {
        let mut tracker = after(|to| frontend::put_parse(to, b"", b"select 1", &[]));
        assert_eq!(tracker.unnamed, b"\0select 1\0\0\0");
        feed(&mut tracker, |to| frontend::put_query(to, "select 2"));
        assert!(tracker.unnamed.is_empty());
    }

    #[test]
    fn names_of_custom_settings_are_kept_for_the_tenant() {
        let tracker = after(|to| frontend::put_query(to, "select set_config('app.tenant', '7', false)"));
        assert_eq!(crate::mutex::lock(&tracker.custom).iter().collect::<Vec<_>>(), ["app.tenant"]);
    }
}

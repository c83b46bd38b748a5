//! The part of a mirror inside a session: copies the statements of the share on their way to the server.

use super::{Mirror, MirroredSession, Sample};
use std::sync::Arc;
use stillpoint_migrate_wire::frame::Message;
use stillpoint_migrate_wire::frontend::{self, SYNC, put_bind, put_execute, put_parse};

/// Longest statement with its parameters, in bytes.
const MESSAGES_MAX: usize = 64 << 10;

/// Copies a session's statements.
pub(crate) struct Tap {
    pub(crate) mirror: Arc<Mirror>,
    /// The session in its present state, once that is known.
    pub(crate) session: Option<Arc<MirroredSession>>,
    /// The session shares server connections with others: its state is asked for at none of them.
    pub(crate) is_shared: bool,
    collected: Option<Collected>,
}

impl std::fmt::Debug for Tap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tap({:?})", self.mirror)
    }
}

/// A statement of the extended protocol, up to the present message.
struct Collected {
    messages: Vec<u8>,
    text: Option<Vec<u8>>,
    /// Last message.
    last: u8,
}

impl Tap {
    pub(crate) fn new(mirror: Arc<Mirror>, is_shared: bool) -> Tap {
        Tap { mirror, session: None, is_shared, collected: None }
    }

    /// Looks at a client's message, whose bytes are given with its header. `begins` if nothing is under way before it,
    /// `dirty` if the session may be in another state than the known one.
    pub(crate) fn frontend(&mut self, message: &Message<'_>, bytes: &[u8], begins: bool, dirty: bool) {
        if begins {
            self.collected = None;
            if matches!(message.tag, b'Q' | b'P' | b'B') && self.mirror.draws() {
                self.begin(message, dirty);
            }
        }
        let Some(mut collected) = self.collected.take() else { return };
        let is_kept = message.is_whole() && collected.messages.len() + message.total() <= MESSAGES_MAX;
        if !is_kept {
            return self.mirror.tally.leave_out("longer than the mirror keeps");
        }
        match (collected.last, message.tag) {
            (0, b'Q') => {
                let text = message.body.strip_suffix(&[0]).unwrap_or(message.body).to_vec();
                return self.finish(simple(&text), text);
            }
            (0, b'P') => collected.text = frontend::parse_text(message.body).map(|(_, text)| text.to_vec()),
            (0 | b'P' | b'p', b'B') => {
                let name = frontend::bind_statement(message.body).unwrap_or_default();
                if !name.is_empty() {
                    let session = self.session.as_ref();
                    collected.text = session.and_then(|session| session.state.statement_text(name));
                } else if collected.last == 0 {
                    collected.text = None;
                }
            }
            (b'P' | b'B', b'D') | (b'B' | b'D', b'E') => {}
            (b'E', b'S') => {
                collected.messages.extend_from_slice(&bytes[..message.total()]);
                return match collected.text {
                    Some(text) => self.finish(collected.messages, text),
                    None => self.mirror.tally.leave_out("a statement whose text is not known"),
                };
            }
            _ => return self.mirror.tally.leave_out("more than one statement between two Syncs, or a part of one"),
        }
        // A description of the statement may come before its Bind.
        collected.last = if (collected.last, message.tag) == (b'P', b'D') { b'p' } else { message.tag };
        collected.messages.extend_from_slice(&bytes[..message.total()]);
        self.collected = Some(collected);
    }

    fn begin(&mut self, message: &Message<'_>, dirty: bool) {
        self.mirror.tally.draw();
        let is_named = message.tag == b'P' && message.body.first() != Some(&0);
        match &self.session {
            _ if self.is_shared => self.mirror.tally.leave_out("a session that shares its server connection"),
            _ if is_named => self.mirror.tally.leave_out("a statement that is being prepared"),
            Some(_) if !dirty => self.collected = Some(Collected { messages: Vec::new(), text: None, last: 0 }),
            _ => self.mirror.tally.leave_out("a session whose state is not known at the moment"),
        }
    }

    fn finish(&self, messages: Vec<u8>, text: Vec<u8>) {
        let Some(session) = self.session.clone() else { return };
        if self.mirror.queue.try_send(Sample { session, text, messages }).is_err() {
            self.mirror.tally.leave_out("all workers were busy");
        }
    }
}

/// Messages of the extended protocol for a text: the server then takes no second statement in it.
fn simple(text: &[u8]) -> Vec<u8> {
    let mut messages = Vec::new();
    put_parse(&mut messages, b"", text, &[]);
    put_bind(&mut messages, b"", b"", &[]);
    put_execute(&mut messages, b"");
    messages.extend(SYNC);
    messages
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::session_state::SessionState;
    use stillpoint_migrate_postgres::Credential;
    use stillpoint_migrate_wire::frame::{Scanner, Step, put};
    use stillpoint_migrate_wire::startup::{Startup, Version};

    fn session() -> Arc<MirroredSession> {
        Arc::new(MirroredSession {
            startup: Startup::of(Version::V3_0, [("user", &b"u"[..])]).unwrap(),
            user: "u".into(),
            credential: Credential::default(),
            state: SessionState::default(),
        })
    }

    /// Texts of the statements that a tap copies from these messages, and reasons why others were left out.
    fn copied(bytes: &[u8]) -> (Vec<String>, Vec<String>) {
        let (mirror, mut samples) = super::super::tests_support::mirror(1_000_000);
        let mut tap = Tap::new(mirror.clone(), false);
        tap.session = Some(session());
        let (mut scanner, mut at, mut open) = (Scanner::new(1 << 20), 0, false);
        while let Ok(Step::Message(message)) = scanner.peek(&bytes[at..]) {
            tap.frontend(&message, &bytes[at..], !open, false);
            open = !matches!(message.tag, b'Q' | b'S');
            at += scanner.take(&message);
        }
        let mut texts = Vec::new();
        while let Ok(sample) = samples.try_recv() {
            texts.push(String::from_utf8(sample.text).unwrap());
        }
        (texts, mirror.report().left_out.into_keys().collect())
    }

    #[test]
    fn single_statements_are_copied() {
        let mut bytes = Vec::new();
        frontend::put_query(&mut bytes, "select 1");
        bytes.extend(simple(b"select 2"));
        put_parse(&mut bytes, b"", b"select 3", &[]);
        put(&mut bytes, b'D', |body| body.extend(b"S\0"));
        put_bind(&mut bytes, b"", b"", &[]);
        put(&mut bytes, b'D', |body| body.extend(b"P\0"));
        put_execute(&mut bytes, b"");
        bytes.extend(SYNC);
        assert_eq!(copied(&bytes), (vec!["select 1".into(), "select 2".into(), "select 3".into()], vec![]));
    }

    #[test]
    fn what_is_not_one_statement_is_left_out() {
        let mut two = Vec::new();
        for _ in 0..2 {
            put_parse(&mut two, b"", b"select 1", &[]);
            put_bind(&mut two, b"", b"", &[]);
            put_execute(&mut two, b"");
        }
        two.extend(SYNC);
        let mut named = Vec::new();
        put_parse(&mut named, b"s", b"select 1", &[]);
        named.extend(SYNC);
        let mut unknown = Vec::new();
        put_bind(&mut unknown, b"", b"s", &[]);
        put_execute(&mut unknown, b"");
        unknown.extend(SYNC);
        let mut long = Vec::new();
        frontend::put_query(&mut long, format!("select '{}'", "x".repeat(MESSAGES_MAX)));
        for (bytes, why) in [(two, "more than one"), (named, "prepared"), (unknown, "not known"), (long, "longer")] {
            let (texts, left_out) = copied(&bytes);
            assert!(texts.is_empty() && left_out.len() == 1 && left_out[0].contains(why), "{texts:?} {left_out:?}");
        }
    }
}

//! State of a session: owed answers, open transaction, copy.
//!
//! Counting is enough as long as both sides keep to the protocol, with one exception. During COPY IN a server ignores
//! the Syncs that it reads, and libpq sends one directly after Execute: such Syncs are never answered. When the copy
//! fails before its end, only the server knows if it had read them. They count as ignored: if they were not, a
//! ReadyForQuery comes for which nothing is owed.

use std::collections::VecDeque;

/// Transaction status that ReadyForQuery reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Status {
    /// No transaction is open.
    #[default]
    Idle,
    /// A transaction is open.
    InTransaction,
    /// A transaction is open that can only be rolled back.
    Failed,
}

/// Message for which the server owes a ReadyForQuery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owed {
    /// A simple query or a function call.
    Query,
    /// A Sync.
    Sync,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Copying {
    #[default]
    Nothing,
    In,
    /// Replication, which never ends.
    Both,
}

/// The state of one session, as the messages of both sides show it. The default is that of a session whose first ReadyForQuery
/// has been received.
#[derive(Debug, Clone, Default)]
pub struct Conversation {
    owed: VecDeque<Owed>,
    /// Messages of the extended protocol were sent, and no Sync after them.
    open: bool,
    status: Status,
    copying: Copying,
}

impl Conversation {
    /// Returns true if nothing is owed and no transaction is open: from here the session could go on at another server.
    #[inline]
    pub fn at_boundary(&self) -> bool {
        self.begins_statement() && self.status == Status::Idle
    }

    /// Returns true if the client's next message begins a statement, and no other one is under way.
    #[inline]
    pub fn begins_statement(&self) -> bool {
        self.owed.is_empty() && !self.open && self.copying == Copying::Nothing
    }

    /// Transaction status in the last ReadyForQuery.
    pub fn status(&self) -> Status {
        self.status
    }

    /// Returns true while the client sends the rows of a COPY.
    #[inline]
    pub fn is_copying_in(&self) -> bool {
        self.copying == Copying::In
    }

    /// Returns true if, as far as is known now, the next message can begin another transaction than the one that may be
    /// open: the server owes the answer that decides it.
    #[inline]
    pub fn awaits_verdict(&self) -> bool {
        !self.open && !self.owed.is_empty() && self.copying == Copying::Nothing
    }

    /// Records that a client's message of this type is passed on.
    #[inline]
    pub fn frontend(&mut self, tag: u8) {
        match tag {
            b'Q' | b'F' => self.owed.push_back(Owed::Query),
            b'S' => {
                self.open = false;
                self.owed.push_back(Owed::Sync);
            }
            b'P' | b'B' | b'D' | b'E' | b'C' => self.open = true,
            b'c' | b'f' if self.copying == Copying::In => self.end_copy(),
            _ => {}
        }
    }

    /// Ends the copy: the server read the Syncs sent so far during COPY IN.
    fn end_copy(&mut self) {
        self.copying = Copying::Nothing;
        if self.owed.front() != Some(&Owed::Query) {
            self.owed.clear();
            self.open = true;
        }
    }

    /// Records a server's ReadyForQuery.
    #[inline]
    pub fn ready(&mut self, status: Status) {
        if self.owed.pop_front().is_none() {
            self.open = false;
        }
        self.status = status;
        self.copying = Copying::Nothing;
    }

    /// Records a server's message of another type than ReadyForQuery.
    #[inline]
    pub fn backend(&mut self, tag: u8) {
        match tag {
            b'G' => self.copying = Copying::In,
            b'W' => self.copying = Copying::Both,
            b'E' if self.copying == Copying::In => self.end_copy(),
            b'C' if self.copying == Copying::In => self.copying = Copying::Nothing,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// State after these messages: a letter is a client's message; `<` marks a message of the server's.
    fn after(messages: &str) -> Conversation {
        let mut conversation = Conversation::default();
        for word in messages.split_whitespace() {
            match word.strip_prefix('<') {
                None => conversation.frontend(word.as_bytes()[0]),
                Some("ZI") => conversation.ready(Status::Idle),
                Some("ZT") => conversation.ready(Status::InTransaction),
                Some("ZE") => conversation.ready(Status::Failed),
                Some(word) => conversation.backend(word.as_bytes()[0]),
            }
        }
        conversation
    }

    #[test]
    fn a_boundary_is_where_nothing_is_owed_and_no_transaction_is_open() {
        for (messages, boundary) in [
            ("", true),
            ("Q", false),
            ("Q <T <D <C <ZI", true),
            ("Q <C <ZT", false),
            ("Q <C <ZT Q <E <ZE", false),
            ("Q <C <ZT Q <C <ZI", true),
            ("Q Q <C <ZI", false),
            ("Q Q <C <ZI <C <ZI", true),
            ("P B D E S <1 <2 <n <C <ZI", true),
            ("P B D E S <1 <2 <n <C", false),
            ("P D H <1 <t", false),
            ("P D H <1 <t S <ZI", true),
            ("P B E S P B E S <ZI", false),
            ("P B E S P B E S <ZI <E <ZI", true),
            ("F <V <ZI", true),
        ] {
            assert_eq!(after(messages).at_boundary(), boundary, "{messages:?}");
        }
    }

    #[test]
    fn copies_end_where_the_protocol_says() {
        for (messages, boundary) in [
            ("Q <G", false),
            ("Q <G d d", false),
            ("Q <G d d c", false),
            ("Q <G d d c <C <ZI", true),
            ("Q <G d f <E <ZI", true),
            ("Q <G d <E <ZI d c", true),
            ("Q <H <d <c <C <ZI", true),
            // libpq: the first Sync is read while copying in, and ignored
            ("P B D E S <G d c S <C <ZI", true),
            ("P B D E S <G d c S <C", false),
            ("P B D E S <G d c", false),
            // psycopg without libpq's early Sync
            ("P B D E H <G d c S <C <ZI", true),
            // fails in the middle
            ("P B D E S <G d <E d c S <ZI", true),
            ("P B D E S <G d <E d c S <ZI Q", false),
            ("P B D E S <G d <E d c S <ZI Q <C <ZI", true),
            ("P B D E S <G <E <ZI d c S", false),
            ("P B D E S <G <E <ZI d c S <ZI", true),
            ("Q <W", false),
            ("Q <W d <d", false),
        ] {
            assert_eq!(after(messages).at_boundary(), boundary, "{messages:?}");
        }
    }

    #[test]
    fn a_verdict_is_awaited_between_pipelined_units_only() {
        for (messages, awaits) in
            [("", false), ("Q", true), ("Q <ZT", false), ("P B", false), ("P B E S", true), ("Q <G", false)]
        {
            assert_eq!(after(messages).awaits_verdict(), awaits, "{messages:?}");
        }
    }
}

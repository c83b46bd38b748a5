//! State that a session carries from one transaction to the next: read from its server, and created again at another
//! one.
//!
//! The obvious way is to follow the client's statements, but functions, DO blocks and prepared SETs hide from it. The
//! server knows everything except two things: custom settings that no extension declared (the question names them), and
//! the unnamed statement (see [`super::state_tracker`]).

use std::collections::BTreeMap;
use std::sync::LazyLock;
use stillpoint_migrate_control::SESSION_SETTINGS;
use stillpoint_migrate_wire::frontend::{SYNC, put_bind, put_close_statement, put_execute, put_parse, put_query};

/// Name of the question's own statement and portal. The unnamed ones belong to the client.
const STATEMENT_NAME: &[u8] = b"stillpoint_carried";

/// Question for one round trip. Every row of the answer: its subject, and three texts. Settings that the client gave the session and
/// settings that it has from its server are read together; custom settings of ALTER ROLE and ALTER DATABASE are in no list of settings.
static STATE_QUERY: LazyLock<String> =
    LazyLock::new(|| format!(include_str!("session_state.sql"), settings = SESSION_SETTINGS.replace(' ', "', '")));

/// Smallest object identifier that a database assigns itself (`FirstNormalObjectId`).
const FIRST_OWN_OID: u32 = 16_384;

/// Settings whose values mean different things on different servers.
const NOT_CARRIED: [&str; 3] = ["is_superuser", "session_authorization", "role"];

/// A prepared statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Statement {
    text: Vec<u8>,
    types: Vec<u32>,
    /// Made by `PREPARE`, which is then its text, not by a Parse.
    by_sql: bool,
}

/// Object identifiers of the types `text` and `text[]`.
const TEXT_OID: u32 = 25;
pub(crate) const TEXT_ARRAY_OID: u32 = 1009;

const SET_CONFIG: &[u8] = b"SELECT pg_catalog.set_config($1, $2, false)";

/// A statement that clears the state of a session at another server.
pub(crate) fn discard() -> Batch {
    let mut batch = Batch::default();
    batch.query("DISCARD ALL");
    batch
}

/// A statement that gives a session a setting.
pub(crate) fn set(name: &[u8], value: &[u8]) -> Batch {
    let mut batch = Batch::default();
    put_parse(&mut batch.bytes, b"", SET_CONFIG, &[TEXT_OID, TEXT_OID]);
    put_bind(&mut batch.bytes, b"", b"", &[name, value]);
    put_execute(&mut batch.bytes, b"");
    batch.sync();
    batch
}

/// Text of an array, as the server reads it.
pub(crate) fn array(texts: impl Iterator<Item: AsRef<[u8]>>) -> Vec<u8> {
    let mut array = b"{".to_vec();
    for text in texts {
        array.extend(if array.len() > 1 { &b",\""[..] } else { b"\"" });
        for byte in text.as_ref() {
            array.extend((*byte == b'"' || *byte == b'\\').then_some(b'\\'));
            array.push(*byte);
        }
        array.push(b'"');
    }
    array.push(b'}');
    array
}

/// State that a session carries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SessionState {
    settings: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Settings that its server gave it: those of ALTER ROLE and ALTER DATABASE, and [`SESSION_SETTINGS`].
    inherited: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Session user and role.
    roles: (Vec<u8>, Vec<u8>),
    statements: BTreeMap<Vec<u8>, Statement>,
    channels: Vec<Vec<u8>>,
    /// Mode, and the three numbers of `pg_locks`.
    locks: Vec<(Vec<u8>, Vec<u8>)>,
    /// State that cannot be created at another server.
    pub(crate) pins: Vec<String>,
}

/// A question or a sequence of statements, with the number of its ReadyForQuery messages.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) bytes: Vec<u8>,
    pub(crate) syncs: usize,
}

impl Batch {
    pub(crate) fn query(&mut self, sql: impl AsRef<[u8]>) {
        put_query(&mut self.bytes, sql);
        self.syncs += 1;
    }

    pub(crate) fn sync(&mut self) {
        self.bytes.extend(SYNC);
        self.syncs += 1;
    }
}

/// Builds the question; `custom` are names of settings that no catalogue lists.
pub(crate) fn state_query<'a>(custom: impl Iterator<Item = &'a str>) -> Batch {
    let quoted: Vec<String> = custom.map(|name| format!("\"{}\"", name.replace(['"', '\\'], ""))).collect();
    let names = format!("{{{}}}", quoted.join(","));
    let mut batch = Batch::default();
    put_parse(&mut batch.bytes, STATEMENT_NAME, STATE_QUERY.as_bytes(), &[]);
    put_bind(&mut batch.bytes, STATEMENT_NAME, STATEMENT_NAME, &[names.as_bytes()]);
    put_execute(&mut batch.bytes, STATEMENT_NAME);
    put_close_statement(&mut batch.bytes, STATEMENT_NAME);
    batch.sync();
    batch
}

/// Builds a question for a database's functions.
pub(crate) fn functions_query(sql: &str) -> Batch {
    const NAME: &[u8] = b"stillpoint_functions";
    let mut batch = Batch::default();
    put_parse(&mut batch.bytes, NAME, sql.as_bytes(), &[]);
    put_bind(&mut batch.bytes, NAME, NAME, &[]);
    put_execute(&mut batch.bytes, NAME);
    put_close_statement(&mut batch.bytes, NAME);
    batch.sync();
    batch
}

/// Reads the answer. Rows of an unknown form are left out; the question returns none.
pub(crate) fn parse_state(rows: Vec<Vec<Option<Vec<u8>>>>) -> SessionState {
    let mut carried = SessionState::default();
    for row in rows {
        let mut row = row.into_iter();
        let mut next = || row.next().flatten();
        let (Some(kind), Some(name), value, more) = (next(), next(), next(), next()) else { continue };
        let Some(value) = value else { continue };
        match kind.as_slice() {
            b"setting" | b"custom" | b"inherited" => {
                if !NOT_CARRIED.iter().any(|known| known.as_bytes() == name) {
                    let of = if kind == b"inherited" { &mut carried.inherited } else { &mut carried.settings };
                    of.insert(name, value);
                }
            }
            b"role" => carried.roles = (name, value),
            b"prepare" | b"parse" => {
                let types = String::from_utf8(more.unwrap_or_default()).unwrap_or_default();
                let types = types.split(',').filter_map(|oid| oid.parse().ok()).map(portable).collect();
                carried.statements.insert(name, Statement { text: value, types, by_sql: kind == b"prepare" });
            }
            b"listen" => carried.channels.push(name),
            b"lock" => carried.locks.push((name, value)),
            _ => carried.pins.push(String::from_utf8_lossy(&name).into_owned()),
        }
    }
    carried.channels.sort();
    carried.locks.sort();
    carried
}

/// Types that a database defines have other numbers on other servers: 0 lets the server infer the type, as most clients
/// do.
fn portable(oid: u32) -> u32 {
    if oid < FIRST_OWN_OID { oid } else { 0 }
}

impl SessionState {
    /// Text of a prepared statement.
    pub(crate) fn statement_text(&self, name: &[u8]) -> Option<Vec<u8>> {
        self.statements.get(name).map(|statement| statement.text.clone())
    }

    /// Takes out what its server gave the session; what is left is its own.
    pub(crate) fn take_inherited(&mut self) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let inherited = std::mem::take(&mut self.inherited);
        self.settings.retain(|name, value| inherited.get(name) != Some(value));
        inherited
    }

    /// The same state with these inherited settings.
    pub(crate) fn with_inherited(&self, inherited: &BTreeMap<Vec<u8>, Vec<u8>>) -> SessionState {
        SessionState { inherited: inherited.clone(), ..self.clone() }
    }

    /// Names of its custom settings: a process that has had one never forgets the name.
    pub(crate) fn custom_names(&self) -> impl Iterator<Item = &Vec<u8>> {
        self.settings.keys().filter(|name| name.contains(&b'.'))
    }

    /// Returns true if it has given this setting a value.
    pub(crate) fn has_setting(&self, name: &[u8]) -> bool {
        self.settings.contains_key(name)
    }

    /// State that binds the session to its server process, if there is any.
    pub(crate) fn binding(&self) -> Option<String> {
        let channels = self.channels.iter().map(|name| format!("LISTEN {}", String::from_utf8_lossy(name)));
        let locks = (!self.locks.is_empty()).then(|| format!("{} advisory locks", self.locks.len()));
        // Their types are not kept: statements with others would look the same.
        let own_types = self.statements.iter().filter(|(_, statement)| statement.types.contains(&0));
        let own_types = own_types.map(|(name, _)| {
            format!("prepared statement {} with a type of the database's own", String::from_utf8_lossy(name))
        });
        let all: Vec<String> = self.pins.iter().cloned().chain(channels).chain(locks).chain(own_types).collect();
        (!all.is_empty()).then(|| all.join(", "))
    }

    /// Returns true if a new session is the same, as far as its own state goes.
    pub(crate) fn is_plain(&self) -> bool {
        let has_role = !matches!(self.roles.1.as_slice(), b"" | b"none");
        self.settings.is_empty() && self.statements.is_empty() && !has_role && self.binding().is_none()
    }

    /// Returns true if notifications may be under way.
    pub(crate) fn listens(&self) -> bool {
        !self.channels.is_empty()
    }

    /// Asks a session at another server which inherited settings differ there, with the values that they must get, as
    /// far as the session may set them. `None` if nothing was inherited. Names and values are in the session's
    /// encoding, which the caller must set before.
    pub(crate) fn inherited_query(&self) -> Option<Batch> {
        const DIFFERENT_SETTINGS: &[u8] =
            b"SELECT w.name, w.value FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) w (name, value) \
            LEFT JOIN pg_catalog.pg_settings s ON s.name = w.name WHERE CASE WHEN s.name IS NULL \
            THEN w.name LIKE '%.%' AND pg_catalog.current_setting(w.name, true) IS DISTINCT FROM w.value \
            ELSE s.setting IS DISTINCT FROM w.value AND (s.context = 'user' \
            OR s.context = 'superuser' AND pg_catalog.current_setting('is_superuser') = 'on') END";
        if self.inherited.is_empty() {
            return None;
        }
        let mut batch = Batch::default();
        let encoding = &b"client_encoding"[..];
        if let Some(value) = self.settings.get(encoding).or_else(|| self.inherited.get(encoding)) {
            batch.bytes.extend(set(encoding, value).bytes);
            batch.syncs += 1;
        }
        put_parse(&mut batch.bytes, b"", DIFFERENT_SETTINGS, &[TEXT_ARRAY_OID, TEXT_ARRAY_OID]);
        put_bind(&mut batch.bytes, b"", b"", &[&array(self.inherited.keys()), &array(self.inherited.values())]);
        put_execute(&mut batch.bytes, b"");
        batch.sync();
        Some(batch)
    }

    /// Statements that give a session at another server, logged in as `user`, the same state, except for
    /// [`SessionState::inherited_query`].
    pub(crate) fn replay(&self, user: &str) -> Batch {
        let mut batch = Batch::default();
        self.replay_settings(user, &mut batch);
        self.replay_statements(&mut batch);
        for channel in &self.channels {
            let mut sql = b"LISTEN \"".to_vec();
            channel.iter().for_each(|b| sql.extend(std::iter::repeat_n(*b, if *b == b'"' { 2 } else { 1 })));
            sql.push(b'"');
            batch.query(&sql);
        }
        batch
    }

    /// Statements that prepare its statements. They are parsed after the settings are set, as the server itself does when
    /// a search path has changed.
    pub(crate) fn replay_statements(&self, batch: &mut Batch) {
        for (name, statement) in &self.statements {
            if statement.by_sql {
                batch.query(&statement.text);
            } else {
                put_parse(&mut batch.bytes, name, &statement.text, &statement.types);
                batch.sync();
            }
        }
    }

    pub(crate) fn replay_settings(&self, user: &str, batch: &mut Batch) {
        let mut settings: Vec<(&[u8], &[u8])> = Vec::new();
        // The encoding is first: the other values are in it. The role is last: it may not be allowed to set the others.
        let encoding = self.settings.get_key_value(&b"client_encoding"[..]);
        let others = self.settings.iter().filter(|(name, _)| name.as_slice() != b"client_encoding");
        settings.extend(encoding.into_iter().chain(others).map(|(name, value)| (name.as_slice(), value.as_slice())));
        let (session_user, role) = &self.roles;
        if !session_user.is_empty() && session_user != user.as_bytes() {
            settings.push((b"session_authorization", session_user));
        }
        if !role.is_empty() && role != b"none" {
            settings.push((b"role", role));
        }
        if settings.is_empty() {
            return;
        }
        put_parse(&mut batch.bytes, b"", SET_CONFIG, &[TEXT_OID, TEXT_OID]);
        for (name, value) in settings {
            put_bind(&mut batch.bytes, b"", b"", &[name, value]);
            put_execute(&mut batch.bytes, b"");
        }
        batch.sync();
    }

    /// Statements that take its advisory locks; each returns one row with `t` if the lock was taken.
    pub(crate) fn take_locks(&self) -> Batch {
        let mut batch = Batch::default();
        for (mode, numbers) in &self.locks {
            let shared = if mode.starts_with(b"Share") { "_shared" } else { "" };
            let numbers: Vec<u64> =
                String::from_utf8_lossy(numbers).split(',').filter_map(|number| number.parse().ok()).collect();
            let key = match numbers.as_slice() {
                [high, low, 1] => format!("{}", ((high << 32) | low) as i64),
                [first, second, 2] => format!("{}, {}", *first as i32, *second as i32),
                _ => continue,
            };
            batch.query(format!("SELECT pg_catalog.pg_try_advisory_lock{shared}({key})"));
        }
        batch
    }

    /// Number of its advisory locks.
    pub(crate) fn lock_count(&self) -> usize {
        self.locks.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_migrate_wire::frame::{Scanner, Step};
    use stillpoint_testing::postgresql::{Cluster, NEWER_MAJOR, available, newer_available};

    fn row(texts: [&str; 4]) -> Vec<Option<Vec<u8>>> {
        texts.map(|text| Some(text.as_bytes().to_vec())).to_vec()
    }

    /// Types of the messages and the text of queries.
    fn summarize(batch: &Batch) -> Vec<String> {
        let (mut scanner, mut at, mut told) = (Scanner::new(1 << 20), 0, Vec::new());
        while let Ok(Step::Message(message)) = scanner.peek(&batch.bytes[at..]) {
            let text = match message.tag {
                b'Q' | b'B' => String::from_utf8_lossy(message.body).replace('\0', " ").trim().to_owned(),
                _ => String::new(),
            };
            told.push(format!("{}{text}", char::from(message.tag)));
            at += scanner.take(&message);
        }
        told
    }

    #[test]
    fn what_was_answered_is_made_again() {
        let carried = parse_state(vec![
            row(["setting", "work_mem", "4096", ""]),
            row(["setting", "client_encoding", "LATIN1", ""]),
            row(["custom", "app.tenant", "7", ""]),
            row(["role", "alice", "reader", ""]),
            row(["parse", "s1", "select $1", "23"]),
            row(["prepare", "p", "prepare p as select 1", ""]),
            row(["listen", "a\"b", "", ""]),
            row(["lock", "ExclusiveLock", "1,2,1", ""]),
            row(["lock", "ShareLock", "1,4294967295,2", ""]),
        ]);
        let replay = carried.replay("alice");
        let told = summarize(&replay);
        let binds: Vec<&String> = told.iter().filter(|message| message.starts_with('B')).collect();
        assert_eq!(binds.len(), 4, "{told:?}");
        assert!(binds[0].contains("client_encoding") && binds[3].contains("reader"), "{binds:?}");
        assert!(told.contains(&"Qprepare p as select 1".to_owned()) && told.contains(&"QLISTEN \"a\"\"b\"".to_owned()));
        assert_eq!(replay.syncs, told.iter().filter(|message| message.starts_with(['Q', 'S'])).count());
        let locks = self::summarize(&carried.take_locks());
        assert_eq!(
            locks,
            [
                "QSELECT pg_catalog.pg_try_advisory_lock(4294967298)",
                "QSELECT pg_catalog.pg_try_advisory_lock_shared(1, -1)"
            ]
        );
        assert!(carried.listens() && carried.lock_count() == 2 && carried.pins.is_empty());
    }

    #[test]
    fn a_session_that_carries_nothing_needs_nothing() {
        let carried = parse_state(vec![row(["role", "alice", "none", ""])]);
        assert_eq!(carried.replay("alice").syncs, 0);
        assert!(carried.inherited_query().is_none());
        assert_eq!(carried.take_locks().syncs, 0);
        let pinned = parse_state(vec![row(["pin", "temporary relation t", "", ""])]);
        assert_eq!(pinned.pins, ["temporary relation t"]);
    }

    /// Settings of the same categories that control how a server works.
    const OF_SERVERS: [&str; 14] = [
        "client_encoding",
        "commit_siblings",
        "default_tablespace",
        "default_toast_compression",
        "gin_pending_list_limit",
        "local_preload_libraries",
        "synchronize_seqscans",
        "temp_tablespaces",
        "transaction_deferrable",
        "transaction_isolation",
        "transaction_read_only",
        "wal_skip_threshold",
        // Of servers before 18, which has other categories for these.
        "vacuum_freeze_min_age",
        "vacuum_freeze_table_age",
    ];

    #[test]
    fn every_setting_of_a_session_is_kept_or_its_server_s() {
        if !available() {
            return;
        }
        let newer = newer_available().then(|| Cluster::of_major(NEWER_MAJOR, &["lc_messages=C"]));
        for cluster in [Some(Cluster::start(&["lc_messages=C"])), newer].into_iter().flatten() {
            let names = cluster.sql(
                "postgres",
                "SELECT name FROM pg_settings WHERE context = 'user' AND category ~ '^(Client Connection Defaults|\
                 Error Handling|Lock Management|Version and Platform|Write-Ahead Log / S)' AND name !~ 'failsafe|multixact'",
            );
            let unknown =
                |name: &&str| SESSION_SETTINGS.split(' ').all(|known| known != *name) && !OF_SERVERS.contains(name);
            assert_eq!(names.lines().filter(unknown).collect::<Vec<_>>(), Vec::<&str>::new());
        }
    }

    #[test]
    fn inherited_settings_are_asked_for_in_the_session_s_encoding() {
        let inherited =
            [row(["inherited", "DateStyle", "SQL, DMY", ""]), row(["inherited", "search_path", "\"a\\b\"", ""])];
        let encoding = row(["setting", "client_encoding", "LATIN1", ""]);
        for (rows, syncs) in [(inherited.to_vec(), 1), ([&inherited[..], &[encoding]].concat(), 2)] {
            let batch = parse_state(rows).inherited_query().unwrap();
            let told = summarize(&batch);
            assert_eq!((batch.syncs, told.iter().filter(|message| *message == "S").count()), (syncs, syncs));
            assert_eq!(told.iter().any(|message| message.contains("client_encoding")), syncs == 2, "{told:?}");
            let asked = told.iter().rfind(|message| message.starts_with('B')).unwrap();
            assert!(asked.contains(r#"{"DateStyle","search_path"}"#), "{asked}");
            assert!(asked.contains(r#"{"SQL, DMY","\"a\\b\""}"#), "{asked}");
        }
    }

    #[test]
    fn names_are_quoted_in_the_question() {
        let batch = state_query(["a.b", "c\".d"].into_iter());
        assert!(summarize(&batch).iter().any(|message| message.contains("{\"a.b\",\"c.d\"}")));
        assert_eq!(batch.syncs, 1);
    }
}

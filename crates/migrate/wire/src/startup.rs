//! Packets that open a connection; they have no type.

use crate::body_reader::Reader;
use crate::frame::{put_cstr, put_packet};
use crate::{WireError, frontend::CancelKey};
use std::collections::BTreeSet;
use std::fmt;

/// Longest packet in bytes, its length field included. The server takes 10,004; the packet for the server can be longer
/// than the client's by the name of a database.
pub const PACKET_MAX: usize = 9_900;
/// Longest name of a role or database, in bytes. A server cuts longer ones off, and would read another name than the
/// proxy.
pub const NAME_MAX: usize = 63;

/// Prefix of the names of protocol options.
const PROTOCOL_OPTION: &str = "_pq_.";
/// Parameters that are not settings, in their exact spelling. A server takes any other spelling for a setting.
const OWN_PARAMETERS: [&str; 4] = ["user", "database", "replication", "options"];
/// Database name of a physical walsender, as in pg_hba.conf; the server ignores any other.
const PHYSICAL_DATABASE: &str = "replication";

const SSL: u32 = (1234 << 16) | 5679;
const GSSENC: u32 = (1234 << 16) | 5680;
const CANCEL: u32 = (1234 << 16) | 5678;

/// A version of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Always 3.
    pub major: u16,
    /// Either 0 or 2; there is no 1.
    pub minor: u16,
}

impl Version {
    /// Version that all clients and servers speak.
    pub const V3_0: Version = Version { major: 3, minor: 0 };
    /// Version with cancel keys of any length (PostgreSQL 18).
    pub const V3_2: Version = Version { major: 3, minor: 2 };
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// The first packet of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opening {
    /// Request for TLS.
    Ssl,
    /// Request for GSSAPI encryption.
    GssEnc,
    /// Request to cancel the statement of another connection.
    Cancel(CancelKey),
    /// Begin of a session.
    Startup(Startup),
}

/// Kind of a session, from the parameter `replication`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Replication {
    /// An ordinary session.
    #[default]
    Off,
    /// A walsender for the whole server, without a database.
    Physical,
    /// A walsender of one database.
    Logical,
}

impl Replication {
    /// Reads a value as the server does: `database`, or a boolean in the server's spellings.
    fn parse(value: &[u8]) -> Result<Replication, WireError> {
        if value == b"database" {
            return Ok(Replication::Logical);
        }
        // A prefix of these words is enough if it fits only one of them.
        let begins = |word: &str, least: usize| {
            (least..=word.len()).contains(&value.len()) && word.as_bytes()[..value.len()].eq_ignore_ascii_case(value)
        };
        match value {
            b"1" => Ok(Replication::Physical),
            b"0" => Ok(Replication::Off),
            _ if begins("true", 1) || begins("yes", 1) || begins("on", 2) => Ok(Replication::Physical),
            _ if begins("false", 1) || begins("no", 1) || begins("off", 2) => Ok(Replication::Off),
            _ => Err(WireError::ReplicationValue(excerpt(&String::from_utf8_lossy(value)))),
        }
    }

    fn value(self) -> Option<&'static [u8]> {
        match self {
            Replication::Off => None,
            Replication::Physical => Some(b"true"),
            Replication::Logical => Some(b"database"),
        }
    }
}

/// Parameters with which a client begins a session: read once, each of them at most once.
///
/// The obvious way is a list of what was sent, in which the proxy looks up what it needs, and which it passes on. A
/// server may read the same list differently (the last of two users; a name cut off). It then serves another role than
/// the one that the rules and passwords were checked for. So a packet that can be read in two ways is an error here,
/// and the packet for a server is built from this value.
///
/// `options` and settings such as `role` or `session_authorization` are passed on unchanged: at the start, the server
/// lets the role set them as far as it does later by SET.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Startup {
    version: Version,
    user: String,
    database: Option<String>,
    replication: Replication,
    protocol_options: Vec<(String, Vec<u8>)>,
    settings: Vec<(String, Vec<u8>)>,
}

impl Startup {
    /// Takes names and values in the order in which they were sent.
    ///
    /// # Errors
    /// Fails if a parameter is there twice (in upper or lower case), if servers and the proxy could read a name or
    /// value differently, or if there is no user.
    pub fn of<'a>(
        version: Version,
        parameters: impl IntoIterator<Item = (&'a str, &'a [u8])>,
    ) -> Result<Startup, WireError> {
        let mut builder = Builder::default();
        parameters.into_iter().try_for_each(|(name, value)| builder.add(name, value))?;
        builder.finish(version)
    }

    /// Newest version that the client speaks.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Role that logs in: 1 to [`NAME_MAX`] bytes.
    pub fn user(&self) -> &str {
        &self.user
    }

    /// Database of the session; `replication` for a physical walsender, which has none.
    pub fn database(&self) -> &str {
        match self.replication {
            Replication::Physical => PHYSICAL_DATABASE,
            Replication::Off | Replication::Logical => self.database.as_deref().unwrap_or(&self.user),
        }
    }

    /// Kind of walsender, or [`Replication::Off`].
    pub fn replication(&self) -> Replication {
        self.replication
    }

    /// Names of protocol options, none of which exists yet; a server reports those that it does not know.
    pub fn protocol_options(&self) -> impl Iterator<Item = &str> {
        self.protocol_options.iter().map(|(name, _)| name.as_str())
    }

    /// Parameters for a server: protocol 3.0 without protocol options, and the database by its name on that server.
    pub fn for_server(&self, database: Option<&str>) -> Startup {
        Startup {
            version: Version::V3_0,
            database: Some(database.unwrap_or_else(|| self.database()).to_owned()),
            protocol_options: Vec::new(),
            ..self.clone()
        }
    }

    /// Appends the packet.
    pub fn encode(&self, into: &mut Vec<u8>) {
        put_packet(into, |body| {
            body.extend(self.version.major.to_be_bytes());
            body.extend(self.version.minor.to_be_bytes());
            let mut put_parameter = |name: &str, value: &[u8]| {
                put_cstr(body, name.as_bytes());
                put_cstr(body, value);
            };
            put_parameter("user", self.user.as_bytes());
            if let Some(database) = &self.database {
                put_parameter("database", database.as_bytes());
            }
            if let Some(value) = self.replication.value() {
                put_parameter("replication", value);
            }
            self.protocol_options.iter().chain(&self.settings).for_each(|(name, value)| put_parameter(name, value));
            body.push(0);
        });
    }
}

/// The parameters of a packet while they are read.
#[derive(Default)]
struct Builder {
    /// Names that were there, in lower case: servers ignore the case of settings.
    names: BTreeSet<String>,
    user: Option<String>,
    database: Option<String>,
    replication: Replication,
    protocol_options: Vec<(String, Vec<u8>)>,
    settings: Vec<(String, Vec<u8>)>,
}

impl Builder {
    fn add(&mut self, name: &str, value: &[u8]) -> Result<(), WireError> {
        let folded = name.to_ascii_lowercase();
        let is_own = OWN_PARAMETERS.contains(&folded.as_str());
        if !is_parameter_name(name) || (is_own && folded != name) {
            return Err(WireError::ParameterName(excerpt(name)));
        }
        if !self.names.insert(folded) {
            return Err(WireError::Repeated(excerpt(name)));
        }
        match name {
            "user" => self.user = object_name("user", value)?,
            "database" => self.database = object_name("database", value)?,
            "replication" => self.replication = Replication::parse(value)?,
            _ if name.starts_with(PROTOCOL_OPTION) => self.protocol_options.push((name.to_owned(), value.to_vec())),
            _ => self.settings.push((name.to_owned(), value.to_vec())),
        }
        Ok(())
    }

    fn finish(self, version: Version) -> Result<Startup, WireError> {
        let Builder { names: _, user, database, replication, protocol_options, settings } = self;
        let user = user.ok_or(WireError::NoUser)?;
        Ok(Startup { version, user, database, replication, protocol_options, settings })
    }
}

/// Returns true if a parameter may have this name: a word that could be a setting's.
fn is_parameter_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '$' | '.' | '-'))
}

/// Reads the name of a role or database; `None` for an empty value, as in the server.
fn object_name(parameter: &'static str, value: &[u8]) -> Result<Option<String>, WireError> {
    let name = std::str::from_utf8(value).map_err(|_| WireError::NotText(parameter))?;
    if name.len() > NAME_MAX {
        return Err(WireError::NameTooLong(parameter));
    }
    Ok((!name.is_empty()).then(|| name.to_owned()))
}

/// Beginning of a text, for an error.
fn excerpt(text: &str) -> String {
    text.chars().take(NAME_MAX).collect()
}

/// Length in bytes of the packet that `bytes` begin with; `None` if too few bytes are there.
///
/// # Errors
/// Fails if no packet can have that length.
pub fn packet_len(bytes: &[u8]) -> Result<Option<usize>, WireError> {
    let Some(&len) = bytes.first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_be_bytes(len);
    match len as usize {
        8..=PACKET_MAX => Ok(Some(len as usize)),
        _ => Err(WireError::Length { tag: 0, len }),
    }
}

/// Decodes a whole packet, its length included.
///
/// # Errors
/// Fails if the version is not 3, or if [`Startup`] cannot hold the parameters.
pub fn decode(packet: &[u8]) -> Result<Opening, WireError> {
    let mut reader = Reader::new(packet, "startup packet");
    if reader.u32()? as usize != packet.len() {
        return Err(reader.malformed());
    }
    match reader.u32()? {
        SSL => reader.end().map(|()| Opening::Ssl),
        GSSENC => reader.end().map(|()| Opening::GssEnc),
        CANCEL => Ok(Opening::Cancel(CancelKey { pid: reader.u32()?, secret: secret(reader.rest())? })),
        code => {
            let version = Version { major: (code >> 16) as u16, minor: code as u16 };
            if version.major != Version::V3_0.major {
                return Err(WireError::Version(version));
            }
            let mut builder = Builder::default();
            loop {
                let name = reader.text()?;
                if name.is_empty() {
                    break;
                }
                builder.add(name, reader.cstr()?)?;
            }
            reader.end()?;
            builder.finish(version).map(Opening::Startup)
        }
    }
}

/// The secret part of a cancel key: 4 bytes in 3.0, up to 256 in 3.2.
pub(crate) fn secret(bytes: &[u8]) -> Result<Vec<u8>, WireError> {
    if (4..=256).contains(&bytes.len()) { Ok(bytes.to_vec()) } else { Err(WireError::Malformed("cancel key")) }
}

/// Appends the request for TLS.
pub fn put_ssl_request(into: &mut Vec<u8>) {
    put_packet(into, |body| body.extend(SSL.to_be_bytes()));
}

/// Appends a request to cancel.
pub fn put_cancel(into: &mut Vec<u8>, key: &CancelKey) {
    put_packet(into, |body| {
        body.extend(CANCEL.to_be_bytes());
        body.extend(key.pid.to_be_bytes());
        body.extend(&key.secret);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(parameters: &[(&str, &str)]) -> Result<Startup, WireError> {
        Startup::of(Version::V3_0, parameters.iter().map(|(name, value)| (*name, value.as_bytes())))
    }

    /// Builds a packet of these parameters unchanged, without any check.
    fn packet(parameters: &[(&str, &str)]) -> Vec<u8> {
        let mut bytes = Vec::new();
        put_packet(&mut bytes, |body| {
            body.extend([0, 3, 0, 0]);
            for (name, value) in parameters {
                put_cstr(body, name.as_bytes());
                put_cstr(body, value.as_bytes());
            }
            body.push(0);
        });
        bytes
    }

    #[test]
    fn a_startup_packet_survives_the_way_there_and_back() {
        let parameters = [("user", &b"a"[..]), ("_pq_.x", b"\xff"), ("TimeZone", b"UTC"), ("replication", b"off")];
        let startup = Startup::of(Version::V3_2, parameters).unwrap();
        let mut bytes = Vec::new();
        startup.encode(&mut bytes);
        assert_eq!(packet_len(&bytes), Ok(Some(bytes.len())));
        assert_eq!(decode(&bytes), Ok(Opening::Startup(startup.clone())));
        assert_eq!((startup.user(), startup.database(), startup.version()), ("a", "a", Version::V3_2));
        assert_eq!(startup.protocol_options().collect::<Vec<_>>(), ["_pq_.x"]);
    }

    #[test]
    fn no_parameter_is_there_twice_in_any_case_or_place() {
        let known =
            ["database", "replication", "options", "_pq_.x", "role", "session_authorization", "TimeZone", "a.b"];
        for name in known.into_iter().chain(["user"]) {
            let spellings = [name.to_owned(), name.to_ascii_uppercase(), name.to_ascii_lowercase()];
            for (first, second) in spellings.iter().flat_map(|a| spellings.iter().map(move |b| (a, b))) {
                for between in [&[][..], &[("work_mem", "1")]] {
                    let mut all = vec![("user", "alice")];
                    all.extend((name != "user").then_some((first.as_str(), "off")));
                    all.extend(between);
                    all.push((second, "on"));
                    let error = decode(&packet(&all)).expect_err(second);
                    let expected = matches!(error, WireError::Repeated(_) | WireError::ParameterName(_));
                    assert!(expected && error.sqlstate() == "08P01", "{all:?}: {error}");
                }
            }
        }
        let twice = [("user", "alice"), ("user", "postgres"), ("database", "shop")];
        assert_eq!(decode(&packet(&twice)), Err(WireError::Repeated("user".into())));
        let walsender = [("user", "a"), ("replication", "false"), ("replication", "database")];
        assert_eq!(decode(&packet(&walsender)), Err(WireError::Repeated("replication".into())));
    }

    #[test]
    fn names_of_other_shapes_are_refused() {
        for name in ["User", "DATABASE", "Replication", "Options", "a b", "a=b", "1a", ".a", "a\nb", "-c", "a\"b"] {
            let error = of(&[("user", "a"), (name, "x")]).expect_err(name);
            assert_eq!((error.clone(), error.sqlstate()), (WireError::ParameterName(name.into()), "08P01"));
            assert!(!error.to_string().contains('\n'), "{error}");
        }
        for name in ["application_name", "app.tenant", "_pq_.new", "plpgsql.variable_conflict", "äöü", "a$b", "a-b"]
        {
            of(&[("user", "a"), (name, "x")]).expect(name);
        }
    }

    #[test]
    fn the_user_is_one_name_that_no_server_cuts() {
        for (parameters, expected) in [
            (&[][..], WireError::NoUser),
            (&[("database", "shop")], WireError::NoUser),
            (&[("user", "")], WireError::NoUser),
        ] {
            assert_eq!(of(parameters), Err(expected.clone()), "{parameters:?}");
            assert_eq!(expected.sqlstate(), "28000");
        }
        let (longest, longer) = ("x".repeat(NAME_MAX), "x".repeat(NAME_MAX + 1));
        for name in ["user", "database"] {
            let with = |value: &str| {
                let all = [("user", "a"), (name, value)];
                of(&all[usize::from(name == "user")..])
            };
            assert!(with(&longest).is_ok());
            let error = with(&longer).unwrap_err();
            assert_eq!((error.clone(), error.sqlstate()), (WireError::NameTooLong(name), "42622"));
        }
        let error = Startup::of(Version::V3_0, [("user", &b"\xff"[..])]).unwrap_err();
        assert_eq!((error.clone(), error.sqlstate()), (WireError::NotText("user"), "28000"));
    }

    #[test]
    fn replication_means_what_the_server_takes_it_for() {
        for (values, expected) in [
            (&["false", "f", "FAL", "no", "n", "off", "OF", "0"][..], Replication::Off),
            (&["true", "t", "Tru", "yes", "y", "on", "ON", "1"], Replication::Physical),
            (&["database"], Replication::Logical),
        ] {
            for value in values {
                let startup = of(&[("user", "a"), ("database", "shop"), ("replication", value)]).expect(value);
                let database = if expected == Replication::Physical { "replication" } else { "shop" };
                assert_eq!((startup.replication(), startup.database()), (expected, database), "{value}");
            }
        }
        for value in ["", "o", "Database", "database ", "truee", "2", "data"] {
            let error = of(&[("user", "a"), ("replication", value)]).expect_err(value);
            assert_eq!(error.sqlstate(), "22023", "{error}");
        }
    }

    #[test]
    fn a_server_gets_what_was_read_and_no_more() {
        let sent = [
            ("TimeZone", &b"UTC"[..]),
            ("database", b"shop"),
            ("_pq_.x", b"1"),
            ("user", b"a"),
            ("options", b"-c x=1"),
        ];
        let startup = Startup::of(Version::V3_2, sent).unwrap();
        let mut bytes = Vec::new();
        startup.for_server(Some("shop_v2")).encode(&mut bytes);
        let expected = packet(&[("user", "a"), ("database", "shop_v2"), ("TimeZone", "UTC"), ("options", "-c x=1")]);
        assert_eq!(bytes, expected);
        assert_eq!(startup.for_server(None).database(), "shop");
        assert_eq!(of(&[("user", "a")]).unwrap().for_server(None).database(), "a");
    }

    #[test]
    fn other_versions_are_named_with_any_contents() {
        for (code, shown) in [(2_u32 << 16, "2.0"), (4 << 16, "4.0"), ((1234 << 16) | 5681, "1234.5681"), (0, "0.0")] {
            let mut bytes = Vec::new();
            put_packet(&mut bytes, |body| body.extend([&code.to_be_bytes()[..], &[7; 20]].concat()));
            let error = decode(&bytes).unwrap_err();
            assert!(error.to_string().contains(shown) && error.sqlstate() == "0A000", "{error}");
        }
    }

    #[test]
    fn cancel_keys_of_both_versions_are_understood() {
        for len in [4, 32, 256] {
            let key = CancelKey { pid: 7, secret: vec![9; len] };
            let mut bytes = Vec::new();
            put_cancel(&mut bytes, &key);
            assert_eq!(decode(&bytes), Ok(Opening::Cancel(key)));
        }
        for len in [0, 3, 257] {
            let mut bytes = Vec::new();
            put_cancel(&mut bytes, &CancelKey { pid: 7, secret: vec![9; len] });
            assert_eq!(decode(&bytes), Err(WireError::Malformed("cancel key")));
        }
    }

    #[test]
    fn lengths_are_judged_before_anything_is_read() {
        assert_eq!(packet_len(b"\0\0"), Ok(None));
        for len in [0_u32, 7, PACKET_MAX as u32 + 1, u32::MAX] {
            assert_eq!(packet_len(&len.to_be_bytes()), Err(WireError::Length { tag: 0, len }));
        }
        assert_eq!(packet_len(&(PACKET_MAX as u32).to_be_bytes()), Ok(Some(PACKET_MAX)));
    }

    #[test]
    fn what_is_cut_off_or_goes_on_is_malformed() {
        let whole = packet(&[("user", "a")]);
        for len in 0..whole.len() {
            assert!(decode(&whole[..len]).is_err(), "{len}");
            let mut cut = whole[..len].to_vec();
            if len >= 4 {
                // The same bytes with a length that fits: the terminator is missing.
                cut[..4].copy_from_slice(&(len as u32).to_be_bytes());
                assert!(decode(&cut).is_err(), "{len}");
            }
        }
        // An empty name ends the packet; a server that reads on would read what comes after it.
        for behind in [&[("", "x")][..], &[("", ""), ("user", "postgres")]] {
            let all = [&[("user", "a")], behind].concat();
            assert_eq!(decode(&packet(&all)), Err(WireError::Malformed("startup packet")), "{all:?}");
        }
        let mut bytes = whole;
        put_ssl_request(&mut bytes);
        assert!(decode(&bytes).is_err());
    }
}

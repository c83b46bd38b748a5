//! Messages of servers: the ones that a proxy reads, and the ones that it sends itself.

use crate::body_reader::Reader;
use crate::frame::{put, put_cstr};
use crate::frontend::CancelKey;
use crate::{Status, WireError, startup};

/// Authentication request that a server sends before it lets a client in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Authentication<'a> {
    /// The client is let in.
    Ok,
    /// The password itself.
    Cleartext,
    /// Its MD5 hash with this salt.
    Md5([u8; 4]),
    /// One of these mechanisms.
    Sasl(Vec<&'a str>),
    /// The next message of the exchange.
    SaslContinue(&'a [u8]),
    /// The last message of the exchange.
    SaslFinal(&'a [u8]),
    /// Another method, by its number, that cannot pass a proxy (GSSAPI, SSPI, Kerberos, SCM).
    Other(u32),
}

/// Decodes an authentication request.
///
/// # Errors
///
/// [`WireError::Malformed`] if the body is not an authentication request.
pub fn authentication(body: &[u8]) -> Result<Authentication<'_>, WireError> {
    let mut reader = Reader::new(body, "authentication request");
    Ok(match reader.u32()? {
        0 => Authentication::Ok,
        3 => Authentication::Cleartext,
        5 => Authentication::Md5(reader.bytes(4)?.try_into().map_err(|_| reader.malformed())?),
        10 => {
            let mut mechanisms = Vec::new();
            loop {
                match reader.text()? {
                    "" => break Authentication::Sasl(mechanisms),
                    mechanism => mechanisms.push(mechanism),
                }
            }
        }
        11 => Authentication::SaslContinue(reader.rest()),
        12 => Authentication::SaslFinal(reader.rest()),
        other => Authentication::Other(other),
    })
}

/// Decodes a ParameterStatus: name and value.
///
/// # Errors
///
/// [`WireError::Malformed`] if the body is not a ParameterStatus.
pub fn parameter_status(body: &[u8]) -> Result<(&str, &[u8]), WireError> {
    let mut reader = Reader::new(body, "parameter status");
    let (name, value) = (reader.text()?, reader.cstr()?);
    reader.end().map(|()| (name, value))
}

/// Decodes a BackendKeyData.
///
/// # Errors
///
/// [`WireError::Malformed`] if the body is not a BackendKeyData.
pub fn key_data(body: &[u8]) -> Result<CancelKey, WireError> {
    let mut reader = Reader::new(body, "key data");
    Ok(CancelKey { pid: reader.u32()?, secret: startup::secret(reader.rest())? })
}

/// Decodes a ReadyForQuery.
///
/// # Errors
///
/// [`WireError::Malformed`] if the body is not a ReadyForQuery.
pub fn ready(body: &[u8]) -> Result<Status, WireError> {
    match body {
        [b'I'] => Ok(Status::Idle),
        [b'T'] => Ok(Status::InTransaction),
        [b'E'] => Ok(Status::Failed),
        _ => Err(WireError::Malformed("ready for query")),
    }
}

/// Decodes the values of a DataRow, NULL as `None`.
///
/// # Errors
///
/// [`WireError::Malformed`] if the body is not a DataRow.
pub fn row(body: &[u8]) -> Result<Vec<Option<&[u8]>>, WireError> {
    let mut reader = Reader::new(body, "data row");
    let count = reader.u16()?;
    let mut values = Vec::new();
    for _ in 0..count {
        values.push(match reader.i32()? {
            -1 => None,
            len => Some(reader.bytes(usize::try_from(len).map_err(|_| reader.malformed())?)?),
        });
    }
    reader.end()?;
    Ok(values)
}

/// The parts of an error or notice that the proxy reads.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    /// ERROR, FATAL, PANIC, WARNING..., not translated.
    pub severity: String,
    /// SQLSTATE.
    pub code: String,
    /// The message.
    pub message: String,
    /// Detail, empty when there is none.
    pub detail: String,
}

/// Decodes an ErrorResponse or NoticeResponse.
///
/// # Errors
///
/// [`WireError::Malformed`] if the body is neither an ErrorResponse nor a NoticeResponse.
pub fn report(body: &[u8]) -> Result<Report, WireError> {
    let mut reader = Reader::new(body, "error response");
    let mut report = Report::default();
    loop {
        let field = match reader.byte()? {
            0 => return reader.end().map(|()| report),
            b'V' => &mut report.severity,
            b'C' => &mut report.code,
            b'M' => &mut report.message,
            b'D' => &mut report.detail,
            _ => {
                reader.cstr()?;
                continue;
            }
        };
        *field = String::from_utf8_lossy(reader.cstr()?).into_owned();
    }
}

/// A server's message with its detail, for readers other than the client: without text that may be a value of the
/// client's.
pub fn without_values(code: &str, message: &str, detail: &str) -> String {
    // Names of columns and constraints are in quotes too; in class 23 the message alone has no values.
    let quoted = |text: &str| {
        let parts = text.split('"').enumerate().map(|(at, part)| if at % 2 == 0 { part } else { "\"...\"" });
        parts.collect::<String>()
    };
    match code.get(..2) {
        Some("22") => quoted(message),
        Some("23") => message.to_owned(),
        Some("P0") => "an exception that a function raised".to_owned(),
        _ if code == "42601" => quoted(message),
        _ if detail.is_empty() => message.to_owned(),
        _ => format!("{message}: {detail}"),
    }
}

/// Appends an error that ends the connection.
pub fn put_fatal(into: &mut Vec<u8>, code: &str, message: &str, hint: Option<&str>) {
    put(into, b'E', |body| {
        for (field, text) in [(b'S', "FATAL"), (b'V', "FATAL"), (b'C', code), (b'M', message)] {
            body.push(field);
            put_cstr(body, text.as_bytes());
        }
        if let Some(hint) = hint {
            body.push(b'H');
            put_cstr(body, hint.as_bytes());
        }
        body.push(0);
    });
}

/// Appends an authentication request with `data`, or the message that lets the client in (`code` 0).
pub fn put_authentication(into: &mut Vec<u8>, code: u32, data: &[u8]) {
    put(into, b'R', |body| {
        body.extend(code.to_be_bytes());
        body.extend(data);
    });
}

/// Appends a request for SASL by one of `mechanisms`.
pub fn put_sasl<'a>(into: &mut Vec<u8>, mechanisms: impl IntoIterator<Item = &'a str>) {
    put(into, b'R', |body| {
        body.extend(10_u32.to_be_bytes());
        mechanisms.into_iter().for_each(|mechanism| put_cstr(body, mechanism.as_bytes()));
        body.push(0);
    });
}

/// Appends the answer to a client that speaks a newer version, or wants options that the proxy does not know.
pub fn put_negotiate<'a>(into: &mut Vec<u8>, minor: u16, unknown: impl Iterator<Item = &'a str>) {
    put(into, b'v', |body| {
        // The server sends its whole version here where the manual says the minor one; clients take the lower half.
        body.extend(((3_u32 << 16) | u32::from(minor)).to_be_bytes());
        let at = body.len();
        body.extend([0; 4]);
        let mut count = 0_u32;
        for option in unknown {
            put_cstr(body, option.as_bytes());
            count += 1;
        }
        body[at..at + 4].copy_from_slice(&count.to_be_bytes());
    });
}

/// Appends a ParameterStatus.
pub fn put_parameter_status(into: &mut Vec<u8>, name: &str, value: &[u8]) {
    put(into, b'S', |body| {
        put_cstr(body, name.as_bytes());
        put_cstr(body, value);
    });
}

/// Appends a BackendKeyData.
pub fn put_key_data(into: &mut Vec<u8>, key: &CancelKey) {
    put(into, b'K', |body| {
        body.extend(key.pid.to_be_bytes());
        body.extend(&key.secret);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::HEADER_LEN;

    #[test]
    fn a_message_is_told_without_values() {
        for (code, message, detail, told) in [
            (
                "22P02",
                "invalid input syntax for type integer: \"secret\"",
                "",
                "invalid input syntax for type integer: \"...\"",
            ),
            ("22003", "value \"99\" is out of range", "more", "value \"...\" is out of range"),
            ("23505", "violates \"t_pkey\"", "Key (a)=(secret) already exists.", "violates \"t_pkey\""),
            ("P0001", "secret", "secret", "an exception that a function raised"),
            ("42601", "syntax error at or near \"secret", "", "syntax error at or near \"...\""),
            (
                "55006",
                "database \"d\" is in use",
                "There is 1 session.",
                "database \"d\" is in use: There is 1 session.",
            ),
            ("", "m", "", "m"),
        ] {
            assert_eq!(without_values(code, message, detail), told);
        }
    }

    #[test]
    fn authentication_requests_are_told_apart() {
        let mut bytes = Vec::new();
        put_sasl(&mut bytes, ["SCRAM-SHA-256-PLUS", "SCRAM-SHA-256"]);
        let expected = Authentication::Sasl(vec!["SCRAM-SHA-256-PLUS", "SCRAM-SHA-256"]);
        assert_eq!(authentication(&bytes[HEADER_LEN..]), Ok(expected));
        assert_eq!(authentication(b"\0\0\0\x05abcd"), Ok(Authentication::Md5(*b"abcd")));
        assert_eq!(authentication(b"\0\0\0\x07"), Ok(Authentication::Other(7)));
        assert!(authentication(b"\0\0\0\x05abc").is_err());
        assert!(authentication(b"\0\0\0\x0aSCRAM").is_err());
    }

    #[test]
    fn an_error_survives_the_way_there_and_back() {
        let mut bytes = Vec::new();
        put_fatal(&mut bytes, "53300", "too many", Some("wait"));
        let report = report(&bytes[HEADER_LEN..]).unwrap();
        assert_eq!(
            (report.severity.as_str(), report.code.as_str(), report.message.as_str()),
            ("FATAL", "53300", "too many")
        );
    }

    #[test]
    fn rows_are_checked_against_their_length() {
        assert_eq!(row(b"\0\x02\0\0\0\x01a\xff\xff\xff\xff"), Ok(vec![Some(&b"a"[..]), None]));
        for bad in [&b"\0\x01\0\0\0\x02a"[..], b"\0\x01\xff\xff\xff\xfe", b"\0\x00a", b"\0", b"\xff\xff\0\0"] {
            assert!(row(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn parameters_keys_and_readiness_are_read() {
        assert_eq!(parameter_status(b"TimeZone\0UTC\0"), Ok(("TimeZone", &b"UTC"[..])));
        assert!(parameter_status(b"TimeZone\0UTC").is_err());
        assert_eq!(key_data(b"\0\0\0\x07abcd"), Ok(CancelKey { pid: 7, secret: b"abcd".to_vec() }));
        assert!(key_data(b"\0\0\0\x07abc").is_err());
        assert_eq!(
            (ready(b"I"), ready(b"T"), ready(b"E")),
            (Ok(Status::Idle), Ok(Status::InTransaction), Ok(Status::Failed))
        );
        assert!(ready(b"X").is_err() && ready(b"").is_err());
    }
}

//! Messages of clients: the ones that a proxy reads, and the ones that it sends itself.

use crate::WireError;
use crate::body_reader::Reader;
use crate::frame::{Message, put, put_cstr};
use std::fmt;

/// Key with which a client can cancel a session's statement.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct CancelKey {
    /// Process number of the server process, or number of the proxy's session.
    pub pid: u32,
    /// Secret that only the session's client knows.
    pub secret: Vec<u8>,
}

impl fmt::Debug for CancelKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CancelKey {{ pid: {}, secret: {} bytes }}", self.pid, self.secret.len())
    }
}

/// Longest message, length included, of the types that hold no text and no values; the server has the same limit.
const SMALL_MAX: usize = 10_000;

/// Checks that clients send messages of this type and length in a running session; the beginning of the message is
/// enough.
///
/// # Errors
///
/// [`WireError::Tag`] or [`WireError::Length`] if clients never send such a message.
#[inline]
pub fn check(message: &Message<'_>) -> Result<(), WireError> {
    let Message { tag, len, .. } = *message;
    match tag {
        b'B' | b'F' | b'P' | b'Q' | b'd' => Ok(()),
        b'C' | b'D' | b'E' | b'H' | b'S' | b'X' | b'c' | b'f' if len + 4 <= SMALL_MAX => Ok(()),
        b'C' | b'D' | b'E' | b'H' | b'S' | b'X' | b'c' | b'f' => Err(WireError::Length { tag, len: len as u32 + 4 }),
        _ => Err(WireError::Tag(tag)),
    }
}

/// Name and text of a Parse, as far as they are there; `None` if the name is incomplete.
pub fn parse_text(body: &[u8]) -> Option<(&[u8], &[u8])> {
    let name = body.iter().position(|b| *b == 0)?;
    let text = &body[name + 1..];
    Some((&body[..name], &text[..text.iter().position(|b| *b == 0).unwrap_or(text.len())]))
}

/// The name of the statement that a Bind uses, if it is there.
pub fn bind_statement(body: &[u8]) -> Option<&[u8]> {
    let (_portal, statement) = parse_text(body)?;
    Some(statement)
}

/// First message of a SASL exchange.
#[derive(Debug, PartialEq, Eq)]
pub struct SaslInitial<'a> {
    /// The mechanism that the client chose.
    pub mechanism: &'a str,
    /// The first message of that mechanism.
    pub data: &'a [u8],
}

/// Decodes the client's first answer to a request for SASL.
///
/// # Errors
///
/// [`WireError::Malformed`] if the body is not a SASLInitialResponse.
pub fn sasl_initial(body: &[u8]) -> Result<SaslInitial<'_>, WireError> {
    let mut reader = Reader::new(body, "SASL initial response");
    let mechanism = reader.text()?;
    let len = usize::try_from(reader.i32()?).map_err(|_| reader.malformed())?;
    let data = reader.bytes(len)?;
    reader.end()?;
    Ok(SaslInitial { mechanism, data })
}

/// Decodes a password, without its terminating zero.
///
/// # Errors
///
/// [`WireError::Malformed`] if the body is not a PasswordMessage.
pub fn password(body: &[u8]) -> Result<&[u8], WireError> {
    let mut reader = Reader::new(body, "password message");
    let text = reader.cstr()?;
    reader.end().map(|()| text)
}

/// Appends the first message of a SASL exchange.
pub fn put_sasl_initial(into: &mut Vec<u8>, mechanism: &str, data: &[u8]) {
    put(into, b'p', |body| {
        put_cstr(body, mechanism.as_bytes());
        body.extend(u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
        body.extend(data);
    });
}

/// Appends a later message of a SASL exchange.
pub fn put_sasl(into: &mut Vec<u8>, data: &[u8]) {
    put(into, b'p', |body| body.extend(data));
}

/// Appends a password.
pub fn put_password(into: &mut Vec<u8>, password: &[u8]) {
    put(into, b'p', |body| put_cstr(body, password));
}

/// Appends a simple query.
pub fn put_query(into: &mut Vec<u8>, sql: impl AsRef<[u8]>) {
    put(into, b'Q', |body| put_cstr(body, sql.as_ref()));
}

/// Appends a Parse with the types of its parameters.
pub fn put_parse(into: &mut Vec<u8>, name: &[u8], sql: &[u8], types: &[u32]) {
    put(into, b'P', |body| {
        put_cstr(body, name);
        put_cstr(body, sql);
        body.extend(u16::try_from(types.len()).unwrap_or(u16::MAX).to_be_bytes());
        types.iter().for_each(|oid| body.extend(oid.to_be_bytes()));
    });
}

/// Appends a Bind with parameters as text; the results are text too.
pub fn put_bind(into: &mut Vec<u8>, portal: &[u8], statement: &[u8], parameters: &[&[u8]]) {
    put(into, b'B', |body| {
        put_cstr(body, portal);
        put_cstr(body, statement);
        body.extend([0, 0]);
        body.extend(u16::try_from(parameters.len()).unwrap_or(u16::MAX).to_be_bytes());
        for value in parameters {
            body.extend(u32::try_from(value.len()).unwrap_or(u32::MAX).to_be_bytes());
            body.extend(*value);
        }
        body.extend([0, 0]);
    });
}

/// Appends an Execute that fetches all rows.
pub fn put_execute(into: &mut Vec<u8>, portal: &[u8]) {
    put(into, b'E', |body| {
        put_cstr(body, portal);
        body.extend([0; 4]);
    });
}

/// Appends the Close of a statement.
pub fn put_close_statement(into: &mut Vec<u8>, name: &[u8]) {
    put(into, b'C', |body| {
        body.push(b'S');
        put_cstr(body, name);
    });
}

/// Appends the Close of a portal.
pub fn put_close_portal(into: &mut Vec<u8>, name: &[u8]) {
    put(into, b'C', |body| {
        body.push(b'P');
        put_cstr(body, name);
    });
}

/// A Sync.
pub const SYNC: [u8; 5] = *b"S\0\0\0\x04";
/// A Terminate.
pub const TERMINATE: [u8; 5] = *b"X\0\0\0\x04";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{HEADER_LEN, Scanner, Step};

    #[test]
    fn names_and_texts_are_found_as_far_as_they_are_there() {
        let mut bytes = Vec::new();
        put_parse(&mut bytes, b"s1", b"select $1", &[23]);
        let body = &bytes[HEADER_LEN..];
        assert_eq!(parse_text(body), Some((&b"s1"[..], &b"select $1"[..])));
        assert_eq!(parse_text(&body[..8]), Some((&b"s1"[..], &b"selec"[..])));
        assert_eq!(parse_text(&body[..2]), None);
        let mut bytes = Vec::new();
        put_bind(&mut bytes, b"", b"s1", &[b"7"]);
        assert_eq!(bind_statement(&bytes[HEADER_LEN..]), Some(&b"s1"[..]));
    }

    #[test]
    fn sasl_messages_survive_the_way_there_and_back() {
        let mut bytes = Vec::new();
        put_sasl_initial(&mut bytes, "SCRAM-SHA-256", b"n,,n=,r=x");
        let Ok(Step::Message(message)) = Scanner::new(1000).peek(&bytes) else { panic!("a message") };
        let initial = sasl_initial(message.body).unwrap();
        assert_eq!(initial, SaslInitial { mechanism: "SCRAM-SHA-256", data: b"n,,n=,r=x" });
        assert!(sasl_initial(&message.body[..20]).is_err());
    }

    #[test]
    fn a_cancel_key_does_not_show_its_secret() {
        let shown = format!("{:?}", CancelKey { pid: 7, secret: vec![200, 201, 202, 203] });
        assert_eq!(shown, "CancelKey { pid: 7, secret: 4 bytes }");
    }
}

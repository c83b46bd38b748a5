//! The packets that open a connection; they have no type.

use crate::frame::{put_cstr, put_packet};
use crate::read::Reader;
use crate::{WireError, frontend::CancelKey};

/// As the server: longer packets are refused before they are read.
pub const PACKET_MAX: usize = 10_000;

const SSL: u32 = (1234 << 16) | 5679;
const GSSENC: u32 = (1234 << 16) | 5680;
const CANCEL: u32 = (1234 << 16) | 5678;

/// A version of the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 3.
    pub major: u16,
    /// 0 or 2; there is no 1.
    pub minor: u16,
}

impl Version {
    /// What everybody speaks.
    pub const V3_0: Version = Version { major: 3, minor: 0 };
    /// Cancel keys of any length (PostgreSQL 18).
    pub const V3_2: Version = Version { major: 3, minor: 2 };
}

/// The first packet of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opening {
    /// May we speak TLS?
    Ssl,
    /// May we speak GSSAPI encryption?
    GssEnc,
    /// Cancel what another connection does.
    Cancel(CancelKey),
    /// Begin a session.
    Startup(Startup),
}

/// What a client wants a session to begin with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Startup {
    /// The newest version that the client speaks.
    pub version: Version,
    /// Names and values in their order, as sent.
    pub parameters: Vec<(String, Vec<u8>)>,
}

impl Startup {
    /// A parameter's value.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.parameters.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_slice())
    }

    /// Options of the protocol that nobody knows yet; a server names those that it does not know.
    pub fn protocol_options(&self) -> impl Iterator<Item = &str> {
        self.parameters.iter().map(|(name, _)| name.as_str()).filter(|name| name.starts_with("_pq_."))
    }

    /// Appends the packet.
    pub fn encode(&self, into: &mut Vec<u8>) {
        put_packet(into, |body| {
            body.extend(self.version.major.to_be_bytes());
            body.extend(self.version.minor.to_be_bytes());
            for (name, value) in &self.parameters {
                put_cstr(body, name.as_bytes());
                put_cstr(body, value);
            }
            body.push(0);
        });
    }
}

/// The length of the packet that `bytes` begin with, once that can be told.
pub fn packet_len(bytes: &[u8]) -> Result<Option<usize>, WireError> {
    let Some(&len) = bytes.first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_be_bytes(len);
    match len as usize {
        8..=PACKET_MAX => Ok(Some(len as usize)),
        _ => Err(WireError::Length { tag: 0, len }),
    }
}

/// Decodes a whole packet, its length included.
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
            let mut parameters = Vec::new();
            loop {
                let name = reader.text()?;
                if name.is_empty() {
                    break;
                }
                parameters.push((name.to_owned(), reader.cstr()?.to_vec()));
            }
            reader.end()?;
            Ok(Opening::Startup(Startup { version, parameters }))
        }
    }
}

/// The secret part of a cancel key: 4 bytes in 3.0, up to 256 in 3.2.
pub(crate) fn secret(bytes: &[u8]) -> Result<Vec<u8>, WireError> {
    if (4..=256).contains(&bytes.len()) { Ok(bytes.to_vec()) } else { Err(WireError::Malformed("cancel key")) }
}

/// Appends the question whether the server speaks TLS.
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

    #[test]
    fn a_startup_packet_survives_the_way_there_and_back() {
        let startup = Startup {
            version: Version::V3_2,
            parameters: vec![("user".into(), b"a".to_vec()), ("_pq_.x".into(), b"\xff".to_vec())],
        };
        let mut bytes = Vec::new();
        startup.encode(&mut bytes);
        assert_eq!(packet_len(&bytes), Ok(Some(bytes.len())));
        assert_eq!(decode(&bytes), Ok(Opening::Startup(startup.clone())));
        assert_eq!((startup.get("user"), startup.get("x")), (Some(&b"a"[..]), None));
        assert_eq!(startup.protocol_options().collect::<Vec<_>>(), ["_pq_.x"]);
    }

    #[test]
    fn cancel_keys_of_both_versions_are_understood() {
        for len in [4, 32, 256] {
            let key = CancelKey { pid: 7, secret: vec![9; len] };
            let mut bytes = Vec::new();
            put_cancel(&mut bytes, &key);
            assert_eq!(decode(&bytes), Ok(Opening::Cancel(key)));
        }
        let mut bytes = Vec::new();
        put_cancel(&mut bytes, &CancelKey { pid: 7, secret: vec![9; 257] });
        assert_eq!(decode(&bytes), Err(WireError::Malformed("cancel key")));
    }

    #[test]
    fn lengths_are_judged_before_anything_is_read() {
        assert_eq!(packet_len(b"\0\0"), Ok(None));
        for len in [0_u32, 7, 10_001, u32::MAX] {
            assert_eq!(packet_len(&len.to_be_bytes()), Err(WireError::Length { tag: 0, len }));
        }
    }

    #[test]
    fn what_is_cut_off_or_goes_on_is_malformed() {
        let mut bytes = Vec::new();
        Startup { version: Version::V3_0, parameters: vec![("user".into(), b"a".to_vec())] }.encode(&mut bytes);
        for len in 0..bytes.len() {
            assert!(decode(&bytes[..len]).is_err(), "{len}");
        }
        put_ssl_request(&mut bytes);
        assert!(decode(&bytes).is_err());
    }
}

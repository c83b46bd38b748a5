//! Harmless requests whose answer shows if a redis CVE fix is active.
//!
//! Each is one short exchange on connections of its own, leaves no data, and runs no attack: it reaches the check that
//! the fix added, not the fault that the check prevents.

use crate::resp::{Client, Reply};
use std::io;

/// One request of this kind.
#[derive(Debug, Clone, Copy)]
pub struct Effect {
    /// The CVE that the fix is for.
    pub cve: &'static str,
    /// Part of the file name of the diff in Debian's series.
    pub diff: &'static str,
    /// The request, for people.
    pub request: &'static str,
    ask: fn(u16) -> io::Result<String>,
    is_fixed: fn(&str) -> bool,
}

/// Answer of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Answer in one line, for people.
    pub text: String,
    /// True if it is the answer of the fixed code.
    pub fixed: bool,
}

impl Effect {
    /// Sends the request to the redis on `port`.
    ///
    /// # Errors
    /// The connection fails, or the answer is not of the protocol.
    pub fn ask(&self, port: u16) -> io::Result<Answer> {
        let text = (self.ask)(port)?;
        Ok(Answer { fixed: (self.is_fixed)(&text), text })
    }
}

/// All known effects, in the order of Debian's series.
pub const EFFECTS: [Effect; 6] = [
    Effect {
        cve: "CVE-2024-31227",
        diff: "Apply-security-fixes-for-CVEs-1113",
        request: "ACL SETUSER u off %~",
        ask: |port| ask_acl(port, "%~"),
        is_fixed: |answer| answer.contains("Syntax error"),
    },
    Effect {
        cve: "CVE-2024-31228",
        diff: "Apply-security-fixes-for-CVEs-1113",
        request: "PUBSUB CHANNELS *?*?... (1,100 times)",
        ask: ask_nested_pattern,
        is_fixed: |answer| answer == "0 channels",
    },
    Effect {
        cve: "CVE-2024-51741",
        diff: "CVE-2024-51741",
        request: "ACL SETUSER u off %",
        ask: |port| ask_acl(port, "%"),
        is_fixed: |answer| answer.contains("Syntax error"),
    },
    Effect {
        cve: "CVE-2025-32023",
        diff: "CVE-2025-32023",
        request: "PFCOUNT of a damaged HyperLogLog",
        ask: ask_hyperloglog,
        is_fixed: |answer| answer.starts_with("INVALIDOBJ"),
    },
    Effect {
        cve: "CVE-2025-67733",
        diff: "CVE-2025-67733",
        request: "FUNCTION LIST \"a\\r\\n:1\"",
        ask: ask_line_break,
        is_fixed: |answer| answer == "1 reply",
    },
    Effect {
        cve: "CVE-2026-25243",
        diff: "CVE-2026-25243",
        request: "RESTORE of a hash whose field is two lengths long",
        ask: ask_restore,
        is_fixed: |answer| answer.contains("Bad data format"),
    },
];

/// Returns the effects of the diff with this file name.
pub fn of_diff(file_name: &str) -> impl Iterator<Item = &'static Effect> {
    EFFECTS.iter().filter(move |effect| file_name.contains(effect.diff))
}

fn one_line(reply: &Reply) -> String {
    match reply {
        Reply::Text(text) | Reply::Error(text) => text.clone(),
        Reply::Integer(number) => number.to_string(),
        Reply::Nil => "(nil)".into(),
        Reply::Array(items) => format!("({} items)", items.len()),
    }
}

/// Sets a key pattern that grants nothing, for a user that is not allowed to log in.
fn ask_acl(port: u16, pattern: &str) -> io::Result<String> {
    let mut client = Client::connect(port)?;
    let answer = client.command(&["ACL", "SETUSER", "stillpoint-effect", "off", pattern])?;
    client.command(&["ACL", "DELUSER", "stillpoint-effect"])?;
    Ok(one_line(&answer))
}

/// Sends a pattern nested deeper than the fix allows, matched against the name of one channel and nothing else.
fn ask_nested_pattern(port: u16) -> io::Result<String> {
    const DEPTH: usize = 1_100;
    let mut subscriber = Client::connect(port)?;
    subscriber.command(&["SUBSCRIBE", &"a".repeat(DEPTH)])?;
    match Client::connect(port)?.command(&["PUBSUB", "CHANNELS", &"*?".repeat(DEPTH)])? {
        Reply::Array(channels) => Ok(format!("{} channels", channels.len())),
        other => Ok(one_line(&other)),
    }
}

/// Sends a sparse HyperLogLog with only empty registers, 2^32 too many: counted in 32 bits their number looks right.
fn ask_hyperloglog(port: u16) -> io::Result<String> {
    const REGISTERS: u64 = 16_384;
    const KEY: &str = "stillpoint:effect:hyperloglog";
    // Magic, sparse encoding, no cached count; then one opcode for each run of 16,384 empty registers.
    let mut value = b"HYLL\x01\0\0\0\0\0\0\0\0\0\0\x80".to_vec();
    let runs = ((1u64 << 32) + REGISTERS) / REGISTERS;
    for _ in 0..runs {
        value.extend_from_slice(&[0x7f, 0xff]);
    }
    let mut client = Client::connect(port)?;
    client.command(&[b"SET", KEY.as_bytes(), &value])?;
    let answer = client.command(&["PFCOUNT", KEY])?;
    client.command(&["DEL", KEY])?;
    Ok(one_line(&answer))
}

/// Sends an argument with a line break, which is part of an error reply; without the fix, the client reads two replies
/// instead of one.
fn ask_line_break(port: u16) -> io::Result<String> {
    let mut client = Client::connect(port)?;
    client.send(&["FUNCTION", "LIST", "a\r\n:1"])?;
    client.send(&["PING"])?;
    let mut replies = 0;
    loop {
        match client.receive()? {
            Reply::Text(text) if text == "PONG" => break,
            _ => replies += 1,
        }
    }
    Ok(if replies == 1 { "1 reply".into() } else { format!("{replies} replies") })
}

/// Restores a hash in the oldest encoding that writes a length of 5 in five bytes. Code without the fix checks the hash
/// by that reading, then reads it with the length in one byte. Our hash is valid both ways, so that no byte out of
/// bounds is read.
fn ask_restore(port: u16) -> io::Result<String> {
    const KEY: &str = "stillpoint:effect:restore";
    // One pair: field of five bytes, value `abc`. By the other reading the value begins three bytes before the field
    // ends, and consists of those, the true value's header, and the value: seven bytes, as the length before them says.
    let hash = [&b"\x01\xfe\x05\0\0\0"[..], b"x\x07\0yz", b"\x03\0abc", b"\xff"].concat();
    let mut payload = vec![9, hash.len() as u8];
    payload.extend_from_slice(&hash);
    payload.extend_from_slice(&9u16.to_le_bytes());
    payload.extend_from_slice(&crc::Crc::<u64>::new(&crc::CRC_64_REDIS).checksum(&payload).to_le_bytes());
    let mut client = Client::connect(port)?;
    let answer = client.command(&[b"RESTORE", KEY.as_bytes(), b"0", &payload])?;
    client.command(&["DEL", KEY])?;
    Ok(one_line(&answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_the_series_finds_its_effects() {
        let cves: Vec<&str> =
            of_diff("0001-Apply-security-fixes-for-CVEs-1113.patch").map(|effect| effect.cve).collect();
        assert_eq!(cves, ["CVE-2024-31227", "CVE-2024-31228"]);
        assert_eq!(of_diff("CVE-2025-46818.patch").count(), 0);
    }
}

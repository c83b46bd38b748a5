//! Plain probes: an echo server over TCP, and GET over HTTP/1.1. Pure.

use super::resp::Malformed;
use super::workload::{Answer, Verdict, Workload};
use stillpoint_base::Random;

/// Sends `value_bytes` unique bytes and expects them back.
#[derive(Debug)]
pub(crate) struct Echo {
    value_bytes: usize,
    sent: u64,
}

impl Echo {
    pub(crate) fn new(value_bytes: u32) -> Self {
        Echo { value_bytes: value_bytes as usize, sent: 0 }
    }
}

impl Workload for Echo {
    type Expect = Vec<u8>;

    fn kinds(&self) -> Vec<String> {
        vec!["echo".into()]
    }

    fn append_request(&mut self, _kind: u8, connection: u32, _rng: &mut Random, out: &mut Vec<u8>) -> Vec<u8> {
        self.sent += 1;
        let mut message = format!("{connection}.{:x}.", self.sent).into_bytes();
        // With the line end it also works for servers that echo lines.
        message.resize(self.value_bytes.max(message.len() + 1) - 1, b'e');
        message.push(b'\n');
        out.extend_from_slice(&message);
        message
    }

    fn judge_answer(&mut self, expect: &Vec<u8>, input: &[u8]) -> Result<Option<Answer>, Malformed> {
        let Some(echo) = input.get(..expect.len()) else { return Ok(None) };
        let right = if echo == expect { Ok(()) } else { Err("the echo differs from what was sent".to_owned()) };
        Ok(Some(Answer { used: echo.len(), verdict: right.into() }))
    }

    fn ping(&mut self, out: &mut Vec<u8>) -> Vec<u8> {
        self.append_request(0, u32::MAX, &mut Random::new(0), out)
    }
}

/// Size limit of the head of an HTTP response, in bytes.
const HEAD_MAX: usize = 64 << 10;
const BODY_MAX: usize = 256 << 20;

/// Sends `GET path` on connections that are kept alive; any 2xx or 3xx is right.
#[derive(Debug)]
pub(crate) struct Http {
    request: Vec<u8>,
}

impl Http {
    pub(crate) fn new(host: &str, path: &str) -> Self {
        let request = format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: stillpoint\r\nAccept: */*\r\n\r\n");
        Http { request: request.into_bytes() }
    }
}

impl Workload for Http {
    type Expect = ();

    fn kinds(&self) -> Vec<String> {
        vec!["get".into()]
    }

    fn append_request(&mut self, _kind: u8, _connection: u32, _rng: &mut Random, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.request);
    }

    fn judge_answer(&mut self, (): &(), input: &[u8]) -> Result<Option<Answer>, Malformed> {
        let Some(head_len) = input.windows(4).take(HEAD_MAX).position(|end| end == b"\r\n\r\n") else {
            let endless = input.len() >= HEAD_MAX;
            return if endless { Err(Malformed("a response head does not end".into())) } else { Ok(None) };
        };
        let head = std::str::from_utf8(&input[..head_len]);
        let head = head.map_err(|_| Malformed("a response head is not text".into()))?;
        let body_at = head_len + 4;
        let (status, framing) = read_head(head)?;
        let body_len = match framing {
            Framing::Length(length) => (input.len() - body_at >= length).then_some(length),
            Framing::Chunked => chunked_len(&input[body_at..])?,
        };
        let Some(body_len) = body_len else { return Ok(None) };
        let verdict = match status {
            200..=399 => Verdict::Ok,
            _ => Verdict::Error(format!("status {status}")),
        };
        Ok(Some(Answer { used: body_at + body_len, verdict }))
    }

    fn ping(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.request);
    }
}

enum Framing {
    Length(usize),
    Chunked,
}

fn read_head(head: &str) -> Result<(u16, Framing), Malformed> {
    let mut lines = head.split("\r\n");
    let first = lines.next().unwrap_or_default();
    let status = first.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1)?.parse().ok());
    let status = status.ok_or_else(|| Malformed(format!("`{first}` is not a status line")))?;
    let mut framing = None;
    for line in lines {
        let Some((name, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            let length = value.parse().ok().filter(|&length| length <= BODY_MAX);
            framing = Some(Framing::Length(length.ok_or_else(|| Malformed(format!("a length of {value}")))?));
        } else if name.eq_ignore_ascii_case("transfer-encoding") && value.eq_ignore_ascii_case("chunked") {
            framing = Some(Framing::Chunked);
            break;
        }
    }
    match framing {
        Some(framing) => Ok((status, framing)),
        None if status == 204 || status == 304 => Ok((status, Framing::Length(0))),
        None => Err(Malformed("a response has no length".into())),
    }
}

/// Length of a chunked body, or `None` if it is not complete yet.
fn chunked_len(body: &[u8]) -> Result<Option<usize>, Malformed> {
    let mut at = 0;
    loop {
        let Some(end) = body[at..].windows(2).take(1024).position(|pair| pair == b"\r\n") else { return Ok(None) };
        let size = std::str::from_utf8(&body[at..at + end]).ok();
        let size = size.and_then(|size| usize::from_str_radix(size.split(';').next()?.trim(), 16).ok());
        let Some(size) = size.filter(|&size| size <= BODY_MAX) else {
            return Err(Malformed("a chunk has no size".into()));
        };
        // The last chunk is empty; servers send no trailers without a TE header.
        at += end + 2 + size + 2;
        if at > body.len() {
            return Ok(None);
        }
        if size == 0 {
            return Ok(Some(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn judge(input: &[u8]) -> Result<Option<Answer>, Malformed> {
        Http::new("h", "/").judge_answer(&(), input)
    }

    #[test]
    fn an_http_response_ends_where_it_says() {
        let cases: [(&[u8], Verdict); 4] = [
            (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", Verdict::Ok),
            (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", Verdict::Ok),
            (b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n", Verdict::Error("status 503".into())),
            (b"HTTP/1.1 204 No Content\r\n\r\n", Verdict::Ok),
        ];
        for (bytes, verdict) in cases {
            for cut in 0..bytes.len() {
                assert_eq!(judge(&bytes[..cut]), Ok(None), "{cut} bytes");
            }
            let more = [bytes, b"HTTP/1.1"].concat();
            assert_eq!(judge(&more), Ok(Some(Answer { used: bytes.len(), verdict })));
        }
        assert!(judge(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
        assert!(judge(b"SSH-2.0-OpenSSH\r\n\r\n").is_err());
    }

    #[test]
    fn an_echo_must_be_the_same() {
        let mut echo = Echo::new(40);
        let mut out = Vec::new();
        let first = echo.append_request(0, 1, &mut Random::new(1), &mut out);
        let second = echo.append_request(0, 1, &mut Random::new(1), &mut out);
        assert_eq!((first.len(), out.len()), (40, 80));
        assert_eq!(echo.judge_answer(&first, &out[..39]), Ok(None));
        assert_eq!(echo.judge_answer(&first, &out).unwrap().unwrap().verdict, Verdict::Ok);
        assert!(matches!(echo.judge_answer(&second, &out).unwrap().unwrap().verdict, Verdict::Wrong(_)));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(tail in proptest::collection::vec(any::<u8>(), 0..200)) {
            let input = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", tail.as_slice()].concat();
            if let Ok(Some(answer)) = judge(&input) {
                prop_assert!(answer.used <= input.len());
            }
        }
    }
}

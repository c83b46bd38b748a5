//! Workload for memcached (text protocol); values are checked by their stamp. Pure.

use super::redis::key_name;
use super::resp::{self, Malformed};
use super::values::{Values, Write};
use super::workload::{Answer, Verdict, Weights, Workload};
use stillpoint_base::Random;

/// Kinds of requests in a mix.
pub(crate) const KINDS: [&str; 3] = ["get", "set", "version"];

const LINE_MAX: usize = 2048;
const VALUE_MAX: usize = 64 << 20;

/// Expected answer.
#[derive(Debug)]
pub(crate) enum Expect {
    Value { key: u32, floor: u32 },
    Stored(Write),
    Version,
}

/// State of the workload.
#[derive(Debug)]
pub(crate) struct Memcached {
    weights: Weights,
    values: Values,
    scratch: Vec<u8>,
}

impl Memcached {
    pub(crate) fn new(mix: &[(String, u32)], values: Values) -> Self {
        Memcached { weights: Weights::new(mix), values, scratch: Vec::new() }
    }

    /// Judges `VALUE key flags bytes\r\n<bytes>\r\nEND\r\n`, or `END\r\n` alone.
    fn judge_value(&mut self, key: u32, floor: u32, input: &[u8]) -> Result<Option<Answer>, Malformed> {
        let Some((line, after)) = line(input)? else { return Ok(None) };
        if line == b"END" {
            return Ok(Some(Answer { used: after, verdict: self.values.check(key, floor, None).into() }));
        }
        let Some(rest) = line.strip_prefix(b"VALUE ") else {
            return Ok(Some(Answer { used: after, verdict: failure(line) }));
        };
        let mut fields = rest.split(|&byte| byte == b' ');
        let (name, _flags, size) = (fields.next(), fields.next(), fields.next());
        let size = size.and_then(|size| std::str::from_utf8(size).ok()?.parse::<usize>().ok());
        let Some(size) = size.filter(|&size| size <= VALUE_MAX) else {
            return Err(Malformed(format!("`{}`", String::from_utf8_lossy(line))));
        };
        let end = b"\r\nEND\r\n";
        let used = after + size + end.len();
        let Some(body) = input.get(after..used) else { return Ok(None) };
        if !body.ends_with(end) {
            return Err(Malformed("a value is longer than its length field".into()));
        }
        let verdict = if name == Some(key_name(&mut self.scratch, key)) {
            self.values.check(key, floor, Some(&body[..size])).into()
        } else {
            Verdict::Wrong(format!("the value of another key than {key}"))
        };
        Ok(Some(Answer { used, verdict }))
    }
}

impl Workload for Memcached {
    type Expect = Expect;

    fn kinds(&self) -> Vec<String> {
        self.weights.names().to_vec()
    }

    fn draw(&mut self, rng: &mut Random) -> u8 {
        self.weights.draw(rng)
    }

    fn append_request(&mut self, kind: u8, _connection: u32, rng: &mut Random, out: &mut Vec<u8>) -> Expect {
        match self.weights.names()[usize::from(kind)].as_str() {
            "get" => {
                let key = self.values.draw(rng);
                out.extend_from_slice(b"get ");
                out.extend_from_slice(key_name(&mut self.scratch, key));
                out.extend_from_slice(b"\r\n");
                Expect::Value { key, floor: self.values.floor(key) }
            }
            "set" => {
                let write = self.values.begin_write(rng);
                set(&self.values, write.key, write.seq, &mut self.scratch, out);
                Expect::Stored(write)
            }
            _ => self.ping(out),
        }
    }

    fn judge_answer(&mut self, expect: &Expect, input: &[u8]) -> Result<Option<Answer>, Malformed> {
        if let Expect::Value { key, floor } = *expect {
            return self.judge_value(key, floor, input);
        }
        let Some((line, used)) = line(input)? else { return Ok(None) };
        let verdict = match expect {
            Expect::Stored(write) if line == b"STORED" => {
                self.values.confirm_write(*write);
                Verdict::Ok
            }
            Expect::Version if line.starts_with(b"VERSION ") => Verdict::Ok,
            _ => failure(line),
        };
        Ok(Some(Answer { used, verdict }))
    }

    fn abandon(&mut self, expect: Expect) {
        if let Expect::Stored(write) = expect {
            self.values.abandon_write(write);
        }
    }

    fn ping(&mut self, out: &mut Vec<u8>) -> Expect {
        out.extend_from_slice(b"version\r\n");
        Expect::Version
    }
}

/// Appends a `set` of write `seq` to `key`.
pub(crate) fn set(values: &Values, key: u32, seq: u32, scratch: &mut Vec<u8>, out: &mut Vec<u8>) {
    out.extend_from_slice(b"set ");
    out.extend_from_slice(key_name(scratch, key));
    out.extend_from_slice(b" 0 0 ");
    resp::decimal(out, values.value_bytes() as u64);
    out.extend_from_slice(b"\r\n");
    values.append(key, seq, out);
    out.extend_from_slice(b"\r\n");
}

fn failure(line: &[u8]) -> Verdict {
    let text = String::from_utf8_lossy(line).into_owned();
    let error = ["ERROR", "CLIENT_ERROR", "SERVER_ERROR", "NOT_STORED"].iter().any(|word| text.starts_with(word));
    if error { Verdict::Error(text) } else { Verdict::Wrong(format!("answered `{text}`")) }
}

/// Returns the first line without its end, and the offset of the next one.
fn line(input: &[u8]) -> Result<Option<(&[u8], usize)>, Malformed> {
    let window = &input[..input.len().min(LINE_MAX)];
    match window.windows(2).position(|pair| pair == b"\r\n") {
        Some(end) => Ok(Some((&input[..end], end + 2))),
        None if input.len() >= LINE_MAX => Err(Malformed("a line has no end".into())),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memcached() -> Memcached {
        let mix = [("get".to_owned(), 1), ("set".to_owned(), 1)];
        Memcached::new(&mix, Values::new(7, 10, 32))
    }

    #[test]
    fn a_value_is_judged_when_it_is_complete() {
        let mut memcached = memcached();
        let mut stored = Vec::new();
        memcached.values.append(4, 0, &mut stored);
        let answer = [b"VALUE sp:4 0 32\r\n", stored.as_slice(), b"\r\nEND\r\n"].concat();
        let expect = Expect::Value { key: 4, floor: 0 };
        for cut in 0..answer.len() {
            assert_eq!(memcached.judge_answer(&expect, &answer[..cut]), Ok(None), "{cut} bytes");
        }
        let right = Answer { used: answer.len(), verdict: Verdict::Ok };
        assert_eq!(memcached.judge_answer(&expect, &answer), Ok(Some(right)));
        let of_another_key = Expect::Value { key: 5, floor: 0 };
        let judged = memcached.judge_answer(&of_another_key, &answer).unwrap().unwrap();
        assert!(matches!(judged.verdict, Verdict::Wrong(_)));
    }

    #[test]
    fn errors_and_nonsense_are_told_apart() {
        let mut memcached = memcached();
        let expect = Expect::Value { key: 1, floor: 0 };
        let judge =
            |memcached: &mut Memcached, input: &[u8]| memcached.judge_answer(&expect, input).unwrap().unwrap().verdict;
        assert_eq!(judge(&mut memcached, b"END\r\n"), Verdict::Ok);
        assert!(matches!(judge(&mut memcached, b"SERVER_ERROR out of memory\r\n"), Verdict::Error(_)));
        assert!(matches!(judge(&mut memcached, b"STORED\r\n"), Verdict::Wrong(_)));
        assert!(memcached.judge_answer(&expect, b"VALUE sp:1 0 x\r\n").is_err());
        assert!(memcached.judge_answer(&expect, &[b'x'; 4000]).is_err());
    }
}

//! Searches over LDAP: one entry by its number, without a bind. Pure.

use super::resp::Malformed;
use super::workload::{Answer, Verdict, Workload};
use stillpoint_base::Random;

/// Size limit of one message of the server, in bytes.
const MESSAGE_MAX: usize = 16 << 20;

const SEQUENCE: u8 = 0x30;
const INTEGER: u8 = 0x02;
const OCTETS: u8 = 0x04;
const ENUMERATED: u8 = 0x0a;
const SEARCH: u8 = 0x63;
const EQUALITY: u8 = 0xa3;
const ENTRY: u8 = 0x64;
const REFERENCE: u8 = 0x73;
const DONE: u8 = 0x65;

/// Expected answer: one entry of this name.
#[derive(Debug)]
pub(crate) struct Expect {
    message: u32,
    name: Vec<u8>,
}

/// Searches for `uid=userN` below a base; N is drawn.
#[derive(Debug)]
pub(crate) struct Ldap {
    base: String,
    records: u64,
    sent: u32,
}

impl Ldap {
    pub(crate) fn new(base: &str, records: u64) -> Self {
        Ldap { base: base.to_owned(), records, sent: 0 }
    }
}

impl Workload for Ldap {
    type Expect = Expect;

    fn kinds(&self) -> Vec<String> {
        vec!["search".into()]
    }

    fn append_request(&mut self, _kind: u8, _connection: u32, rng: &mut Random, out: &mut Vec<u8>) -> Expect {
        self.sent = (self.sent + 1) & 0x7fff_ffff;
        let user = format!("user{}", rng.below(self.records));
        let filter = [value(OCTETS, b"uid"), value(OCTETS, user.as_bytes())].concat();
        let search = [
            value(OCTETS, self.base.as_bytes()),
            // the whole tree, aliases as they are, no limits, values as well
            vec![ENUMERATED, 1, 2, ENUMERATED, 1, 0, INTEGER, 1, 0, INTEGER, 1, 0, 1, 1, 0],
            value(EQUALITY, &filter),
            value(SEQUENCE, &[]),
        ]
        .concat();
        let message = [value(INTEGER, &self.sent.to_be_bytes()), value(SEARCH, &search)].concat();
        out.extend_from_slice(&value(SEQUENCE, &message));
        Expect { message: self.sent, name: format!("uid={user},").into_bytes() }
    }

    fn judge_answer(&mut self, expect: &Expect, input: &[u8]) -> Result<Option<Answer>, Malformed> {
        let (mut rest, mut entries, mut right) = (input, 0, true);
        loop {
            let Some(message) = take(&mut rest)? else { return Ok(None) };
            let mut body = of_tag(message, SEQUENCE)?;
            let number = of_tag(inside(&mut body)?, INTEGER)?;
            let number = number.iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte));
            if number != u64::from(expect.message) {
                return Err(Malformed(format!("message {number} is no answer to {}", expect.message)));
            }
            match inside(&mut body)? {
                (ENTRY, mut entry) => {
                    entries += 1;
                    right &= of_tag(inside(&mut entry)?, OCTETS)?.starts_with(&expect.name);
                }
                (REFERENCE, _) => {}
                (DONE, mut result) => {
                    let verdict = match (of_tag(inside(&mut result)?, ENUMERATED)?, entries, right) {
                        ([0], 1, true) => Verdict::Ok,
                        ([0], _, _) => Verdict::Wrong(format!("{entries} entries instead of the one asked for")),
                        (code, _, _) => Verdict::Error(format!("result {code:?}")),
                    };
                    return Ok(Some(Answer { used: input.len() - rest.len(), verdict }));
                }
                (tag, _) => return Err(Malformed(format!("an answer of kind {tag:#04x} to a search"))),
            }
        }
    }

    fn ping(&mut self, out: &mut Vec<u8>) -> Expect {
        self.append_request(0, u32::MAX, &mut Random::new(0), out)
    }
}

/// Encodes a value with its tag and length.
fn value(tag: u8, bytes: &[u8]) -> Vec<u8> {
    let length = (bytes.len() as u32).to_be_bytes();
    let mut out = vec![tag];
    match bytes.len() {
        short @ 0..=0x7f => out.push(short as u8),
        _ => out.extend([&[0x84], &length[..]].concat()),
    }
    out.extend_from_slice(bytes);
    out
}

/// Takes the first value, tag and content; `None` if it is incomplete.
fn take<'a>(rest: &mut &'a [u8]) -> Result<Option<(u8, &'a [u8])>, Malformed> {
    let (Some(&tag), Some(&first)) = (rest.first(), rest.get(1)) else { return Ok(None) };
    let bytes = match first {
        0..=0x7f => 0,
        0x81..=0x84 => usize::from(first & 0x7f),
        _ => return Err(Malformed(format!("a length begins with {first:#04x}"))),
    };
    let Some(long) = rest.get(2..2 + bytes) else { return Ok(None) };
    let long = long.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
    let length = if bytes == 0 { usize::from(first) } else { long };
    if length > MESSAGE_MAX {
        return Err(Malformed(format!("a message of {length} bytes")));
    }
    let Some(content) = rest.get(2 + bytes..2 + bytes + length) else { return Ok(None) };
    *rest = &rest[2 + bytes + length..];
    Ok(Some((tag, content)))
}

/// Takes a value that lies inside of another one, which is complete.
fn inside<'a>(rest: &mut &'a [u8]) -> Result<(u8, &'a [u8]), Malformed> {
    take(rest)?.ok_or_else(|| Malformed("a value ends behind its message".into()))
}

fn of_tag((tag, content): (u8, &[u8]), wanted: u8) -> Result<&[u8], Malformed> {
    if tag == wanted { Ok(content) } else { Err(Malformed(format!("{tag:#04x} instead of {wanted:#04x}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const DN: &str = "uid=user3,dc=example";

    fn expect() -> Expect {
        Expect { message: 5, name: b"uid=user3,".to_vec() }
    }

    fn message(body: &[u8]) -> Vec<u8> {
        value(SEQUENCE, &[&value(INTEGER, &[5]), body].concat())
    }

    fn entry(name: &str) -> Vec<u8> {
        message(&value(ENTRY, &[value(OCTETS, name.as_bytes()), value(SEQUENCE, &[0; 300])].concat()))
    }

    fn done(code: u8) -> Vec<u8> {
        message(&value(DONE, &[value(ENUMERATED, &[code]), value(OCTETS, b""), value(OCTETS, b"")].concat()))
    }

    fn judge(input: &[u8]) -> Result<Option<Answer>, Malformed> {
        Ldap::new("dc=example", 10).judge_answer(&expect(), input)
    }

    #[test]
    fn a_search_is_judged_when_its_result_is_there() {
        let cases = [
            ([entry(DN), done(0)].concat(), true),
            ([entry("uid=user33,dc=example"), done(0)].concat(), false),
            (done(0), false),
            ([entry(DN), entry(DN), done(0)].concat(), false),
            ([entry(DN), done(80)].concat(), false),
        ];
        for (bytes, right) in cases {
            for cut in 0..bytes.len() {
                assert_eq!(judge(&bytes[..cut]), Ok(None), "{cut} bytes");
            }
            let answer = judge(&[&bytes[..], b"0"].concat()).unwrap().unwrap();
            assert_eq!((answer.used, answer.verdict == Verdict::Ok), (bytes.len(), right), "{:?}", answer.verdict);
        }
        let other = value(SEQUENCE, &[value(INTEGER, &[6]), value(DONE, &[])].concat());
        assert!(judge(&other).is_err(), "the answer to another request");
    }

    #[test]
    fn a_request_is_one_value_and_names_a_record() {
        let mut ldap = Ldap::new(&"dc=example,".repeat(20), 1);
        let mut out = Vec::new();
        let expect = ldap.append_request(0, 0, &mut Random::new(1), &mut out);
        assert_eq!((expect.message, expect.name), (1, b"uid=user0,".to_vec()));
        let mut rest = &out[..];
        let mut body = of_tag(take(&mut rest).unwrap().unwrap(), SEQUENCE).unwrap();
        assert!(rest.is_empty() && out.windows(5).any(|part| part == b"user0"));
        assert_eq!(inside(&mut body).unwrap(), (INTEGER, &[0, 0, 0, 1][..]));
        assert_eq!(inside(&mut body).unwrap().0, SEARCH);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(input in proptest::collection::vec(any::<u8>(), 0..100)) {
            for input in [input.clone(), message(&input), [entry(DN), input].concat()] {
                if let Ok(Some(answer)) = judge(&input) {
                    prop_assert!(answer.used <= input.len());
                }
            }
        }
    }
}

//! Workload for Redis. Every reply is checked: values by their stamp, counters by their successor, scripts by their arguments. Pure.

use super::resp::{self, Malformed, Reply};
use super::values::{Values, Write};
use super::workload::{Answer, PushAndPop, Verdict, Weights, Workload};
use stillpoint_base::Random;

/// Kinds of requests in a mix.
pub(crate) const KINDS: [&str; 6] = ["get", "set", "lua", "blpop", "incr", "ping"];

/// Script that returns its argument and the size of the value: both are known.
const SCRIPT: &[u8] = b"return {ARGV[1], redis.call('STRLEN', KEYS[1])}";

/// Expected reply.
#[derive(Debug)]
pub(crate) enum Expect {
    Value { key: u32, floor: u32 },
    Stored(Write),
    Script { key: u32, floor: u32, token: u64 },
    Counter { connection: u32 },
    Pong,
    Pushed,
    Popped { list: Vec<u8>, token: u64 },
}

/// State of the workload.
#[derive(Debug)]
pub(crate) struct Redis {
    weights: Weights,
    values: Values,
    run: u32,
    /// Last value of the counter of each connection; `None` if the next one cannot be predicted.
    counters: Vec<Option<i64>>,
    tokens: u64,
    scratch: Vec<u8>,
}

impl Redis {
    pub(crate) fn new(mix: &[(String, u32)], run: u32, values: Values, connections: u32) -> Self {
        let counters = vec![None; connections as usize];
        Redis { weights: Weights::new(mix), values, run, counters, tokens: 0, scratch: Vec::new() }
    }

    fn token(&mut self) -> u64 {
        self.tokens += 1;
        self.tokens
    }

    fn list(&self, connection: u32, epoch: u32) -> Vec<u8> {
        format!("sp:list:{:08x}:{connection}:{epoch}", self.run).into_bytes()
    }

    fn check(&mut self, expect: &Expect, reply: &Reply) -> Verdict {
        if let Reply::Error(text) = reply {
            if let Expect::Counter { connection } = expect {
                self.counters[*connection as usize] = None;
            }
            return Verdict::Error(String::from_utf8_lossy(text).into_owned());
        }
        match (expect, reply) {
            (Expect::Value { key, floor }, Reply::Bulk(value)) => self.values.check(*key, *floor, *value).into(),
            (Expect::Stored(write), Reply::Simple(b"OK")) => {
                self.values.confirm_write(*write);
                Verdict::Ok
            }
            (Expect::Script { key, floor, token }, Reply::Array(Some(items))) => match items.as_slice() {
                [Reply::Bulk(Some(echo)), Reply::Integer(size)] if *echo == token.to_string().as_bytes() => {
                    let must_be_there = *floor > 0 || self.values.loaded;
                    let right = *size == self.values.value_bytes() as i64 || (*size == 0 && !must_be_there);
                    if right { Verdict::Ok } else { Verdict::Wrong(format!("key {key} has {size} bytes in a script")) }
                }
                _ => Verdict::Wrong("a script did not return its argument".into()),
            },
            (Expect::Counter { connection }, Reply::Integer(value)) => self.check_counter(*connection, *value),
            (Expect::Pong, Reply::Simple(b"PONG")) => Verdict::Ok,
            (Expect::Pushed, Reply::Integer(1..)) => Verdict::Ok,
            (Expect::Popped { list, token }, Reply::Array(Some(items))) => match items.as_slice() {
                [Reply::Bulk(Some(from)), Reply::Bulk(Some(value))]
                    if from == list && *value == token.to_string().as_bytes() =>
                {
                    Verdict::Ok
                }
                _ => Verdict::Wrong("a pop returned an element that was not pushed".into()),
            },
            _ => Verdict::Wrong("the reply is of another type than the request".into()),
        }
    }

    /// Checks a connection's own counter: two steps for one request, or none, are detected.
    fn check_counter(&mut self, connection: u32, value: i64) -> Verdict {
        match self.counters[connection as usize].replace(value) {
            Some(before) if value != before + 1 => {
                Verdict::Wrong(format!("counter {connection} went from {before} to {value}"))
            }
            _ => Verdict::Ok,
        }
    }
}

impl Workload for Redis {
    type Expect = Expect;

    fn kinds(&self) -> Vec<String> {
        self.weights.names().to_vec()
    }

    fn draw(&mut self, rng: &mut Random) -> u8 {
        self.weights.draw(rng)
    }

    fn is_push(&self, kind: u8) -> bool {
        self.weights.names()[usize::from(kind)] == "blpop"
    }

    fn append_request(&mut self, kind: u8, connection: u32, rng: &mut Random, out: &mut Vec<u8>) -> Expect {
        match self.weights.names()[usize::from(kind)].as_str() {
            "get" => {
                let key = self.values.draw(rng);
                let floor = self.values.floor(key);
                resp::command(out, &[b"GET", key_name(&mut self.scratch, key)]);
                Expect::Value { key, floor }
            }
            "set" => {
                let write = self.values.begin_write(rng);
                set(&self.values, write.key, write.seq, &mut self.scratch, out);
                Expect::Stored(write)
            }
            "lua" => {
                let key = self.values.draw(rng);
                let (floor, token) = (self.values.floor(key), self.token());
                let argument = token.to_string();
                let name = key_name(&mut self.scratch, key);
                resp::command(out, &[b"EVAL", SCRIPT, b"1", name, argument.as_bytes()]);
                Expect::Script { key, floor, token }
            }
            "incr" => {
                let name = format!("sp:counter:{:08x}:{connection}", self.run);
                resp::command(out, &[b"INCR", name.as_bytes()]);
                Expect::Counter { connection }
            }
            // Pushes are sent by `push`, see `is_push`.
            _ => self.ping(out),
        }
    }

    fn judge_answer(&mut self, expect: &Expect, input: &[u8]) -> Result<Option<Answer>, Malformed> {
        let Some((reply, used)) = resp::parse(input)? else { return Ok(None) };
        Ok(Some(Answer { used, verdict: self.check(expect, &reply) }))
    }

    fn abandon(&mut self, expect: Expect) {
        match expect {
            Expect::Stored(write) => self.values.abandon_write(write),
            Expect::Counter { connection } => self.counters[connection as usize] = None,
            _ => {}
        }
    }

    fn ping(&mut self, out: &mut Vec<u8>) -> Expect {
        out.extend_from_slice(b"*1\r\n$4\r\nPING\r\n");
        Expect::Pong
    }

    fn block(&mut self, connection: u32, epoch: u32, out: &mut Vec<u8>) {
        resp::command(out, &[b"BLPOP", &self.list(connection, epoch), b"0"]);
    }

    fn push(&mut self, connection: u32, epoch: u32, out: &mut Vec<u8>) -> PushAndPop<Expect> {
        let (list, token) = (self.list(connection, epoch), self.token());
        resp::command(out, &[b"RPUSH", &list, token.to_string().as_bytes()]);
        PushAndPop { push: Expect::Pushed, pop: Expect::Popped { list, token } }
    }
}

/// Appends a `SET` of write `seq` to `key`.
pub(crate) fn set(values: &Values, key: u32, seq: u32, scratch: &mut Vec<u8>, out: &mut Vec<u8>) {
    out.extend_from_slice(b"*3\r\n$3\r\nSET\r\n");
    resp::bulk(out, key_name(scratch, key));
    resp::bulk_head(out, values.value_bytes());
    values.append(key, seq, out);
    out.extend_from_slice(b"\r\n");
}

/// Returns `sp:` and the number of the key.
pub(crate) fn key_name(scratch: &mut Vec<u8>, key: u32) -> &[u8] {
    scratch.clear();
    scratch.extend_from_slice(b"sp:");
    resp::decimal(scratch, u64::from(key));
    scratch
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redis(mix: &[(&str, u32)]) -> Redis {
        let mix: Vec<_> = mix.iter().map(|&(name, weight)| (name.to_owned(), weight)).collect();
        Redis::new(&mix, 7, Values::new(7, 100, 64), 4)
    }

    fn verdict(redis: &mut Redis, expect: &Expect, reply: &[u8]) -> Verdict {
        redis.judge_answer(expect, reply).unwrap().unwrap().verdict
    }

    #[test]
    fn the_answer_to_another_question_is_wrong() {
        let mut redis = redis(&[("get", 1)]);
        let mut out = Vec::new();
        let expect = redis.append_request(0, 0, &mut Random::new(1), &mut out);
        assert!(out.starts_with(b"*2\r\n$3\r\nGET\r\n$"));
        assert!(matches!(verdict(&mut redis, &expect, b"+OK\r\n"), Verdict::Wrong(_)));
        assert!(matches!(verdict(&mut redis, &expect, b"$3\r\nabc\r\n"), Verdict::Wrong(_)));
        assert!(matches!(verdict(&mut redis, &expect, b"-LOADING\r\n"), Verdict::Error(_)));
        assert_eq!(verdict(&mut redis, &expect, b"$-1\r\n"), Verdict::Ok);
        redis.values.loaded = true;
        assert!(matches!(verdict(&mut redis, &expect, b"$-1\r\n"), Verdict::Wrong(_)));
    }

    #[test]
    fn a_counter_that_skips_or_repeats_is_found_out() {
        let mut redis = redis(&[("incr", 1)]);
        let expect = redis.append_request(0, 2, &mut Random::new(1), &mut Vec::new());
        assert_eq!(verdict(&mut redis, &expect, b":17\r\n"), Verdict::Ok);
        assert_eq!(verdict(&mut redis, &expect, b":18\r\n"), Verdict::Ok);
        assert!(matches!(verdict(&mut redis, &expect, b":18\r\n"), Verdict::Wrong(_)));
        assert!(matches!(verdict(&mut redis, &expect, b":20\r\n"), Verdict::Wrong(_)));
        redis.abandon(expect);
        let expect = redis.append_request(0, 2, &mut Random::new(1), &mut Vec::new());
        assert_eq!(verdict(&mut redis, &expect, b":30\r\n"), Verdict::Ok);
    }

    #[test]
    fn a_pop_must_return_what_was_pushed_to_its_own_list() {
        let mut redis = redis(&[("blpop", 1)]);
        let mut out = Vec::new();
        let pair = redis.push(3, 0, &mut out);
        assert_eq!(verdict(&mut redis, &pair.push, b":1\r\n"), Verdict::Ok);
        let right = b"*2\r\n$20\r\nsp:list:00000007:3:0\r\n$1\r\n1\r\n";
        assert_eq!(verdict(&mut redis, &pair.pop, right), Verdict::Ok);
        let other = b"*2\r\n$20\r\nsp:list:00000007:3:0\r\n$1\r\n2\r\n";
        assert!(matches!(verdict(&mut redis, &pair.pop, other), Verdict::Wrong(_)));
        assert!(matches!(verdict(&mut redis, &pair.pop, b"*-1\r\n"), Verdict::Wrong(_)));
    }

    #[test]
    fn a_script_must_return_its_argument_and_the_size_of_the_value() {
        let mut redis = redis(&[("lua", 1)]);
        let expect = redis.append_request(0, 0, &mut Random::new(1), &mut Vec::new());
        assert_eq!(verdict(&mut redis, &expect, b"*2\r\n$1\r\n1\r\n:64\r\n"), Verdict::Ok);
        assert_eq!(verdict(&mut redis, &expect, b"*2\r\n$1\r\n1\r\n:0\r\n"), Verdict::Ok);
        assert!(matches!(verdict(&mut redis, &expect, b"*2\r\n$1\r\n2\r\n:64\r\n"), Verdict::Wrong(_)));
        assert!(matches!(verdict(&mut redis, &expect, b"*2\r\n$1\r\n1\r\n:63\r\n"), Verdict::Wrong(_)));
    }
}

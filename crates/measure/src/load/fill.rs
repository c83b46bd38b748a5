//! Fill of the key space, pipelined, before a load.

use std::io::{self, BufWriter, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::connection::Address;
use super::plan::{Plan, Protocol, Target};
use super::redis::{self, key_name};
use super::resp::{self, Reply};
use super::values::Values;
use super::{memcached, plan};
use crate::error::{Error, Result};

/// Commands in progress at a time; their answers fit the socket buffers, so writing never waits for reading.
const BATCH_COMMANDS: u64 = 2_000;
const IO_TIMEOUT: Duration = Duration::from_secs(60);

/// Result of a fill.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Fill {
    /// Number of keys stored.
    pub keys: u64,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Stores every key of the key space with its initial value.
///
/// # Errors
/// The server cannot be reached, or an answer does not confirm a stored value; earlier keys stay stored.
pub fn fill(target: &Target, protocol: &Protocol, mut progress: impl FnMut(u64)) -> Result<Fill> {
    let (keys, value_bytes) = protocol.size();
    type Set = fn(&Values, u32, u32, &mut Vec<u8>, &mut Vec<u8>);
    let (set, stored): (Set, &[u8]) = match protocol {
        Protocol::Redis { .. } => (redis::set, b"+OK\r\n"),
        Protocol::Memcached { .. } => (memcached::set, b"STORED\r\n"),
        _ => return Err(Error::Plan { option: "load", problem: format!("{} has no keys", protocol.name()) }),
    };
    plan::check_value_bytes(value_bytes)?;
    plan::check_keys(keys)?;
    let began = Instant::now();
    let mut client = Client::connect(target)?;
    // The stamp needs no table of keys; run 0 is the fill.
    let values = Values::new(0, 0, value_bytes);
    let (mut out, mut scratch) = (Vec::new(), Vec::new());
    for first in (0..keys).step_by(BATCH_COMMANDS as usize) {
        out.clear();
        let batch = first..(first + BATCH_COMMANDS).min(keys);
        for key in batch.clone() {
            set(&values, key as u32, 0, &mut scratch, &mut out);
        }
        client.store(&out, stored, batch.end - batch.start, first)?;
        progress(batch.end);
    }
    Ok(Fill { keys, seconds: began.elapsed().as_secs_f64() })
}

/// Returns true if the first, the middle and the last key exist: then a later miss is a wrong answer.
pub(super) fn is_loaded(plan: &Plan, keys: u64) -> Result<bool> {
    let mut client = Client::connect(&plan.target)?;
    let (mut out, mut scratch) = (Vec::new(), Vec::new());
    for key in [0, keys / 2, keys - 1] {
        let name = key_name(&mut scratch, key as u32);
        out.clear();
        let redis = matches!(plan.protocol, Protocol::Redis { .. });
        if redis {
            resp::command(&mut out, &[b"EXISTS", name]);
        } else {
            out.extend_from_slice(b"get ");
            out.extend_from_slice(name);
            out.extend_from_slice(b"\r\n");
        }
        let found = client.ask(&out, |input| {
            if redis {
                let reply = resp::parse(input).map_err(|malformed| malformed.0)?;
                return Ok(reply.map(|(reply, _)| reply == Reply::Integer(1)));
            }
            Ok(input.ends_with(b"END\r\n").then(|| input.starts_with(b"VALUE ")))
        });
        if !found.map_err(|source| Error::Connect { target: plan.target.to_string(), source })? {
            return Ok(false);
        }
    }
    Ok(true)
}

trait Stream: Read + Write {}
impl<S: Read + Write> Stream for S {}

/// Plain blocking connection.
struct Client {
    stream: BufWriter<Box<dyn Stream>>,
    target: String,
}

impl Client {
    fn connect(target: &Target) -> Result<Client> {
        let name = target.to_string();
        let fail = |source| Error::Connect { target: name.clone(), source };
        let stream: Box<dyn Stream> = match target.resolve()? {
            Address::Tcp(address) => {
                let stream = TcpStream::connect_timeout(&address, IO_TIMEOUT).map_err(fail)?;
                stream.set_nodelay(true).and_then(|()| stream.set_read_timeout(Some(IO_TIMEOUT))).map_err(fail)?;
                Box::new(stream)
            }
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).map_err(fail)?;
                stream.set_read_timeout(Some(IO_TIMEOUT)).map_err(fail)?;
                Box::new(stream)
            }
        };
        Ok(Client { stream: BufWriter::new(stream), target: name })
    }

    /// Sends a batch and reads the answer `stored` `count` times.
    fn store(&mut self, batch: &[u8], stored: &[u8], count: u64, first: u64) -> Result<()> {
        let fail = |source| Error::Connect { target: self.target.clone(), source };
        self.stream.write_all(batch).and_then(|()| self.stream.flush()).map_err(fail)?;
        let mut answers = vec![0; stored.len() * count as usize];
        let mut got = 0;
        while got < answers.len() {
            match self.stream.get_mut().read(&mut answers[got..]) {
                Ok(0) => return Err(fail(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => got += count,
                Err(source) => return Err(fail(source)),
            }
            // Checked as it arrives: an error is shorter than the expected answer, and waiting for the rest would take a minute.
            let whole = &answers[..got - got % stored.len()];
            if let Some(at) = whole.chunks(stored.len()).position(|chunk| chunk != stored) {
                let text = String::from_utf8_lossy(&answers[at * stored.len()..got]).into_owned();
                let answer = text.lines().next().unwrap_or_default().to_owned();
                return Err(Error::Fill { target: self.target.clone(), key: first + at as u64, answer });
            }
        }
        Ok(())
    }

    /// Sends a request and reads until `judge` returns a value.
    fn ask<T>(&mut self, question: &[u8], judge: impl Fn(&[u8]) -> Result<Option<T>, String>) -> io::Result<T> {
        self.stream.write_all(question)?;
        self.stream.flush()?;
        let (mut input, mut buffer) = (Vec::new(), [0; 4096]);
        loop {
            let count = self.stream.get_mut().read(&mut buffer)?;
            if count == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            input.extend_from_slice(&buffer[..count]);
            if let Some(answer) = judge(&input).map_err(io::Error::other)? {
                return Ok(answer);
            }
        }
    }
}

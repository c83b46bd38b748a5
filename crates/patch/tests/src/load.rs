//! Load on a redis or memcached, by `stillpoint measure` in a process of its own, and the requests of its clients in
//! any window of time.

use crate::cli::Stillpoint;
use crate::server::ChildGuard;
use crate::wait;
use rustix::process::Signal;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use stillpoint_measure::record::Record;
use stillpoint_measure::summary::Summary;

/// Load of the clients.
#[derive(Debug, Clone)]
pub struct Clients {
    /// Protocol: `redis` or `memcached`.
    pub protocol: &'static str,
    /// Connections that carry requests.
    pub connections: u32,
    /// Requests a second, sent by schedule, also without answers.
    pub rate: u32,
    /// Connections that are only kept open.
    pub idle: u32,
    /// Connections blocked in BLPOP to the end.
    pub blocking: u32,
    /// Kinds of requests with weights.
    pub mix: &'static str,
    /// Keys in the key space.
    pub keys: u64,
}

impl Default for Clients {
    fn default() -> Clients {
        Clients {
            protocol: "redis",
            connections: 50,
            rate: 8_000,
            idle: 200,
            blocking: 20,
            mix: "get=75,set=20,lua=5",
            keys: 100_000,
        }
    }
}

/// Load in progress.
#[derive(Debug)]
pub struct Load {
    process: ChildGuard,
    record: PathBuf,
    output: PathBuf,
}

/// Results of a load.
#[derive(Debug)]
pub struct Observed {
    /// Record of every request.
    pub record: Record,
    /// Output of `stillpoint measure --json` at its end.
    pub result: serde_json::Value,
}

impl Load {
    /// Fills the key space of the server on `port`.
    #[track_caller]
    pub fn fill(port: u16, clients: &Clients) {
        let call =
            Stillpoint::new().args(["measure", "load", "--addr"]).arg(address(port)).arg("--keys").arg(clients.keys);
        call.args(["--protocol", clients.protocol]).succeed();
    }

    /// Starts it, and returns when requests get answers. The record and the output go to files in `dir`.
    #[track_caller]
    pub fn start(port: u16, clients: &Clients, dir: &Path, name: &str) -> Load {
        let (record, output) = (dir.join(format!("{name}.rec")), dir.join(format!("{name}.json")));
        let call = Stillpoint::new()
            .args(["measure", clients.protocol, "--addr"])
            .arg(address(port))
            .args(["--mix", clients.mix, "--duration", "36000", "--connections"])
            .arg(clients.connections)
            .arg("--rate")
            .arg(clients.rate)
            .arg("--idle")
            .arg(clients.idle)
            .arg("--keys")
            .arg(clients.keys)
            .arg("--record")
            .arg(&record)
            .json();
        let call = match clients.protocol {
            "redis" => call.arg("--blocking").arg(clients.blocking),
            _ => call,
        };
        let file = File::create(&output).unwrap_or_else(|e| panic!("create {}: {e}", output.display()));
        let child = call.command().stdout(file).stderr(Stdio::piped()).spawn().expect("start stillpoint measure");
        let mut load = Load { process: ChildGuard::from_child(child), record, output };
        load.await_answers();
        load
    }

    fn await_answers(&mut self) {
        wait::until("the load to record requests", || {
            self.assert_running();
            Record::open(&self.record).ok().filter(|record| !record.samples.is_empty())
        });
    }

    /// Panics with its output unless it runs.
    #[track_caller]
    pub fn assert_running(&mut self) {
        if let Some(status) = self.process.ended() {
            let mut errors = String::new();
            if let Some(pipe) = &mut self.process.child().stderr {
                // An unreadable pipe has no text to show.
                let _ = pipe.read_to_string(&mut errors);
            }
            panic!("stillpoint measure ended with {status}: {errors}");
        }
    }

    /// Ends it in order and reads what it recorded.
    #[track_caller]
    pub fn finish(mut self) -> Observed {
        self.assert_running();
        self.process.signal(Signal::INT);
        wait::until("the load to end", || self.process.ended());
        let record = Record::open(&self.record).unwrap_or_else(|e| panic!("read the record: {e}"));
        let text = std::fs::read_to_string(&self.output).expect("read the load's output");
        let last = text.lines().last().unwrap_or_default();
        let result = serde_json::from_str(last).unwrap_or_else(|e| panic!("the load printed {last:?}: {e}"));
        Observed { record, result }
    }

    /// Returns the path of the file with every request.
    pub fn record_path(&self) -> &Path {
        &self.record
    }
}

impl Observed {
    /// Returns requests in progress at any time in one of the windows (nanoseconds of `CLOCK_MONOTONIC`).
    pub fn windows(&self, windows: &[(u64, u64)]) -> Summary {
        let inside = |from: u64, to: u64| windows.iter().any(|&(a, b)| from <= b && to >= a);
        let samples = self.record.samples.iter().filter(|s| inside(s.scheduled_ns, s.ended_ns()));
        let from = windows.iter().map(|w| w.0).min().unwrap_or(0);
        let to = windows.iter().map(|w| w.1).max().unwrap_or(0);
        Summary::of_samples(&self.record.header.kinds, samples, from, to)
    }

    /// Returns the summary of all requests.
    pub fn all(&self) -> Summary {
        Summary::of_record(&self.record)
    }

    /// Returns the number of connections that ended without a request of the client.
    pub fn dropped(&self) -> u64 {
        self.record.end.map_or(0, |end| end.dropped)
    }

    /// Returns the number of idle and blocked connections that were not alive at the end.
    pub fn dead(&self) -> u64 {
        let (header, end) = (&self.record.header, self.record.end.unwrap_or_default());
        u64::from(header.idle - end.idle_alive.min(header.idle))
            + u64::from(header.blocking - end.blocking_alive.min(header.blocking))
    }
}

fn address(port: u16) -> String {
    format!("127.0.0.1:{port}")
}

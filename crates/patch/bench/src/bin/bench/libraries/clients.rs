//! Clients that print a line for each answer, and the count of their answers and failures.

use super::programs::Machine;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdout, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use stillpoint_patch_tests::wait;

/// Answers and failures of all clients so far.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) answers: u64,
    pub(super) failed: usize,
}

/// Answers that one client has got.
#[derive(Debug)]
struct Progress {
    /// The client's command.
    command: String,
    answers: u64,
    last: Instant,
    longest_gap: Duration,
    failures: Vec<String>,
}

/// Running clients.
pub(super) struct Clients {
    clients: Vec<Arc<Mutex<Progress>>>,
    is_over: Arc<AtomicBool>,
    readers: Vec<JoinHandle<()>>,
    children: Vec<stillpoint_patch_tests::server::ChildGuard>,
}

fn lock(progress: &Mutex<Progress>) -> MutexGuard<'_, Progress> {
    progress.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Clients {
    /// Starts the clients of all servers of a machine.
    pub(super) fn start(machine: &mut Machine) -> Clients {
        let is_over = Arc::new(AtomicBool::new(false));
        let mut started =
            Clients { clients: Vec::new(), is_over: is_over.clone(), readers: Vec::new(), children: Vec::new() };
        for client in machine.clients() {
            let mut command = client.command;
            let progress = Arc::new(Mutex::new(Progress {
                command: format!("{command:?}"),
                answers: 0,
                last: Instant::now(),
                longest_gap: Duration::ZERO,
                failures: Vec::new(),
            }));
            command.stdout(Stdio::piped()).process_group(0);
            let mut child = machine.spawn(command);
            let stdout = child.child().stdout.take().expect("standard output is a pipe");
            let (into, over, is_answer) = (progress.clone(), is_over.clone(), client.is_answer);
            started.readers.push(std::thread::spawn(move || read(stdout, &into, &over, is_answer)));
            started.clients.push(progress);
            started.children.push(child);
        }
        started
    }

    /// Waits until each client has got two more answers.
    pub(super) fn await_answers(&self) {
        let before: Vec<u64> = self.clients.iter().map(|client| lock(client).answers).collect();
        for (client, before) in self.clients.iter().zip(before) {
            let command = lock(client).command.clone();
            wait::until(&format!("answers for {command}"), || {
                let progress = lock(client);
                assert!(progress.failures.len() < 10, "{:?}", progress.failures);
                (progress.answers >= before + 2).then_some(())
            });
        }
    }

    pub(super) fn counts(&self) -> Counts {
        self.clients.iter().map(|client| lock(client)).fold(Counts::default(), |counts, client| Counts {
            answers: counts.answers + client.answers,
            failed: counts.failed + client.failures.len(),
        })
    }

    /// Forgets the gaps of before.
    pub(super) fn begin_window(&self) {
        for client in &self.clients {
            let mut client = lock(client);
            (client.last, client.longest_gap) = (Instant::now(), Duration::ZERO);
        }
    }

    /// Returns the longest time between two answers of a client since the window has begun.
    pub(super) fn longest_gap(&self) -> Duration {
        self.clients.iter().map(|client| lock(client).longest_gap).max().unwrap_or_default()
    }

    /// Ends all clients, and returns what failed.
    pub(super) fn end(mut self) -> Vec<String> {
        self.is_over.store(true, Ordering::Relaxed);
        for child in &mut self.children {
            // with the other processes of its pipeline
            let group = rustix::process::Pid::from_raw(child.pid()).expect("a child's pid is positive");
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::TERM);
            child.end();
        }
        self.readers.into_iter().for_each(|reader| reader.join().expect("a reader ends"));
        self.clients.iter().flat_map(|client| std::mem::take(&mut lock(client).failures)).collect()
    }
}

fn read(stdout: ChildStdout, progress: &Mutex<Progress>, is_over: &AtomicBool, is_answer: fn(&str) -> bool) {
    for line in BufReader::new(stdout).lines() {
        let Ok(line) = line else { break };
        let (now, mut progress) = (Instant::now(), lock(progress));
        if is_answer(&line) {
            progress.answers += 1;
            progress.longest_gap = progress.longest_gap.max(now - progress.last);
            progress.last = now;
        } else if !is_over.load(Ordering::Relaxed) {
            progress.failures.push(line);
        }
    }
    if !is_over.load(Ordering::Relaxed) {
        lock(progress).failures.push("a client has ended".to_owned());
    }
}

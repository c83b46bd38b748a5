//! Hostile targets: ledgers that no tool of ours wrote, and memory that takes very long to search.

use crate::engine::support::compile;
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use stillpoint_patch_engine::fleet::patched_processes;
use stillpoint_patch_engine::ledger::{
    ConstantRecord, Contents, DataTransition, FunctionRecord, HookRecord, LookupRedirectRecord, Phase, PlacedPatch,
    Record, Span, SymbolRecord, Transition, encode_header,
};
use stillpoint_patch_engine::{Error, ServiceState, debugger_files, peek};
use stillpoint_patch_format::{Avma, BuildId, Scope};
use stillpoint_patch_tracee::Pid;
use stillpoint_testing::random::Random;
use stillpoint_testing::soak::rounds;
use tempfile::TempDir;

/// Makes mappings by its arguments, and waits for its end. Arguments: a file to copy into a ledger's place, the number
/// of further mappings, and the size of each in MiB.
const FORGER: &str = r#"
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
int main(int argc, char **argv) {
  // what records name as the memory of patches can be read
  mmap((void *)0x100000, 0x4000, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  size_t room = (16 << 20) + 8192;
  char *at = mmap(0, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  FILE *file = argc == 4 ? fopen(argv[1], "r") : 0;
  if (at == MAP_FAILED || !file) return 1;
  if (fread(at, 1, room, file) == 0 || mprotect(at, room, PROT_READ)) return 2;
  for (int n = atoi(argv[2]); n > 0; n--)
    if (mmap(0, (size_t)atoi(argv[3]) << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED) return 3;
  puts("ready");
  fflush(stdout);
  return getchar() == 0;
}
"#;

struct Forger {
    child: Child,
}

impl Forger {
    fn start(program: &Path, ledger: &Path, mappings: [u32; 2]) -> Forger {
        let mut command = Command::new(program);
        command.arg(ledger).args(mappings.map(|number| number.to_string()));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("the forger starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("stdout")).read_line(&mut line).expect("it says something");
        assert_eq!(line, "ready\n");
        Forger { child }
    }

    fn pid(&self) -> Pid {
        Pid(self.child.id().cast_signed())
    }
}

impl Drop for Forger {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Workshop {
    dir: TempDir,
    program: PathBuf,
}

impl Workshop {
    fn new() -> Workshop {
        let dir = tempfile::tempdir().expect("a directory");
        let program = compile(dir.path(), "forger", FORGER, &[]);
        Workshop { dir, program }
    }

    /// Starts a process that holds these records with valid checksums.
    fn forger(&self, records: &[Record]) -> Forger {
        let path = self.dir.path().join("ledger");
        std::fs::write(&path, ledger(records)).expect("write the ledger");
        Forger::start(&self.program, &path, [0, 0])
    }

    /// Starts a process without a ledger: number of mappings, and size of each in MiB.
    fn mapper(&self, mappings: [u32; 2]) -> Forger {
        let path = self.dir.path().join("nothing");
        std::fs::write(&path, "nothing").expect("write a file");
        Forger::start(&self.program, &path, mappings)
    }
}

fn ledger(records: &[Record]) -> Vec<u8> {
    let mut bytes = encode_header(0x80).to_vec();
    for (record, sequence) in records.iter().zip(1_u32..) {
        let payload = postcard::to_stdvec(record).expect("encodes");
        let digest = Sha256::new().chain_update(sequence.to_le_bytes()).chain_update(&payload).finalize();
        bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&sequence.to_le_bytes());
        bytes.extend_from_slice(&digest[..8]);
        bytes.extend_from_slice(&payload);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
    bytes
}

fn patch() -> PlacedPatch {
    let at = |offset: u64, len| Span::new(Avma(0x10_0000 + offset), len);
    PlacedPatch {
        name: "fix".into(),
        digest: [0; 32],
        description: "a fix".into(),
        cves: vec![],
        diffs: vec![],
        based_on: vec![],
        build_id: BuildId(vec![1; 20]),
        module: "forger".into(),
        bias: 0,
        signer: None,
        scope: Scope::ThreadLocal,
        placed_at_s: 0,
        arena: at(0, 0x3000),
        states: at(0x1000, 64),
        trampolines: vec![],
        text: vec![],
        eh_frame: at(0x1100, 64),
        search_table: at(0x1200, 16),
        functions: vec![],
        constants: vec![],
        data: vec![],
        off_stack: vec![],
        staying: vec![],
        exports: vec![],
        escaping: vec![],
        hooks: HookRecord::default(),
        symbols: vec![],
    }
}

fn forged(forge: impl FnOnce(&mut PlacedPatch)) -> Record {
    let mut patch = patch();
    forge(&mut patch);
    Record::Placed(Box::new(patch))
}

fn redirect(len: u64) -> Record {
    Record::LookupRedirect(Box::new(LookupRedirectRecord {
        entry: Avma(0x1000),
        original: [0; 5],
        jump: [0; 5],
        inner_boundaries: vec![],
        code: Avma(0x2000),
        displaced: Avma(0x2080),
        table: Span::new(Avma(0x3000), len),
    }))
}

#[test]
fn a_forged_ledger_is_refused_and_nothing_is_written_for_it() {
    let shop = Workshop::new();
    let cases = [
        ("a path", forged(|patch| patch.name = "../../../../tmp/stillpoint-forged".into())),
        ("a line of a script", forged(|patch| patch.name = "x\nshell touch /tmp/stillpoint-forged\n".into())),
        ("memory without end", forged(|patch| patch.arena.len = u64::MAX)),
        ("1 TiB", forged(|patch| patch.eh_frame.len = 1 << 40)),
        ("states before the text", forged(|patch| patch.states.start = Avma(0))),
        ("a lookup redirect without a table", redirect(8)),
    ];
    for (what, record) in cases {
        let forger = shop.forger(&[record]);
        let error = peek(forger.pid()).expect_err(what);
        assert!(matches!(error, Error::Ledger(_)), "{what}: {error:?}");
        assert_eq!(error.service_state(), ServiceState::Untouched, "{what}");
        let directory = shop.dir.path().join("gdb");
        debugger_files(forger.pid(), &directory).expect_err(what);
        assert!(!directory.exists(), "{what}");
        assert!(!Path::new("/tmp/stillpoint-forged").exists(), "{what}");
    }
}

struct Dice(Random);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0.index(end)
    }

    fn text(&mut self) -> String {
        const TEXTS: [&str; 8] = [
            "../../../../tmp/stillpoint-forged",
            "x\nshell touch /tmp/stillpoint-forged\n",
            "\u{1b}]0;x\u{7}",
            "",
            "\" -s .text 0\nshell touch /tmp/stillpoint-forged",
            "-o",
            "fix",
            "sorted",
        ];
        TEXTS[self.below(TEXTS.len())].to_owned()
    }

    fn number(&mut self) -> u64 {
        const NUMBERS: [u64; 12] =
            [0, 1, 64, 0x1000, 0x10_0000, 0x10_1000, 1 << 30, 1 << 40, (1 << 47) - 1, 1 << 47, u64::MAX - 4, u64::MAX];
        NUMBERS[self.below(NUMBERS.len())]
    }

    fn numbers(&mut self, end: u32) -> Vec<u32> {
        (0..self.below(3)).map(|_| self.below(end as usize + 1) as u32).collect()
    }

    /// Makes a function with valid records, except for random faults.
    fn function(&mut self) -> FunctionRecord {
        let at = |offset: u64, len| Span::new(Avma(0x10_0000 + offset), len);
        let mut function = FunctionRecord {
            name: "f".into(),
            unit: "a.c".into(),
            old: at(0x2000, 64),
            old_parts: vec![],
            original: [0x90; 5],
            displaced_len: 5,
            inner_boundaries: vec![1, 2],
            loops_to_entry: false,
            displaced: at(0, 0).start,
            new: at(0x200, 0).start,
            new_span: at(0x200, 32),
            dispatchers: at(0x180, 128),
            dispatcher_len: 64,
        };
        match self.below(12) {
            0 => function.name = self.text(),
            1 => function.unit = self.text(),
            2 => function.old = Span::new(Avma(self.number()), self.number()),
            3 => function.displaced_len = self.number() as u8,
            4 => function.inner_boundaries = vec![self.number() as u8; 3],
            5 => function.dispatchers.len = self.number(),
            6 => function.dispatcher_len = self.number() as u32,
            _ => {}
        }
        function
    }

    fn placed(&mut self) -> Record {
        let mut patch = patch();
        for _ in 0..self.below(4) {
            match self.below(14) {
                0 => patch.name = self.text(),
                1 => patch.module = self.text(),
                2 => patch.description = self.text(),
                3 => patch.cves.push(self.text()),
                4 => patch.arena = Span::new(Avma(self.number()), self.number()),
                5 => patch.states.start = Avma(self.number()),
                6 => patch.eh_frame.len = self.number(),
                7 => patch.trampolines.push(Span::new(Avma(self.number()), self.number())),
                8 => patch.bias = self.number(),
                9 => patch.hooks.post_apply.push(Avma(self.number())),
                10 => {
                    let (name, span) = (self.text(), Span::new(Avma(self.number()), self.number()));
                    patch.symbols.push(SymbolRecord { name, span, code: true });
                }
                11 => {
                    let new = vec![7; self.number() as usize % 5000];
                    let original = if self.below(4) == 0 { vec![] } else { new.clone() };
                    patch.constants.push(ConstantRecord { name: self.text(), at: Avma(self.number()), original, new });
                }
                _ => patch.functions.push(self.function()),
            }
        }
        Record::Placed(Box::new(patch))
    }

    fn data(&mut self) -> Vec<ConstantRecord> {
        let one = |dice: &mut Self| {
            let new = vec![7; dice.number() as usize % 5000];
            let original = if dice.below(4) == 0 { vec![] } else { new.clone() };
            ConstantRecord { name: dice.text(), at: Avma(dice.number()), original, new }
        };
        (0..self.below(4)).map(|_| one(self)).collect()
    }

    fn data_transition(&mut self) -> DataTransition {
        let data = self.data().into_iter();
        let changes = data.map(|c| Contents { name: c.name, at: c.at, from: c.original, to: c.new }).collect();
        let opened = (0..self.below(3)).map(|_| Span::new(Avma(self.number()), self.number())).collect();
        DataTransition { changes, opened, completer: Avma(self.number()) }
    }

    /// Makes records that usually contradict each other.
    fn records(&mut self) -> Vec<Record> {
        let mut records: Vec<Record> = (0..=self.below(3)).map(|_| self.placed()).collect();
        let (last, mut active) = (records.len() as u32, Vec::new());
        if self.below(3) == 0 {
            records.push(Record::PlacedData(self.data()));
        }
        for number in 1..=self.below(3) as u32 {
            let before = if self.below(8) == 0 { self.numbers(last) } else { active.clone() };
            let after = self.numbers(last);
            let begun = Transition {
                number: if self.below(8) == 0 { self.number() as u32 } else { number },
                operation: if self.below(8) == 0 { self.text() } else { "apply".into() },
                state: Avma(if self.below(8) == 0 { self.number() } else { 0x10_1000 }),
                before,
                after: after.clone(),
                sites: vec![],
                constants: vec![],
                data: None,
                trampolines: vec![],
                leave: vec![],
                enter: vec![],
                staying: vec![],
                loop_entries: vec![],
            };
            records.push(match self.below(4) {
                0 => Record::BeginWithData(Box::new(begun), Box::new(self.data_transition())),
                _ => Record::Begin(Box::new(begun)),
            });
            let phase = [Phase::Committed, Phase::Migrating, Phase::Aborted, Phase::Resting][self.below(4)];
            if phase == Phase::Committed {
                active = after;
            }
            records.push(Record::Phase { transition: number, phase });
        }
        if self.below(4) == 0 {
            records.push(redirect(self.number()));
        }
        records
    }
}

/// Reads 1,000 ledgers in the long form. For any content, the reader terminates and writes no value from them.
#[test]
fn ledgers_that_were_made_up_harm_no_reader() {
    let shop = Workshop::new();
    let seed = std::env::var("STILLPOINT_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed);
    let (mut dice, mut believed) = (Dice(Random::new(seed)), 0);
    for round in 0..rounds(40, 1000) {
        let records = dice.records();
        let forger = shop.forger(&records);
        let begun = Instant::now();
        let peeked = peek(forger.pid());
        let directory = shop.dir.path().join(format!("gdb-{round}"));
        let files = debugger_files(forger.pid(), &directory);
        let of = || format!("seed {seed}, round {round}: {records:?}");
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}, {}", begun.elapsed(), of());
        if let Err(error) = &peeked {
            assert_eq!(error.service_state(), ServiceState::Untouched, "{error}, {}", of());
        }
        assert!(!Path::new("/tmp/stillpoint-forged").exists(), "{}", of());
        let Ok(files) = files else { continue };
        believed += 1;
        std::fs::remove_file(&files.perf_map).expect("remove the names for perf");
        let script = std::fs::read_to_string(&files.script).expect("read the script");
        let ours = format!("add-symbol-file \"{}/", directory.display());
        assert!(script.lines().skip(1).all(|line| line.starts_with(&ours)), "{script}, {}", of());
        assert!(
            files.images.iter().all(|image| image.parent() == Some(directory.as_path()) && image.exists()),
            "{}",
            of()
        );
    }
    assert!(believed > 0, "no ledger was good enough to be used");
}

#[test]
fn a_hostile_process_keeps_none_of_the_others_from_being_found() {
    let shop = Workshop::new();
    let (liar, honest) = (shop.forger(&[forged(|patch| patch.name = "a\nb".into())]), shop.forger(&[forged(|_| ())]));
    let carriers = patched_processes();
    assert!(carriers.found.iter().any(|status| status.pid == honest.pid().0), "{carriers:?}");
    let left_out = carriers.unknown.iter().find(|(pid, _)| *pid == liar.pid()).expect("it is named");
    assert!(matches!(left_out.1, Error::Ledger(_)), "{left_out:?}");
    // threads of the kernel carry no patches, and are not reported
    let is_kernel = |(_, error): &(Pid, Error)| error.to_string().contains("kernel thread");
    assert!(!carriers.unknown.iter().any(is_kernel), "{carriers:?}");
}

#[test]
fn memory_that_nothing_touched_is_not_searched_page_by_page() {
    let shop = Workshop::new();
    let vast = shop.mapper([100, 256]);
    assert!(peek(vast.pid()).expect("it is searched").is_none());
    let endless = shop.mapper([70, 1024]);
    let error = peek(endless.pid()).expect_err("that much is not");
    assert!(matches!(error, Error::TooMuchMemory(pid) if pid == endless.pid()), "{error:?}");
}

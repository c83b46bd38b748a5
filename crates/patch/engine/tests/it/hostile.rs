//! Targets that lie: ledgers that no tool of ours wrote, and memory that takes for ever to search.

use crate::support::compile;
use sha2::{Digest, Sha256};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use stillpoint_patch_engine::fleet::carriers;
use stillpoint_patch_engine::ledger::{GuideRecord, HookRecord, PlacedPatch, Record, Span, encode_header};
use stillpoint_patch_engine::{Error, Landing, debugger_files, peek};
use stillpoint_patch_format::{Avma, BuildId, Scope};
use stillpoint_patch_tracee::Pid;
use tempfile::TempDir;

/// Maps what its arguments say, and waits for its end: a file to be copied into a ledger's place, how many further mappings, and
/// how many MiB each has.
const FORGER: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
int main(int argc, char **argv) {
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

    /// A process that holds these records under right checksums.
    fn forger(&self, records: &[Record]) -> Forger {
        let path = self.dir.path().join("ledger");
        std::fs::write(&path, ledger(records)).expect("write the ledger");
        Forger::start(&self.program, &path, [0, 0])
    }

    /// A process without a ledger, and with so many mappings of so many MiB.
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

fn guide(len: u64) -> Record {
    Record::Guide(Box::new(GuideRecord {
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
        ("a guide without a table", guide(8)),
    ];
    for (what, record) in cases {
        let forger = shop.forger(&[record]);
        let error = peek(forger.pid()).expect_err(what);
        assert!(matches!(error, Error::Ledger(_)), "{what}: {error:?}");
        assert_eq!(error.landing(), Landing::Untouched, "{what}");
        let directory = shop.dir.path().join("gdb");
        debugger_files(forger.pid(), &directory).expect_err(what);
        assert!(!directory.exists(), "{what}");
        assert!(!Path::new("/tmp/stillpoint-forged").exists(), "{what}");
    }
}

#[test]
fn a_hostile_process_keeps_none_of_the_others_from_being_found() {
    let shop = Workshop::new();
    let (liar, honest) = (shop.forger(&[forged(|patch| patch.name = "a\nb".into())]), shop.forger(&[forged(|_| ())]));
    let carriers = carriers();
    assert!(carriers.found.iter().any(|status| status.pid == honest.pid().0), "{carriers:?}");
    let left_out = carriers.unclear.iter().find(|(pid, _)| *pid == liar.pid()).expect("it is named");
    assert!(matches!(left_out.1, Error::Ledger(_)), "{left_out:?}");
    // threads of the kernel carry nothing, and are not worth a word
    let is_kernel = |(_, error): &(Pid, Error)| error.to_string().contains("kernel thread");
    assert!(!carriers.unclear.iter().any(is_kernel), "{carriers:?}");
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

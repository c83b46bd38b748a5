//! Time for which a program is stopped, by the size of its memory, without the kernel's boot: criu's own images (basic,
//! incremental, on demand), FOAM on disk, FOAM in memory that outlives kernels. After KUP's figures 4, 7 and 8 (ATC
//! 2016). There is one emulated machine for each size, and for each number of simultaneous programs; a last switch of
//! kernels shows the additional time of the boot.
//!
//! The machines' clocks count instructions: other work of the host has little effect.
//!
//! usage: kup-fig7 JSON SVG [MIB...]; a table goes to standard output. Results are kept in JSON.part: a second run
//! continues after them, and a size that fails does not affect the others.
#![forbid(unsafe_code)]

use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};
use stillpoint_testing::figure::{Axis, Curve, Figure};
use stillpoint_testing::machine::clients::{switch, wait_until_done};
use stillpoint_testing::machine::{Clock, Guest, Machine, Shape};

const METHODS: [(&str, &str); 5] = [
    ("basic", "basic (criu, disk)"),
    ("incremental", "incremental (criu, disk)"),
    ("on-demand", "on demand (criu, disk)"),
    ("foam-disk", "FOAM, disk"),
    ("foam-pmem", "FOAM, pmem"),
];
/// MiB of pages a second that the worker writes to.
const DIRTY_MIB_PER_S: u32 = 4;
/// Limit for one method, once.
const METHOD_TIMEOUT: Duration = Duration::from_secs(1800);
/// MiB of a machine's memory beside the region, at least: the 3 GiB that are located below 4 GiB, and some after it.
const EXTRA_MEMORY_MIB: u32 = 3072 + 768;
/// Sizes in MiB if no argument is given.
const SIZES_MIB: [u32; 4] = [256, 512, 1024, 2048];
/// Numbers of simultaneous programs, and the size of each in MiB.
const COUNTS: [u32; 4] = [1, 2, 4, 8];
const PROGRAM_MIB: u32 = 64;

/// Simultaneous programs of one measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Load {
    mib: u32,
    count: u32,
}

impl Load {
    fn is_of(self, row: &Value) -> bool {
        row["mib"] == self.mib && row["count"] == self.count
    }

    fn total(self) -> u32 {
        self.mib * self.count
    }
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (tool, [json, svg, sizes @ ..]) = (std::env::var_os("STILLPOINT_BIN"), &words[..]) else {
        eprintln!("usage: STILLPOINT_BIN=FILE kup-fig7 JSON SVG [MIB...]");
        return ExitCode::from(2);
    };
    let sizes: Result<Vec<u32>, _> = sizes.iter().map(|word| word.parse()).collect();
    let (Some(tool), Ok(sizes)) = (tool, sizes) else {
        eprintln!("error: STILLPOINT_BIN names the binary, and sizes are MiB");
        return ExitCode::from(2);
    };
    let guest = match Guest::build() {
        Ok(guest) => guest,
        Err(why) => {
            eprintln!("error: {why}");
            return ExitCode::from(3);
        }
    };
    let sizes = if sizes.is_empty() { SIZES_MIB.to_vec() } else { sizes };
    let by_size: Vec<Load> = sizes.into_iter().map(|mib| Load { mib, count: 1 }).collect();
    let by_count = COUNTS.map(|count| Load { mib: PROGRAM_MIB, count });
    let part = format!("{json}.part");
    let earlier_rows = measure(&guest, Path::new(&tool), (&by_count, &by_size), Path::new(&part));
    let Some((rows, kexec)) = earlier_rows else {
        eprintln!("error: some measurements failed; {part} contains the others, and the next run continues with it");
        return ExitCode::FAILURE;
    };
    tables(&rows, &by_size, &by_count, &kexec);
    std::fs::write(svg, drawing(&rows_of(&rows, &by_size)).svg()).expect("write the drawing");
    let whole = json!({ "rate_mib_s": DIRTY_MIB_PER_S, "rows": rows, "switch": kexec });
    let text = serde_json::to_string_pretty(&whole).expect("numbers are JSON");
    std::fs::write(json, text + "\n").expect("write the numbers");
    std::fs::remove_file(part).expect("it is whole");
    ExitCode::SUCCESS
}

/// Returns the rows of some loads, in their order.
fn rows_of<'r>(rows: &'r [Value], loads: &[Load]) -> Vec<&'r Value> {
    loads.iter().flat_map(|load| rows.iter().filter(|row| load.is_of(row))).collect()
}

/// Returns the rows of an earlier run.
fn earlier_rows(part: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(part).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

fn append_row(part: &Path, row: &Value) {
    use std::io::Write;
    eprintln!("{row}");
    let mut file = std::fs::File::options().create(true).append(true).open(part).expect("open what was measured");
    // in one write, as another row may be kept at the same time
    file.write_all(format!("{row}\n").as_bytes()).expect("keep a row");
}

/// Measures all methods for all loads, and a switch with the last one; returns nothing when some failed. Two machines
/// run at a time: each has one processor, and its clock does not depend on the work of the other one.
fn measure(
    guest: &Guest,
    tool: &Path,
    (by_count, by_size): (&[Load], &[Load]),
    part: &Path,
) -> Option<(Vec<Value>, Value)> {
    let most = *by_size.last()?;
    std::thread::scope(|scope| {
        scope.spawn(|| by_count.iter().for_each(|load| measure_in_machine(guest, tool, *load, part, false)));
        by_size.iter().for_each(|load| measure_in_machine(guest, tool, *load, part, *load == most));
    });
    let whole = by_count.iter().chain(by_size).all(|load| missing(part, *load).is_empty());
    let asked = |row: &Value| by_count.iter().chain(by_size).any(|load| load.is_of(row));
    let kexec = switched(part, most);
    kexec.filter(|_| whole).map(|kexec| (earlier_rows(part).into_iter().filter(asked).collect(), kexec))
}

/// Measures in one machine all that is missing for a load. A machine that fails loses its own load, but no row that was
/// kept.
fn measure_in_machine(guest: &Guest, tool: &Path, load: Load, part: &Path, switches: bool) {
    let missing = missing(part, load);
    let switches = switches && switched(part, load).is_none();
    if missing.is_empty() && !switches {
        return;
    }
    let _ = std::panic::catch_unwind(|| {
        let (mut machine, to) = boot(guest, tool, load.total());
        for method in missing {
            append_row(part, &measure_method(&mut machine, method, load));
        }
        if switches {
            append_row(part, &switch_kernel(&mut machine, load.mib, &to));
        }
    });
}

/// Returns the methods that have not been measured for a load.
fn missing(part: &Path, load: Load) -> Vec<&'static str> {
    let done = earlier_rows(part);
    let has = |method: &str| done.iter().any(|row| row["way"] == method && load.is_of(row));
    METHODS.iter().map(|(method, _)| *method).filter(|method| !has(method)).collect()
}

/// Returns the switch of kernels with a load.
fn switched(part: &Path, load: Load) -> Option<Value> {
    earlier_rows(part).into_iter().find(|row| row["timings"].is_array() && row["mib"] == load.mib)
}

/// Boots a machine for `mib` MiB of programs; returns it with the kernel that it can go to.
fn boot(guest: &Guest, tool: &Path, mib: u32) -> (Machine, String) {
    let dir = tempfile::tempdir().expect("a directory");
    let worker = dir.path().join("worker");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/bin/kup-fig7");
    let built = Command::new("cc")
        .args(["-O2", "-static", "-pthread", "-o"])
        .args([&worker, &source.join("worker.c")])
        .status();
    assert!(built.is_ok_and(|status| status.success()), "cc builds the worker");
    // the images need the worker's memory and a third more; the worker's own memory is beside that
    let region = (mib * 4 / 3 + 256).next_multiple_of(256);
    let kernels = &guest.kernels;
    let [.., from, to] = &kernels[..] else { panic!("two kernels: {kernels:?}") };
    let mut machine = Machine::boot_as(
        guest,
        from,
        tool,
        Shape {
            clock: Clock::Instructions,
            // the region begins at 4 GiB, so all memory below it is needed too
            memory_mib: region + (mib + 1792).max(EXTRA_MEMORY_MIB),
            append: &format!("memmap={region}M!4G"),
            disk_mib: region * 2,
            programs: &[&worker, &source.join("run.sh")],
        },
    );
    // criu detects the features of the kernel once in a boot
    machine.run("criu check");
    machine.succeed("mkdir -p /disk /pmem; mke2fs -q -t ext4 -E lazy_itable_init=0,lazy_journal_init=0 /dev/vdc && mount /dev/vdc /disk");
    machine.succeed("mke2fs -q -t ext4 -b 4096 -O ^has_journal /dev/pmem0 && mount -o dax /dev/pmem0 /pmem");
    (machine, to.clone())
}

fn measure_method(machine: &mut Machine, method: &str, load: Load) -> Value {
    let Load { mib, count } = load;
    machine.succeed(&format!("rm -f /run/once.* /run/*.[0-9]; (setsid sh -c 'run.sh {method} {mib} {DIRTY_MIB_PER_S} {count} >/run/once.out 2>/run/once.err; echo $? >/run/once.end' &)"));
    let end = Instant::now() + METHOD_TIMEOUT;
    // seldom, as each test takes the machine's time
    while machine.try_run("test -s /run/once.end").is_none_or(|output| output.code != 0) {
        assert!(Instant::now() < end, "{method} of {count} times {mib} MiB has no end\n{}", machine.console());
        std::thread::sleep(Duration::from_secs(1));
    }
    let said = machine.succeed("cat /run/once.err /run/once.end /run/once.out");
    let line = said.lines().last().and_then(|line| serde_json::from_str::<Value>(line).ok());
    line.unwrap_or_else(|| {
        let logs = machine.run("for f in /disk/image/*/*.log /disk/image/*/*/*.log /pmem/image/*/*.log; do [ -e $f ] && { echo $f; tail -n 8 $f; }; done; df /disk /pmem; free -m");
        panic!("{method} of {count} times {mib} MiB: {said}\n{}", logs.text)
    })
}

/// Makes one switch of kernels with the image in memory; returns the phases of its journal.
fn switch_kernel(machine: &mut Machine, mib: u32, to: &str) -> Value {
    machine.succeed(&format!(
        "printf '[Service]\\nExecStart=/usr/local/bin/worker serve {mib} {DIRTY_MIB_PER_S}\\nStandardOutput=null\\nStandardError=null\\n' \
         >/etc/systemd/system/worker.service && rm -rf /disk/image /pmem/image && mkdir -p /etc/stillpoint"
    ));
    machine.succeed(
        "printf 'criu = \"/usr/local/bin/criu\"\\nimages = \"/pmem\"\\nverify-on-demand = true\\n[units.worker]\\nhealth = [\"worker\", \"load\", \"0.1\"]\\n' \
         >/etc/stillpoint/kernel.toml && systemctl daemon-reload && systemctl start worker",
    );
    machine.run_until_success("test \"$(worker load 0.2)\" != 0");
    eprintln!("{}", machine.succeed(&format!("stillpoint kernel switch --to {to} --dry-run")));
    switch(machine, to, to);
    let journal: Value = serde_json::from_str(&wait_until_done(machine)).expect("a journal");
    assert!(journal["why"].is_null(), "{journal}");
    json!({ "mib": mib, "from": journal["from"], "to": to, "timings": journal["timings"] })
}

fn ms(row: &Value, key: &str) -> f64 {
    row[key].as_f64().expect("a number") / 1e3
}

/// Returns the milliseconds from the last answer to the image on disk, plus those from the start of the restore to the
/// next answer.
fn blackout(row: &Value) -> f64 {
    ms(row, "frozen_us") + ms(row, "first_us")
}

fn tables(rows: &[Value], by_size: &[Load], by_count: &[Load], kexec: &Value) {
    println!(
        "Programs half of whose memory is written, {DIRTY_MIB_PER_S} MiB of pages a second. Blackout: from the \
         last answer until the image is complete on disk (stopped; criu's image is complete when the programs have \
         ended, FOAM's when it is sealed, and a switch then starts the next kernel by kexec), and from the start \
         of the restore to the next answer (first answer). Cached files are dropped between, as by a kexec, except \
         those of the programs that restore; that time is not counted. All memory is resident when the daemon has \
         ended; stillpoint's daemon has then also put it into huge pages, as before. Aim: a blackout of twice the \
         copy and 0.5 s; the copy is that of the bytes written while the programs were stopped, to the same place.\n"
    );
    table(&rows_of(rows, by_size));
    println!();
    for load in by_size {
        let of = |method: &str| rows.iter().find(|row| row["way"] == method && load.is_of(row)).map(blackout);
        if let (Some(basic), Some(disk), Some(pmem)) = (of("basic"), of("foam-disk"), of("foam-pmem")) {
            println!(
                "{} MiB: the blackout of basic is {:.1} times that of FOAM on disk, {:.1} times that of FOAM in memory.",
                load.mib,
                basic / disk,
                basic / pmem
            );
        }
    }
    println!(
        "\nSeveral at the same time, {PROGRAM_MIB} MiB each: from the first one's last answer to the last one's first answer.\n"
    );
    table(&rows_of(rows, by_count));
    println!(
        "\nOne switch from {} to {}, {} MiB, image in memory, from its journal:\n",
        kexec["from"], kexec["to"], kexec["mib"]
    );
    println!("| kernel | phase | ms |\n|---|---|---|");
    for timing in kexec["timings"].as_array().into_iter().flatten() {
        let text = |key: &str| timing[key].as_str().unwrap_or_default().to_owned();
        println!("| {} | {} | {:.0} |", text("kernel"), text("phase"), ms(timing, "duration_us"));
    }
}

fn table(rows: &[&Value]) {
    println!(
        "| programs, MiB | method | blackout, ms | stopped, ms | first answer, ms | all memory resident, ms | written while stopped, MiB | the same copied, ms | image, MiB | answers a second before, after |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let mib = |row: &Value, key: &str| row[key].as_f64().expect("a number") / f64::from(1 << 20);
    for row in rows {
        let name = METHODS.iter().find(|(method, _)| row["way"] == *method).map_or("", |(_, name)| name);
        println!(
            "| {} of {} | {name} | {:.0} | {:.0} | {:.0} | {:.0} | {:.1} | {} | {:.0} | {}, {} |",
            row["count"],
            row["mib"],
            blackout(row),
            ms(row, "frozen_us"),
            ms(row, "first_us"),
            ms(row, "filled_us"),
            mib(row, "frozen_bytes"),
            row["copy_us"].as_f64().map_or_else(|| "-".into(), |us| format!("{:.1}", us / 1e3)),
            mib(row, "stored_bytes"),
            row["before"],
            row["after"],
        );
    }
}

fn drawing(rows: &[&Value]) -> Figure {
    let curve = |(method, name): &(&str, &str)| Curve {
        name: (*name).to_owned(),
        points: rows
            .iter()
            .filter(|row| row["way"] == *method)
            .map(|row| (row["mib"].as_f64().expect("a number"), blackout(row)))
            .collect(),
        joined: true,
    };
    Figure {
        x: Axis { label: "MiB of memory, half of it written", logarithmic: false },
        y: Axis { label: "blackout without the kernel's boot, ms", logarithmic: true },
        curves: METHODS.iter().map(curve).collect(),
    }
}

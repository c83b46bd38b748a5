//! Memory and processor time of the processes of a server.

/// Memory of some processes together, in KiB.
#[derive(Debug, Clone, Copy, Default)]
pub struct Memory {
    /// Each shared page counts by its share.
    pub pss: f64,
    /// Each shared page counts in each process.
    pub rss: f64,
    /// Pages that no other process has.
    pub private: f64,
    /// Page tables.
    pub page_tables: f64,
}

/// Returns the memory of these processes. Panics if one does not run.
#[track_caller]
pub fn memory(pids: &[i32]) -> Memory {
    let mut sum = Memory::default();
    for pid in pids {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).expect("the process runs");
        let text = read("smaps_rollup") + &read("status");
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let field = match words.next() {
                Some("Pss:") => &mut sum.pss,
                Some("Rss:") => &mut sum.rss,
                Some("Private_Clean:" | "Private_Dirty:") => &mut sum.private,
                Some("VmPTE:") => &mut sum.page_tables,
                _ => continue,
            };
            *field += words.next().and_then(|word| word.parse::<f64>().ok()).expect("the kernel prints numbers");
        }
    }
    sum
}

/// Returns the processor time of all threads of these processes so far, in microseconds.
pub fn cpu_us(pids: &[i32]) -> f64 {
    let of_thread = |thread: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse::<f64>().ok()
    };
    let threads = pids.iter().filter_map(|pid| std::fs::read_dir(format!("/proc/{pid}/task")).ok()).flatten();
    threads.filter_map(of_thread).sum::<f64>() / 1e3
}

//! Texts of /proc: the kernel writes them, and any process chooses names in them. The first byte selects the file.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};

// Not public in their crates; they are pure, so this program can compile them directly.
#[allow(dead_code)]
#[path = "../../crates/patch/tracee/src/launch/credentials.rs"]
mod credentials;
#[allow(dead_code)]
#[path = "../../crates/patch/tracee/src/ids.rs"]
mod ids;
#[allow(dead_code)]
#[path = "../../crates/patch/tracee/src/maps.rs"]
mod maps;
#[allow(dead_code)]
#[path = "../../crates/kernel/switch/src/memmap.rs"]
mod memmap;
#[allow(dead_code)]
#[path = "../../crates/patch/tracee/src/status.rs"]
mod status;

use ids::{Pid, Tid};
// maps.rs names it so
#[allow(unused_imports)]
use status::Stat;

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let Some((which, bytes)) = input.split_first() else { return Corpus::Reject };
    let text = String::from_utf8_lossy(bytes);
    match which % 7 {
        0 => {
            if let Ok(mappings) = maps::parse(&text) {
                assert_eq!(mappings.len(), text.lines().count());
                for mapping in mappings {
                    assert!(mapping.start <= mapping.end);
                    let _ = (mapping.len(), mapping.is_empty(), mapping.contains(mapping.start));
                }
            }
        }
        1 => {
            if let Some(stat) = status::Stat::parse(&text) {
                let _ = (stat.kernel_thread(), stat.kernel_worker((6, 4)));
            }
        }
        2 => {
            let _ = status::Status::parse(&text);
        }
        3 => {
            let activity = status::ThreadActivity::parse(&text, 7);
            assert_eq!(activity.ran_since(&activity, 0), activity.waits_in.is_none());
        }
        4 => {
            let (before, after) = text.split_once('\0').unwrap_or((&text, &text));
            if let (Some(before), Some(after)) =
                (credentials::Credentials::parse(before), credentials::Credentials::parse(after))
            {
                assert!(!before.are_exceeded_by(&before) && !after.are_exceeded_by(&after));
                let _ = before.are_exceeded_by(&after);
            }
        }
        5 => {
            let _ = credentials::is_secure(bytes);
        }
        _ => {
            let (iomem, line) = text.split_once('\0').unwrap_or((&text, ""));
            let bytes = 64 << 20;
            if let Ok(region) = memmap::Ram::parse(iomem).and_then(|ram| ram.choose(bytes, &[], line)) {
                assert_eq!(region.end - region.start, bytes);
                assert!(memmap::argument(&region).starts_with("memmap=64M!"));
            }
        }
    }
    Corpus::Keep
});

fn seeds() -> Vec<Vec<u8>> {
    let read = |path: &str| std::fs::read(path).unwrap_or_default();
    let seed = |which: u8, bytes: Vec<u8>| [vec![which], bytes].concat();
    let iomem = "00001000-0009fbff : System RAM\n00100000-bffdffff : System RAM\n  1d000000-1dbfffff : Kernel code\n\
        100000000-1ffffffff : System RAM\n\0quiet memmap=1G!0x100000000,64K$18G";
    vec![
        seed(0, read("/proc/self/maps")),
        seed(1, read("/proc/self/stat")),
        seed(2, read("/proc/self/status")),
        seed(3, b"232 0x5 0x7ffe 0x80 0xffffffffffffffff 0x0 0x0 0x7ff0 0x7f00\n".to_vec()),
        seed(4, [read("/proc/self/status"), vec![0], read("/proc/self/status")].concat()),
        seed(5, read("/proc/self/auxv")),
        seed(6, iomem.into()),
    ]
}

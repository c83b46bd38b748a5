//! Uprobes at function entries: a jump there would crash the process.

use crate::Error;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use stillpoint_host::kernel_files;
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::EntryPlan;
use stillpoint_patch_tracee::Module;

/// Refuses an entry whose displaced bytes hold one of `probes`.
pub(crate) fn no_uprobe(probes: &[(String, Avma)], function: &str, entry: Avma, plan: &EntryPlan) -> Result<(), Error> {
    let inside = |at: &Avma| (entry.0..entry.0 + plan.displaced_len as u64).contains(&at.0);
    match probes.iter().find(|(_, at)| inside(at)) {
        Some((probe, at)) => Err(Error::Uprobe { function: function.to_owned(), at: *at, probe: probe.clone() }),
        None => Ok(()),
    }
}

/// Returns all uprobes in a module that the kernel lists: name and address.
pub(crate) fn uprobes(module: &Module) -> Vec<(String, Avma)> {
    let lists = ["/sys/kernel/tracing/uprobe_events", "/sys/kernel/debug/tracing/uprobe_events"];
    let Some(text) = lists.iter().find_map(|path| kernel_files::text(path).ok()) else { return Vec::new() };
    let inside = |(probe, path, offset): (&str, &str, u64)| {
        Path::new(path).metadata().ok().filter(|file| file.ino() == module.file.1)?;
        let mapping = module.mappings.iter().find(|m| (m.offset..m.offset + m.len()).contains(&offset))?;
        Some((probe.to_owned(), Avma(mapping.start.0 + (offset - mapping.offset))))
    };
    text.lines().filter_map(uprobe).filter_map(inside).collect()
}

/// Parses `p:group/name /path/of/file:0x1234 arguments`.
fn uprobe(line: &str) -> Option<(&str, &str, u64)> {
    let mut words = line.split_whitespace();
    let (probe, place) = (words.next()?, words.next()?);
    let (path, offset) = place.rsplit_once(":0x")?;
    let digits = offset.split(|c: char| !c.is_ascii_hexdigit()).next()?;
    Some((probe, path, u64::from_str_radix(digits, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uprobe_lines_are_read() {
        let line = "p:probe_redis/call /usr/bin/redis-check-rdb:0x000000000005a2c0 arg1=%di";
        assert_eq!(uprobe(line), Some(("p:probe_redis/call", "/usr/bin/redis-check-rdb", 0x5a2c0)));
        assert_eq!(uprobe("r:x/y /bin/true:0x10(ref)"), Some(("r:x/y", "/bin/true", 0x10)));
        assert_eq!(uprobe(""), None);
    }
}

//! `xtask cache`: lists the cache, and makes entries for tests and scripts.

use anyhow::{Context, Result, anyhow, bail};
use std::time::SystemTime;
use stillpoint_host::cache::{Removed, State};
use stillpoint_testing::{Unavailable, WITHHELD_CODE, recipes};

const GIB: f64 = (1u64 << 30) as f64;

/// Runs one of the subcommands, and returns true; if the archive withholds a package the process exits with code 75.
///
/// # Errors
/// The cache cannot be used, or the requested entry cannot be made.
pub(crate) fn run(words: &[String]) -> Result<bool> {
    let cache = recipes::cache().map_err(|why| anyhow!(why))?;
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["root"] => println!("{}", cache.root().display()),
        ["list"] => list()?,
        ["clean"] => report(&cache.clean().context("clean the cache")?),
        ["evict"] => report(&cache.evict(cache.limit_bytes()).context("reduce the cache to its size limit")?),
        ["path", _, ..] => match recipes::path(&words[1..]) {
            Ok(path) => println!("{}", path.display()),
            Err(Unavailable::Withheld(why)) => {
                eprintln!("withheld by the archive: {why}");
                std::process::exit(WITHHELD_CODE);
            }
            Err(why) => bail!(why),
        },
        _ => bail!(
            "usage: xtask cache root | list | clean | evict | path NAME, where NAME is one of: {}",
            recipes::NAMES.join(", ")
        ),
    }
    Ok(true)
}

/// Files of one kind are many and small: they share one line.
fn list() -> Result<()> {
    let cache = recipes::cache().map_err(|why| anyhow!(why))?;
    let items = cache.list().context("list the cache")?;
    println!("{:>9}  {:>11}  entry", "MiB", "last use");
    let mut files = std::collections::BTreeMap::<&str, (usize, u64)>::new();
    for item in &items {
        if item.state == State::File {
            let (count, bytes) = files.entry(&item.kind).or_default();
            (*count, *bytes) = (*count + 1, *bytes + item.bytes);
            continue;
        }
        let hours = SystemTime::now().duration_since(item.last_use).map_or(0, |age| age.as_secs() / 3600);
        let last_use = match item.state {
            State::Half => "unfinished".to_owned(),
            _ => format!("{hours} h ago"),
        };
        println!("{:>9.1}  {last_use:>11}  {}/{}", item.bytes as f64 / 1_048_576.0, item.kind, item.name);
    }
    for (kind, (count, bytes)) in files {
        println!("{:>9.1}  {:>11}  {kind}: {count} files", bytes as f64 / 1_048_576.0, "");
    }
    let total: u64 = items.iter().map(|item| item.bytes).sum();
    let limit = cache.limit_bytes() as f64 / GIB;
    println!("{:.2} GiB of {limit} in {}", total as f64 / GIB, cache.root().display());
    Ok(())
}

fn report(removed: &Removed) {
    println!("removed {} entries, {:.2} GiB", removed.entries.len(), removed.bytes as f64 / GIB);
    for entry in &removed.in_use {
        println!("in use by a process, not removed: {entry}");
    }
    for mount in &removed.mounts {
        println!("mounted, not removed until it is unmounted: {}", mount.display());
    }
}

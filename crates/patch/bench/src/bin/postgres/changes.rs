//! Changes of our own to Debian's unmodified server.

use std::path::Path;
use stillpoint_patch_bench::build_report::{functions, why};
use stillpoint_patch_format::decode;
use stillpoint_patch_tests::cli::Stillpoint;
use stillpoint_patch_tests::postgres::{Bench, Change, Cluster, Postgres, changes, unpatchable};
use tempfile::TempDir;

pub(crate) fn run() -> Result<(), String> {
    let postgres = Postgres::debian()?;
    let dir = TempDir::with_prefix("stillpoint-postgres-table-").map_err(|e| e.to_string())?;
    println!("postgresql-15 {}, Debian's own binary\n", postgres.version);
    println!("| change | part | target | function | functions | wave | effect | why not |");
    println!("|---|---|---|---|---|---|---|---|");
    let preloaded = "shared_preload_libraries=plpgsql,pgoutput";
    let mut cluster = Cluster::start(&postgres, &[preloaded]);
    Bench::prepare(&cluster, 1);
    let idle: Vec<_> = (0..100).map(|_| cluster.session()).collect();
    let bench = Bench::start(&cluster, 4, &[]);
    let (mut active, mut total) = (0, 0);
    let mut placed = PlacedShare::default();
    for change in changes().into_iter().chain(unpatchable()) {
        let outcome = one(&postgres, &mut cluster, &change, &dir);
        placed.add(&dir.path().join(format!("{}.patch", change.name)));
        active += usize::from(outcome.is_ok());
        total += 1;
        let (functions, wave, effect, reason) = match outcome {
            Ok((functions, wave)) => {
                (functions.to_string(), wave, "observed, and absent after the revert", String::new())
            }
            Err(reason) => ("".into(), "".into(), "", reason),
        };
        let Change { name, area, target, function, .. } = change;
        println!("| {name} | {area} | {target} | {function} | {functions} | {wave} | {effect} | {reason} |");
        cluster.assert_unharmed();
    }
    println!(
        "\n{active} of {total} active, observed and reverted; {} statements of pgbench, none failed",
        bench.assert_clean()
    );
    println!(
        "{} units compiled again as shipped: {} of their {} functions found byte for byte in Debian's binaries",
        placed.units, placed.found, placed.functions
    );
    drop(idle);
    Ok(())
}

/// Share of the recompiled units that is in the target unchanged.
#[derive(Debug, Default)]
struct PlacedShare {
    units: usize,
    functions: u64,
    found: u64,
}

impl PlacedShare {
    fn add(&mut self, patch: &Path) {
        let Some(signed) = std::fs::read(patch).ok().and_then(|bytes| decode(&bytes).ok()) else { return };
        for unit in &signed.patch.source.units {
            self.units += 1;
            self.functions += u64::from(unit.functions_total);
            self.found += u64::from(unit.functions_placed);
        }
    }
}

/// Builds one change, applies it, checks its effect, and reverts it; returns the number of functions and the duration
/// for all processes.
fn one(postgres: &Postgres, cluster: &mut Cluster, change: &Change, dir: &TempDir) -> Result<(usize, String), String> {
    let run = postgres.build(std::slice::from_ref(change), change.name, dir.path());
    let patch = dir.path().join(format!("{}.patch", change.name));
    if run.code != Some(0) || !patch.is_file() {
        return Err(why(&run));
    }
    let mut session = cluster.session();
    // a library that is loaded on demand: load it once before, otherwise there is nothing to patch
    let _ = change.show_in(&mut session, cluster.port());
    let shows = !change.effect.ask.is_empty();
    // for a change that cannot become active, one process of each kind reports it; otherwise every process would wait
    // for its time-out
    let processes = match shows {
        true => ["--exe".to_owned(), cluster.executable().display().to_string()],
        false => ["--pid".to_owned(), format!("{},{}", session.pid(), cluster.pid())],
    };
    let apply = Stillpoint::new().args(["patch", "apply"]).arg(&patch).args(["--timeout", "3s", "--json"]);
    let apply = apply.args(&processes).run();
    if apply.code != Some(0) {
        let _ = revert(&processes, change.name).run();
        return Err(apply.stderr.lines().take(2).collect::<Vec<_>>().join(" "));
    }
    if shows {
        change.assert_shows_in(&mut session, cluster, true);
    }
    let revert = revert(&processes, change.name).run();
    if revert.code != Some(0) {
        return Err(revert.stderr);
    }
    if shows {
        change.assert_shows_in(&mut session, cluster, false);
    }
    let wave = apply.json().into_iter().find(|line| line["event"] == "wave").unwrap_or_default();
    let number = |key: &str| wave[key].as_u64().unwrap_or_default();
    let text = format!("{} processes, {} ms", number("done"), number("duration_us") / 1000);
    Ok((functions(&run), text))
}

fn revert(processes: &[String], name: &str) -> Stillpoint {
    Stillpoint::new().args(["patch", "revert", name]).args(processes)
}

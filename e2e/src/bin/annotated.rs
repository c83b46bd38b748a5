//! Builds redis and memcached with quiescence points, and a patch of each fix, for those who take them from `.cache`.

use std::process::ExitCode;
use stillpoint_e2e::annotated;
use stillpoint_e2e::series::Series;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let series = Series::annotated(&[], &mut |text| println!("{text}"))?;
    println!("redis {}: {} patches, {} refused", series.version, series.patches.len(), series.refused.len());
    let (_, patch) = annotated::memcached()?;
    println!("memcached: {}", patch.display());
    Ok(())
}

//! Builds redis and memcached with quiescence points, and a patch of each fix, for tests that take them from the cache.

use std::process::ExitCode;
use stillpoint_patch_tests::series::Series;
use stillpoint_patch_tests::{Unavailable, annotation};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Unavailable> {
    let series = Series::annotated(&[], &mut |text| println!("{text}"))?;
    println!("redis {}: {} patches, {} refused", series.version, series.patches.len(), series.refused.len());
    let (_, patch) = annotation::memcached()?;
    println!("memcached: {}", patch.display());
    Ok(())
}

//! Builds redis and memcached with quiescence points, and a patch of each fix, for those who take them from the cache; with
//! the word `mariadb`, MariaDB instead, without patches.

use std::process::ExitCode;
use stillpoint_patch_tests::series::Series;
use stillpoint_patch_tests::{Unavailable, annotated, mariadb};

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
    if std::env::args().nth(1).as_deref() == Some("mariadb") {
        let built = mariadb::annotated::annotated().as_ref()?;
        println!("mariadb: {}", built.packaged.binary.path.display());
        return Ok(());
    }
    let series = Series::annotated(&[], &mut |text| println!("{text}"))?;
    println!("redis {}: {} patches, {} refused", series.version, series.patches.len(), series.refused.len());
    let (_, patch) = annotated::memcached()?;
    println!("memcached: {}", patch.display());
    Ok(())
}

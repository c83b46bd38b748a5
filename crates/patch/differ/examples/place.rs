//! Prints where a unit's names are in a target: `place TARGET UNIT.o`.
use std::process::ExitCode;
use stillpoint_patch_differ::{TargetElf, place};

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let [target, unit] = paths.as_slice() else {
        eprintln!("usage: place TARGET UNIT.o");
        return Ok(ExitCode::from(2));
    };
    let target = TargetElf::parse(&std::fs::read(target)?, target)?;
    let placement = place(&target, unit, &std::fs::read(unit)?)?;
    for (name, placed) in &placement.symbols {
        println!("{name} {:?} {:?}", placed.value, placed.how);
    }
    println!(
        "{} of {} functions placed; not: {:?}",
        placement.functions_placed, placement.functions_total, placement.unplaced
    );
    Ok(ExitCode::SUCCESS)
}

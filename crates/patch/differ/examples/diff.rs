//! Diffs units and writes a patch: `diff TARGET OUT PATH SHIPPED BEFORE AFTER [PATH SHIPPED BEFORE AFTER]...`; `-` is an
//! absent object. The exports of earlier patches are read from the environment variable KNOWN.
use std::process::ExitCode;
use stillpoint_patch_differ::{Options, Outcome, TargetElf, UnitInput, diff};

fn read(path: &str) -> std::io::Result<Vec<u8>> {
    if path == "-" { Ok(Vec::new()) } else { std::fs::read(path) }
}

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let [target, out, units @ ..] = paths.as_slice() else {
        eprintln!("usage: diff TARGET OUT [PATH SHIPPED BEFORE AFTER]...");
        return Ok(ExitCode::from(2));
    };
    let target = TargetElf::parse(&std::fs::read(target)?, target)?;
    let mut objects = Vec::new();
    for unit in units.chunks_exact(4) {
        objects.push((unit[0].clone(), read(&unit[1])?, read(&unit[2])?, read(&unit[3])?));
    }
    let inputs: Vec<UnitInput<'_>> = objects
        .iter()
        .map(|(path, shipped, before, after)| UnitInput { path, shipped, before, after, sources: None })
        .collect();
    let known = std::env::var("KNOWN").unwrap_or_default().split_whitespace().map(str::to_owned).collect();
    let options = Options { name: "example".to_owned(), known, ..Options::default() };
    match diff(&target, &inputs, &options) {
        Ok(Outcome::NothingToPatch) => println!("nothing to patch"),
        Ok(Outcome::Patch(patch)) => {
            for f in &patch.functions {
                println!(
                    "{} {} {}+{} parts {:?}: {}",
                    f.unit,
                    f.name,
                    f.old.start,
                    f.old.len,
                    f.old_parts,
                    f.reasons.join("; ")
                );
            }
            for s in &patch.sections {
                println!("section {} {:?} {} bytes, {} relocations", s.name, s.kind, s.size, s.relocations.len());
            }
            for s in &patch.symbols {
                println!("symbol {} {:?} {:?}", s.name, s.value, s.resolved_by);
            }
            println!("exports {:?} escaping {:?} warnings {:?}", patch.exports, patch.escaping, patch.warnings);
            let exports: Vec<&str> = patch.exports.iter().map(|e| patch.symbols[*e as usize].name.as_str()).collect();
            println!("exportnames {}", exports.join(" "));
            println!("types {}", patch.types.len());
            if out != "-" {
                std::fs::write(out, stillpoint_patch_format::encode(&patch)?)?;
            }
        }
        Err(refusals) => {
            refusals.iter().for_each(|r| println!("refused ({}): {r}", r.code()));
            return Ok(ExitCode::from(3));
        }
    }
    Ok(ExitCode::SUCCESS)
}

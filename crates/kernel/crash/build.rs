//! Compiles the program that the next kernel starts first: separately, since it has neither the standard library nor
//! unwinding.

use std::env;
use std::path::Path;
use std::process::Command;

const SOURCE: &str = "first/main.rs";

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    let of_cargo = |name: &str| env::var_os(name).unwrap_or_else(|| panic!("cargo sets {name}"));
    let mut rustc = Command::new(of_cargo("RUSTC"));
    rustc.args(["--edition=2024", "--crate-name=first", "--crate-type=bin", "--deny=warnings"]);
    rustc.args(["-Copt-level=s", "-Cpanic=abort", "-Cstrip=symbols", "-Crelocation-model=static"]);
    for argument in
        ["-nostartfiles", "-nostdlib", "-static", "-no-pie", "-Wl,--build-id=none", "-Wl,-z,noseparate-code"]
    {
        rustc.arg(format!("-Clink-arg={argument}"));
    }
    let program = Path::new(&of_cargo("OUT_DIR")).join("first");
    rustc.arg("--target").arg(of_cargo("TARGET")).arg("-o").arg(program).arg(SOURCE);
    let status = rustc.status().unwrap_or_else(|error| panic!("{rustc:?}: {error}"));
    assert!(status.success(), "{SOURCE} cannot be compiled: {status}");
}

//! Link options of the program, which shorten its start: it runs on processors that a server needs.
//!
//! The program is linked for a fixed address. A position-independent one has 33,000 addresses to relocate when it starts, on 140 private
//! pages: half a millisecond at each call.
//!
//! The compiler's support library is linked statically. Loading the shared one takes a tenth of the remaining time, since that library asks
//! the processor for its features and a virtual machine answers slowly.
//!
//! Starts of programs that do nothing (400 of each): 0.12 to 0.17 ms without a library, 0.41 with the C library linked statically, 0.52 with
//! the shared one, 0.61 with the mathematics library as well. The C library stays shared: a static one loads modules of the system for names
//! of hosts, which an upgrade may change to another version. The mathematics library is needed for five functions.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    println!("cargo::rustc-link-arg-bins=-no-pie");
    // The Rust compiler requests the shared library by its name: under that name the linker finds the static ones here.
    let dir = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo says where to write"));
    std::fs::write(dir.join("libgcc_s.so"), "GROUP ( -lgcc_eh -lgcc )\n")?;
    println!("cargo::rustc-link-arg-bins=-L{}", dir.display());
    println!("cargo::rerun-if-changed=build.rs");
    Ok(())
}

//! How the program is linked, so that a start of it takes little of a processor that a server wants.
//!
//! It runs where it is linked for. One that may run anywhere has 33,000 addresses to mend when it starts, on 140 pages of its
//! own: half a millisecond at each call.
//!
//! The compiler's support library is part of it. Loading the shared one, and its asking the processor what it can do, which a
//! virtual machine answers slowly, take a tenth of what is left.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    println!("cargo::rustc-link-arg-bins=-no-pie");
    // The Rust compiler asks for the shared library by its name: the linker finds the static ones under that.
    let dir = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo says where to write"));
    std::fs::write(dir.join("libgcc_s.so"), "GROUP ( -lgcc_eh -lgcc )\n")?;
    println!("cargo::rustc-link-arg-bins=-L{}", dir.display());
    println!("cargo::rerun-if-changed=build.rs");
    Ok(())
}

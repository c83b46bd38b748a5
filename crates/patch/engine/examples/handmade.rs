//! Makes a patch file by hand: `handmade NAME TARGET OBJECT OUT`. For experiments and end-to-end tests of the engine
//! that do not want the differ.

#[path = "../tests/it/support/mod.rs"]
mod support;

fn main() {
    let args: Vec<std::path::PathBuf> = std::env::args_os().skip(1).map(Into::into).collect();
    let [name, target, object, out] = &args[..] else {
        eprintln!("usage: handmade NAME TARGET OBJECT OUT");
        std::process::exit(2);
    };
    let patch = support::Handmade::new(&name.to_string_lossy(), target, object).build();
    let bytes = stillpoint_patch_format::encode(&patch).expect("patch is valid");
    std::fs::write(out, bytes).expect("file is written");
}

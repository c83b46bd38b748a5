//! `stillpoint kernel inspect`: prints the contents of an image.

use super::program::machine_key;
use super::untouched;
use crate::output::{Failure, Output};
use serde_json::json;
use std::path::PathBuf;
use stillpoint_kernel_checkpoint::{Image, LAZY, MachineKey, PRESENT};

/// Arguments of `stillpoint kernel inspect`.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory of the image.
    image: PathBuf,
    /// Print every range of pages.
    #[arg(long)]
    extents: bool,
    /// Compare every page with its checksum.
    #[arg(long)]
    verify: bool,
}

/// Runs `stillpoint kernel inspect`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let image = Image::open(&args.image).map_err(untouched)?;
    image.verify_criu_files().map_err(untouched)?;
    if args.verify {
        image.verify_pages().map_err(untouched)?;
    }
    let index = image.index();
    let stored = |flags: u8| {
        move |recorded: &stillpoint_kernel_checkpoint::Recorded| -> u64 {
            recorded.extents.iter().filter(|e| e.flags & flags == flags).map(|e| e.pages).sum()
        }
    };
    let origin = &index.origin;
    let key = MachineKey::read(&machine_key()).map_err(untouched)?;
    let sealed_here = key.is_some_and(|key| image.is_sealed_by(&key));
    output.line(format_args!(
        "{} (process {}), machine {}, kernel {}, criu {}; {}; {:?}, {} passes, {} files of criu{}",
        origin.name,
        origin.pid,
        origin.machine,
        origin.kernel,
        origin.criu,
        if sealed_here { "sealed by this machine" } else { "not sealed by this machine" },
        index.form,
        index.passes,
        index.beside.len(),
        if args.verify { "; every page is as it was sealed" } else { "" }
    ));
    let mut memories = Vec::new();
    for recorded in &index.memories {
        let (object, pages) = (recorded.object.to_string(), stored(PRESENT)(recorded));
        let (pages_lazy, ranges) = (stored(PRESENT | LAZY)(recorded), recorded.extents.iter().count());
        output.line(format_args!(
            "{object}: {pages} pages, {pages_lazy} of them can be fetched on demand, in {ranges} ranges"
        ));
        let shown = recorded.extents.iter().filter(|_| args.extents);
        let extents: Vec<(u64, u64, u8, u32)> = shown.map(|e| (e.start, e.pages, e.flags, e.pass)).collect();
        for (start, pages, flags, pass) in &extents {
            let lazy = if flags & LAZY != 0 { "lazy" } else { "" };
            output.line(format_args!("  {start:#014x} {pages:8} pages, pass {pass} {lazy}"));
        }
        memories.push(json!({"object": object, "pages": pages, "pages_lazy": pages_lazy, "extents": extents}));
    }
    output.result(
        "image",
        &json!({
            "name": origin.name,
            "pid": origin.pid,
            "machine": origin.machine,
            "kernel": origin.kernel,
            "criu": origin.criu,
            "made_s": origin.made_s,
            "form": index.form,
            "passes": index.passes,
            "files": index.beside.len(),
            "memories": memories,
            "sealed_here": sealed_here,
            "verified": args.verify,
        }),
    );
    Ok(())
}

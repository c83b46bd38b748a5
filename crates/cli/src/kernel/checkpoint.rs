//! `stillpoint kernel checkpoint`: writes a running program into an image.

use super::program::{PASSES, Program, WithCriu, machine_key};
use super::{check, failure, untouched};
use crate::output::{Failure, Output};
use serde_json::{Value, json};
use std::path::PathBuf;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_checkpoint::{Checkpoint, CheckpointOptions, Form, Guard, Pass, check_unit_restart, checkpoint};
use stillpoint_operation::{FaultPoint, Faults};

/// Arguments of `stillpoint kernel checkpoint`.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    program: Program,
    /// Directory of the image, for instance /run/stillpoint/NAME; it is created if it does not exist. No user but you and
    /// root may be able to change it or a directory above it. Its files are sparse on tmpfs and XFS, and dense elsewhere.
    #[arg(long, value_name = "DIR")]
    image: PathBuf,
    #[command(flatten)]
    criu: WithCriu,
    /// Let the program continue after the checkpoint.
    #[arg(long)]
    leave_running: bool,
    /// Write dense files even on a file system that supports sparse ones of this length.
    #[arg(long)]
    dense: bool,
    /// Guard that makes peers of its connections wait until the restore.
    #[arg(long, value_enum, default_value = "nftables", value_name = "HOW")]
    guard: Guard,
    /// Maximum number of passes over its memory while it runs; passes end early when little memory remains to be written.
    #[arg(long, default_value_t = PASSES, value_name = "N")]
    passes: u32,
    /// Only check; change nothing.
    #[arg(long)]
    dry_run: bool,
    /// For tests: fail after the dump, before the image is sealed.
    #[arg(long, hide = true)]
    fail_before_seal: bool,
}

/// Fields that the results of a checkpoint and of a rehearsal have in common.
pub(super) fn result(done: &Checkpoint) -> Value {
    let pass = |pass: &Pass| json!({ "bytes_written": pass.written, "duration_us": pass.duration_ns / 1000 });
    json!({
        "memories": done.memories,
        "pages": done.pages,
        "bytes_written": done.written,
        "frozen_us": done.frozen_ns / 1000,
        "passes": done.passes.iter().map(pass).collect::<Vec<_>>(),
    })
}

/// Runs `stillpoint kernel checkpoint`.
pub(crate) fn run(args: &Args, output: &Output) -> Result<(), Failure> {
    let (pid, criu) = (args.program.root()?, args.criu.criu());
    if args.dry_run {
        Directory::check(&args.image).map_err(|error| untouched(error.into()))?;
        let report = stillpoint_kernel_checkpoint::check(pid, &criu).map_err(untouched)?;
        check::show(&report, output);
        report.require_no_refusal().map_err(Failure::refused)?;
        return if args.leave_running { Ok(()) } else { check_unit_restart(pid).map_err(Failure::refused) };
    }
    let faults = match args.fail_before_seal {
        true => Faults::none().failing(FaultPoint::before("seal")),
        false => Faults::none(),
    };
    let options = CheckpointOptions {
        pid,
        image: args.image.clone(),
        criu,
        leave_running: args.leave_running,
        form: args.dense.then_some(Form::Dense),
        guard: args.guard,
        passes: args.passes,
        key: machine_key(),
        faults,
    };
    let done = checkpoint(&options, &|event| output.event(event))
        .map_err(|error| failure(error, "the program continues as before; there is no image"))?;
    let mut fields = result(&done);
    fields["bytes_zero"] = done.zeros.into();
    output.result("checkpointed", &fields);
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    output.line(format_args!(
        "{}: {} memories, {:.1} MiB; {} passes while it ran; it was stopped for {:.0} ms, in which {:.1} MiB were \
         written{}",
        args.image.display(),
        done.memories,
        mib(done.pages * 4096),
        done.passes.len(),
        done.frozen_ns as f64 / 1e6,
        mib(done.written),
        if args.leave_running { ", and continues" } else { ", and has ended" }
    ));
    Ok(())
}

//! `stillpoint kernel check --rehearse`: makes a checkpoint and discards it.

use super::checkpoint::result;
use super::failure;
use super::program::{PASSES, machine_key};
use crate::output::{Failure, Output};
use std::path::Path;
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_checkpoint::{CheckpointOptions, Criu, Guard, checkpoint, discard};
use stillpoint_operation::Faults;

/// Rehearses the checkpoint of a program that passed the check.
pub(super) fn run(pid: i32, criu: Criu, scratch: &Path, guard: Guard, output: &Output) -> Result<(), Failure> {
    let image = scratch.join(format!("stillpoint-rehearsal-{pid}-{}", std::process::id()));
    // for this user alone: other users may write to the parent directory
    let made = Directory::make(&image);
    let made =
        made.map_err(|error| Failure::failed(error, "nothing was touched; there is no directory for an image"))?;
    let options = CheckpointOptions {
        pid,
        image: image.clone(),
        criu,
        leave_running: true,
        form: None,
        guard,
        passes: PASSES,
        key: machine_key(),
        faults: Faults::none(),
    };
    let done = checkpoint(&options, &|event| output.event(event));
    let image_bytes = made.allocated().unwrap_or_default();
    // after a failure the logs stay, since they show the reason
    if done.is_ok() {
        let _ = discard(&image);
        let removed = made.remove_all();
        removed
            .map_err(|error| Failure::failed(error, format!("the program continues; {} remains", image.display())))?;
    }
    let done = done.map_err(|error| {
        failure(error, &format!("the program continues as before; criu's logs are in {}", image.display()))
    })?;
    let mut fields = result(&done);
    fields["image_bytes"] = image_bytes.into();
    output.result("rehearsed", &fields);
    output.line(format_args!(
        "rehearsed: the program was stopped for {:.0} ms and continues; the image had {} memories and {:.1} MiB, and \
         was removed",
        done.frozen_ns as f64 / 1e6,
        done.memories,
        image_bytes as f64 / (1 << 20) as f64
    ));
    Ok(())
}

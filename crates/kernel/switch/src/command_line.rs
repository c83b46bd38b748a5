//! Kernel command lines: of the next kernel, of its crash kernel, and of this one when it is started again.

use stillpoint_host::kernel_files;
use stillpoint_kernel_checkpoint::{Error, ErrorContext};
use stillpoint_kernel_crash::{FIRST_PROGRAM, UNUSED_PROCESSOR_ARGUMENT};

/// Argument for the next switch: the driver of a watchdog that is kept from loading.
const WATCHDOG_ARGUMENT: &str = "stillpoint.watchdog=";
/// Argument for the next switch: the program that the initramfs would have started.
const NEXT_INIT_ARGUMENT: &str = "stillpoint.rdinit=";
/// Argument for the old kernel: a crash kernel has started it, after this kernel.
const PANICKED_ARGUMENT: &str = "stillpoint.panicked=";
const RDINIT: &str = "rdinit=";
const CRASHKERNEL: &str = "crashkernel=";
/// Prefix of arguments that a switch has added.
const OWN_PREFIX: &str = "stillpoint";
/// Program that the kernel starts by default.
const DEFAULT_INIT: &str = "/init";

/// Returns the command line of this kernel.
pub(crate) fn running() -> Result<String, Error> {
    kernel_files::text("/proc/cmdline").at("read", "/proc/cmdline")
}

/// Returns the command lines of this kernel and of the next one.
pub(crate) fn both_kernels(append: &str) -> Result<(String, String), Error> {
    running().map(|running| (running.clone(), next_kernel(&running, append, None, None)))
}

/// Returns the arguments of this kernel, without those that the switch to it has added.
fn original_arguments(running: &str) -> Vec<String> {
    let parts = || running.split_whitespace();
    // the driver that an earlier switch kept away is not kept away for ever
    let driver_blacklist = parts().find_map(|part| part.strip_prefix(WATCHDOG_ARGUMENT)).map(self::driver_blacklist);
    let is_guarded = parts().any(|part| part.strip_prefix(RDINIT) == Some(FIRST_PROGRAM));
    let is_added = |part: &&str| {
        part.starts_with(OWN_PREFIX)
            || driver_blacklist.as_deref() == Some(part)
            || is_guarded && [RDINIT, CRASHKERNEL].iter().any(|name| part.starts_with(name))
    };
    let mut line: Vec<String> = parts().filter(|part| !is_added(part)).map(ToOwned::to_owned).collect();
    line.extend(parts().find_map(|part| part.strip_prefix(NEXT_INIT_ARGUMENT)).map(|next| format!("{RDINIT}{next}")));
    line
}

/// Returns the next kernel's command line: a kernel that panics must not stop for ever. The driver of a watchdog that
/// is to run on is not loaded, and `crash_mib` MiB are reserved for a crash kernel.
pub(crate) fn next_kernel(running: &str, append: &str, watchdog: Option<&str>, crash_mib: Option<u64>) -> String {
    let mut line = without(original_arguments(running), "BOOT_IMAGE= initrd= panic= crashkernel=");
    line.push("panic=1".into());
    line.extend(
        watchdog.into_iter().flat_map(|driver| [driver_blacklist(driver), format!("{WATCHDOG_ARGUMENT}{driver}")]),
    );
    line.extend(append.split_whitespace().map(ToOwned::to_owned));
    if let Some(mib) = crash_mib {
        let next = rdinit(&line).map(|next| format!("{NEXT_INIT_ARGUMENT}{next}"));
        line = without(line, RDINIT);
        line.extend([format!("{CRASHKERNEL}{mib}M"), format!("{RDINIT}{FIRST_PROGRAM}")]);
        line.extend(next);
    }
    line.join(" ")
}

/// Returns the program that the next kernel's initramfs starts, after the one that is started first.
pub(crate) fn next_init(running: &str, append: &str) -> String {
    let mut line = original_arguments(running);
    line.extend(append.split_whitespace().map(ToOwned::to_owned));
    rdinit(&line).unwrap_or(DEFAULT_INIT).to_owned()
}

/// Returns true if `append` configures crash kernels itself.
pub(crate) fn has_crashkernel(append: &str) -> bool {
    append.split_whitespace().any(|part| part.starts_with(CRASHKERNEL))
}

/// Returns the old kernel's command line when a crash kernel starts it: the same as before.
pub(crate) fn old_kernel(running: &str, next: &str) -> String {
    let mut line = original_arguments(running);
    line.push(format!("{PANICKED_ARGUMENT}{next}"));
    line.join(" ")
}

/// Returns true if a crash kernel has started this one.
pub(crate) fn is_after_panic(running: &str) -> bool {
    running.split_whitespace().any(|part| part.starts_with(PANICKED_ARGUMENT))
}

/// Returns true if the processor that the firmware starts with is not used: after a crash on another one it must not be
/// woken.
pub(crate) fn has_unused_processor(running: &str) -> bool {
    running.split_whitespace().any(|part| part.starts_with(UNUSED_PROCESSOR_ARGUMENT))
}

/// Arguments that a crash kernel does not need: file systems, programs, and all that would take more memory than it
/// has.
const CRASH_KERNEL_OMITTED: &str = "BOOT_IMAGE= initrd= panic= crashkernel= rdinit= init= root= rootflags= \
    rootfstype= memmap= mem= hugepages= hugepagesz= default_hugepagesz= cma= log_buf_len= kernelcore= movablecore= \
    kho= liveupdate= swiotlb=";

/// Returns the crash kernel's command line: one processor, devices as the other kernel has left them, no memory for
/// unused drivers.
pub(crate) fn crash_kernel(running: &str) -> String {
    let mut line = without(original_arguments(running), CRASH_KERNEL_OMITTED);
    line.push("panic=1 nr_cpus=1 irqpoll reset_devices swiotlb=noforce".into());
    line.join(" ")
}

/// Returns a line without the arguments that begin with one of `names`, which have a space between two of them.
fn without(line: Vec<String>, names: &str) -> Vec<String> {
    line.into_iter().filter(|part| !names.split(' ').any(|name| part.starts_with(name))).collect()
}

/// Returns the value of the last `rdinit=`, which is the valid one.
fn rdinit(line: &[String]) -> Option<&str> {
    line.iter().rev().find_map(|part| part.strip_prefix(RDINIT))
}

/// Returns the argument that lets a driver be loaded only by its name.
fn driver_blacklist(driver: &str) -> String {
    format!("modprobe.blacklist={driver}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_command_line_is_this_one_and_what_a_switch_needs() {
        let running = "BOOT_IMAGE=/vmlinuz root=/dev/vda console=ttyS0 panic=0\n";
        assert_eq!(next_kernel(running, "", None, None), "root=/dev/vda console=ttyS0 panic=1");
        assert_eq!(next_kernel("quiet", "a=1 b=2", None, None), "quiet panic=1 a=1 b=2");
        let watched = next_kernel("quiet modprobe.blacklist=floppy", "a=1", Some("iTCO_wdt"), None);
        let expected = "modprobe.blacklist=iTCO_wdt stillpoint.watchdog=iTCO_wdt a=1";
        assert_eq!(watched, format!("quiet modprobe.blacklist=floppy panic=1 {expected}"));
        // the same one once more, and then none
        assert_eq!(next_kernel(&watched, "", Some("iTCO_wdt"), None).matches("iTCO_wdt").count(), 2);
        assert_eq!(next_kernel(&watched, "", None, None), "quiet modprobe.blacklist=floppy a=1 panic=1");
    }

    #[test]
    fn a_crash_kernel_comes_first_once_and_nothing_is_forgotten_over_it() {
        let guarded = next_kernel("quiet crashkernel=256M rdinit=/a", "x=1", None, Some(128));
        assert_eq!(guarded, "quiet panic=1 x=1 crashkernel=128M rdinit=/stillpoint/first stillpoint.rdinit=/a");
        assert_eq!(next_init("quiet rdinit=/a", "x=1"), "/a");
        assert_eq!((next_init("quiet", "rdinit=/b"), next_init("quiet", "")), ("/b".into(), "/init".into()));
        // and in the next switches
        assert_eq!(next_init(&guarded, ""), "/a");
        assert_eq!(next_kernel(&guarded, "", None, None), "quiet x=1 rdinit=/a panic=1");
        assert_eq!(next_kernel(&guarded, "", None, Some(96)).matches("crashkernel=").count(), 1);
        assert!(has_crashkernel("a=1 crashkernel=1G") && !has_crashkernel("nocrashkernel=1"));
    }

    #[test]
    fn the_old_kernel_comes_again_with_the_line_it_had() {
        let running = "BOOT_IMAGE=/vmlinuz root=/dev/vda panic=0 crashkernel=256M memmap=1G!4G\n";
        let line = old_kernel(running, "6.12");
        assert_eq!(line, format!("{} stillpoint.panicked=6.12", running.trim()));
        assert!(is_after_panic(&line) && !is_after_panic(running));
        assert_eq!(old_kernel(&line, "6.13"), format!("{} stillpoint.panicked=6.13", running.trim()));
        // a kernel that was started by a switch has not requested that switch's crash kernel
        let came = next_kernel("root=/dev/vda", "", None, Some(128));
        assert_eq!(old_kernel(&came, "6.13"), "root=/dev/vda panic=1 stillpoint.panicked=6.13");
        assert!(has_unused_processor("quiet disable_cpu_apicid=0") && !has_unused_processor(&line));
    }

    #[test]
    fn a_crash_kernel_has_what_the_machine_needs_and_nothing_that_takes_memory() {
        let running =
            "root=/dev/vda console=ttyS0 hugepages=512 memmap=1G!4G kho=on no_timer_check stillpoint.fault=panic";
        let expected = "console=ttyS0 no_timer_check panic=1 nr_cpus=1 irqpoll reset_devices swiotlb=noforce";
        assert_eq!(crash_kernel(running), expected);
    }
}

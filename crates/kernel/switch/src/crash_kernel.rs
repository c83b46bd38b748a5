//! A crash kernel for the next kernel: when that one panics, it starts this kernel again, with all of the machine's
//! memory and without the firmware, which may be slow and may clear RAM. Before it is loaded, and where it cannot be
//! loaded, the boot loader starts this kernel again.

use crate::command_line;
use crate::config::Config;
use crate::handover::{CONFIGURATION_MAX, available_bytes, has_option};
use crate::kernel::{CrashKernelImage, IMAGE_BYTES_MAX, Kernel};
use crate::memmap::excluded_ranges;
use serde::{Deserialize, Serialize};
use std::path::Path;
use stillpoint_host::file::{read_regular, read_regular_text};
use stillpoint_host::kernel_files::{self, Files};
use stillpoint_kernel_checkpoint::command::run;
use stillpoint_kernel_checkpoint::{Error, ErrorContext, host};
use stillpoint_kernel_crash::{OldKernel, archive, reservation};

/// Boot parameters of the running kernel.
const PARAMETERS_FILE: &str = "/sys/kernel/boot_params/data";
const SETUP_DATA_DIRECTORY: &str = "/sys/kernel/boot_params/setup_data";
/// Type of the entries that continue the map of memory.
const SETUP_E820_EXT: &str = "0x1";
/// Bytes of the parameters that hold the address of the tables of ACPI.
const ACPI_ADDRESS_RANGE: std::ops::Range<usize> = 0x70..0x78;
const EFI_DIRECTORY: &str = "/sys/firmware/efi";
const LOADED_FILE: &str = "/sys/kernel/kexec_crash_loaded";
const SIZE_FILE: &str = "/sys/kernel/kexec_crash_size";
/// Bytes of RAM that are left to everything else.
const RAM_BYTES_LEFT_MIN: u64 = 128 << 20;

/// Reason for which a switch did not succeed.
pub(crate) const PANICKED_TEXT: &str =
    "the machine started with the old kernel: the new one panicked, and its crash kernel started the old one";
const UNUSED_PROCESSOR_TEXT: &str =
    "the processor that the firmware starts with is not used until the machine restarts";

/// First release whose kernels detect that the firmware's first processor is not theirs, and leave it stopped. Older
/// ones had an argument for it (`disable_cpu_apicid=`), but the processor woke all the same, in memory that was theirs
/// by then: the machine was reset.
const RELEASE_WITHOUT_BOOT_PROCESSOR: [u64; 2] = [6, 9];

/// Crash kernel of the next kernel, and its state there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrashKernel {
    /// MiB of RAM that are reserved for it.
    pub mib: u64,
    /// True if it returns from a panic on any processor; otherwise only on the one that the firmware starts with.
    pub on_any: bool,
    /// Result of the test that it was loaded when units were to be restored; `None` before.
    pub loaded: Option<Result<(), String>>,
    /// Result of releasing its RAM since; `None` before.
    #[serde(rename = "given_back")]
    pub released: Option<Result<(), String>>,
}

impl CrashKernel {
    /// Returns the crash kernel of the next kernel, or the reason why a panic of that goes through the boot loader.
    pub(crate) fn of(config: &Config, to: &str) -> Result<Self, String> {
        if command_line::has_crashkernel(&config.append) {
            return Err("`append` already contains crashkernel=".into());
        }
        let options =
            [(to, ["CONFIG_KEXEC_FILE", "CONFIG_CRASH_DUMP"].as_slice()), (&host::kernel(), &["CONFIG_KEXEC"])];
        for (version, options) in options {
            let text = read_regular_text(&config.boot.join(format!("config-{version}")), CONFIGURATION_MAX).ok();
            if let Some(option) = options.iter().find(|option| !has_option(text.as_deref(), option)) {
                return Err(format!("{version} was built without {option}"));
            }
        }
        let lockdown = kernel_files::text("/sys/kernel/security/lockdown").unwrap_or_default();
        if !lockdown.is_empty() && !lockdown.contains("[none]") {
            return Err("this kernel is locked down, and a crash kernel could not start it".into());
        }
        let crash = CrashKernel {
            mib: reservation_bytes(config)? >> 20,
            on_any: runs_without_boot_processor(&host::kernel()),
            loaded: None,
            released: None,
        };
        crash.load(config, to).map_err(|error| error.with_causes())?;
        let needed = (crash.mib << 20) + RAM_BYTES_LEFT_MIN;
        match available_bytes() {
            Some(free) if free < needed => Err(format!(
                "{} MiB of memory are free: a crash kernel needs {}, and {} must remain free",
                free >> 20,
                crash.mib,
                RAM_BYTES_LEFT_MIN >> 20
            )),
            _ => Ok(crash),
        }
    }

    /// Makes all that the next kernel needs to load it.
    pub(crate) fn load(&self, config: &Config, to: &str) -> Result<CrashKernelImage, Error> {
        let old = Kernel::find(&config.boot, &host::kernel()).map_err(Error::refused)?;
        let (kernel, initrd) =
            (read_regular(&old.image, IMAGE_BYTES_MAX)?, read_regular(&old.initrd, IMAGE_BYTES_MAX)?);
        let (parameters, running) =
            (kernel_files::bytes(PARAMETERS_FILE).at("read", PARAMETERS_FILE)?, command_line::running()?);
        check_parameters(&parameters).map_err(Error::refused)?;
        let preserved = excluded_ranges(&running).map_err(Error::refused)?;
        let cpus = kernel_files::text("/proc/cpuinfo").at("read", "/proc/cpuinfo")?;
        let old = OldKernel {
            kernel: &kernel,
            initrd: &initrd,
            parameters: &parameters,
            command_line: &command_line::old_kernel(&running, to),
            preserved: &preserved,
            boot_processor: boot_processor(&cpus).filter(|_| !command_line::has_unused_processor(&running)),
            runs_without_boot_processor: self.on_any,
        };
        let archive =
            archive(&old, &command_line::crash_kernel(&running), &command_line::next_init(&running, &config.append))
                .map_err(Error::refused)?;
        Ok(CrashKernelImage { mib: self.mib, archive })
    }

    /// Records, on the next kernel, whether it is loaded.
    pub(crate) fn record_loaded(&mut self) {
        let files = Files::of_kernel();
        self.loaded = Some(match (files.value(SIZE_FILE).as_str(), files.value(LOADED_FILE).as_str()) {
            ("" | "0", _) => Err("the kernel has reserved no memory for it".into()),
            (_, "1") => Ok(()),
            _ => Err("it could not be loaded: the reason is in the kernel's log".into()),
        });
    }

    /// Releases its memory, on the next kernel, when the units serve: after that a panic goes through the boot loader
    /// again.
    pub(crate) fn release(&mut self) {
        if self.released.is_some() || self.loaded != Some(Ok(())) {
            return;
        }
        let unloaded = run("unload the crash kernel", "kexec", &["-s", "-p", "-u"], None);
        let outcome = unloaded
            .and_then(|_| kernel_files::write(SIZE_FILE, "0").at("write", SIZE_FILE))
            .map_err(|error| error.with_causes());
        if let Err(why) = &outcome {
            tracing::warn!("{} MiB remain reserved for a crash kernel: {why}", self.mib);
        }
        self.released = Some(outcome);
    }

    /// Returns the sentence for the operator before a switch.
    pub fn description(&self, from: &str, to: &str, stays: bool) -> String {
        let until = if stays { "permanently" } else { "until the units serve" };
        let which = if self.on_any { "" } else { " on the processor that the firmware starts with" };
        format!(
            "when {to} panics{which}, from its initramfs on, a crash kernel starts {from} again without the firmware: \
             it reserves {} MiB of RAM, {until}",
            self.mib
        )
    }
}

fn runs_without_boot_processor(kernel: &str) -> bool {
    host::numbers(kernel) >= RELEASE_WITHOUT_BOOT_PROCESSOR.to_vec()
}

/// Returns the bytes of RAM for it, from the configuration or from its content.
fn reservation_bytes(config: &Config) -> Result<u64, String> {
    if let Some(mib) = config.crash_kernel_mib {
        return Ok(mib << 20);
    }
    let old = Kernel::find(&config.boot, &host::kernel())?;
    let kernel = read_regular(&old.image, IMAGE_BYTES_MAX).map_err(|error| error.to_string())?;
    let initrd = old.initrd.metadata().map_err(|error| format!("{}: {error}", old.initrd.display()))?;
    reservation(&kernel, initrd.len())
}

/// Refuses boot parameters that are not complete.
fn check_parameters(parameters: &[u8]) -> Result<(), String> {
    let files = Files::of_kernel();
    let kind = |name| files.value(Path::new(SETUP_DATA_DIRECTORY).join(name).join("type"));
    if files.names(SETUP_DATA_DIRECTORY).into_iter().any(|name| kind(name) == SETUP_E820_EXT) {
        return Err("this machine's map of memory has too many entries".into());
    }
    // the old kernel starts without the firmware's services, which would show the address
    if Path::new(EFI_DIRECTORY).exists()
        && parameters.get(ACPI_ADDRESS_RANGE).is_none_or(|at| at.iter().all(|byte| *byte == 0))
    {
        return Err("this kernel does not report where the firmware's tables are located".into());
    }
    Ok(())
}

/// Returns the initial APIC id of the processor that this kernel, and so the firmware, began with.
fn boot_processor(cpuinfo: &str) -> Option<u32> {
    let value = |line: &str| line.strip_prefix("initial apicid")?.split_once(':')?.1.trim().parse().ok();
    cpuinfo.lines().find_map(value)
}

/// Returns the reason why the old kernel was started again, if a crash kernel has started it.
pub(crate) fn panic_reason() -> Option<String> {
    let line = command_line::running().unwrap_or_default();
    panic_reason_in(&line)
}

fn panic_reason_in(line: &str) -> Option<String> {
    let asleep =
        if command_line::has_unused_processor(line) { format!(" ({UNUSED_PROCESSOR_TEXT})") } else { String::new() };
    command_line::is_after_panic(line).then(|| format!("{PANICKED_TEXT}{asleep}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_processor_is_the_firmware_s() {
        let text = "processor\t: 0\napicid\t\t: 9\ninitial apicid\t: 4\n\nprocessor\t: 1\ninitial apicid\t: 0\n";
        assert_eq!(boot_processor(text), Some(4));
        assert_eq!(boot_processor("processor\t: 0\n"), None);
    }

    #[test]
    fn the_way_back_says_whether_a_processor_sleeps() {
        assert_eq!(panic_reason_in("quiet"), None);
        assert_eq!(panic_reason_in("quiet disable_cpu_apicid=0"), None);
        assert_eq!(panic_reason_in("quiet stillpoint.panicked=6.12").as_deref(), Some(PANICKED_TEXT));
        let description = panic_reason_in("quiet stillpoint.panicked=6.12 disable_cpu_apicid=0").unwrap();
        assert!(
            description.starts_with(PANICKED_TEXT) && description.contains("is not used until the machine restarts"),
            "{description}"
        );
    }

    #[test]
    fn what_was_not_loaded_is_not_given_back() {
        let mut crash = CrashKernel { mib: 128, on_any: true, loaded: Some(Err("no".into())), released: None };
        crash.release();
        assert_eq!(crash.released, None);
        assert!(crash.description("6.1", "6.12", false).ends_with("it reserves 128 MiB of RAM, until the units serve"));
        assert!(crash.description("6.9", "6.12", true).ends_with("permanently"));
        crash.on_any = runs_without_boot_processor("6.1.0-50-amd64");
        assert!(
            crash.description("6.1", "6.12", true).contains("panics on the processor that the firmware starts with,")
        );
        assert!(
            runs_without_boot_processor("6.9.1")
                && runs_without_boot_processor("7.2")
                && !runs_without_boot_processor("6.8.12")
        );
    }
}

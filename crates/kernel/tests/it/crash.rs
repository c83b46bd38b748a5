//! Kernels that panic. Before the crash kernel is loaded the boot loader starts the old kernel, after that the crash
//! kernel does, without a firmware that may clear the memory of the images.

use std::time::{Duration, Instant};
use stillpoint_testing::LineClient;
use stillpoint_testing::binary::stillpoint;
use stillpoint_testing::machine::clients::{
    CountingClient, append, place_images_in_memory, prepare_units, read_pairs, store_pairs, switch, wait_until_done,
};
use stillpoint_testing::machine::{Guest, Machine, Shape};

/// Time between two requests of a client: all of them share the emulated processors.
const REQUEST_INTERVAL: Duration = Duration::from_millis(250);
const KEYS: u32 = 2000;
const BOOT_LOADER_TEXT: &str = "the new one panicked or hung, or power was lost";
const CRASH_KERNEL_TEXT: &str = "its crash kernel started the old one";
const UNUSED_PROCESSOR_TEXT: &str = "the processor that the firmware starts with is not used";

/// redis and memcached under load, while next kernels panic.
struct LoadedMachine {
    machine: Machine,
    client: LineClient,
    pulses: [CountingClient; 2],
    from: String,
    to: String,
    /// Memory map of the old kernel.
    memory: String,
}

/// Returns the RAM that a kernel has, as ranges of addresses.
fn memory(machine: &mut Machine) -> String {
    machine.succeed("awk '/System RAM/ { print $1 }' /proc/iomem")
}

impl LoadedMachine {
    #[track_caller]
    fn boot(guest: &Guest, (from, to): (&str, &str), shape: Shape<'_>) -> LoadedMachine {
        let mut machine = Machine::boot_as(guest, from, stillpoint(), shape);
        prepare_units(&mut machine, &["memcached", "redis-server"]);
        machine.succeed("sed -i '1i crash-kernel = true' /etc/stillpoint/kernel.toml");
        let mut client = machine.client(6379);
        store_pairs(&mut client, KEYS);
        let pulses = [
            CountingClient::redis(&machine, "pulse", REQUEST_INTERVAL),
            CountingClient::memcached(&machine, "pulse", REQUEST_INTERVAL),
        ];
        let memory = memory(&mut machine);
        LoadedMachine { machine, client, pulses, from: from.into(), to: to.into(), memory }
    }

    /// Lets the next kernel panic by this fault; the old one returns with all of the machine, except perhaps one
    /// processor.
    #[track_caller]
    fn panic_next(&mut self, fault: &str, why: &str, is_one_asleep: bool) {
        append(&mut self.machine, fault);
        let begun = Instant::now();
        switch(&mut self.machine, &self.to, &self.from);
        let journal = wait_until_done(&mut self.machine);
        println!("{journal}\nfrom the command to the end of {fault} {:.1} s", begun.elapsed().as_secs_f64());
        assert!(journal.contains(why), "{journal}");
        let told = self.machine.succeed("stillpoint kernel status");
        assert!(told.contains(&format!("fell back to {}", self.from)) && told.contains(why), "{told}");
        assert_eq!(memory(&mut self.machine), self.memory);
        assert_eq!(journal.contains(UNUSED_PROCESSOR_TEXT), is_one_asleep, "{journal}");
        assert_eq!(self.machine.succeed("nproc"), if is_one_asleep { "1" } else { "2" }, "{journal}");
        assert_eq!(self.machine.succeed("nft list tables"), "");
        read_pairs(&mut self.client, KEYS);
        println!("COUNT ways back, {fault} 1");
    }

    /// Switches to the next kernel, which gets its memory back.
    #[track_caller]
    fn switch_over(mut self) {
        append(&mut self.machine, "");
        switch(&mut self.machine, &self.to, &self.to);
        let journal = wait_until_done(&mut self.machine);
        println!("{journal}");
        assert!(journal.contains("\"why\": null"), "{journal}");
        assert_eq!(journal.matches("\"Ok\": null").count(), 2, "loaded, and given back: {journal}");
        assert_eq!(self.machine.succeed("cat /sys/kernel/kexec_crash_loaded /sys/kernel/kexec_crash_size"), "0\n0");
        self.machine.succeed("! grep -q 'Crash kernel' /proc/iomem");
        read_pairs(&mut self.client, KEYS);
        for pulse in self.pulses {
            println!("COUNT requests that had their effect once {}", pulse.end().len());
        }
    }
}

#[test]
#[ignore = "seven boots of an emulated machine more: one of the long forms"]
fn panics_lead_back_to_images_on_a_disk() {
    let Some(guest) = Guest::for_test() else { return };
    let mut loaded = LoadedMachine::boot(&guest, (&guest.kernels[0], &guest.kernels[1]), Shape::default());
    let told = loaded.machine.succeed(&format!("stillpoint kernel switch --to {} --dry-run", loaded.to));
    assert!(told.contains("a crash kernel starts") && told.contains("MiB of RAM, until the units serve"), "{told}");
    loaded.panic_next("stillpoint.fault=panic", CRASH_KERNEL_TEXT, false);
    // such an old kernel needs the processor that the firmware starts with
    loaded.panic_next("stillpoint.fault=panic-aside", BOOT_LOADER_TEXT, false);
    loaded.panic_next("stillpoint-fault=first", BOOT_LOADER_TEXT, false);
    loaded.switch_over();
}

#[test]
#[ignore = "seven boots of an emulated machine more: one of the long forms"]
fn panics_lead_back_to_images_in_memory() {
    let Some(guest) = Guest::for_test() else { return };
    let [_, from, to] = &guest.kernels[..] else { panic!("three kernels: {:?}", guest.kernels) };
    let region = Shape { append: "memmap=256M!1G", ..Shape::default() };
    let mut loaded = LoadedMachine::boot(&guest, (from, to), region);
    place_images_in_memory(&mut loaded.machine);
    loaded.panic_next("stillpoint-fault=first", BOOT_LOADER_TEXT, false);
    loaded.panic_next("stillpoint.fault=panic-aside", CRASH_KERNEL_TEXT, true);
    // with the one processor that is left
    loaded.panic_next("stillpoint.initrd=panic", CRASH_KERNEL_TEXT, true);
    loaded.switch_over();
}

//! Kernels that panic. Before the crash kernel is loaded the boot loader starts the old kernel, after that the crash
//! kernel does, without a firmware that may clear the memory of the images.

use std::time::{Duration, Instant};
use stillpoint_testing::binary::stillpoint;
use stillpoint_testing::machine::clients::{
    Client, Pulse, all_pairs, append, images_in_memory, redis_pairs, switch, take_along, until_done,
};
use stillpoint_testing::machine::{Guest, Machine, Shape};

/// Time between two requests of a client: all of them share the emulated processors.
const REST: Duration = Duration::from_millis(250);
const KEYS: u32 = 2000;
const LOADER: &str = "the new one panicked or hung, or power was lost";
const CRASH: &str = "its crash kernel started the old one";
const ASLEEP: &str = "the processor that the firmware starts with sleeps";

/// redis and memcached under load, while next kernels panic.
struct Loaded {
    machine: Machine,
    client: Client,
    pulses: [Pulse; 2],
    from: String,
    to: String,
    /// Memory map of the old kernel.
    memory: String,
}

/// Returns the RAM that a kernel has, as ranges of addresses.
fn memory(machine: &mut Machine) -> String {
    machine.ok("awk '/System RAM/ { print $1 }' /proc/iomem")
}

impl Loaded {
    #[track_caller]
    fn boot(guest: &Guest, (from, to): (&str, &str), shape: Shape<'_>) -> Loaded {
        let mut machine = Machine::boot_as(guest, from, stillpoint(), shape);
        take_along(&mut machine, &["memcached", "redis-server"]);
        machine.ok("sed -i '1i crash-kernel = true' /etc/stillpoint/kernel.toml");
        let mut client = Client::connect(&machine, 6379);
        redis_pairs(&mut client, KEYS);
        let pulses = [Pulse::redis(&machine, "pulse", REST), Pulse::memcached(&machine, "pulse", REST)];
        let memory = memory(&mut machine);
        Loaded { machine, client, pulses, from: from.into(), to: to.into(), memory }
    }

    /// Lets the next kernel panic by this fault; the old one returns with all of the machine, except perhaps one
    /// processor.
    #[track_caller]
    fn panics(&mut self, fault: &str, why: &str, is_one_asleep: bool) {
        append(&mut self.machine, fault);
        let begun = Instant::now();
        switch(&mut self.machine, &self.to, &self.from);
        let journal = until_done(&mut self.machine);
        println!("{journal}\nfrom the command to the end of {fault} {:.1} s", begun.elapsed().as_secs_f64());
        assert!(journal.contains(why), "{journal}");
        let told = self.machine.ok("stillpoint kernel status");
        assert!(told.contains(&format!("fell back to {}", self.from)) && told.contains(why), "{told}");
        assert_eq!(memory(&mut self.machine), self.memory);
        assert_eq!(journal.contains(ASLEEP), is_one_asleep, "{journal}");
        assert_eq!(self.machine.ok("nproc"), if is_one_asleep { "1" } else { "2" }, "{journal}");
        assert_eq!(self.machine.ok("nft list tables"), "");
        all_pairs(&mut self.client, KEYS);
        println!("COUNT ways back, {fault} 1");
    }

    /// Switches to the next kernel, which gets its memory back.
    #[track_caller]
    fn goes_over(mut self) {
        append(&mut self.machine, "");
        switch(&mut self.machine, &self.to, &self.to);
        let journal = until_done(&mut self.machine);
        println!("{journal}");
        assert!(journal.contains("\"why\": null"), "{journal}");
        assert_eq!(journal.matches("\"Ok\": null").count(), 2, "loaded, and given back: {journal}");
        assert_eq!(self.machine.ok("cat /sys/kernel/kexec_crash_loaded /sys/kernel/kexec_crash_size"), "0\n0");
        self.machine.ok("! grep -q 'Crash kernel' /proc/iomem");
        all_pairs(&mut self.client, KEYS);
        for pulse in self.pulses {
            println!("COUNT requests that had their effect once {}", pulse.end().len());
        }
    }
}

#[test]
#[ignore = "seven boots of an emulated machine more: one of the long forms"]
fn panics_lead_back_to_images_on_a_disk() {
    let Some(guest) = Guest::for_test() else { return };
    let mut loaded = Loaded::boot(&guest, (&guest.kernels[0], &guest.kernels[1]), Shape::default());
    let told = loaded.machine.ok(&format!("stillpoint kernel switch --to {} --dry-run", loaded.to));
    assert!(
        told.contains("a crash kernel starts") && told.contains("MiB of RAM there, until its units serve"),
        "{told}"
    );
    loaded.panics("stillpoint.fault=panic", CRASH, false);
    // such an old kernel needs the processor that the firmware starts with
    loaded.panics("stillpoint.fault=panic-aside", LOADER, false);
    loaded.panics("stillpoint-fault=first", LOADER, false);
    loaded.goes_over();
}

#[test]
#[ignore = "seven boots of an emulated machine more: one of the long forms"]
fn panics_lead_back_to_images_in_memory() {
    let Some(guest) = Guest::for_test() else { return };
    let [_, from, to] = &guest.kernels[..] else { panic!("three kernels: {:?}", guest.kernels) };
    let region = Shape { append: "memmap=256M!1G", ..Shape::default() };
    let mut loaded = Loaded::boot(&guest, (from, to), region);
    images_in_memory(&mut loaded.machine);
    loaded.panics("stillpoint-fault=first", LOADER, false);
    loaded.panics("stillpoint.fault=panic-aside", CRASH, true);
    // with the one processor that is left
    loaded.panics("stillpoint.initrd=panic", CRASH, true);
    loaded.goes_over();
}

//! Control block and slots of libstillpoint: bytes in the memory of a target, read by a tool that runs as root.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use stillpoint_patch_engine::abi;

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let slots = abi::decode_slots(input);
    assert!(slots.len() <= input.len() / abi::SLOT_LEN);
    for slot in &slots {
        assert!(format!("{} {:?}", slot.name, slot.group).chars().all(|c| !c.is_control()));
    }
    if let Some(control) = abi::Control::decode(input) {
        assert!(control.slots_used <= abi::THREADS_MAX && control.priorities <= abi::PRIORITIES_MAX);
        if let Some(request) = control.pending() {
            let _ = slots.iter().filter(|slot| request.awaits(slot)).count();
        }
    }
    Corpus::Keep
});

fn seeds() -> Vec<Vec<u8>> {
    let mut control = vec![0; abi::CONTROL_LEN];
    control[..16].copy_from_slice(abi::MAGIC);
    control[16..20].copy_from_slice(&(abi::CONTROL_LEN as u32).to_le_bytes());
    control[20..24].copy_from_slice(&abi::VERSION.to_le_bytes());
    let at = abi::facts().into_iter().find(|(name, _)| *name == "offsetof(struct sp_control, slot_size)");
    if let Some((_, at)) = at {
        control[at as usize..at as usize + 4].copy_from_slice(&(abi::SLOT_LEN as u32).to_le_bytes());
    }
    let mut slot = vec![0; abi::SLOT_LEN];
    slot[0] = 1;
    vec![control, slot]
}

//! Inputs of the kernel pillar: criu's messages and images, and the index of a FOAM image. The first byte selects one.
#![no_main]

use libfuzzer_sys::{Corpus, fuzz_target};
use sha2::{Digest, Sha256};
use stillpoint_kernel_criu::image::{inet_sockets, processes, run_id};
use stillpoint_kernel_criu::lazy::Message;
use stillpoint_kernel_criu::page_server::{Command, Form, PE_PRESENT};
use stillpoint_kernel_criu::{pagemap, rpc, tcp};
use stillpoint_kernel_foam::{Index, Memory, Object, Pending};

fuzz_target!(init: stillpoint_fuzz::seed(seeds), |input: &[u8]| -> Corpus {
    let Some((what, bytes)) = input.split_first() else { return Corpus::Reject };
    match what % 6 {
        0 => dump(bytes),
        1 => {
            if let Ok((id, ranges)) = pagemap::decode(bytes) {
                let again = pagemap::encode(Form::Long, id, pagemap::Gaps::Closed, ranges.iter().copied());
                assert_eq!(pagemap::decode(&again), Ok((id, ranges)));
            }
        }
        2 => {
            let _ = processes(bytes);
            let _ = inet_sockets(bytes);
            let _ = run_id(bytes);
            let _ = tcp::connections(bytes);
            let _ = tcp::locals(bytes);
            let _ = tcp::progress(bytes);
        }
        3 => {
            let _ = rpc::Answer::decode(bytes);
            if let Some(word) = bytes.first_chunk() {
                let _ = Message::decode(*word);
            }
        }
        _ => index(bytes),
    }
    Corpus::Keep
});

/// Connection of criu: pages that a store would accept are recorded.
fn dump(mut bytes: &[u8]) {
    let Some(Ok(form)) = bytes.first_chunk().map(Form::of_first) else { return };
    let mut memory = Memory::new(Object::Task(7));
    memory.begin_pass();
    while let Some((header, rest)) = bytes.split_at_checked(form.bytes()) {
        bytes = rest;
        match Command::decode(form, header) {
            Ok(Command::Pages { start, pages, flags, .. }) if flags & 1 == 0 => {
                let _ = memory.add(start, pages, (flags & (PE_PRESENT | 2)) as u8);
            }
            Ok(Command::Pages { start, pages, .. }) => {
                // pages that are sent again unchanged keep their pass, and nothing else changes
                let before = memory.extents().pages();
                memory.keep(start, pages);
                assert_eq!(memory.extents().pages(), before);
                let _ = memory.keep_unchanged(start, pages);
            }
            Ok(Command::Open { .. }) => {
                memory.end_pass();
                memory.begin_pass();
            }
            Ok(_) => {}
            Err(_) => return,
        }
    }
    let mut end = 0;
    for extent in memory.extents().iter() {
        assert!(extent.start >= end && extent.pages > 0);
        end = extent.end();
    }
    let mut pending = Pending::of(memory.extents());
    while let Some(run) = pending.next(end / 2) {
        let before = pending.bytes();
        pending.remove(run.address, run.address + run.bytes);
        assert!(pending.bytes() < before);
    }
}

/// Index with a correct checksum, so that the code behind the check is reached.
fn index(body: &[u8]) {
    let mut bytes = b"STPFOAM3".to_vec();
    bytes.extend_from_slice(&(body.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&Sha256::digest(body));
    bytes.extend_from_slice(body);
    if let Ok(index) = Index::decode(&bytes) {
        let again = index.encode().expect("what was read is written");
        assert_eq!(Index::decode(&again), Ok(index));
    }
}

fn seeds() -> Vec<Vec<u8>> {
    use stillpoint_kernel_criu::page_server::Destination;
    let destination = Destination::Task(7);
    let commands = [
        Command::Open { destination, wants_answer: true },
        Command::Pages { destination, start: 0x5555_5555_5000, pages: 3, flags: 6 },
        Command::Open { destination, wants_answer: true },
        Command::Pages { destination, start: 0x5555_5555_5000, pages: 2, flags: 1 },
        Command::Close,
    ];
    let mut seeds: Vec<Vec<u8>> = [Form::Short, Form::Long]
        .into_iter()
        .map(|form| {
            let mut bytes = vec![0];
            commands.iter().for_each(|command| command.encode(form, &mut bytes));
            bytes
        })
        .collect();
    let range = pagemap::Pages { start: 0x1000, pages: 2, flags: 6 };
    seeds.push([vec![1], pagemap::encode(Form::Long, 1, pagemap::Gaps::Named, [range])].concat());
    seeds.push([vec![3], rpc::Request::notified(true).encode()].concat());
    seeds
}

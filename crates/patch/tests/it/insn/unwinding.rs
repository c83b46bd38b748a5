//! Data for unwinders: the stack in displaced code, and the code that answers in glibc's place.

use iced_x86::{Decoder, DecoderOptions, FlowControl};
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::{FIND_OBJECT_LEN, StackState, find_object, stack_states};

fn state(offset: u32, frame: u64, saved: &[(u8, u64)]) -> StackState {
    StackState { offset, frame, saved: saved.to_vec() }
}

#[test]
fn pushes_and_room_for_locals_are_followed() {
    // push rbp; mov rbp,rsp; push rbx; sub rsp,0x18; jmp +0
    let code = [0x55, 0x48, 0x89, 0xe5, 0x53, 0x48, 0x83, 0xec, 0x18, 0xe9, 0, 0, 0, 0, 0xcc];
    let found = stack_states(&code, Avma(0x1000));
    let expected = [
        state(0, 8, &[]),
        state(1, 16, &[(6, 16)]),
        state(5, 24, &[(6, 16), (3, 24)]),
        state(9, 48, &[(6, 16), (3, 24)]),
    ];
    assert_eq!((&found.states[..], found.len), (&expected[..], 14));
}

#[test]
fn what_is_not_understood_ends_the_description() {
    // lea r10,[rsp+8]; and rsp,-32: the distance is no longer known after it
    let found = stack_states(&[0x4c, 0x8d, 0x54, 0x24, 0x08, 0x48, 0x83, 0xe4, 0xe0, 0x90], Avma(0));
    assert_eq!((found.states.len(), found.len), (1, 9));
    // mov rbx,rdi without having saved rbx
    let found = stack_states(&[0x90, 0x48, 0x89, 0xfb, 0x90], Avma(0));
    assert_eq!((found.states.len(), found.len), (1, 4));
    // the same after push rbx
    let found = stack_states(&[0x53, 0x48, 0x89, 0xfb, 0x90], Avma(0));
    assert_eq!((found.states.len(), found.len), (2, 5));
    // sub rsp,rax
    assert_eq!(stack_states(&[0x48, 0x29, 0xc4, 0x90], Avma(0)).len, 3);
    // a second push of a register that was saved and changed since does not save the caller's value
    let found = stack_states(&[0x53, 0x31, 0xdb, 0x53, 0xc3], Avma(0));
    assert_eq!(found.states.last(), Some(&state(4, 24, &[(3, 16)])));
}

#[test]
fn a_displaced_call_has_its_return_address_on_the_stack() {
    // push [rip+8]; jmp rel32
    let found = stack_states(&[0xff, 0x35, 8, 0, 0, 0, 0xe9, 0, 0, 0, 0], Avma(0));
    assert_eq!(found.states, [state(0, 8, &[]), state(6, 16, &[])]);
}

#[test]
fn the_stand_in_is_whole_instructions_and_stays_inside() {
    let (at, table, original) = (Avma(0x7f00_0000_0000), Avma(0x7f00_0000_1000), Avma(0x7f00_0000_0080));
    let code = find_object(at, table, original).expect("within reach");
    let list: Vec<_> = Decoder::with_ip(64, &code, at.0, DecoderOptions::NONE).into_iter().collect();
    assert_eq!(list.last().map(|i| i.next_ip()), Some(at.0 + FIND_OBJECT_LEN as u64));
    assert!(list.iter().all(|i| !i.is_invalid()));
    let starts: Vec<u64> = list.iter().map(|i| i.ip()).collect();
    for jump in list.iter().filter(|i| i.flow_control() == FlowControl::ConditionalBranch) {
        assert!(starts.contains(&jump.near_branch_target()), "{jump:?}");
    }
    let tables = list.iter().filter(|i| i.is_ip_rel_memory_operand()).map(|i| i.ip_rel_memory_address());
    assert_eq!(tables.collect::<Vec<_>>(), [table.0, table.0]);
    assert_eq!(list.last().map(|i| i.near_branch_target()), Some(original.0));
    assert!(list.iter().all(|i| i.stack_pointer_increment() == 0 || i.flow_control() == FlowControl::Return));
    assert!(find_object(at, Avma(at.0 + (1 << 32)), original).is_err());
}

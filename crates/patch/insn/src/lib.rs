//! Redirects function entries: the bytes that a jump displaces, the displaced code at its new address, jumps, dispatchers.
//!
//! The caller guarantees three things. `code` is the *whole* hot part of one function as it is in memory, because a branch outside it is
//! not seen. Cold parts are checked with [`branch_targets`]. No thread executes the inner bytes of an entry while they are written.
//!
//! The crate guarantees that the code of [`displace`], run at its new address, does exactly what the displaced instructions did and then
//! continues in the old function after them. Branches and rip-relative operands keep their targets. A call leaves the *original* return
//! address on the stack, so that unwinding sees the old text. The crate refuses each instruction that it cannot move in this way, and the
//! error names it; the crate never approximates.
//!
//! It does not follow indirect jumps: it cannot see a jump table that leads into the first bytes of its own function. Compilers make no
//! such table, because the code before the table's jump is also before its targets.
//!
//! ```text
//! entry: jmp D            D: what the state byte says, else  P: displaced prologue
//!        (inner bytes)       cmpl $T, %fs:off                   jmp entry+displaced_len
//! entry+displaced_len:       je  then  (new code)
//!                            jmp otherwise (P)
//! ```
//!
//! ```
//! use stillpoint_patch_format::{Avma, Svma};
//! // push rbx; mov rbx,rdi; add rbx,rsi; mov rax,rbx; pop rbx; ret
//! let code = [0x53, 0x48, 0x89, 0xfb, 0x48, 0x01, 0xf3, 0x48, 0x89, 0xd8, 0x5b, 0xc3];
//! let plan = stillpoint_patch_insn::plan_entry(&code, Svma(0x1000))?;
//! assert_eq!((plan.displaced_len, &plan.inner_boundaries[..]), (7, &[1, 4][..]));
//! let moved = stillpoint_patch_insn::displace(&code, Svma(0x1000), &plan, Avma(0x55001000), Avma(0x55800000))?;
//! assert_eq!(moved[..7], code[..7]);
//! assert_eq!(moved[7], 0xe9); // and back
//! # Ok::<(), stillpoint_patch_insn::Error>(())
//! ```
//!
//! Follows "Text poking" and "Per-thread generation" of the design, Intel SDM volume 2 for encodings.
#![forbid(unsafe_code)]

mod complete_data;
mod displace;
mod entry;
mod error;
mod find_object;
mod jump;
mod stack;

pub use complete_data::{COMPLETE_DATA_LEN, complete_data, data_list};
pub use displace::{DISPLACED_MAX, displace};
pub use entry::{EntryPlan, branch_targets, is_padding, plan_entry};
pub use error::Error;
pub use find_object::{FIND_ENTRY_LEN, FIND_HEADER_LEN, FIND_OBJECT_LEN, FIND_STATE_AT, find_object};
pub use jump::{DISPATCH_LEN, DispatchState, FAR_STUB_LEN, JUMP_LEN, dispatch, far_stub, jump5};
pub use stack::{StackState, StackStates, leaves_stack_alone, stack_states};

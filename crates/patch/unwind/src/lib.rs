//! Walks a stack by the unwind data of the code alone: takes registers and a read callback, returns frames. Also makes such data for code
//! that no compiler made ([`describe()`]), and the table by which unwinders find it ([`search_table()`]).
//!
//! The caller passes every module's `.eh_frame` with its address in the process ([`Module`]), the registers of a stopped thread, and a
//! function that reads words of its stack. Only the pages that a walk needs are read ([`Section`]).
//!
//! The crate guarantees that a walk whose [`Walk::end`] is [`End::Outermost`] followed only call-frame information, from the first frame to
//! a frame whose return address is *undefined* (as in `_start` and `clone`). Only such a walk proves that some code is not on the stack.
//! There is no frame-pointer fallback, no guess and no cache. Missing data, or data that is not understood, ends the walk, and
//! [`Walk::end`] reports it.
//!
//! ```text
//! CFA = rule(registers),  register' = rule(CFA, stack),  rsp' = CFA,  pc' = rule(return address)
//! ```
//!
//! It does not know names. It does not walk across stacks (coroutines), because no unwind data leads there.
//!
//! ```
//! use stillpoint_patch_unwind::{End, Registers, Unwinder};
//! let walk = Unwinder::new(Vec::new()).walk(Registers { pc: 0x1000, ..Registers::default() }, |_| None);
//! assert_eq!((walk.frames.len(), walk.end), (1, End::NoData(0x1000)));
//! ```
//!
//! Records are found by the search table of each module: to read all records of a MariaDB takes 10 to 20 ms.
//!
//! The crate uses gimli, not framehop: framehop falls back to frame pointers by itself and does not report that it did. It follows DWARF 5,
//! section 6.4, and the LSB's `.eh_frame`.
#![forbid(unsafe_code)]

mod describe;
mod search_table;
mod section;
mod walk;

pub use describe::{COMMON_LEN, PIECE_MAX, PLAIN_LEN, Piece, Row, describe};
pub use search_table::{Described, TableError, count_described, described, search_table, table_len};
pub use section::Section;
pub use walk::{End, Frame, Module, Registers, Unwinder, Walk};

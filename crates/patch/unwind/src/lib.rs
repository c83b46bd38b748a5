//! Walks a stack by the unwind data of the code alone: registers and a read callback in, frames out. Makes such data for
//! code that no compiler wrote ([`describe()`]), and the table by which unwinders find it ([`search_table()`]).
//!
//! The caller hands over every module's `.eh_frame` with the address that it has in the process ([`Module`]), of which only
//! those pages are read that a walk needs ([`Section`]), the registers of a thread that stands, and a function that reads
//! words of its stack.
//!
//! The crate guarantees that a walk whose [`Walk::end`] is [`End::Outermost`] followed nothing but call-frame
//! information from the first frame to a frame whose return address is *undefined* (what `_start` and `clone` say): only
//! such a walk proves that some code is not on the stack. There is no frame-pointer fallback, no guess and no cache;
//! whatever is missing or not understood ends the walk and says so.
//!
//! ```text
//! CFA = rule(registers),  register' = rule(CFA, stack),  rsp' = CFA,  pc' = rule(return address)
//! ```
//!
//! It does not know names, and does not walk across stacks (coroutines), for no unwind data leads there.
//!
//! ```
//! use stillpoint_patch_unwind::{End, Registers, Unwinder};
//! let walk = Unwinder::new(Vec::new()).walk(Registers { pc: 0x1000, ..Registers::default() }, |_| None);
//! assert_eq!((walk.frames.len(), walk.end), (1, End::NoData(0x1000)));
//! ```
//!
//! gimli, not framehop: framehop falls back to frame pointers by itself and does not say that it did. Follows DWARF 5,
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

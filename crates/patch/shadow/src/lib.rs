//! Moves members that a fix adds to a structure into shadow variables, so that the structure keeps its shipped layout.
//!
//! A program that runs has objects of the old layout. Here a unit of C is rewritten after it was preprocessed: the
//! member is taken out of the structure, and `object->member` becomes a look-up by the object's address in a table that
//! is part of the patch ([`RUNTIME`]).
//!
//! **The compiler decides, not the text.** The obvious way is to search for accesses by the member's name; it fails as
//! other structures have members of this name, and as macros and typedefs hide types. Here the parser only proposes
//! places and their extents, each of which is put under a file name of its own, and the compiler checks the unit without
//! the member: an error in such a file is an answer. An error elsewhere refuses the member, so that no use is missed.
//! The same question finds each `sizeof` of the structure and of those that contain it, pointers to them that
//! functions of memory get, and assignments of whole structures, for which the structure gets a constant member.
//!
//! **Stale values.** An entry belongs to the address of an object for ever. Where the program gets memory with the size
//! of the structure, or clears it, the rewritten code clears the entries of this range: a later object at the address of
//! an earlier one begins as it would with the real member. So nothing has to be done where objects are freed. A use of the
//! size for something that is not known to be one of these is refused, and so are objects whose begin is not visible:
//! those on stacks.
//!
//! **The caller must guarantee** that all units that see the structure are rewritten, and that no thread runs old code
//! while others run the new: the patch has the scope of the process.
//!
//! **It does not** rewrite C++, nor know objects that code outside of the rewritten units makes.
#![forbid(unsafe_code)]

mod definition;
mod edits;
mod error;
mod mask;
mod member;
mod objects;
mod rewrite;
mod syntax;
mod uses;

pub use error::{Kind, Refusal};
pub use member::ShadowMember;
pub use rewrite::{Check, Checked, Origin, Request, Rewritten, Stop, rewrite};

/// Source in C of the table, which becomes a unit of the patch: its file name and text.
pub const RUNTIME: (&str, &str) = ("stillpoint-members.c", include_str!("../runtime/stillpoint-members.c"));

/// Version of the rules; increase it with every change of what a rewriting gives.
pub const VERSION: u32 = 1;

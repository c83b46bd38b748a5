//! Linker: takes a patch and an address, returns bytes. Pure: the caller has looked up the values of symbols.

mod layout;
mod relocation;
mod unwind_tables;

pub use layout::{DISPATCHER_LEN, DISPATCHERS, FunctionLayout, Layout, STATES_LEN};
pub(crate) use relocation::contents;
pub use relocation::{Image, LinkError, SymbolAddress, link};
pub use unwind_tables::make_visible;

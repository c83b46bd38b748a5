//! Linker: takes a patch and an address, returns bytes. Pure: the caller has looked up the values of symbols.

mod layout;
mod relocate;
mod visible;

pub use layout::{DISPATCHER_LEN, DISPATCHERS, FunctionLayout, Layout, STATES_LEN, Segment};
pub use relocate::{Image, LinkError, SymbolAddress, link};
pub use visible::make_visible;

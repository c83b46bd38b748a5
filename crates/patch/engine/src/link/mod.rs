//! A patch and an address in, bytes out. Pure: what symbols stand for has been looked up by the caller.

mod layout;
mod relocate;
mod visible;

pub use layout::{DISPATCHER_LEN, DISPATCHERS, FunctionLayout, Layout, STATES_LEN, Segment};
pub use relocate::{Image, LinkError, SymbolAddress, link};
pub use visible::make_visible;

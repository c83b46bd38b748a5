//! Checkpoint and restore of real programs, with their connections and their memory.

mod addresses;
mod earlier_version;
mod faults;
mod footprint;
mod guard;
mod images;
mod live;
mod ownership;
mod support;
mod wake;

//! Real programs, with their connections and their memory, into images and back.

mod addresses;
mod faults;
mod footprint;
mod guard;
mod images;
mod live;
mod ownership;
mod support;
mod wake;

//! The clusters that other tests run on.

mod cluster;

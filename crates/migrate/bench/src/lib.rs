//! Common code of the benchmarks, experiments and the demonstration of live migration: processors for servers that must
//! share none.
//!
//! The caller may change the affinity of the processes that it names. The crate guarantees that a process whose affinity
//! could not be set ends the measurement. It judges no result.

pub mod processors;

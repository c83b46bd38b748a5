//! Common code of the benchmarks, experiments and the demonstration of live migration.

pub mod processors;

//! Common code of the benchmarks, experiments and the demonstration of live patching: one operation with its stops, the
//! machine of a measurement, and the times in which the machine itself stalled.

pub mod machine;
pub mod operation;
pub mod stalls;

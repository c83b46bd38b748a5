//! Common code of the benchmarks, experiments and the demonstration of live patching: one operation with its stops, the
//! machine of a measurement, the times in which the machine itself stalled, and diffs of packages.
//!
//! The caller runs servers of its own, and applies and reverts by the real binary (`stillpoint_patch_tests::cli`). The
//! crate guarantees that times are of the clock that the events of an operation have. It judges no result.

pub mod build_report;
pub mod consumption;
pub mod latencies;
pub mod machine;
pub mod operation;
pub mod package_diff;
pub mod stalls;

//! Tests of the load, its record and its report.

mod load;
mod postgres;
mod record;
mod report;

//! Load, its record and the report of it.

mod load;
mod postgres;
mod record;
mod report;

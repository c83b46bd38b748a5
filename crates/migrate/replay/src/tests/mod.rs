//! The crate as a whole: the paper's example, the rules as properties, and random histories on a model database.
//!
//! `STILLPOINT_SOAK=1` runs 100,000 histories and more; `STILLPOINT_SEED=n` runs one of them alone.

mod database;
mod history;
mod paper;
mod queued_syncsets;
mod rules_matter;
mod simulation;
mod target;

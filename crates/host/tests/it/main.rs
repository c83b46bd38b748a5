//! Tests of the machine services.

mod attacks;
mod races;

//! Tests of what the tests share.

mod postgresql;
mod withholding;

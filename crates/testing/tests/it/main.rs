//! Tests of the helpers that other tests share.

mod postgresql;
mod withholding;

//! Tests of what the tests share.

mod withholding;

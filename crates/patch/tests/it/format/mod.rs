//! Tests of the patch file.

mod file;

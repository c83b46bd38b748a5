//! Tests of call-frame information.

mod made;

//! Tests of edits placed by anchors.

mod anchors;

//! Tests of the builder with the machine's own compiler.

mod link_time;
mod shadow;
mod shadow_members;
mod source_trees;
mod withheld_versions;

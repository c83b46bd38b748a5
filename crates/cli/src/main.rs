//! The `stillpoint` binary: arguments, output and exit codes; everything else lives in the engines.
fn main() {}

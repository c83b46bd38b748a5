//! Tests of instructions moved, read and described.

mod displace_properties;
mod entry;
mod unwinding;

use stillpoint_patch_format::Avma;

/// Returns the target of the jump at `at`, if `bytes` start with a `jmp rel32`.
fn jump_target(bytes: &[u8], at: Avma) -> Option<Avma> {
    match bytes {
        [0xe9, a, b, c, d, ..] => {
            let distance = i64::from(i32::from_le_bytes([*a, *b, *c, *d]));
            Some(Avma(at.0.wrapping_add(5).wrapping_add_signed(distance)))
        }
        _ => None,
    }
}

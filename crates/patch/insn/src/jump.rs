//! Fixed sequences: the jump at an entry, the dispatcher, the stub for calls out of reach.

use crate::Error;
use stillpoint_patch_format::Avma;

/// Bytes of `jmp rel32`.
pub const JUMP_LEN: usize = 5;
/// Bytes of a dispatcher.
pub const DISPATCH_LEN: usize = 23;
/// Bytes of the stub that reaches any address.
pub const FAR_STUB_LEN: usize = 6;

/// Distance from the end of an instruction at `at` of `len` bytes, when 32 bits hold it.
fn rel32(at: Avma, len: u64, to: Avma) -> Result<[u8; 4], Error> {
    let distance = to.0.wrapping_sub(at.0.wrapping_add(len)) as i64;
    i32::try_from(distance).map(i32::to_le_bytes).map_err(|_| Error::OutOfReach { at, to })
}

/// `jmp to`, placed at `at`.
pub fn jump5(at: Avma, to: Avma) -> Result<[u8; JUMP_LEN], Error> {
    let [a, b, c, d] = rel32(at, 5, to)?;
    Ok([0xe9, a, b, c, d])
}

/// Where the bytes at `at` jump to, when they are a `jmp rel32`.
pub fn jump_target(bytes: &[u8], at: Avma) -> Option<Avma> {
    match bytes {
        [0xe9, a, b, c, d, ..] => {
            let distance = i64::from(i32::from_le_bytes([*a, *b, *c, *d]));
            Some(Avma(at.0.wrapping_add(5).wrapping_add_signed(distance)))
        }
        _ => None,
    }
}

/// `cmpl $transition, %fs:tp_offset; je then; jmp otherwise`, placed at `at`.
///
/// Uses no register and no stack; flags are dead at every function entry (psABI).
pub fn dispatch(
    at: Avma,
    tp_offset: i32,
    transition: u32,
    then: Avma,
    otherwise: Avma,
) -> Result<[u8; DISPATCH_LEN], Error> {
    let mut out = [0; DISPATCH_LEN];
    out[..4].copy_from_slice(&[0x64, 0x81, 0x3c, 0x25]);
    out[4..8].copy_from_slice(&tp_offset.to_le_bytes());
    out[8..12].copy_from_slice(&transition.to_le_bytes());
    out[12..14].copy_from_slice(&[0x0f, 0x84]);
    out[14..18].copy_from_slice(&rel32(Avma(at.0 + 12), 6, then)?);
    out[18..].copy_from_slice(&jump5(Avma(at.0 + 18), otherwise)?);
    Ok(out)
}

/// `jmp *slot(%rip)`, placed at `at`: goes wherever the 8 bytes at `slot` say.
pub fn far_stub(at: Avma, slot: Avma) -> Result<[u8; FAR_STUB_LEN], Error> {
    let [a, b, c, d] = rel32(at, 6, slot)?;
    Ok([0xff, 0x25, a, b, c, d])
}

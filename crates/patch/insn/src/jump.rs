//! Fixed instruction sequences: the jump at an entry, the dispatcher, the stub for calls out of reach.

use crate::Error;
use stillpoint_patch_format::Avma;

/// Bytes of `jmp rel32`.
pub const JUMP_LEN: usize = 5;
/// Bytes of a dispatcher.
pub const DISPATCH_LEN: usize = 43;
/// Bytes of the stub that reaches any address.
pub const FAR_STUB_LEN: usize = 6;

/// Returns the distance from the end of the instruction of `len` bytes at `at` to `to`, if 32 bits can hold it.
pub(crate) fn rel32(at: Avma, len: u64, to: Avma) -> Result<[u8; 4], Error> {
    let distance = to.0.wrapping_sub(at.0.wrapping_add(len)) as i64;
    i32::try_from(distance).map(i32::to_le_bytes).map_err(|_| Error::OutOfReach { at, to })
}

/// Returns `jmp to`, placed at `at`.
///
/// # Errors
/// [`Error::OutOfReach`] if 32 bits cannot hold the distance.
pub fn jump5(at: Avma, to: Avma) -> Result<[u8; JUMP_LEN], Error> {
    let [a, b, c, d] = rel32(at, 5, to)?;
    Ok([0xe9, a, b, c, d])
}

/// Meaning of the state byte of a transition for its dispatchers. It is one byte, so that a write cannot tear. It is the commit point of
/// the whole transition, for every entry, every thread and every future thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DispatchState {
    /// Each thread follows its own word.
    PerThread = 0,
    /// All threads go to the new side; their words are ignored.
    AllThen = 1,
    /// All threads go to the old side; their words are ignored.
    AllOtherwise = 2,
    /// All threads are stopped while data change. If the tool dies, they complete the change before they execute other code, see
    /// [`complete_data`](crate::complete_data); then the state is [`DispatchState::AllThen`].
    DataChanging = 3,
}

impl DispatchState {
    /// Returns the state that a byte in memory encodes.
    pub fn from_byte(byte: u8) -> Option<Self> {
        [Self::PerThread, Self::AllThen, Self::AllOtherwise, Self::DataChanging].into_iter().find(|s| *s as u8 == byte)
    }
}

/// Returns a dispatcher, placed at `at`:
///
/// ```text
///       cmpb $1, state(%rip)
///       jb   1f
///       je   then
///       jmp  otherwise
/// 1:    cmpl $transition, %fs:tp_offset
///       je   then
///       jmp  otherwise
/// ```
///
/// It uses no register and no stack; flags are dead at every function entry (psABI).
///
/// # Errors
/// [`Error::OutOfReach`] if 32 bits cannot hold one of the distances.
pub fn dispatch(
    at: Avma,
    state: Avma,
    tp_offset: i32,
    transition: u32,
    then: Avma,
    otherwise: Avma,
) -> Result<[u8; DISPATCH_LEN], Error> {
    let mut out = [0; DISPATCH_LEN];
    out[..2].copy_from_slice(&[0x80, 0x3d]);
    out[2..6].copy_from_slice(&rel32(at, 7, state)?);
    out[6] = DispatchState::AllThen as u8;
    out[7..9].copy_from_slice(&[0x72, 11]);
    out[9..11].copy_from_slice(&[0x0f, 0x84]);
    out[11..15].copy_from_slice(&rel32(Avma(at.0 + 9), 6, then)?);
    out[15..20].copy_from_slice(&jump5(Avma(at.0 + 15), otherwise)?);
    out[20..24].copy_from_slice(&[0x64, 0x81, 0x3c, 0x25]);
    out[24..28].copy_from_slice(&tp_offset.to_le_bytes());
    out[28..32].copy_from_slice(&transition.to_le_bytes());
    out[32..34].copy_from_slice(&[0x0f, 0x84]);
    out[34..38].copy_from_slice(&rel32(Avma(at.0 + 32), 6, then)?);
    out[38..].copy_from_slice(&jump5(Avma(at.0 + 38), otherwise)?);
    Ok(out)
}

/// Returns `jmp *slot(%rip)`, placed at `at`: a jump to the address in the 8 bytes at `slot`.
///
/// # Errors
/// [`Error::OutOfReach`] if 32 bits cannot hold the distance.
pub fn far_stub(at: Avma, slot: Avma) -> Result<[u8; FAR_STUB_LEN], Error> {
    let [a, b, c, d] = rel32(at, 6, slot)?;
    Ok([0xff, 0x25, a, b, c, d])
}

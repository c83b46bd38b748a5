//! Replacement for glibc's `_dl_find_object`: finds code that is unknown to the loader in a table, and forwards all other addresses to
//! glibc.

use crate::Error;
use crate::jump::jump5;
use stillpoint_patch_format::Avma;

/// Bytes of [`find_object`].
pub const FIND_OBJECT_LEN: usize = 100;
/// Bytes of the table's header: 16 unused, then the lowest and the highest address that is looked up in the table, 8 bytes each.
pub const FIND_HEADER_LEN: usize = 64;
/// Bytes of an entry: start, end, link map, search table of the unwind data (8 bytes each), state (one byte).
pub const FIND_ENTRY_LEN: usize = 64;
/// Offset of the state in an entry: 0 means never used and ends the table; odd means active, any other even value inactive.
pub const FIND_STATE_AT: usize = 32;

/// ```text
///       lea  table(%rip), %rax
///       cmp  16(%rax), %rdi             lowest
///       jb   otherwise
///       cmp  24(%rax), %rdi             highest
///       jae  otherwise
/// 1:    lea  table(%rip), %rax
/// 2:    add  $64, %rax
///       movzbl 32(%rax), %ecx
///       test %ecx, %ecx
///       je   otherwise
///       test $1, %cl
///       je   2b
///       mov  (%rax), %r8
///       mov  8(%rax), %r9
///       cmp  %r8, %rdi
///       jb   2b
///       cmp  %r9, %rdi
///       jae  2b
///       mov  16(%rax), %r10
///       mov  24(%rax), %r11
///       cmp  %cl, 32(%rax)              was the entry removed and used again meanwhile?
///       jne  1b
///       xor  %eax, %eax
///       mov  %rax, (%rsi)
///       mov  %r8, 8(%rsi)
///       mov  %r9, 16(%rsi)
///       mov  %r10, 24(%rsi)
///       mov  %r11, 32(%rsi)
///       ret
/// otherwise:
///       jmp  original
/// ```
#[rustfmt::skip]
const CODE: [u8; FIND_OBJECT_LEN] = [
    0x48, 0x8d, 0x05, 0, 0, 0, 0,
    0x48, 0x3b, 0x78, 0x10, 0x72, 0x52,
    0x48, 0x3b, 0x78, 0x18, 0x73, 0x4c,
    0x48, 0x8d, 0x05, 0, 0, 0, 0,
    0x48, 0x83, 0xc0, 0x40,
    0x0f, 0xb6, 0x48, 0x20, 0x85, 0xc9, 0x74, 0x39,
    0xf6, 0xc1, 0x01, 0x74, 0xef,
    0x4c, 0x8b, 0x00, 0x4c, 0x8b, 0x48, 0x08,
    0x4c, 0x39, 0xc7, 0x72, 0xe3, 0x4c, 0x39, 0xcf, 0x73, 0xde,
    0x4c, 0x8b, 0x50, 0x10, 0x4c, 0x8b, 0x58, 0x18,
    0x38, 0x48, 0x20, 0x75, 0xca,
    0x31, 0xc0, 0x48, 0x89, 0x06, 0x4c, 0x89, 0x46, 0x08, 0x4c, 0x89, 0x4e, 0x10,
    0x4c, 0x89, 0x56, 0x18, 0x4c, 0x89, 0x5e, 0x20, 0xc3,
    0xe9, 0, 0, 0, 0,
];

/// Returns `int _dl_find_object(void *address, struct dl_find_object *result)` placed at `at`, for the table at `table`. An address that
/// the table does not hold goes to `original`, with both arguments unchanged. The code takes no lock, uses no stack, and may be interrupted
/// anywhere.
///
/// # Errors
/// [`Error::OutOfReach`] if 32 bits cannot hold one of the distances.
pub fn find_object(at: Avma, table: Avma, original: Avma) -> Result<[u8; FIND_OBJECT_LEN], Error> {
    let mut out = CODE;
    for field in [3, 22] {
        let behind = Avma(at.0 + field as u64 + 4);
        let distance = table.0.wrapping_sub(behind.0) as i64;
        let distance = i32::try_from(distance).map_err(|_| Error::OutOfReach { at: behind, to: table })?;
        out[field..field + 4].copy_from_slice(&distance.to_le_bytes());
    }
    let jump = FIND_OBJECT_LEN - 5;
    out[jump..].copy_from_slice(&jump5(Avma(at.0 + jump as u64), original)?);
    Ok(out)
}

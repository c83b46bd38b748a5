//! Data for the start of the old kernel: page tables, the instructions that enter it, its boot parameters and its
//! command line, one after another.

use crate::OldKernel;
use crate::image::Image;
use crate::placement::Places;
use iced_x86::code_asm::*;
use iced_x86::{Code, Instruction};
use stillpoint_base::PAGE;

// Pages of it: two roots, for four levels of tables and for five, one table of gibibytes, and one of 2 MiB for each of
// four.
const FOUR_AT: u64 = 0;
const FIVE_AT: u64 = PAGE;
const GIB_AT: u64 = 2 * PAGE;
const LARGE_AT: u64 = 3 * PAGE;
pub(crate) const CODE_AT: u64 = 7 * PAGE;
const SEGMENTS_AT: u64 = CODE_AT + 0x800;
const PARAMETERS_AT: u64 = 8 * PAGE;
pub(crate) const COMMAND_LINE_AT: u64 = 9 * PAGE;
/// Length in bytes.
pub(crate) const START_DATA_BYTES: u64 = 10 * PAGE;

/// Flags of a table, and of a large page: present and writable, with those that a processor would set.
const TABLE: u64 = 0x63;
const LARGE: u64 = 0xe3;
/// Segments that the kernel expects, by their offsets in the table: 64-bit code, data.
const CODE: u32 = 0x10;
const DATA: u32 = 0x18;
const SEGMENTS: [u64; 4] = [0, 0, 0x00af_9a00_0000_ffff, 0x00cf_9200_0000_ffff];
/// Bit of CR4 for five levels.
const LA57: u32 = 1 << 12;
/// Offset of a kernel's 64-bit entry from its 32-bit one.
const ENTRY_64_OFFSET: u64 = 0x200;
/// Type of a boot loader that has no number of its own.
const LOADER_TYPE: u8 = 0xff;

/// Returns the data for the place that was chosen for it. `other` follows the zero that ends its command line.
pub(crate) fn start_data(old: &OldKernel<'_>, image: &Image, places: &Places, other: &str) -> Result<Vec<u8>, String> {
    let mut start_data = vec![0; START_DATA_BYTES as usize];
    let mut put = |at: u64, bytes: &[u8]| start_data[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    let tables = |at: u64| (places.start_data + at) | TABLE;
    put(FOUR_AT, &tables(GIB_AT).to_le_bytes());
    put(FIVE_AT, &tables(FOUR_AT).to_le_bytes());
    for gib in 0..4 {
        put(GIB_AT + 8 * gib, &tables(LARGE_AT + gib * PAGE).to_le_bytes());
    }
    for page in 0..4 * 512 {
        put(LARGE_AT + 8 * page, &((page << 21) | LARGE).to_le_bytes());
    }
    put(CODE_AT, &code(places).map_err(|error| error.to_string())?);
    for (at, segment) in SEGMENTS.iter().enumerate() {
        put(SEGMENTS_AT + 8 * at as u64, &segment.to_le_bytes());
    }
    // address and length of the table of segments, as the processor reads them
    put(SEGMENTS_AT + 0x20, &31_u16.to_le_bytes());
    put(SEGMENTS_AT + 0x22, &(places.start_data + SEGMENTS_AT).to_le_bytes());
    put(PARAMETERS_AT, &parameters(old, image, places)?);
    put(COMMAND_LINE_AT, [old.command_line, "\0", other, "\0"].concat().as_bytes());
    Ok(start_data)
}

/// Returns the instructions with which the crash kernel ends. Its page tables map these, but perhaps not the memory
/// that the kernel uses first.
fn code(places: &Places) -> Result<Vec<u8>, IcedError> {
    let mut code = CodeAssembler::new(64)?;
    let (mut are_four, mut reloaded) = (code.create_label(), code.create_label());
    let here = |at: u64| places.start_data + at;
    code.cli()?;
    code.cld()?;
    code.mov(rax, cr4)?;
    code.mov(ecx, here(FOUR_AT) as u32)?;
    code.test(eax, LA57)?;
    code.je(are_four)?;
    code.mov(ecx, here(FIVE_AT) as u32)?;
    code.set_label(&mut are_four)?;
    code.mov(cr3, rcx)?;
    code.mov(eax, (here(SEGMENTS_AT) + 0x20) as u32)?;
    code.lgdt(qword_ptr(rax))?;
    code.mov(esp, here(PARAMETERS_AT) as u32)?;
    code.mov(eax, CODE)?;
    code.push(rax)?;
    code.lea(rax, qword_ptr(reloaded))?;
    code.push(rax)?;
    code.add_instruction(Instruction::with(Code::Retfq))?;
    code.set_label(&mut reloaded)?;
    code.mov(eax, DATA)?;
    for segment in [ds, es, ss, fs, gs] {
        code.mov(segment, eax)?;
    }
    code.mov(esi, here(PARAMETERS_AT) as u32)?;
    code.mov(eax, (places.kernel + ENTRY_64_OFFSET) as u32)?;
    code.jmp(rax)?;
    code.assemble(here(CODE_AT))
}

/// Returns the parameters of the running kernel, with the changes for one that has not been started yet.
fn parameters(old: &OldKernel<'_>, image: &Image, places: &Places) -> Result<Vec<u8>, String> {
    let mut parameters = old.parameters.to_vec();
    if parameters.len() != PAGE as usize {
        return Err(format!("the parameters that this kernel was started with have {} bytes", parameters.len()));
    }
    let mut put = |at: usize, bytes: &[u8]| parameters[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &image.header);
    // The upper halves of addresses, data that a boot loader has left in memory, and the firmware's services, which can
    // be moved only once: the old kernel runs without them.
    for range in [0xc0..0xcc, 0x1c0..0x1e0, 0x1ef..0x1f0, 0x250..0x258] {
        put(range.start, &vec![0; range.len()]);
    }
    put(0x210, &[LOADER_TYPE]);
    put(0x218, &(places.initrd as u32).to_le_bytes());
    put(0x21c, &(old.initrd.len() as u32).to_le_bytes());
    put(0x228, &((places.start_data + COMMAND_LINE_AT) as u32).to_le_bytes());
    Ok(parameters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{image, old, parameters};
    use iced_x86::{Decoder, DecoderOptions, Mnemonic};

    const PLACES: Places = Places { kernel: 32 << 20, start_data: 96 << 20, initrd: 100 << 20 };

    fn made() -> Vec<u8> {
        let (kernel, parameters) = (image(), parameters(1 << 30));
        start_data(&old(&kernel, &parameters), &Image::parse(&kernel).unwrap(), &PLACES, "a=1").unwrap()
    }

    fn number(start_data: &[u8], at: u64) -> u64 {
        u64::from_le_bytes(start_data[at as usize..at as usize + 8].try_into().unwrap())
    }

    /// Returns the physical address of an address, found as a processor finds it.
    fn walk(start_data: &[u8], root: u64, levels: u32, address: u64) -> u64 {
        let mut table = root;
        for level in (2..=levels).rev() {
            let entry = number(start_data, table - PLACES.start_data + 8 * (address >> (12 + 9 * (level - 1)) & 511));
            assert_eq!(entry & 1, 1, "{address:#x} at level {level}");
            if entry & 0x80 != 0 {
                return (entry & !0xfff) | (address & 0x1f_ffff);
            }
            table = entry & !0xfff;
        }
        panic!("{address:#x} has no large page")
    }

    #[test]
    fn tables_of_four_levels_and_of_five_show_the_first_four_gib_as_they_are() {
        let start_data = made();
        for address in [0, 0x9_0000, 16 << 20, (3 << 30) + 12345, (4 << 30) - 1] {
            assert_eq!(walk(&start_data, PLACES.start_data + FOUR_AT, 4, address), address);
            assert_eq!(walk(&start_data, PLACES.start_data + FIVE_AT, 5, address), address);
        }
    }

    #[test]
    fn instructions_end_at_the_kernel_s_entry() {
        let start_data = made();
        let code = &start_data[CODE_AT as usize..SEGMENTS_AT as usize];
        let decoder = Decoder::with_ip(64, code, PLACES.start_data + CODE_AT, DecoderOptions::NONE);
        let found: Vec<_> = decoder.into_iter().take_while(|one| !one.is_invalid()).collect();
        let end = found.iter().position(|one| one.mnemonic() == Mnemonic::Jmp).unwrap();
        assert_eq!(found[end - 1].immediate64(), PLACES.kernel + 0x200);
        assert_eq!(found[end - 2].immediate64(), PLACES.start_data + PARAMETERS_AT);
        let far = found.iter().position(|one| one.code() == Code::Retfq).unwrap();
        assert_eq!(found[far - 2].memory_displacement64(), found[far + 1].ip());
        assert_eq!(number(&start_data, SEGMENTS_AT + u64::from(CODE)) >> 40 & 0xff, 0x9a);
        assert_eq!(number(&start_data, SEGMENTS_AT + 0x22), PLACES.start_data + SEGMENTS_AT);
    }

    #[test]
    fn parameters_are_the_running_kernel_s_but_for_what_a_loader_says() {
        let (kernel, mut before) = (image(), parameters(1 << 30));
        before[0x70..0x78].copy_from_slice(&0xf_5210_u64.to_le_bytes());
        before[0x1c0..0x1e0].fill(7);
        before[0x250..0x258].fill(7);
        let image = Image::parse(&kernel).unwrap();
        let after = parameters_of(&old(&kernel, &before), &image);
        assert_eq!(after[0x70..0x78], before[0x70..0x78]);
        assert_eq!(after[0x2d0..0x300], before[0x2d0..0x300]);
        assert_eq!(&after[0x202..0x206], b"HdrS");
        assert_eq!((&after[0x1c0..0x1e0], &after[0x250..0x258]), (&[0; 32][..], &[0; 8][..]));
        assert_eq!(number(&after, 0x218), PLACES.initrd | 12 << 32);
        assert_eq!(number(&after, 0x228) as u32, (PLACES.start_data + COMMAND_LINE_AT) as u32);
        let short = OldKernel { parameters: &before[..100], ..old(&kernel, &before) };
        assert!(parameters_refused(&short, &image).contains("100 bytes"));
    }

    fn parameters_of(old: &OldKernel<'_>, image: &Image) -> Vec<u8> {
        super::parameters(old, image, &PLACES).unwrap()
    }

    fn parameters_refused(old: &OldKernel<'_>, image: &Image) -> String {
        super::parameters(old, image, &PLACES).unwrap_err()
    }
}

//! Image of a kernel, as Linux's boot protocol for x86 describes it.

/// Offset of its header.
const HEADER_OFFSET: usize = 0x1f1;
/// The first version of the protocol whose header has the memory that the kernel needs at its start.
const PROTOCOL_VERSION_MIN: u16 = 0x20c;

/// Data from its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Image {
    /// Bytes that are copied into the boot parameters.
    pub(crate) header: Vec<u8>,
    /// Bytes of code for real mode, which is not used.
    pub(crate) real_mode_bytes: u64,
    /// Preferred address, and alignment.
    pub(crate) preferred: u64,
    pub(crate) align: u64,
    /// Bytes that it needs there.
    pub(crate) needed: u64,
    /// Address below which an initramfs must be located.
    pub(crate) initrd_end: u64,
}

impl Image {
    pub(crate) fn parse(image: &[u8]) -> Result<Self, String> {
        let failed = |why: &str| format!("the old kernel cannot be started by a crash kernel: {why}");
        let bytes = |at: usize, length: usize| image.get(at..at + length).ok_or_else(|| failed("it is truncated"));
        let number = |at: usize, length: usize| {
            let bytes = bytes(at, length)?;
            Ok::<u64, String>(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
        };
        if bytes(0x202, 4)? != b"HdrS" || number(0x206, 2)? < u64::from(PROTOCOL_VERSION_MIN) {
            return Err(failed("its header does not contain the memory that it needs"));
        }
        // from the first field to the target of the jump over it
        let end = 0x202 + number(0x201, 1)? as usize;
        let header = bytes(HEADER_OFFSET, end.saturating_sub(HEADER_OFFSET))?.to_vec();
        if number(0x236, 2)? & 1 == 0 {
            return Err(failed("it has no 64-bit entry"));
        }
        if number(0x234, 1)? == 0 {
            return Err(failed("it is not relocatable (CONFIG_RELOCATABLE)"));
        }
        // in an old kernel 0 means 4
        let setup = match number(HEADER_OFFSET, 1)? {
            0 => 4,
            sectors => sectors,
        };
        Ok(Image {
            header,
            real_mode_bytes: (setup + 1) * 512,
            preferred: number(0x258, 8)?,
            align: number(0x230, 4)?.max(1),
            needed: number(0x260, 4)?.max(image.len() as u64),
            initrd_end: number(0x22c, 4)? + 1,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::image;

    #[test]
    fn what_a_kernel_needs_stands_in_its_header() {
        let parsed = Image::parse(&image()).unwrap();
        assert_eq!((parsed.real_mode_bytes, parsed.preferred, parsed.needed), (2048, 16 << 20, 50 << 20));
        assert_eq!((parsed.align, parsed.initrd_end), (2 << 20, 2 << 30));
        assert_eq!((parsed.header.len(), parsed.header[0]), (0x7b, 3));
    }

    #[test]
    fn what_cannot_be_started_is_told() {
        let with = |at: usize, byte: u8| {
            let mut image = image();
            image[at] = byte;
            Image::parse(&image).unwrap_err()
        };
        assert!(with(0x202, 0).contains("its header"));
        assert!(with(0x206, 0xb).contains("its header"));
        assert!(with(0x236, 0).contains("64-bit"));
        assert!(with(0x234, 0).contains("CONFIG_RELOCATABLE"));
        assert!(Image::parse(&image()[..0x240]).unwrap_err().contains("truncated"));
    }
}

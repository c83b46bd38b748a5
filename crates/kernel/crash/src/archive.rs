//! Archives in the format that a kernel unpacks (`cpio`, `newc`).

/// An archive that is being written, with the bytes that have not been taken.
#[derive(Debug, Default)]
pub(crate) struct Archive {
    bytes: Vec<u8>,
    number: u32,
}

impl Archive {
    /// Takes the bytes that have been written since the last time.
    pub(crate) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    pub(crate) fn directory(&mut self, name: &str) {
        self.entry(name, 0o40755, 0);
    }

    pub(crate) fn file(&mut self, name: &str, data: &[u8]) {
        self.head(name, data.len());
        self.bytes.extend(data);
        self.tail(data.len());
    }

    /// Writes the bytes before a file of this length.
    pub(crate) fn head(&mut self, name: &str, bytes: usize) {
        self.entry(name, 0o100_755, bytes);
    }

    /// Writes the bytes after it.
    pub(crate) fn tail(&mut self, bytes: usize) {
        self.bytes.extend(std::iter::repeat_n(0, bytes.next_multiple_of(4) - bytes));
    }

    pub(crate) fn end(&mut self) {
        self.entry("TRAILER!!!", 0, 0);
    }

    fn entry(&mut self, name: &str, mode: u32, bytes: usize) {
        self.number += 1;
        let links = 1;
        let fields = [self.number, mode, 0, 0, links, 0, bytes as u32, 0, 0, 0, 0, name.len() as u32 + 1, 0];
        let text: String = fields.iter().map(|field| format!("{field:08x}")).collect();
        let head = format!("070701{text}{name}\0");
        self.bytes.extend(head.as_bytes());
        self.tail(head.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_begin_at_multiples_of_four() {
        let mut archive = Archive::default();
        archive.file("a", b"12345");
        assert_eq!(archive.bytes.len(), 112 + 8);
        archive.directory("bcd");
        let whole = archive.take();
        assert_eq!(&whole[120..126], b"070701");
        assert_eq!(whole.len(), 120 + 116);
        assert_eq!(&whole[54..62], b"00000005");
        assert_eq!(&whole[110..112], b"a\0");
        archive.end();
        assert_eq!(archive.take().len(), 124);
    }
}

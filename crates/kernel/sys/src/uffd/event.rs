//! Messages of a userfaultfd.

use super::Error;

/// Bytes of one message of the kernel.
pub(crate) const BYTES: usize = 32;

/// One message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// A thread waits for a page.
    Fault(u64),
    /// The process has forked; the child's memory has a userfaultfd of its own, open in the process that read the message.
    Fork(i32),
    /// Pages have moved (`mremap`).
    Remap {
        /// Old address.
        from: u64,
        /// New address.
        to: u64,
        /// Length in bytes.
        bytes: u64,
    },
    /// Pages were given up: by `madvise` (the range stays mapped) or `munmap`.
    Remove {
        /// First address.
        start: u64,
        /// Address after the last page.
        end: u64,
    },
}

impl Event {
    /// Decodes a message; `None` if there is none.
    pub(crate) fn decode(bytes: &[u8; BYTES]) -> Result<Option<Event>, Error> {
        let word = |at: usize| bytes[at..].first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        Ok(Some(match u32::from(bytes[0]) {
            0 => return Ok(None),
            linux_raw_sys::general::UFFD_EVENT_PAGEFAULT => Event::Fault(word(16)),
            linux_raw_sys::general::UFFD_EVENT_FORK => Event::Fork(word(8) as u32 as i32),
            linux_raw_sys::general::UFFD_EVENT_REMAP => Event::Remap { from: word(8), to: word(16), bytes: word(24) },
            linux_raw_sys::general::UFFD_EVENT_REMOVE | linux_raw_sys::general::UFFD_EVENT_UNMAP => {
                Event::Remove { start: word(8), end: word(16) }
            }
            _ => return Err(Error::Event(bytes[0])),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(event: u32, words: [u64; 3]) -> [u8; BYTES] {
        let mut bytes = [0; BYTES];
        bytes[0] = event as u8;
        words.iter().enumerate().for_each(|(i, w)| bytes[8 * (i + 1)..8 * (i + 2)].copy_from_slice(&w.to_le_bytes()));
        bytes
    }

    #[test]
    fn messages_are_those_of_the_kernel() {
        let decode = |event, words| Event::decode(&message(event, words)).unwrap();
        assert_eq!(decode(0, [0; 3]), None);
        assert_eq!(decode(0x12, [1, 0x7000, 0]), Some(Event::Fault(0x7000)));
        assert_eq!(decode(0x13, [9, 0, 0]), Some(Event::Fork(9)));
        assert_eq!(decode(0x14, [1, 2, 3]), Some(Event::Remap { from: 1, to: 2, bytes: 3 }));
        assert_eq!(decode(0x15, [1, 2, 0]), Some(Event::Remove { start: 1, end: 2 }));
        assert_eq!(decode(0x16, [1, 2, 0]), Some(Event::Remove { start: 1, end: 2 }));
        assert!(Event::decode(&message(0x17, [0; 3])).is_err());
    }
}

//! The page server's side of a dump: criu sends pages, and sometimes a question.
//!
//! Headers have two forms, and no message names the form. The first message of a connection opens a memory or asks for
//! a parent, always with address 0: this distinguishes the forms.
//!
//! ```text
//! short, to 4.1:   cmd u32  pages u32          address u64  destination u64
//! long, from 4.2:  cmd u32  0 u32   pages u64  address u64  destination u64
//! cmd = flags << 16 | command        destination = id << 8 | kind
//! ```

use crate::Error;
use stillpoint_base::PAGE;

/// Largest number of pages in one message: 1 TiB.
const PAGES_MAX: u64 = 1 << 28;

/// Form of the headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Headers of 24 bytes.
    Short,
    /// Headers of 32 bytes.
    Long,
}

impl Form {
    /// Returns the length of a header in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Form::Short => 24,
            Form::Long => 32,
        }
    }

    /// Detects the form from the first 24 bytes of a connection.
    ///
    /// # Errors
    /// The bytes begin with neither form of header.
    pub fn of_first(bytes: &[u8; 24]) -> Result<Self, Error> {
        let command = u32_at(bytes, 0) & COMMAND;
        if !matches!(command, OPEN | OPEN2 | PARENT) {
            return Err(Error::Form);
        }
        // The address is 0 in both, and a destination never is: kind 0 does not exist.
        match (u64_at(bytes, 8), u64_at(bytes, 16)) {
            (0, 0) => Ok(Form::Long),
            (0, _) => Ok(Form::Short),
            _ => Err(Error::Form),
        }
    }
}

/// The memory that a message is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Destination {
    /// Memory of a process, by its id.
    Task(u32),
    /// Shared memory, by its number in criu.
    Shmem(u64),
}

/// Flag of pages that are the same as in the parent image.
pub const PE_PARENT: u32 = 1;
/// Flag of pages that may be fetched after the process runs.
pub const PE_LAZY: u32 = 2;
/// Flag of pages that follow the message.
pub const PE_PRESENT: u32 = 4;

/// A message of criu.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Pages of a memory follow.
    Open {
        /// The memory that the message is about.
        destination: Destination,
        /// True if criu awaits one byte: is there a parent?
        wants_answer: bool,
    },
    /// Question for a parent of this memory; criu awaits four bytes.
    Parent(Destination),
    /// Pages of the memory.
    Pages {
        /// The memory that the message is about.
        destination: Destination,
        /// Address of the first page.
        start: u64,
        /// Number of pages; their bytes follow if `flags` have [`PE_PRESENT`].
        pages: u64,
        /// Bits: [`PE_PARENT`], [`PE_LAZY`], [`PE_PRESENT`].
        flags: u32,
    },
    /// End of the dump; criu awaits four bytes.
    Close,
}

const COMMAND: u32 = 0xffff;
const ADD: u32 = 1;
const HOLE: u32 = 2;
const OPEN: u32 = 3;
const OPEN2: u32 = 4;
const PARENT: u32 = 5;
const ADD_F: u32 = 6;
const CLOSE: u32 = 0x1023;
const FORCE_CLOSE: u32 = 0x1024;

impl Command {
    /// Decodes one header of [`Form::bytes`] bytes.
    ///
    /// # Errors
    /// The command, the memory or the range of pages is not valid.
    pub fn decode(form: Form, header: &[u8]) -> Result<Self, Error> {
        if header.len() != form.bytes() {
            return Err(Error::Short(header.len()));
        }
        let cmd = u32_at(header, 0);
        let (pages, start, destination) = match form {
            Form::Short => (u64::from(u32_at(header, 4)), u64_at(header, 8), u64_at(header, 16)),
            Form::Long => (u64_at(header, 8), u64_at(header, 16), u64_at(header, 24)),
        };
        let of = || Destination::decode(destination);
        let brings = |flags| {
            if pages == 0 || pages > PAGES_MAX || !start.is_multiple_of(PAGE) || start > (1 << 56) {
                return Err(Error::Pages { start, pages });
            }
            Ok(Command::Pages { destination: of()?, start, pages, flags })
        };
        match cmd & COMMAND {
            OPEN => Ok(Command::Open { destination: of()?, wants_answer: false }),
            OPEN2 => Ok(Command::Open { destination: of()?, wants_answer: true }),
            PARENT => Ok(Command::Parent(of()?)),
            ADD => brings(PE_PRESENT),
            HOLE => brings(PE_PARENT),
            ADD_F if cmd >> 16 & !(PE_PARENT | PE_LAZY | PE_PRESENT) == 0 => brings(cmd >> 16),
            CLOSE | FORCE_CLOSE => Ok(Command::Close),
            _ => Err(Error::Command(cmd)),
        }
    }

    /// Encodes the message as criu does.
    pub fn encode(&self, form: Form, into: &mut Vec<u8>) {
        let (cmd, pages, start, destination) = match *self {
            Command::Open { destination, wants_answer: false } => (OPEN, 0, 0, destination.encode()),
            Command::Open { destination, wants_answer: true } => (OPEN2, 0, 0, destination.encode()),
            Command::Parent(destination) => (PARENT, 0, 0, destination.encode()),
            Command::Pages { destination, start, pages, flags } => {
                (flags << 16 | ADD_F, pages, start, destination.encode())
            }
            Command::Close => (CLOSE, 0, 0, 0),
        };
        into.extend_from_slice(&cmd.to_le_bytes());
        match form {
            Form::Short => into.extend_from_slice(&(pages as u32).to_le_bytes()),
            Form::Long => {
                into.extend_from_slice(&[0; 4]);
                into.extend_from_slice(&pages.to_le_bytes());
            }
        }
        into.extend_from_slice(&start.to_le_bytes());
        into.extend_from_slice(&destination.to_le_bytes());
    }
}

impl Destination {
    fn decode(bits: u64) -> Result<Self, Error> {
        match (bits & 0xff, bits >> 8) {
            (1, id) => u32::try_from(id).map(Destination::Task).map_err(|_| Error::Destination(bits)),
            (2, id) => Ok(Destination::Shmem(id)),
            _ => Err(Error::Destination(bits)),
        }
    }

    fn encode(self) -> u64 {
        match self {
            Destination::Task(id) => u64::from(id) << 8 | 1,
            Destination::Shmem(id) => id << 8 | 2,
        }
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Messages of criu 4.2.1 for a process 4121: the opening, 3 lazy pages, the vdso's hole in an incremental pass,
    /// the end.
    const LONG: &[&str] = &[
        "04000000 00000000 0000000000000000 0000000000000000 0119100000000000",
        "06000600 00000000 0300000000000000 0050555555550000 0119100000000000",
        "06000100 00000000 0200000000000000 00e0ffffff7f0000 0119100000000000",
        "23100000 00000000 0000000000000000 0000000000000000 0000000000000000",
    ];
    /// Messages of criu 3.17 for the same process.
    const SHORT: &[&str] = &[
        "04000000 00000000 0000000000000000 0119100000000000",
        "06000600 03000000 0050555555550000 0119100000000000",
        "06000100 02000000 00e0ffffff7f0000 0119100000000000",
        "23100000 00000000 0000000000000000 0000000000000000",
    ];

    fn bytes(hex: &str) -> Vec<u8> {
        hex::decode(hex.replace(' ', "")).unwrap()
    }

    #[test]
    fn both_forms_are_told_apart_and_say_the_same() {
        let destination = Destination::Task(4121);
        let expected = [
            Command::Open { destination, wants_answer: true },
            Command::Pages { destination, start: 0x5555_5555_5000, pages: 3, flags: PE_LAZY | PE_PRESENT },
            Command::Pages { destination, start: 0x7fff_ffff_e000, pages: 2, flags: PE_PARENT },
            Command::Close,
        ];
        for (form, messages) in [(Form::Long, LONG), (Form::Short, SHORT)] {
            let first: [u8; 24] = bytes(messages[0])[..24].try_into().unwrap();
            assert_eq!(Form::of_first(&first), Ok(form));
            for (message, expected) in messages.iter().zip(&expected) {
                assert_eq!(Command::decode(form, &bytes(message)).as_ref(), Ok(expected));
                let mut again = Vec::new();
                expected.encode(form, &mut again);
                assert_eq!(again, bytes(message));
            }
        }
    }

    #[test]
    fn a_connection_begins_with_an_opening_or_a_question() {
        let mut first: [u8; 24] = bytes(LONG[1])[..24].try_into().unwrap();
        assert_eq!(Form::of_first(&first), Err(Error::Form));
        first = [0xff; 24];
        assert_eq!(Form::of_first(&first), Err(Error::Form));
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (hex, expected) in [
            ("07000000 00000000 0100000000000000 0050555555550000 0119100000000000", Error::Command(7)),
            ("06000800 00000000 0100000000000000 0050555555550000 0119100000000000", Error::Command(0x8_0006)),
            ("04000000 00000000 0000000000000000 0000000000000000 0319100000000000", Error::Destination(0x10_1903)),
            (
                "06000600 00000000 0000000000000000 0050555555550000 0119100000000000",
                Error::Pages { start: 0x5555_5555_5000, pages: 0 },
            ),
            (
                "06000600 00000000 0100000000000000 0150555555550000 0119100000000000",
                Error::Pages { start: 0x5555_5555_5001, pages: 1 },
            ),
        ] {
            assert_eq!(Command::decode(Form::Long, &bytes(hex)), Err(expected));
        }
    }

    proptest! {
        #[test]
        fn what_decodes_is_written_as_it_came_or_in_its_newer_words(header: [u8; 32], op in 0u8..7) {
            let mut header = header;
            (header[0], header[1], header[2], header[3]) = (op, 0, header[2] & 7, 0);
            if let Ok(command) = Command::decode(Form::Long, &header) {
                let mut again = Vec::new();
                command.encode(Form::Long, &mut again);
                prop_assert_eq!(Command::decode(Form::Long, &again), Ok(command));
            }
        }
    }
}

//! Records in files: a writer that streams whole blocks and a reader that accepts a truncated end.

use std::io::{self, BufReader, Read, Write};
use std::path::Path;

use stillpoint_host::file::open_named;

use super::codec::{self, Block, BlockHead, Damage, PREAMBLE_LEN, SampleEncoder};
use super::{End, Header, Mark, Sample};
use crate::error::{Error, Result};

/// Bytes of a possible rest of zeros that are read at a time.
const ZEROS_BYTES: usize = 4096;

/// Writes a record, block by block; flushed blocks survive a crash of the writer.
#[derive(Debug)]
pub struct Writer<W: Write> {
    sink: W,
    samples: SampleEncoder,
}

impl<W: Write> Writer<W> {
    /// Begins a record on any sink.
    ///
    /// # Errors
    /// The header cannot be written.
    pub fn new(mut sink: W, header: &Header) -> io::Result<Self> {
        sink.write_all(&codec::preamble())?;
        sink.write_all(&codec::encode_json(codec::HEADER, header))?;
        sink.flush()?;
        Ok(Writer { sink, samples: SampleEncoder::default() })
    }

    /// Adds a request.
    ///
    /// # Errors
    /// A complete block cannot be written.
    pub fn sample(&mut self, sample: &Sample) -> io::Result<()> {
        self.samples.push(sample).map_or(Ok(()), |block| self.block(&block))
    }

    /// Adds an event of a connection.
    ///
    /// # Errors
    /// The block cannot be written.
    pub fn mark(&mut self, mark: &Mark) -> io::Result<()> {
        self.sink.write_all(&codec::encode_json(codec::MARK, mark))
    }

    /// Writes out the samples collected so far.
    ///
    /// # Errors
    /// The block cannot be written.
    pub fn flush(&mut self) -> io::Result<()> {
        match self.samples.flush() {
            Some(block) => self.block(&block),
            None => self.sink.flush(),
        }
    }

    /// Closes the record.
    ///
    /// # Errors
    /// A block cannot be written.
    pub fn end(mut self, end: &End) -> io::Result<W> {
        if let Some(block) = self.samples.flush() {
            self.sink.write_all(&block)?;
        }
        self.sink.write_all(&codec::encode_json(codec::END, end))?;
        self.sink.flush()?;
        Ok(self.sink)
    }

    fn block(&mut self, block: &[u8]) -> io::Result<()> {
        self.sink.write_all(block)?;
        self.sink.flush()
    }
}

/// Content of a record after the header, as a [`Reader`] returns it.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    /// Requests, in the order of their ends.
    Samples(Vec<Sample>),
    /// Event of a connection.
    Mark(Mark),
    /// The run ended in order; nothing follows.
    End(End),
    /// The file ends without an end block: the writer crashed or still runs. All blocks before are valid.
    CutOff,
}

/// Cause of a failed read: the bytes or the file.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The bytes are not those of a record.
    #[error(transparent)]
    Damage(#[from] Damage),
    /// The file could not be read.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Streams a record; memory is bounded by one block.
#[derive(Debug)]
pub struct Reader<R: Read> {
    source: R,
    header: Header,
    offset: u64,
    done: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// The source cannot be read, or does not begin with a valid header.
    pub fn new(mut source: R) -> Result<Self, ReadError> {
        let Ok(preamble) = <[u8; PREAMBLE_LEN]>::try_from(read_part(&mut source, PREAMBLE_LEN)?) else {
            return Err(Damage::Magic.into());
        };
        codec::check_preamble(&preamble)?;
        let mut offset = PREAMBLE_LEN as u64;
        match next_block(&mut source, &mut offset)? {
            Some(Block::Header(header)) => Ok(Reader { source, header, offset, done: false }),
            Some(_) => Err(Damage::Content("the first block is not a header").into()),
            None => Err(Damage::Truncated.into()),
        }
    }

    /// Returns the parameters of the run.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the next item; `None` after [`Item::End`] or [`Item::CutOff`].
    ///
    /// # Errors
    /// The source cannot be read, or a block is damaged.
    pub fn next_item(&mut self) -> Result<Option<Item>, ReadError> {
        if self.done {
            return Ok(None);
        }
        let start = self.offset;
        let at = |source: Damage| Damage::At { offset: start, source: Box::new(source) };
        let item = match next_block(&mut self.source, &mut self.offset) {
            Ok(Some(Block::Samples(samples))) => Item::Samples(samples),
            Ok(Some(Block::Mark(mark))) => Item::Mark(mark),
            Ok(Some(Block::End(end))) => Item::End(end),
            Ok(Some(Block::Header(_))) => return Err(at(Damage::Content("a second header")).into()),
            Ok(None) => Item::CutOff,
            Err(ReadError::Damage(damage)) => return Err(at(damage).into()),
            Err(error) => return Err(error),
        };
        self.done = matches!(item, Item::End(_) | Item::CutOff);
        Ok(Some(item))
    }
}

/// Returns the next block, or `None` at the end of the file (in order, truncated, or in zeros).
fn next_block(source: &mut impl Read, offset: &mut u64) -> Result<Option<Block>, ReadError> {
    let Ok(bytes) = <[u8; BlockHead::LEN]>::try_from(read_part(source, BlockHead::LEN)?) else { return Ok(None) };
    let head = codec::decode_head(&bytes)?;
    if head.is_zero() {
        return if only_zeros(source)? { Ok(None) } else { Err(Damage::Kind(0).into()) };
    }
    let payload = read_part(source, head.payload_len())?;
    if payload.len() < head.payload_len() {
        return Ok(None);
    }
    match codec::decode_block(head, &payload) {
        Ok(block) => {
            *offset += (bytes.len() + payload.len()) as u64;
            Ok(Some(block))
        }
        // A file system may have extended the file without its data when the machine crashed.
        Err(Damage::Checksum { .. }) if payload.ends_with(&[0; 16]) && only_zeros(source)? => Ok(None),
        Err(damage) => Err(damage.into()),
    }
}

/// Reads so many bytes, or fewer at the end.
fn read_part(source: &mut impl Read, length: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(length);
    source.take(length as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn only_zeros(source: &mut impl Read) -> io::Result<bool> {
    loop {
        let part = read_part(source, ZEROS_BYTES)?;
        if part.iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
        if part.len() < ZEROS_BYTES {
            return Ok(true);
        }
    }
}

/// Whole record in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Parameters of the run.
    pub header: Header,
    /// Every request, in the order of their ends.
    pub samples: Vec<Sample>,
    /// Events of connections.
    pub marks: Vec<Mark>,
    /// End block; `None` if the record is truncated.
    pub end: Option<End>,
}

impl Record {
    /// Makes a record of requests by foreign clients: it begins with the first due time and ends with the last answer. `unix_apart_ns` is
    /// the difference between nanoseconds since 1970 and the samples' clock.
    pub fn of_others(header: Header, mut samples: Vec<Sample>, unix_apart_ns: u64) -> Record {
        samples.sort_by_key(Sample::ended_ns);
        let started_ns = samples.iter().map(|sample| sample.scheduled_ns).min().unwrap_or(0);
        let started_unix_s = (started_ns + unix_apart_ns) / 1_000_000_000;
        let end = samples.last().map(|last| End { ended_ns: last.ended_ns(), ..End::default() });
        Record { header: Header { started_ns, started_unix_s, ..header }, samples, marks: Vec::new(), end }
    }

    /// Reads a record file.
    ///
    /// # Errors
    /// The file cannot be read, or is not a record.
    pub fn open(path: &Path) -> Result<Record> {
        let file = open_named(path).map_err(Error::file("open", path))?;
        Record::read(BufReader::with_capacity(256 << 10, file)).map_err(|error| match error {
            ReadError::Damage(source) => Error::Record { path: path.to_owned(), source },
            ReadError::Io(source) => Error::File { action: "read", path: path.to_owned(), source },
        })
    }

    /// Reads a record from any source.
    ///
    /// # Errors
    /// The source cannot be read, or is not a record.
    pub fn read(source: impl Read) -> Result<Record, ReadError> {
        let mut reader = Reader::new(source)?;
        let header = reader.header().clone();
        let mut record = Record { header, samples: Vec::new(), marks: Vec::new(), end: None };
        while let Some(item) = reader.next_item()? {
            match item {
                Item::Samples(mut samples) => record.samples.append(&mut samples),
                Item::Mark(mark) => record.marks.push(mark),
                Item::End(end) => record.end = Some(end),
                Item::CutOff => {}
            }
        }
        let kinds = record.header.kinds.len();
        if record.samples.iter().any(|sample| usize::from(sample.kind) >= kinds) {
            return Err(Damage::Content("a sample is of a kind that the header does not name").into());
        }
        Ok(record)
    }

    /// Returns the end of the run, or the last answer if the record is truncated.
    pub fn ended_ns(&self) -> u64 {
        let last = self.samples.iter().map(Sample::ended_ns).max().unwrap_or(self.header.started_ns);
        self.end.map_or(last, |end| end.ended_ns.max(last))
    }
}

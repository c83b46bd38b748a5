//! Encoding and decoding of blocks. Pure: no I/O, no clock; every byte sequence is either decoded or refused.

use super::{End, Header, KINDS_MAX, Mark, Outcome, Sample};
use crc::Crc;

/// First bytes of a record file.
pub const MAGIC: [u8; 8] = *b"stpl-rec";
/// Version of the format, stored after the magic.
pub const VERSION: u16 = 1;
/// Size limit of a block's payload in bytes; a longer one is damage, so a reader needs no more memory than this.
pub const BLOCK_PAYLOAD_MAX: usize = 1 << 20;
/// A samples block is closed when its payload has reached this size.
pub(super) const SAMPLES_PAYLOAD_TARGET: usize = 48 << 10;
/// Length of magic and version.
pub(super) const PREAMBLE_LEN: usize = 10;
const HEAD_LEN: usize = 9;
const SAMPLES_HEAD_LEN: usize = 12;

pub(super) const HEADER: u8 = 1;
const SAMPLES: u8 = 2;
pub(super) const MARK: u8 = 3;
pub(super) const END: u8 = 4;

/// Damage of a record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// Not a record file.
    #[error("the first bytes are not those of a record")]
    Magic,
    /// Written by a version that this one does not know.
    #[error("format version {0} is not known (this program reads version 1)")]
    Version(u16),
    /// The file ends inside a block. A reader may use all blocks before it.
    #[error("the record ends inside a block")]
    Truncated,
    /// Kind of block that version 1 does not have.
    #[error("unknown block kind {0}")]
    Kind(u8),
    /// Length field above the limit of a block.
    #[error("a block claims {0} bytes")]
    Length(u32),
    /// The bytes are not those that were written.
    #[error("checksum {found:08x} where {stored:08x} is stored")]
    Checksum {
        /// Checksum in the block.
        stored: u32,
        /// Checksum of the block's bytes.
        found: u32,
    },
    /// The checksum is right but the content is not.
    #[error("{0}")]
    Content(&'static str),
    /// Damage with its place in a file.
    #[error("block at offset {offset}")]
    At {
        /// Offset of the block's first byte.
        offset: u64,
        /// Kind of the damage.
        #[source]
        source: Box<Damage>,
    },
}

/// Fixed part in front of every block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockHead {
    kind: u8,
    length: u32,
    crc: u32,
}

impl BlockHead {
    /// Size of a head in the file.
    pub const LEN: usize = HEAD_LEN;

    /// Bytes of payload that follow.
    pub fn payload_len(&self) -> usize {
        self.length as usize
    }

    /// Returns true if the head is all zero, as in a file that grew but was not written before a crash.
    pub fn is_zero(&self) -> bool {
        self.kind == 0 && self.length == 0 && self.crc == 0
    }
}

/// Decoded block.
#[derive(Debug, Clone, PartialEq)]
pub enum Block {
    /// Parameters of the run.
    Header(Header),
    /// Requests, in the order of their ends.
    Samples(Vec<Sample>),
    /// Event of a connection.
    Mark(Mark),
    /// The run ended in order.
    End(End),
}

/// Reads the head of a block.
///
/// # Errors
/// The bytes are not the head of a block.
pub fn decode_head(bytes: &[u8; HEAD_LEN]) -> Result<BlockHead, Damage> {
    let [kind, l0, l1, l2, l3, c0, c1, c2, c3] = *bytes;
    let head =
        BlockHead { kind, length: u32::from_le_bytes([l0, l1, l2, l3]), crc: u32::from_le_bytes([c0, c1, c2, c3]) };
    if head.is_zero() {
        return Ok(head);
    }
    if !(HEADER..=END).contains(&kind) {
        return Err(Damage::Kind(kind));
    }
    if head.payload_len() > BLOCK_PAYLOAD_MAX {
        return Err(Damage::Length(head.length));
    }
    Ok(head)
}

/// Decodes the payload that belongs to `head`.
///
/// # Errors
/// The payload does not have the checksum of its head, or is not valid.
pub fn decode_block(head: BlockHead, payload: &[u8]) -> Result<Block, Damage> {
    if payload.len() != head.payload_len() {
        return Err(Damage::Truncated);
    }
    let found = block_crc(head.kind, payload);
    if found != head.crc {
        return Err(Damage::Checksum { stored: head.crc, found });
    }
    match head.kind {
        HEADER => {
            let header: Header = json(payload, "the header is not valid")?;
            if header.kinds.len() > KINDS_MAX {
                return Err(Damage::Content("the header names more kinds of requests than a sample can encode"));
            }
            Ok(Block::Header(header))
        }
        SAMPLES => decode_samples(payload).map(Block::Samples),
        MARK => json(payload, "a mark is not valid").map(Block::Mark),
        END => json(payload, "the end block is not valid").map(Block::End),
        other => Err(Damage::Kind(other)),
    }
}

pub(super) fn preamble() -> [u8; PREAMBLE_LEN] {
    let mut out = [0; PREAMBLE_LEN];
    out[..8].copy_from_slice(&MAGIC);
    out[8..].copy_from_slice(&VERSION.to_le_bytes());
    out
}

pub(super) fn check_preamble(bytes: &[u8; PREAMBLE_LEN]) -> Result<(), Damage> {
    if bytes[..8] != MAGIC {
        return Err(Damage::Magic);
    }
    match u16::from_le_bytes([bytes[8], bytes[9]]) {
        VERSION => Ok(()),
        other => Err(Damage::Version(other)),
    }
}

/// Encodes a block of JSON.
pub(super) fn encode_json<T: serde::Serialize>(kind: u8, value: &T) -> Vec<u8> {
    // These types contain only strings, numbers and lists; serde_json cannot fail on them.
    let payload = serde_json::to_vec(value).unwrap_or_default();
    let mut out = Vec::with_capacity(HEAD_LEN + payload.len());
    push_block(&mut out, kind, &payload);
    out
}

fn json<T: serde::de::DeserializeOwned>(payload: &[u8], problem: &'static str) -> Result<T, Damage> {
    serde_json::from_slice(payload).map_err(|_| Damage::Content(problem))
}

fn push_block(out: &mut Vec<u8>, kind: u8, payload: &[u8]) {
    out.push(kind);
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(&block_crc(kind, payload).to_le_bytes());
    out.extend_from_slice(payload);
}

/// Collects samples into one block after the other.
#[derive(Debug, Default)]
pub struct SampleEncoder {
    body: Vec<u8>,
    base_ns: u64,
    previous_ns: u64,
    count: u32,
}

impl SampleEncoder {
    /// Adds a sample; returns the bytes of a complete block whenever one is full.
    pub fn push(&mut self, sample: &Sample) -> Option<Vec<u8>> {
        debug_assert!(usize::from(sample.kind) < KINDS_MAX);
        if self.count == 0 {
            self.base_ns = sample.scheduled_ns;
            self.previous_ns = sample.scheduled_ns;
        }
        self.body.push(sample.kind << 3 | sample.outcome as u8);
        let step = sample.scheduled_ns.wrapping_sub(self.previous_ns) as i64;
        put_varint(&mut self.body, ((step << 1) ^ (step >> 63)) as u64);
        put_varint(&mut self.body, sample.latency_ns);
        put_varint(&mut self.body, u64::from(sample.late_us));
        put_varint(&mut self.body, u64::from(sample.connection));
        self.previous_ns = sample.scheduled_ns;
        self.count += 1;
        (self.body.len() >= SAMPLES_PAYLOAD_TARGET).then(|| self.take_block())
    }

    /// Returns a block with the samples collected so far, if there are any.
    pub fn flush(&mut self) -> Option<Vec<u8>> {
        (self.count > 0).then(|| self.take_block())
    }

    fn take_block(&mut self) -> Vec<u8> {
        let mut payload = Vec::with_capacity(SAMPLES_HEAD_LEN + self.body.len());
        payload.extend_from_slice(&self.base_ns.to_le_bytes());
        payload.extend_from_slice(&self.count.to_le_bytes());
        payload.append(&mut self.body);
        self.count = 0;
        let mut out = Vec::with_capacity(HEAD_LEN + payload.len());
        push_block(&mut out, SAMPLES, &payload);
        out
    }
}

fn decode_samples(payload: &[u8]) -> Result<Vec<Sample>, Damage> {
    let short = Damage::Content("a samples block is shorter than its count requires");
    let head = payload.split_first_chunk::<8>().and_then(|(base, rest)| Some((base, rest.split_first_chunk::<4>()?)));
    let Some((base, (count, mut body))) = head else { return Err(short) };
    let count = u32::from_le_bytes(*count) as usize;
    // A sample has at least five bytes: so a wrong count cannot reserve more memory than the payload justifies.
    if count > body.len() / 5 {
        return Err(short);
    }
    let mut previous = u64::from_le_bytes(*base);
    let mut samples = Vec::with_capacity(count);
    for _ in 0..count {
        let sample = take_sample(&mut body, previous)?;
        previous = sample.scheduled_ns;
        samples.push(sample);
    }
    if !body.is_empty() {
        return Err(Damage::Content("a samples block is longer than its count requires"));
    }
    Ok(samples)
}

fn take_sample(body: &mut &[u8], previous_ns: u64) -> Result<Sample, Damage> {
    let (&tag, rest) = body.split_first().ok_or(Damage::Content("a sample is cut off"))?;
    *body = rest;
    let outcome = Outcome::ALL.get(usize::from(tag & 7)).copied();
    let outcome = outcome.ok_or(Damage::Content("a sample has an unknown outcome"))?;
    let step = take_varint(body)?;
    let step = (step >> 1) as i64 ^ -((step & 1) as i64);
    let latency_ns = take_varint(body)?;
    let narrow = |value: u64| u32::try_from(value).map_err(|_| Damage::Content("a number does not fit its field"));
    let late_us = narrow(take_varint(body)?)?;
    let connection = narrow(take_varint(body)?)?;
    let scheduled_ns = previous_ns.wrapping_add(step as u64);
    Ok(Sample { scheduled_ns, latency_ns, late_us, connection, kind: tag >> 3, outcome })
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn take_varint(body: &mut &[u8]) -> Result<u64, Damage> {
    let mut value = 0u64;
    for (index, &byte) in body.iter().enumerate().take(10) {
        let part = u64::from(byte & 0x7f);
        if index == 9 && part > 1 {
            return Err(Damage::Content("a number has more than 64 bits"));
        }
        value |= part << (7 * index);
        if byte & 0x80 == 0 {
            *body = &body[index + 1..];
            return Ok(value);
        }
    }
    Err(Damage::Content("a number does not end"))
}

fn block_crc(kind: u8, payload: &[u8]) -> u32 {
    let mut digest = CRC.digest();
    digest.update(&[kind]);
    digest.update(&(payload.len() as u32).to_le_bytes());
    digest.update(payload);
    digest.finalize()
}

/// The common CRC-32 (IEEE 802.3, reflected).
static CRC: Crc<u32> = Crc::<u32>::new(&crc::CRC_32_ISO_HDLC);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn varints_end_after_ten_bytes_at_the_latest() {
        for value in [0, 1, 127, 128, 16_383, 16_384, u64::from(u32::MAX), u64::MAX] {
            let mut bytes = Vec::new();
            put_varint(&mut bytes, value);
            let mut rest = bytes.as_slice();
            assert_eq!(take_varint(&mut rest), Ok(value));
            assert!(rest.is_empty());
        }
        assert!(take_varint(&mut [0xff; 11].as_slice()).is_err());
        assert!(take_varint(&mut [0x80; 3].as_slice()).is_err());
        assert!(take_varint(&mut [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02].as_slice()).is_err());
    }

    #[test]
    fn a_count_that_the_payload_cannot_hold_is_refused_before_memory_is_reserved() {
        let mut payload = vec![0; 12];
        payload[8..].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(decode_samples(&payload), Err(Damage::Content(_))));
    }

    #[test]
    fn a_typical_request_takes_less_than_twelve_bytes() {
        let mut encoder = SampleEncoder::default();
        let mut bytes = 0;
        let count = 20_000u64;
        for n in 0..count {
            let sample = Sample {
                scheduled_ns: 5_000_000_000_000 + n * 16_667,
                latency_ns: 80_000 + (n * 7_919) % 900_000,
                late_us: (n % 90) as u32,
                connection: (n % 200) as u32,
                kind: (n % 4) as u8,
                outcome: Outcome::Ok,
            };
            bytes += encoder.push(&sample).map_or(0, |block| block.len());
        }
        bytes += encoder.flush().map_or(0, |block| block.len());
        assert!(bytes as u64 <= 10 * count, "{bytes} bytes for {count} samples");
    }
}

//! Netlink messages: encode and decode. Bytes in, messages out.

/// `NLMSG_ERROR`.
pub(crate) const ERROR: u16 = 2;
/// `NLMSG_DONE`.
pub(crate) const DONE: u16 = 3;
/// `NLM_F_REQUEST`.
pub(crate) const REQUEST: u16 = 1;
/// `NLM_F_ACK`.
pub(crate) const ACK: u16 = 4;
/// `NLM_F_DUMP`.
pub(crate) const DUMP: u16 = 0x300;

const HEADER: usize = 16;
/// `NLA_F_NESTED`.
const NESTED: u16 = 0x8000;

/// Appends a message.
pub(crate) fn put(into: &mut Vec<u8>, kind: u16, flags: u16, payload: &[u8]) {
    into.extend_from_slice(&((HEADER + payload.len()) as u32).to_ne_bytes());
    into.extend_from_slice(&kind.to_ne_bytes());
    into.extend_from_slice(&flags.to_ne_bytes());
    into.extend_from_slice(&[0; 8]);
    into.extend_from_slice(payload);
    into.resize(into.len().next_multiple_of(4), 0);
}

/// Appends an attribute.
pub(crate) fn put_attribute(into: &mut Vec<u8>, kind: u16, value: &[u8]) {
    into.extend_from_slice(&((4 + value.len()) as u16).to_ne_bytes());
    into.extend_from_slice(&kind.to_ne_bytes());
    into.extend_from_slice(value);
    into.resize(into.len().next_multiple_of(4), 0);
}

/// Appends an attribute that holds others (`NLA_F_NESTED`).
pub(crate) fn put_nested(into: &mut Vec<u8>, kind: u16, fill: impl FnOnce(&mut Vec<u8>)) {
    let mut value = Vec::new();
    fill(&mut value);
    put_attribute(into, NESTED | kind, &value);
}

/// Returns kind and payload of each message in a packet.
pub(crate) fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = (u32_at(bytes, 0)? as usize).min(bytes.len());
        let (kind, payload) = (u16_at(bytes, 4)?, bytes.get(HEADER..length)?);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, payload))
    })
}

/// Returns kind and value of each attribute.
pub(crate) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16_at(bytes, 0)?);
        let (kind, value) = (u16_at(bytes, 2)?, bytes.get(4..length)?);
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// Returns the number at a place, in the machine's byte order.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map(u32::from_ne_bytes)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2).and_then(|word| word.try_into().ok()).map(u16::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_comes_out() {
        let (mut payload, mut packet) = (vec![1, 2, 3, 4], Vec::new());
        put_attribute(&mut payload, 7, b"odd");
        put_attribute(&mut payload, 8, &[]);
        put(&mut packet, 20, REQUEST, &payload);
        put(&mut packet, DONE, 0, &[]);
        let found: Vec<(u16, &[u8])> = messages(&packet).collect();
        assert_eq!(found, [(20, &payload[..]), (DONE, &[][..])]);
        let found: Vec<(u16, &[u8])> = attributes(&payload[4..]).collect();
        assert_eq!(found, [(7, &b"odd"[..]), (8, &[][..])]);
    }

    #[test]
    fn what_is_cut_off_or_lies_about_its_length_ends_it() {
        let mut packet = Vec::new();
        put(&mut packet, 20, 0, &[9; 8]);
        for end in 0..packet.len() {
            assert!(messages(&packet[..end]).count() <= 1, "{end}");
        }
        packet[0] = 3;
        assert_eq!(messages(&packet).count(), 0);
        assert_eq!(attributes(&[2, 0, 1, 0, 2, 0, 1, 0]).count(), 0);
    }
}

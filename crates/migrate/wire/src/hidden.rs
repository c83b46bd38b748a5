//! A last column that only the proxy sees: taken out of what a server sends, and put into what a client asks for; and
//! errors in a statement that the client sent behind others.

use crate::WireError;
use crate::frame::{put, put_cstr};
use crate::read::Reader;

/// Appends a RowDescription without its last field.
pub fn put_description_without_last(into: &mut Vec<u8>, body: &[u8]) -> Result<(), WireError> {
    let mut reader = Reader::new(body, "row description");
    let count = reader.u16()?;
    let kept = count.checked_sub(1).ok_or_else(|| reader.malformed())?;
    let fields = reader.rest();
    let mut rest = Reader::new(fields, "row description");
    let mut len = 0;
    for _ in 0..kept {
        // Its name; table, column, type, length, modifier and format.
        len += rest.cstr()?.len() + 1;
        rest.bytes(18)?;
        len += 18;
    }
    rest.cstr()?;
    rest.bytes(18)?;
    rest.end()?;
    put(into, b'T', |message| {
        message.extend(kept.to_be_bytes());
        message.extend(&fields[..len]);
    });
    Ok(())
}

/// The last value of a DataRow.
pub fn last_value(body: &[u8]) -> Result<Option<&[u8]>, WireError> {
    let mut reader = Reader::new(body, "data row");
    let mut last = Err(reader.malformed());
    for _ in 0..reader.u16()? {
        last = Ok(match reader.i32()? {
            -1 => None,
            len => Some(reader.bytes(usize::try_from(len).map_err(|_| reader.malformed())?)?),
        });
    }
    reader.end()?;
    last
}

/// Appends a DataRow without its last value, which is `last`.
pub fn put_row_without_last(into: &mut Vec<u8>, body: &[u8], last: Option<&[u8]>) -> Result<(), WireError> {
    let mut reader = Reader::new(body, "data row");
    let kept = reader.u16()?.checked_sub(1).ok_or_else(|| reader.malformed())?;
    let values = reader.rest();
    let len = values.len().checked_sub(4 + last.map_or(0, <[u8]>::len)).ok_or_else(|| reader.malformed())?;
    put(into, b'D', |message| {
        message.extend(kept.to_be_bytes());
        message.extend(&values[..len]);
    });
    Ok(())
}

/// Appends a Bind for another statement, whose last column the client does not know of; the column is a text, which looks
/// the same in both formats.
pub fn put_bind_elsewhere(into: &mut Vec<u8>, body: &[u8], statement: &[u8]) -> Result<(), WireError> {
    let mut reader = Reader::new(body, "bind");
    let portal = reader.cstr()?;
    reader.cstr()?;
    let parameters = reader.rest();
    let mut rest = Reader::new(parameters, "bind");
    for _ in 0..rest.u16()? {
        rest.u16()?;
    }
    for _ in 0..rest.u16()? {
        let len = rest.i32()?;
        if len > 0 {
            rest.bytes(usize::try_from(len).map_err(|_| rest.malformed())?)?;
        }
    }
    let formats = rest.rest();
    let before = &parameters[..parameters.len() - formats.len()];
    let mut rest = Reader::new(formats, "bind");
    let count = rest.u16()?;
    let codes = rest.rest();
    if codes.len() != usize::from(count) * 2 {
        return Err(rest.malformed());
    }
    put(into, b'B', |message| {
        put_cstr(message, portal);
        put_cstr(message, statement);
        message.extend(before);
        // None and one stand for all columns.
        let more = u16::from(count > 1);
        message.extend((count + more).to_be_bytes());
        message.extend(codes);
        message.extend([0, 0].iter().take(usize::from(more) * 2));
    });
    Ok(())
}

/// Appends an error whose position counts from so many characters further on.
pub fn put_error_moved(into: &mut Vec<u8>, body: &[u8], by: usize) -> Result<(), WireError> {
    let mut reader = Reader::new(body, "error response");
    let mut moved = Vec::with_capacity(body.len() + 8);
    loop {
        let field = reader.byte()?;
        moved.push(field);
        if field == 0 {
            break;
        }
        let text = reader.cstr()?;
        match std::str::from_utf8(text).ok().and_then(|text| text.parse::<usize>().ok()).filter(|_| field == b'P') {
            Some(position) => put_cstr(&mut moved, (position + by).to_string().as_bytes()),
            None => put_cstr(&mut moved, text),
        }
    }
    reader.end()?;
    put(into, b'E', |message| message.extend(moved));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::HEADER_LEN;

    fn body(write: impl FnOnce(&mut Vec<u8>) -> Result<(), WireError>) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes).expect("well-formed");
        assert_eq!(u32::from_be_bytes(bytes[1..5].try_into().unwrap()) as usize, bytes.len() - 1);
        bytes.split_off(HEADER_LEN)
    }

    #[test]
    fn the_last_column_is_taken_out() {
        let field = |name: &[u8]| [name, &[0], &[7; 18]].concat();
        let two = [&[0, 2][..], &field(b"a"), &field(b"hidden")].concat();
        assert_eq!(body(|to| put_description_without_last(to, &two)), [&[0, 1][..], &field(b"a")].concat());
        let row = b"\0\x02\0\0\0\x01x\0\0\0\x02yz";
        let last = last_value(row).unwrap();
        assert_eq!(last, Some(&b"yz"[..]));
        assert_eq!(body(|to| put_row_without_last(to, row, last)), b"\0\x01\0\0\0\x01x");
        let null = b"\0\x01\xff\xff\xff\xff";
        assert_eq!(last_value(null), Ok(None));
        assert_eq!(body(|to| put_row_without_last(to, null, None)), b"\0\0");
        for wrong in [&b"\0\0"[..], b"\0\x01", b"\0\x01\0\0\0\x09a", b""] {
            assert!(last_value(wrong).is_err(), "{wrong:?}");
            assert!(put_description_without_last(&mut Vec::new(), wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn an_error_points_further_on() {
        let error = b"SERROR\0P7\0p7\0\0";
        assert_eq!(body(|to| put_error_moved(to, error, 35)), b"SERROR\0P42\0p7\0\0");
        assert!(put_error_moved(&mut Vec::new(), b"SERROR\0P7\0", 1).is_err());
    }

    #[test]
    fn a_bind_goes_to_another_statement() {
        let bind = |formats: &[u8]| [&b"p\0s\0\0\x01\0\x01\0\x02\0\0\0\x01v\xff\xff\xff\xff"[..], formats].concat();
        let moved = |formats: &[u8]| body(|to| put_bind_elsewhere(to, &bind(formats), b"twin"));
        let expected =
            |formats: &[u8]| [&b"p\0twin\0\0\x01\0\x01\0\x02\0\0\0\x01v\xff\xff\xff\xff"[..], formats].concat();
        assert_eq!(moved(b"\0\0"), expected(b"\0\0"));
        assert_eq!(moved(b"\0\x01\0\x01"), expected(b"\0\x01\0\x01"));
        assert_eq!(moved(b"\0\x02\0\x01\0\x01"), expected(b"\0\x03\0\x01\0\x01\0\0"));
        assert!(put_bind_elsewhere(&mut Vec::new(), &bind(b"\0\x02\0"), b"twin").is_err());
        assert!(put_bind_elsewhere(&mut Vec::new(), b"p\0s\0\0", b"twin").is_err());
    }
}

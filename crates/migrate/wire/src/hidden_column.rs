//! A first column that only the proxy sees: it is removed from what a server sends, and added to what a client asks
//! for. Also positions of errors in a statement that the client sent after others.

use crate::WireError;
use crate::body_reader::Reader;
use crate::frame::{put, put_cstr};

/// Appends a RowDescription without its first field.
///
/// # Errors
///
/// [`WireError::Malformed`] if the body is not a RowDescription with at least one field.
pub fn put_description_without_first(into: &mut Vec<u8>, body: &[u8]) -> Result<(), WireError> {
    let mut reader = Reader::new(body, "row description");
    let kept = reader.u16()?.checked_sub(1).ok_or_else(|| reader.malformed())?;
    // Skips its name; then table, column, type, length, modifier and format.
    reader.cstr()?;
    reader.bytes(18)?;
    let fields = reader.rest();
    put(into, b'T', |message| {
        message.extend(kept.to_be_bytes());
        message.extend(fields);
    });
    Ok(())
}

/// The first value of a DataRow, and the bytes of the others unchanged.
///
/// # Errors
///
/// [`WireError::Malformed`] if the body is not a DataRow with at least one value.
pub fn first_value(body: &[u8]) -> Result<(Option<&[u8]>, &[u8]), WireError> {
    let mut reader = Reader::new(body, "data row");
    reader.u16()?.checked_sub(1).ok_or_else(|| reader.malformed())?;
    let first = match reader.i32()? {
        -1 => None,
        len => Some(reader.bytes(usize::try_from(len).map_err(|_| reader.malformed())?)?),
    };
    Ok((first, reader.rest()))
}

/// Appends the beginning of a DataRow of `len` bytes without its first value, up to the second; the caller appends the
/// rest. Returns how many bytes of the row come before the second value, or `None` if too few bytes are here.
///
/// # Errors
///
/// [`WireError::Malformed`] if the bytes do not begin a DataRow with at least one value.
pub fn put_beginning_without_first(
    into: &mut Vec<u8>,
    beginning: &[u8],
    len: usize,
) -> Result<Option<usize>, WireError> {
    let [a, b, c, d, e, f, ..] = *beginning else { return Ok(None) };
    let malformed = || WireError::Malformed("data row");
    let kept = u16::from_be_bytes([a, b]).checked_sub(1).ok_or_else(malformed)?;
    let first = match i32::from_be_bytes([c, d, e, f]) {
        -1 => 0,
        first => usize::try_from(first).map_err(|_| malformed())?,
    };
    let before = 6 + first;
    let left = len.checked_sub(before).and_then(|left| u32::try_from(left).ok()).ok_or_else(malformed)?;
    into.push(b'D');
    into.extend((left + 6).to_be_bytes());
    into.extend(kept.to_be_bytes());
    Ok(Some(before))
}

/// Appends a DataRow without its first value; `others` are the bytes of the other values.
///
/// # Errors
///
/// [`WireError::Malformed`] if the row has no first value.
pub fn put_row_without_first(into: &mut Vec<u8>, body: &[u8], others: &[u8]) -> Result<(), WireError> {
    let mut reader = Reader::new(body, "data row");
    let kept = reader.u16()?.checked_sub(1).ok_or_else(|| reader.malformed())?;
    put(into, b'D', |message| {
        message.extend(kept.to_be_bytes());
        message.extend(others);
    });
    Ok(())
}

/// Appends a Bind for another statement, whose first column the client does not know. That column is a text, which
/// looks the same in both formats.
///
/// # Errors
///
/// [`WireError::Malformed`] if the body is not a Bind.
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
        // No code and one code apply to all columns.
        let more = u16::from(count > 1);
        message.extend((count + more).to_be_bytes());
        message.extend([0, 0].iter().take(usize::from(more) * 2));
        message.extend(codes);
    });
    Ok(())
}

/// Appends an error whose position is moved by `by` characters.
///
/// # Errors
///
/// [`WireError::Malformed`] if the body is not an ErrorResponse.
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
    fn the_first_column_is_taken_out() {
        let field = |name: &[u8]| [name, &[0], &[7; 18]].concat();
        let two = [&[0, 2][..], &field(b"hidden"), &field(b"a")].concat();
        assert_eq!(body(|to| put_description_without_first(to, &two)), [&[0, 1][..], &field(b"a")].concat());
        let row = b"\0\x02\0\0\0\x02yz\0\0\0\x01x";
        let (first, others) = first_value(row).unwrap();
        assert_eq!(first, Some(&b"yz"[..]));
        assert_eq!(body(|to| put_row_without_first(to, row, others)), b"\0\x01\0\0\0\x01x");
        let null = b"\0\x01\xff\xff\xff\xff";
        assert_eq!(first_value(null), Ok((None, &b""[..])));
        assert_eq!(body(|to| put_row_without_first(to, null, b"")), b"\0\0");
        for wrong in [&b"\0\0"[..], b"\0\x01", b"\0\x01\0\0\0\x09a", b"\0\x01\xff\xff\xff\xfe", b""] {
            assert!(first_value(wrong).is_err(), "{wrong:?}");
            assert!(put_description_without_first(&mut Vec::new(), wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_row_begins_without_its_first_column() {
        let row = b"\0\x02\0\0\0\x02yz\0\0\0\x01x";
        for (row, expected) in [(&row[..], &b"\0\x01\0\0\0\x01x"[..]), (b"\0\x01\xff\xff\xff\xff", b"\0\0")] {
            for here in 0..=row.len() {
                let mut bytes = Vec::new();
                let before = put_beginning_without_first(&mut bytes, &row[..here], row.len()).unwrap();
                assert_eq!(before.is_some(), here >= 6);
                let Some(before) = before else { continue };
                bytes.extend(&row[before..]);
                let whole = body(|to| {
                    to.extend(&bytes);
                    Ok(())
                });
                assert_eq!(whole, expected);
            }
        }
        for wrong in [&b"\0\0\0\0\0\0"[..], b"\0\x01\0\0\0\x09", b"\0\x01\xff\xff\xff\xfe"] {
            assert!(put_beginning_without_first(&mut Vec::new(), wrong, 10).is_err(), "{wrong:?}");
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
        assert_eq!(moved(b"\0\x02\0\x01\0\x01"), expected(b"\0\x03\0\0\0\x01\0\x01"));
        assert!(put_bind_elsewhere(&mut Vec::new(), &bind(b"\0\x02\0"), b"twin").is_err());
        assert!(put_bind_elsewhere(&mut Vec::new(), b"p\0s\0\0", b"twin").is_err());
    }
}

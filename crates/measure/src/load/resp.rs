//! Parser and encoder of RESP2, the protocol of Redis. Pure.

/// Reply of the server; strings borrow from the input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reply<'a> {
    Simple(&'a [u8]),
    Error(&'a [u8]),
    Integer(i64),
    /// `None` is the null bulk string.
    Bulk(Option<&'a [u8]>),
    /// `None` is the null array.
    Array(Option<Vec<Reply<'a>>>),
}

/// Error for bytes that are not RESP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Malformed(pub(crate) String);

/// Length limit of a line that is not a bulk string, in bytes.
const LINE_MAX: usize = 64 << 10;
/// Size limit of a bulk string in bytes, as in Redis.
const BULK_MAX: usize = 512 << 20;
const ARRAY_MAX: usize = 1 << 20;
const DEPTH_MAX: u32 = 8;

/// Parses the first reply in `input`; returns it with its length, or `None` if it is incomplete.
pub(crate) fn parse(input: &[u8]) -> Result<Option<(Reply<'_>, usize)>, Malformed> {
    let mut rest = input;
    Ok(take(&mut rest, 0)?.map(|reply| (reply, input.len() - rest.len())))
}

fn take<'a>(rest: &mut &'a [u8], depth: u32) -> Result<Option<Reply<'a>>, Malformed> {
    let Some(&kind) = rest.first() else { return Ok(None) };
    if !b"+-:$*".contains(&kind) {
        return Err(Malformed(format!("a reply begins with byte {kind:#04x}")));
    }
    let Some(line) = take_line(rest)? else { return Ok(None) };
    match kind {
        b'+' => Ok(Some(Reply::Simple(line))),
        b'-' => Ok(Some(Reply::Error(line))),
        b':' => Ok(Some(Reply::Integer(number(line)?))),
        b'$' => take_bulk(rest, number(line)?),
        _ => take_array(rest, number(line)?, depth),
    }
}

/// Returns the line after the kind byte, without its end.
fn take_line<'a>(rest: &mut &'a [u8]) -> Result<Option<&'a [u8]>, Malformed> {
    let window = &rest[..rest.len().min(LINE_MAX)];
    let Some(end) = window.iter().position(|&byte| byte == b'\n') else {
        return if rest.len() >= LINE_MAX { Err(Malformed("a line has no end".into())) } else { Ok(None) };
    };
    let line = &rest[1..end.max(1)];
    let Some((b'\r', line)) = line.split_last() else {
        return Err(Malformed("a line ends without a carriage return".into()));
    };
    *rest = &rest[end + 1..];
    Ok(Some(line))
}

fn take_bulk<'a>(rest: &mut &'a [u8], length: i64) -> Result<Option<Reply<'a>>, Malformed> {
    let Some(length) = bounded(length, BULK_MAX)? else { return Ok(Some(Reply::Bulk(None))) };
    let Some((bulk, after)) = rest.split_at_checked(length) else { return Ok(None) };
    let Some((end, after)) = after.split_at_checked(2) else { return Ok(None) };
    if end != b"\r\n" {
        return Err(Malformed("a bulk string is longer than its length field".into()));
    }
    *rest = after;
    Ok(Some(Reply::Bulk(Some(bulk))))
}

fn take_array<'a>(rest: &mut &'a [u8], length: i64, depth: u32) -> Result<Option<Reply<'a>>, Malformed> {
    let Some(length) = bounded(length, ARRAY_MAX)? else { return Ok(Some(Reply::Array(None))) };
    if depth >= DEPTH_MAX {
        return Err(Malformed("arrays are nested too deeply".into()));
    }
    let mut items = Vec::with_capacity(length.min(rest.len() / 3));
    for _ in 0..length {
        let Some(item) = take(rest, depth + 1)? else { return Ok(None) };
        items.push(item);
    }
    Ok(Some(Reply::Array(Some(items))))
}

fn number(line: &[u8]) -> Result<i64, Malformed> {
    let text = std::str::from_utf8(line).ok().filter(|text| !text.starts_with('+'));
    text.and_then(|text| text.parse().ok())
        .ok_or_else(|| Malformed(format!("`{}` is not a number", String::from_utf8_lossy(line))))
}

/// Checks a length; -1 stands for null.
fn bounded(length: i64, limit: usize) -> Result<Option<usize>, Malformed> {
    match usize::try_from(length) {
        Ok(length) if length <= limit => Ok(Some(length)),
        _ if length == -1 => Ok(None),
        _ => Err(Malformed(format!("a length of {length}"))),
    }
}

/// Appends a command with these arguments.
pub(crate) fn command(out: &mut Vec<u8>, arguments: &[&[u8]]) {
    out.push(b'*');
    decimal(out, arguments.len() as u64);
    out.extend_from_slice(b"\r\n");
    for argument in arguments {
        bulk(out, argument);
    }
}

/// Appends a bulk string.
pub(crate) fn bulk(out: &mut Vec<u8>, bytes: &[u8]) {
    bulk_head(out, bytes.len());
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// Appends the head of a bulk string of `length` bytes.
pub(crate) fn bulk_head(out: &mut Vec<u8>, length: usize) {
    out.push(b'$');
    decimal(out, length as u64);
    out.extend_from_slice(b"\r\n");
}

/// Appends a number; `write!` would be the larger part of the cost of a request.
pub(crate) fn decimal(out: &mut Vec<u8>, mut number: u64) {
    let mut digits = [0; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_kind_of_reply_is_read() {
        let cases: [(&[u8], Reply); 8] = [
            (b"+OK\r\n", Reply::Simple(b"OK")),
            (b"-ERR no\r\n", Reply::Error(b"ERR no")),
            (b":-42\r\n", Reply::Integer(-42)),
            (b"$3\r\na\nb\r\n", Reply::Bulk(Some(b"a\nb"))),
            (b"$0\r\n\r\n", Reply::Bulk(Some(b""))),
            (b"$-1\r\n", Reply::Bulk(None)),
            (b"*-1\r\n", Reply::Array(None)),
            (
                b"*2\r\n:1\r\n*1\r\n$1\r\nx\r\n",
                Reply::Array(Some(vec![Reply::Integer(1), Reply::Array(Some(vec![Reply::Bulk(Some(b"x"))]))])),
            ),
        ];
        for (bytes, reply) in cases {
            assert_eq!(parse(bytes), Ok(Some((reply, bytes.len()))));
            for cut in 0..bytes.len() {
                assert_eq!(parse(&bytes[..cut]), Ok(None), "{cut} bytes of {}", bytes.escape_ascii());
            }
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let deep = b"*1\r\n".repeat(20);
        let cases: [&[u8]; 8] =
            [b"HTTP/1.1", b"$x\r\n", b"$-2\r\n", b"$99999999999\r\n", b":+1\r\n", b"+OK\n", b"$1\r\nabc\r\n", &deep];
        for bytes in cases {
            assert!(parse(bytes).is_err(), "{}", bytes.escape_ascii());
        }
    }

    #[test]
    fn numbers_are_written_in_decimal() {
        for number in [0, 9, 10, 12_345, u64::MAX] {
            let mut out = Vec::new();
            decimal(&mut out, number);
            assert_eq!(out, number.to_string().as_bytes());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(Some((_, used))) = parse(&bytes) {
                prop_assert!(used > 0 && used <= bytes.len());
            }
        }

        #[test]
        fn commands_are_arrays_of_bulk_strings(args in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..50), 1..5)) {
            let slices: Vec<&[u8]> = args.iter().map(Vec::as_slice).collect();
            let mut out = Vec::new();
            command(&mut out, &slices);
            let items = slices.iter().map(|arg| Reply::Bulk(Some(arg))).collect();
            prop_assert_eq!(parse(&out), Ok(Some((Reply::Array(Some(items)), out.len()))));
        }
    }
}

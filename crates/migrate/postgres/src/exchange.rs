//! Questions of the product's own on a session, and their answers.

use crate::error::LinkError;
use crate::reader::Reader;
use crate::stream::Stream;
use stillpoint_migrate_wire::backend;

/// A server's answers to questions of the product's own.
#[derive(Debug, Default)]
pub struct Answers {
    /// Rows in the session's encoding.
    pub rows: Vec<Vec<Option<Vec<u8>>>>,
    /// Code and message of the first error.
    pub error: Option<(String, String)>,
    /// Messages that are not answers: for the session's client.
    pub aside: Vec<u8>,
}

/// Sends `question`, which ends in `syncs` ReadyForQuery messages, and waits for all of them. The caller must have
/// nothing else under way.
///
/// # Errors
///
/// [`LinkError`] if the connection or the session ends, or the server breaks the protocol.
pub async fn exchange(stream: &mut Stream, question: &[u8], syncs: usize) -> Result<Answers, LinkError> {
    stream.send(question).await.map_err(LinkError::Io)?;
    let (mut reader, mut answers, mut left) = (Reader::default(), Answers::default(), syncs);
    while left > 0 {
        let frame = reader.next(stream).await?;
        match frame.tag {
            b'D' => {
                let row = backend::row(&frame.body).map_err(LinkError::Protocol)?;
                answers.rows.push(row.into_iter().map(|value| value.map(<[u8]>::to_vec)).collect());
            }
            b'E' => {
                let report = backend::report(&frame.body).map_err(LinkError::Protocol)?;
                if report.severity == "FATAL" {
                    return Err(LinkError::Refused(report));
                }
                answers.error.get_or_insert((report.code, report.message));
            }
            b'N' | b'A' | b'S' => frame.put(&mut answers.aside),
            b'Z' => left -= 1,
            _ => {}
        }
    }
    answers.aside.extend_from_slice(reader.leftover());
    Ok(answers)
}

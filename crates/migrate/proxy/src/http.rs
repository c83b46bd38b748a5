//! The little HTTP that metrics and the live page need.

use crate::metrics;
use crate::page;
use crate::proxy::Proxy;
use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};

/// Most bytes of a request's head, and of its body; both must arrive within `REQUEST_TIMEOUT`.
const HEAD_BYTES_MAX: usize = 8 << 10;
const BODY_BYTES_MAX: usize = 1 << 10;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// Most connections at a time; at the limit the oldest one makes way.
const CONNECTIONS_MAX: usize = 16;

/// A request, as far as it is read.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct HttpRequest {
    pub(crate) method: String,
    pub(crate) path: String,
    /// Name or address in the header `Host`, without the port.
    pub(crate) host: String,
    /// Header `Origin` of a script's request.
    pub(crate) origin: Option<String>,
    /// Header `Authorization: Bearer`.
    pub(crate) token: Option<Vec<u8>>,
    pub(crate) body: Vec<u8>,
}

/// A reply.
#[derive(Debug)]
pub(crate) struct HttpReply {
    pub(crate) status: &'static str,
    pub(crate) content_type: &'static str,
    /// More lines of the head, each with its end.
    pub(crate) head: String,
    pub(crate) body: String,
}

impl HttpReply {
    pub(crate) fn text(status: &'static str, body: impl Into<String>) -> HttpReply {
        HttpReply { status, content_type: "text/plain; charset=utf-8", head: String::new(), body: body.into() }
    }
}

/// Answer to a request.
pub(crate) enum Answer {
    Reply(HttpReply),
    /// Events until the client leaves.
    Events,
}

/// Answers each client in a task of its own: a silent one does not block the others.
pub(crate) async fn serve(listener: TcpListener, proxy: Arc<Proxy>) {
    let (mut tasks, mut connections) = (JoinSet::new(), VecDeque::<AbortHandle>::new());
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                connections.retain(|connection| !connection.is_finished());
                if connections.len() >= CONNECTIONS_MAX
                    && let Some(oldest) = connections.pop_front()
                {
                    oldest.abort();
                }
                let proxy = proxy.clone();
                connections.push_back(tasks.spawn(answer(stream, proxy)));
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
        while tasks.try_join_next().is_some() {}
    }
}

async fn answer(mut stream: TcpStream, proxy: Arc<Proxy>) {
    let answered = tokio::time::timeout(REQUEST_TIMEOUT, async {
        let Some(request) = read_request(&mut stream).await? else { return Ok(false) };
        let reply = match request {
            Ok(request) => match route(&request, &proxy) {
                Answer::Reply(reply) => reply,
                Answer::Events => return Ok(true),
            },
            Err(why) => HttpReply::text("400 Bad Request", format!("{why}\n")),
        };
        write_reply(&mut stream, &reply).await.map(|()| false)
    });
    if let Ok(Ok(true)) = answered.await {
        page::stream_events(&mut stream, &proxy).await;
    }
}

fn route(request: &HttpRequest, proxy: &Arc<Proxy>) -> Answer {
    match (&*request.method, &*request.path) {
        ("GET", "/metrics") => Answer::Reply(HttpReply {
            status: "200 OK",
            content_type: "text/plain; version=0.0.4",
            head: String::new(),
            body: metrics::text(proxy),
        }),
        _ => page::route(request, proxy)
            .unwrap_or_else(|| Answer::Reply(HttpReply::text("404 Not Found", "see /metrics\n"))),
    }
}

/// Reads a request; `None` if the client left. The inner error is the reason why it is no request.
async fn read_request(stream: &mut TcpStream) -> std::io::Result<Option<Result<HttpRequest, &'static str>>> {
    let mut bytes = Vec::new();
    let head_len = loop {
        if let Some(at) = bytes.windows(4).position(|end| end == b"\r\n\r\n") {
            break at;
        }
        if bytes.len() > HEAD_BYTES_MAX {
            return Ok(Some(Err("the head of the request is too long")));
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return Ok(None);
        }
    };
    let body = bytes.split_off(head_len + 4);
    let (mut request, body_len) = match parse_head(&bytes[..head_len]) {
        Ok(parsed) => parsed,
        Err(why) => return Ok(Some(Err(why))),
    };
    request.body = body;
    while request.body.len() < body_len {
        if stream.read_buf(&mut request.body).await? == 0 {
            return Ok(None);
        }
    }
    request.body.truncate(body_len);
    Ok(Some(Ok(request)))
}

/// Parses a request's head without its last line; returns the length of the body as well.
fn parse_head(head: &[u8]) -> Result<(HttpRequest, usize), &'static str> {
    let head = std::str::from_utf8(head).map_err(|_| "the request is not text")?;
    let mut lines = head.split("\r\n");
    let mut words = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(path), Some("HTTP/1.1" | "HTTP/1.0"), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err("the request is not HTTP/1.1");
    };
    let mut request = HttpRequest { method: method.into(), path: path.into(), ..HttpRequest::default() };
    let mut body_len = None;
    let mut hosts = 0;
    for line in lines {
        let (name, value) = line.split_once(':').ok_or("a line of the request has no colon")?;
        let value = value.trim_matches([' ', '\t']);
        match &*name.to_ascii_lowercase() {
            "host" => {
                hosts += 1;
                value.clone_into(&mut request.host);
            }
            "origin" => request.origin = Some(value.to_owned()),
            "authorization" => request.token = value.strip_prefix("Bearer ").map(|token| token.as_bytes().to_vec()),
            "content-length" => {
                let len = value.parse().ok().filter(|len| *len <= BODY_BYTES_MAX);
                if body_len.replace(len.ok_or("the body of the request is too long")?).is_some() {
                    return Err("the length of the body is given twice");
                }
            }
            "transfer-encoding" => return Err("the request has a transfer encoding"),
            _ => {}
        }
    }
    if hosts > 1 {
        return Err("the request names several hosts");
    }
    request.host = without_port(&request.host).to_owned();
    Ok((request, body_len.unwrap_or(0)))
}

/// Name or address of `HOST:PORT`.
pub(crate) fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    }
}

async fn write_reply(stream: &mut TcpStream, reply: &HttpReply) -> std::io::Result<()> {
    let HttpReply { status, content_type, head: more, body } = reply;
    let mut head = format!("HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n{more}");
    let _ = write!(head, "Content-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body.as_bytes()).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_read_as_far_as_they_are_needed() {
        let (request, len) = parse_head(
            b"POST /switch HTTP/1.1\r\nhost: [::1]:9187\r\nOrigin: http://[::1]:9187\r\nAuthorization: Bearer a:b\r\n\
              Content-Length: 4\r\nX: y",
        )
        .unwrap();
        assert_eq!(len, 4);
        let expected = HttpRequest {
            method: "POST".into(),
            path: "/switch".into(),
            host: "[::1]".into(),
            origin: Some("http://[::1]:9187".into()),
            token: Some(b"a:b".to_vec()),
            body: vec![],
        };
        assert_eq!(request, expected);
        for (text, host) in [("a", "a"), ("a:1", "a"), ("[::1]", "[::1]"), ("[::1]:80", "[::1]"), ("::1", "::1")] {
            assert_eq!(without_port(text), host, "{text}");
        }
    }

    #[test]
    fn requests_that_are_not_whole_or_ambiguous_are_refused() {
        for head in [
            "",
            "GET /",
            "GET / HTTP/2",
            "GET  / HTTP/1.1\r\nHost: a",
            "GET / x HTTP/1.1\r\nHost: a",
            "GET / HTTP/1.1\r\nHost: a\r\nHost: b",
            "GET / HTTP/1.1\r\nHost: a\r\nno colon",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 1",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999",
            "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1",
            "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked",
        ] {
            assert!(parse_head(head.as_bytes()).is_err(), "{head:?}");
        }
        assert!(parse_head(b"GET / HTTP/1.1\r\nHost: \xff").is_err());
    }
}

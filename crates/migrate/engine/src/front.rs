//! The proxy in front of both servers, as far as the manager needs it: its control socket.

use crate::{Error, Server};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

/// More than the proxy's own limits; it is the proxy that falls back by itself.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// A conversation with the proxy about one tenant. Dropping it ends a pause: clients go on where they are.
pub(crate) struct Front {
    stream: BufReader<UnixStream>,
    tenant: String,
    path: PathBuf,
}

/// Sessions that are ready to go over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ready {
    pub(crate) sessions: u64,
}

impl Front {
    pub(crate) async fn connect(path: &Path, tenant: &str) -> Result<Front, Error> {
        let stream = UnixStream::connect(path).await;
        let stream = stream.map_err(|error| Error::Proxy(format!("control socket {}: {error}", path.display())))?;
        Ok(Front { stream: BufReader::new(stream), tenant: tenant.into(), path: path.into() })
    }

    async fn ask(&mut self, request: Value) -> Result<Value, Error> {
        let broken = |what: String| Error::Proxy(what);
        let asking = async {
            let mut line = request.to_string();
            line.push('\n');
            self.stream.get_mut().write_all(line.as_bytes()).await?;
            let mut answer = String::new();
            self.stream.read_line(&mut answer).await?;
            Ok::<String, std::io::Error>(answer)
        };
        let answer = tokio::time::timeout(ANSWER_LIMIT, asking).await;
        let answer = answer.map_err(|_| broken(format!("no answer from {}", self.path.display())))?;
        let answer = answer.map_err(|error| broken(error.to_string()))?;
        let answer: Value =
            serde_json::from_str(&answer).map_err(|_| broken(format!("answered `{}`", answer.trim())))?;
        match answer["reply"].as_str() {
            Some("error") => Err(broken(answer["message"].as_str().unwrap_or("refused").to_owned())),
            _ => Ok(answer),
        }
    }

    /// Where the tenant is served now, and whether the proxy knows it.
    pub(crate) async fn serving(&mut self) -> Result<Option<(String, u16)>, Error> {
        let status = self.ask(json!({ "request": "status" })).await?;
        let tenants = status["tenants"].as_array().cloned().unwrap_or_default();
        let tenant = tenants.iter().find(|tenant| tenant["name"] == self.tenant.as_str());
        Ok(tenant.map(|tenant| {
            let server = &tenant["server"];
            let port = server["port"].as_u64().and_then(|port| port.try_into().ok()).unwrap_or(5432);
            (server["host"].as_str().unwrap_or_default().to_owned(), port)
        }))
    }

    /// Opens a session on the target for each of the tenant's; waits until all are ready. `verifiers` are stored passwords
    /// by role, for a target that asks for them.
    pub(crate) async fn prepare(
        &mut self,
        target: &Server,
        verifiers: &BTreeMap<String, String>,
        limit: Duration,
    ) -> Result<Ready, Error> {
        let (host, port) = target.host_and_port();
        let begun = tokio::time::Instant::now();
        loop {
            let server = json!({ "host": host, "port": port });
            let request = json!({
                "request": "prepare", "tenant": self.tenant, "target": server, "verifiers": verifiers,
                "limit_ms": limit.as_millis() as u64
            });
            let answer = self.ask(request).await?;
            let who = [remarks(&answer["pinned"]), remarks(&answer["failed"])].concat();
            let waiting = remarks(&answer["waiting"]);
            if who.is_empty() && waiting.is_empty() {
                return Ok(Ready { sessions: answer["sessions"].as_u64().unwrap_or(0) });
            }
            if begun.elapsed() >= limit || !remarks(&answer["failed"]).is_empty() {
                let who = [who, waiting].concat();
                return Err(Error::TimedOut { what: "preparing sessions on the target".into(), limit, who });
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Lets no transaction begin and waits until none runs. After `limit`, which counts until the switch, clients go on
    /// by themselves.
    pub(crate) async fn pause(&mut self, limit: Duration) -> Result<(), Error> {
        let request = json!({ "request": "pause", "tenant": self.tenant, "limit_ms": limit.as_millis() as u64 });
        let answer = self.ask(request).await?;
        if answer["reply"] == "drained" {
            return Ok(());
        }
        let who = remarks(&answer["sessions"]);
        Err(Error::TimedOut { what: "waiting for running transactions to end".into(), limit, who })
    }

    /// Sends clients on to the target; only in a pause.
    pub(crate) async fn switch(&mut self) -> Result<(), Error> {
        self.ask(json!({ "request": "switch", "tenant": self.tenant })).await.map(drop)
    }

    /// Sends clients on to where they were.
    pub(crate) async fn resume(&mut self) -> Result<(), Error> {
        self.ask(json!({ "request": "resume", "tenant": self.tenant })).await.map(drop)
    }

    /// Closes the sessions on the target.
    pub(crate) async fn abandon(&mut self) -> Result<(), Error> {
        self.ask(json!({ "request": "abandon", "tenant": self.tenant })).await.map(drop)
    }
}

/// Sessions and what is to be said of them, for people.
fn remarks(list: &Value) -> Vec<String> {
    let text = |remark: &Value| {
        let why = remark["why"].as_str().unwrap_or("busy");
        let since = remark["transaction_ms"].as_u64().map_or_else(String::new, |ms| format!(" for {ms} ms"));
        let user = remark["user"].as_str().map_or_else(String::new, |user| format!(" of {user}"));
        format!("session {}{user}: {why}{since}", remark["id"])
    };
    list.as_array().map(|list| list.iter().map(text).collect()).unwrap_or_default()
}

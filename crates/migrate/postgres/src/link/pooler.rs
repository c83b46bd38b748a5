//! Poolers between us and a server: programs whose sessions are not the server's own.
//!
//! ```text
//! cancel key's process id = pg_backend_pid()      the session is the server's own, or its pooler hands the ids on
//!                         otherwise               a pooler: consoles may give its name
//! SHOW pool_version has an answer                 Pgpool-II, which hands the ids on
//! ```
//!
//! Programs that pass bytes on and do not share sessions (HAProxy, a load balancer of a cloud) give the server's own ids, and
//! are no poolers here.

use super::{APPLICATION, CONNECT_TIMEOUT, Server, ServerError};
use crate::{Answers, Credential, Ready, connect, exchange, log_in};
use stillpoint_migrate_wire::frontend::{TERMINATE, put_query};
use stillpoint_migrate_wire::startup::{Startup, Version};

/// Databases by which poolers serve their consoles, with the beginnings of their answers to `SHOW VERSION`.
const CONSOLES: [(&str, &[&str]); 2] =
    [("pgbouncer", &["PgBouncer", "PgCat", "pgcat"]), ("console", &["Odyssey", "odyssey"])];
/// Answer of PgBouncer's console to a role that is not among its administrators.
const PGBOUNCER_REFUSAL: (&str, &str) = ("08P01", "not allowed");
/// Most characters of a pooler's own name.
const NAME_CHARS_MAX: usize = 40;

/// Name of a pooler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pooler {
    /// It has told its name.
    Named(String),
    /// Its sessions have process ids of its own; its name is not known.
    Unnamed,
}

impl std::fmt::Display for Pooler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Pooler::Named(name) => f.write_str(name),
            Pooler::Unnamed => f.write_str("a pooler that does not tell its name"),
        }
    }
}

impl Server {
    /// Looks for a pooler between us and the server; `None` if sessions are the server's own as far as can be told.
    ///
    /// # Errors
    ///
    /// [`ServerError`] if a session cannot be opened, or breaks.
    pub async fn pooler(&self) -> Result<Option<Pooler>, ServerError> {
        let looking = tokio::time::timeout(CONNECT_TIMEOUT, self.look_for_pooler());
        looking.await.map_err(|_| ServerError::TimedOut { server: self.to_string(), limit: CONNECT_TIMEOUT })?
    }

    async fn look_for_pooler(&self) -> Result<Option<Pooler>, ServerError> {
        let mut session = self.bare_session(&self.database).await?;
        let own = ask(&mut session, "SELECT pg_catalog.pg_backend_pid()").await;
        let own = own.map_err(|error| ServerError::link(&self.to_string(), error))?;
        let shows_own_id = first_value(&own).is_some_and(|pid| pid == session.key.pid.cast_signed().to_string());
        let version = ask(&mut session, "SHOW pool_version").await.unwrap_or_default();
        let _ = session.stream.send(&TERMINATE).await;
        if let Some(version) = first_value(&version) {
            return Ok(Some(Pooler::Named(shorten(&format!("Pgpool-II {version}")))));
        }
        if shows_own_id {
            return Ok(None);
        }
        for (console, names) in CONSOLES {
            match self.bare_session(console).await {
                Ok(mut session) => {
                    let answer = ask(&mut session, "SHOW VERSION").await.unwrap_or_default();
                    let _ = session.stream.send(&TERMINATE).await;
                    let known = first_value(&answer).filter(|text| names.iter().any(|name| text.starts_with(name)));
                    if let Some(name) = known {
                        return Ok(Some(Pooler::Named(shorten(&name))));
                    }
                }
                Err(ServerError::Sql { code, message, .. })
                    if console == "pgbouncer" && (&*code, &*message) == PGBOUNCER_REFUSAL =>
                {
                    return Ok(Some(Pooler::Named("PgBouncer".into())));
                }
                Err(_) => {}
            }
        }
        Ok(Some(Pooler::Unnamed))
    }

    /// Opens a session without settings: poolers refuse those that they do not know.
    async fn bare_session(&self, database: &str) -> Result<Ready, ServerError> {
        let name = self.to_string();
        let stream = connect(&self.address).await.map_err(|error| ServerError::connect(&name, error))?;
        let names = [
            ("user", self.user.as_bytes()),
            ("database", database.as_bytes()),
            ("application_name", APPLICATION.as_bytes()),
        ];
        let startup = Startup::of(Version::V3_0, names).map_err(|error| ServerError::protocol(&name, error))?;
        let mut packet = Vec::new();
        startup.encode(&mut packet);
        let credential = Credential { login: self.login().await?, stored: None };
        log_in(stream, &packet, &self.user, &credential).await.map_err(|error| ServerError::login(&name, error))
    }
}

async fn ask(session: &mut Ready, sql: &str) -> Result<Answers, crate::LinkError> {
    let mut question = Vec::new();
    put_query(&mut question, sql);
    exchange(&mut session.stream, &question, 1).await
}

fn first_value(answers: &Answers) -> Option<String> {
    let value = answers.rows.first()?.first()?.as_ref()?;
    Some(String::from_utf8_lossy(value).into_owned())
}

/// Shortens the text of a program that is not ours.
fn shorten(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(NAME_CHARS_MAX).collect()
}

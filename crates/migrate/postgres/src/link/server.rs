//! Address and login of a server, from the user's connection string.

use super::conninfo::take;
use super::error::ServerError;
use super::password::Password;
use crate::credential::Login;
use crate::server::ServerTls;
use std::fmt;
use std::path::PathBuf;
use tokio_postgres::config::{Config, Host};

/// Application name of our connections, by which both servers distinguish them from clients.
pub const APPLICATION: &str = "stillpoint migrate";

/// A server, the database on it that is moved, and our role there. The password appears in no message.
#[derive(Clone)]
pub struct Server {
    /// Name of the server in messages: `source` or `target`.
    pub(super) side: String,
    /// Address and encryption, as the proxy uses them too: its sessions are as secure as ours.
    pub address: crate::Server,
    /// Name of our role.
    pub user: String,
    pub(super) password: Option<Password>,
    /// Name of the database.
    pub database: String,
}

impl Server {
    /// Parses a connection string in either form of libpq; `side` is the server's name in messages. The default user is
    /// `postgres`, and the default password is that of `PGPASSWORD`. If the string has no database, `database` must be given.
    /// `sslmode` is `require` or `verify-full` (with `sslrootcert`); without one of these the connection is not encrypted.
    ///
    /// # Errors
    ///
    /// [`ServerError::Conninfo`] if the string cannot be parsed, or uses something that is not supported.
    pub fn parse(side: &str, conninfo: &str, database: Option<&str>) -> Result<Server, ServerError> {
        let wrong = |why: String| ServerError::Conninfo { side: side.into(), why };
        let (rest, mode) = take(conninfo, "sslmode");
        let (rest, ca) = take(&rest, "sslrootcert");
        let ca = ca.map(PathBuf::from);
        let tls = match mode.as_deref() {
            None | Some("disable" | "allow" | "prefer") => ServerTls::Disable,
            Some("require") => ServerTls::Require,
            Some("verify-full") if ca.is_some() => ServerTls::VerifyFull,
            Some("verify-full") => return Err(wrong("sslmode=verify-full needs sslrootcert".into())),
            Some(mode) => return Err(wrong(format!("sslmode={mode}: disable, require and verify-full are supported"))),
        };
        let config: Config = rest.parse().map_err(|error: tokio_postgres::Error| wrong(error.to_string()))?;
        if config.get_hosts().len() > 1 {
            return Err(wrong("several hosts: name one server".into()));
        }
        let port = config.get_ports().first().copied().unwrap_or(5432);
        let host = match config.get_hosts().first() {
            Some(Host::Tcp(host)) => host.clone(),
            Some(Host::Unix(directory)) => directory.components().as_path().display().to_string(),
            None => "/var/run/postgresql".into(),
        };
        let address = crate::Server { name: String::new(), host, port, database: None, tls, ca };
        if tls != ServerTls::Disable && address.is_unix_socket() {
            return Err(wrong("it is a Unix socket, which does not support TLS".into()));
        }
        let database = database.or(config.get_dbname()).filter(|name| !name.is_empty());
        let database = database.ok_or_else(|| wrong("no database is named".into()))?.to_owned();
        if database.contains('\0') {
            return Err(wrong("the name of the database holds a zero byte".into()));
        }
        let user = config.get_user().unwrap_or("postgres").to_owned();
        let password = config.get_password().map(<[u8]>::to_vec);
        let password = password.or_else(|| std::env::var("PGPASSWORD").ok().map(String::into_bytes));
        let password = password.map(|password| Password::Given(password.into()));
        Ok(Server { side: side.into(), address, user, password, database })
    }

    /// Returns the same server with a password that a shell command prints each time that it is needed.
    pub fn with_password_command(self, command: &str) -> Server {
        Server { password: Some(Password::Command(command.into())), ..self }
    }

    /// Secret with which our role logs in.
    ///
    /// # Errors
    ///
    /// [`ServerError::PasswordCommand`] if a command should print it, and fails.
    pub(super) async fn login(&self) -> Result<Login, ServerError> {
        match &self.password {
            Some(password) => Ok(Login::Password(password.read(&self.to_string()).await?)),
            None => Ok(Login::Trusted),
        }
    }

    /// Returns the same server with another database.
    pub fn database(&self, database: &str) -> Server {
        Server { database: database.into(), ..self.clone() }
    }

    /// Returns the same server under another name in messages: source and target are exchanged on the way back.
    pub fn with_side(&self, side: &str) -> Server {
        Server { side: side.into(), ..self.clone() }
    }

    /// Environment variables with which libpq's programs connect to it.
    ///
    /// # Errors
    ///
    /// [`ServerError::PasswordCommand`] if a command should print the password, and fails.
    pub async fn environment(&self) -> Result<Vec<(&'static str, String)>, ServerError> {
        let crate::Server { host, port, tls, ca, .. } = &self.address;
        let mut variables = vec![
            ("PGHOST", host.clone()),
            ("PGPORT", port.to_string()),
            ("PGUSER", self.user.clone()),
            ("PGAPPNAME", APPLICATION.into()),
        ];
        if *tls != ServerTls::Disable {
            variables.push(("PGSSLMODE", tls.to_string()));
        }
        if let Some(ca) = ca {
            variables.push(("PGSSLROOTCERT", ca.display().to_string()));
        }
        if let Some(password) = &self.password {
            let password = password.read(&self.to_string()).await?;
            variables.push(("PGPASSWORD", String::from_utf8_lossy(&password).into_owned()));
        }
        Ok(variables)
    }

    /// Returns true if both run on one machine, judged by their addresses: there, work for one takes processor time from
    /// clients of the other.
    pub fn shares_machine_with(&self, other: &Server) -> bool {
        let (one, two) = (&self.address, &other.address);
        self.is_local() && other.is_local() || !one.is_unix_socket() && one.host == two.host
    }

    /// Returns true if it runs on this machine, judged by its address.
    pub fn is_local(&self) -> bool {
        let host = &self.address.host;
        self.address.is_unix_socket()
            || host == "localhost"
            || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    /// Host (or socket directory) and port, as the proxy expects them.
    pub fn host_and_port(&self) -> (String, u16) {
        (self.address.host.clone(), self.address.port)
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}/{}", self.side, self.address, self.database)
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Server({self}, user {})", self.user)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_a_connection_string() {
        let words =
            Server::parse("source", "host=10.0.0.1 port=5433 user=mover password=s3cret dbname=shop", None).unwrap();
        let url = Server::parse("source", "postgresql://mover:s3cret@10.0.0.1:5433/shop", None).unwrap();
        for server in [words, url] {
            assert_eq!(server.host_and_port(), ("10.0.0.1".into(), 5433));
            assert_eq!((server.user.as_str(), server.database.as_str()), ("mover", "shop"));
            assert!(!format!("{server:?} {server}").contains("s3cret"));
        }
    }

    #[test]
    fn addresses_tell_which_servers_share_a_machine() {
        let server = |host: &str| Server::parse("source", &format!("host={host} dbname=x"), None).unwrap();
        for (one, other, same) in [
            ("127.0.0.1", "localhost", true),
            ("/tmp", "::1", true),
            ("10.0.0.1", "10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("10.0.0.1", "127.0.0.1", false),
        ] {
            assert_eq!(server(one).shares_machine_with(&server(other)), same, "{one} {other}");
        }
    }

    #[test]
    fn a_directory_is_a_socket() {
        let server = Server::parse("target", "host=/tmp/x port=5433 dbname=shop", None).unwrap();
        assert!(server.address.is_unix_socket());
        assert_eq!(server.host_and_port(), ("/tmp/x".into(), 5433));
    }

    #[test]
    fn what_is_not_supported_is_refused() {
        for wrong in [
            "host=a,b dbname=x",
            "host=a sslmode=verify-full dbname=x",
            "host=a sslmode=verify-ca dbname=x",
            "host=/tmp sslmode=require dbname=x",
            "host=a",
            "host=a dbname=''",
            "postgres://a/x%00y",
            "nonsense",
        ] {
            assert!(Server::parse("source", wrong, None).is_err(), "{wrong}");
        }
    }

    #[tokio::test]
    async fn tls_goes_to_all_who_connect() {
        let server =
            Server::parse("target", "host=a sslmode=verify-full sslrootcert='/etc/a b.pem' dbname=x", None).unwrap();
        let url = "postgresql://a/x?sslrootcert=%2Fetc%2Fa%20b.pem&sslmode=verify-full";
        for server in [server, Server::parse("target", url, None).unwrap()] {
            let environment = server.environment().await.unwrap();
            assert!(environment.contains(&("PGSSLMODE", "verify-full".into())), "{environment:?}");
            assert!(environment.contains(&("PGSSLROOTCERT", "/etc/a b.pem".into())), "{environment:?}");
            let proxied = server.address;
            assert_eq!((proxied.tls, proxied.ca), (ServerTls::VerifyFull, Some("/etc/a b.pem".into())));
        }
        let plain = Server::parse("target", "host=a dbname=x sslmode=prefer", None).unwrap();
        assert_eq!(plain.address.tls, ServerTls::Disable);
    }
}

//! Address and login of a server, from the user's connection string.

use crate::Error;
use crate::conninfo::take;
use std::fmt;
use std::path::PathBuf;
use stillpoint_migrate_postgres::ServerTls;
use tokio_postgres::config::{Config, Host};

/// Application name of our connections, by which both servers distinguish them from clients.
pub(crate) const APPLICATION: &str = "stillpoint migrate";

/// Address at which the server listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// Host name or address, and port.
    Tcp(String, u16),
    /// The path of the socket.
    Unix(PathBuf),
}

/// A server, the database on it that is moved, and our role there. The password appears in no message.
#[derive(Clone)]
pub struct Server {
    /// Name of the server in messages: `source` or `target`.
    pub(crate) side: String,
    pub(crate) address: Address,
    pub(crate) user: String,
    pub(crate) password: Option<Vec<u8>>,
    pub(crate) database: String,
    tls: ServerTls,
    /// Root certificates, for `verify-full`.
    ca: Option<PathBuf>,
}

impl Server {
    /// Parses a connection string in either form of libpq; `side` is the server's name in messages. The default user is
    /// `postgres`, and the default password is that of `PGPASSWORD`. If the string has no database, `database` must be given.
    /// `sslmode` is `require` or `verify-full` (with `sslrootcert`); without one of these the connection is not encrypted.
    ///
    /// # Errors
    ///
    /// [`Error::Conninfo`] if the string cannot be parsed, or uses something that is not supported.
    pub fn parse(side: &str, conninfo: &str, database: Option<&str>) -> Result<Server, Error> {
        let wrong = |why: String| Error::Conninfo { side: side.into(), why };
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
        let address = match config.get_hosts().first() {
            Some(Host::Tcp(host)) => Address::Tcp(host.clone(), port),
            Some(Host::Unix(directory)) => Address::Unix(directory.join(format!(".s.PGSQL.{port}"))),
            None => Address::Unix(PathBuf::from(format!("/var/run/postgresql/.s.PGSQL.{port}"))),
        };
        if tls != ServerTls::Disable && matches!(address, Address::Unix(_)) {
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
        Ok(Server { side: side.into(), address, user, password, database, tls, ca })
    }

    /// Returns the same server with another database.
    pub(crate) fn database(&self, database: &str) -> Server {
        Server { database: database.into(), ..self.clone() }
    }

    /// Returns the same server under another name in messages: source and target are exchanged on the way back.
    pub(crate) fn with_side(&self, side: &str) -> Server {
        Server { side: side.into(), ..self.clone() }
    }

    /// Name of the database that is moved.
    pub fn database_name(&self) -> &str {
        &self.database
    }

    /// Environment variables with which libpq's programs connect to it.
    pub(crate) fn environment(&self) -> Vec<(&'static str, String)> {
        let mut variables = match &self.address {
            Address::Tcp(host, port) => vec![("PGHOST", host.clone()), ("PGPORT", port.to_string())],
            Address::Unix(path) => {
                let directory = path.parent().map_or_else(String::new, |path| path.display().to_string());
                let port = path.extension().and_then(|port| port.to_str()).unwrap_or("5432");
                vec![("PGHOST", directory), ("PGPORT", port.to_owned())]
            }
        };
        variables.push(("PGUSER", self.user.clone()));
        variables.push(("PGAPPNAME", APPLICATION.into()));
        match self.tls {
            ServerTls::Disable => {}
            ServerTls::Require => variables.push(("PGSSLMODE", "require".into())),
            ServerTls::VerifyFull => variables.push(("PGSSLMODE", "verify-full".into())),
        }
        if let Some(ca) = &self.ca {
            variables.push(("PGSSLROOTCERT", ca.display().to_string()));
        }
        if let Some(password) = &self.password {
            variables.push(("PGPASSWORD", String::from_utf8_lossy(password).into_owned()));
        }
        variables
    }

    /// Returns true if both run on one machine, judged by their addresses: there, work for one takes processor time from
    /// clients of the other.
    pub(crate) fn shares_machine_with(&self, other: &Server) -> bool {
        let host = |server: &Server| match &server.address {
            Address::Unix(_) => None,
            Address::Tcp(host, _) => Some(host.clone()),
        };
        self.is_local() && other.is_local() || host(self).is_some() && host(self) == host(other)
    }

    /// Returns true if it runs on this machine, judged by its address.
    pub(crate) fn is_local(&self) -> bool {
        match &self.address {
            Address::Unix(_) => true,
            Address::Tcp(host, _) => {
                host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
            }
        }
    }

    /// Returns the same server as connections and the proxy describe it: the proxy's sessions are as secure as ours.
    pub(crate) fn to_proxy_server(&self) -> stillpoint_migrate_postgres::Server {
        let (host, port) = self.host_and_port();
        let (tls, ca) = (self.tls, self.ca.clone());
        stillpoint_migrate_postgres::Server { name: String::new(), host, port, database: None, tls, ca }
    }

    /// Host (or socket directory) and port, as the proxy expects them.
    pub fn host_and_port(&self) -> (String, u16) {
        match &self.address {
            Address::Tcp(host, port) => (host.clone(), *port),
            Address::Unix(path) => {
                let directory = path.parent().map_or_else(String::new, |path| path.display().to_string());
                let port = path.extension().and_then(|port| port.to_str()?.parse().ok()).unwrap_or(5432);
                (directory, port)
            }
        }
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (host, port) = self.host_and_port();
        write!(f, "{} {host}:{port}/{}", self.side, self.database)
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
            assert_eq!(server.address, Address::Tcp("10.0.0.1".into(), 5433));
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
        assert_eq!(server.address, Address::Unix("/tmp/x/.s.PGSQL.5433".into()));
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

    #[test]
    fn tls_goes_to_all_who_connect() {
        let server =
            Server::parse("target", "host=a sslmode=verify-full sslrootcert='/etc/a b.pem' dbname=x", None).unwrap();
        let url = "postgresql://a/x?sslrootcert=%2Fetc%2Fa%20b.pem&sslmode=verify-full";
        for server in [server, Server::parse("target", url, None).unwrap()] {
            let environment = server.environment();
            assert!(environment.contains(&("PGSSLMODE", "verify-full".into())), "{environment:?}");
            assert!(environment.contains(&("PGSSLROOTCERT", "/etc/a b.pem".into())), "{environment:?}");
            let proxied = server.to_proxy_server();
            assert_eq!((proxied.tls, proxied.ca), (ServerTls::VerifyFull, Some("/etc/a b.pem".into())));
        }
        let plain = Server::parse("target", "host=a dbname=x sslmode=prefer", None).unwrap();
        assert_eq!(plain.tls, ServerTls::Disable);
    }
}

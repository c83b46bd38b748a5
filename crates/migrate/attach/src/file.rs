//! The proxy's configuration file: missing tenants are appended, so that everything else, comments too, stays as its owner
//! wrote it.
//!
//! The text is made by hand and not by `toml_edit`: the operator is shown what is added, and it stands at the end of the file.

use crate::Error;
use std::path::{Path, PathBuf};
use stillpoint_host::file::read_regular;
use stillpoint_host::trusted::Directory;
use stillpoint_migrate_control::Config;
use stillpoint_migrate_postgres::ServerTls;
use stillpoint_migrate_postgres::link::Server;

/// Maximum size in bytes of a file that the proxy's own user may have written.
pub(super) const FILE_MAX: u64 = 64 << 20;

/// A configuration, with the text of its file.
#[derive(Debug)]
pub(super) struct File {
    path: PathBuf,
    text: String,
    pub(super) config: Config,
}

fn config_error(path: &Path, why: impl ToString) -> Error {
    Error::Attach(vec![format!("the proxy's configuration {}: {}", path.display(), why.to_string())])
}

impl File {
    /// Reads it and checks its directory: a user with write access to that directory could direct our write to another file.
    pub(super) fn read(path: &Path) -> Result<File, Error> {
        Directory::of_file(path).map_err(|error| config_error(path, error))?;
        let bytes = read_regular(path, FILE_MAX).map_err(|error| config_error(path, error))?;
        let text = String::from_utf8(bytes).map_err(|error| config_error(path, error))?;
        let config = Config::parse(&text).map_err(|error| config_error(path, error))?;
        Ok(File { path: path.into(), text, config })
    }

    /// Text that must be added so that the proxy serves `databases` of `server`; empty if it does already.
    pub(super) fn missing(&self, server: &Server, databases: &[String]) -> Result<String, Error> {
        let any = self.config.tenants.contains_key("*");
        let lacking = |name: &&String| !self.config.tenants.contains_key(*name) && **name != server.database;
        let others = !any && databases.iter().any(|name| lacking(&name));
        // The database gets its own tenant, even if `*` would serve it, because it is to be moved separately.
        let own = !self.config.tenants.contains_key(&server.database);
        if !own && !others {
            return Ok(String::new());
        }
        let (name, mut added) = self.name_of(server);
        let tenant = |of: &str| format!("[tenants.{}]\nserver = {}\n", toml_string(of), toml_string(&name));
        if own {
            added += &tenant(&server.database);
        }
        if others {
            added += &tenant("*");
        }
        Config::parse(&format!("{}\n{added}", self.text)).map_err(|error| {
            config_error(&self.path, format!("tenants cannot be added to its end ({error}); add them by hand"))
        })?;
        Ok(added)
    }

    /// Name of the server in the file, and text that must be added to give it one.
    fn name_of(&self, server: &Server) -> (String, String) {
        let wanted = &server.address;
        let known = self.config.servers.iter().find(|(_, known)| {
            (&known.host, known.port, known.tls) == (&wanted.host, wanted.port, wanted.tls) && known.database.is_none()
        });
        if let Some((name, _)) = known {
            return (name.clone(), String::new());
        }
        let name = format!("{}:{}", wanted.host, wanted.port);
        let mut added =
            format!("[servers.{}]\nhost = {}\nport = {}\n", toml_string(&name), toml_string(&wanted.host), wanted.port);
        if wanted.tls != ServerTls::Disable {
            added += &format!("tls = \"{}\"\n", wanted.tls);
        }
        if let Some(ca) = &wanted.ca {
            added += &format!("ca = {}\n", toml_string(&ca.display().to_string()));
        }
        (name, added)
    }

    /// Appends to the file, as one atomic change.
    pub(super) fn extend(&self, added: &str) -> Result<(), Error> {
        self.replace(&format!("{}\n# Added by `stillpoint migrate attach`.\n{added}", self.text.trim_end_matches('\n')))
    }

    /// Undoes [`File::extend`].
    pub(super) fn restore(&self) -> Result<(), Error> {
        self.replace(&self.text)
    }

    fn replace(&self, text: &str) -> Result<(), Error> {
        // The file's reader may be another user.
        let replaced =
            Directory::of_file(&self.path).and_then(|(directory, name)| directory.replace(name, text.as_bytes()));
        replaced.map(drop).map_err(|error| config_error(&self.path, error))
    }
}

/// Formats a basic string of TOML, which has the same syntax as in JSON.
fn toml_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const PLAIN: &str = "# ours\nlisten = [\"127.0.0.1:1\"]\ncontrol = \"/c\"\nroutes = \"/r\"\n[servers.old]\nhost = \"h\"\n\
                         port = 7\n[tenants.shop]\nserver = \"old\"\n";

    fn file(dir: &Path, text: &str) -> File {
        let path = dir.join("proxy.toml");
        fs::write(&path, text).unwrap();
        File::read(&path).unwrap()
    }

    fn server(database: &str) -> Server {
        Server::parse("source", "host=h port=7", Some(database)).unwrap()
    }

    #[test]
    fn what_is_served_already_is_not_added() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(file(dir.path(), PLAIN).missing(&server("shop"), &["shop".into()]).unwrap(), "");
        let any = format!("{PLAIN}[tenants.\"*\"]\nserver = \"old\"\n");
        assert_eq!(file(dir.path(), &any).missing(&server("shop"), &["shop".into(), "x".into()]).unwrap(), "");
    }

    #[test]
    fn what_lacks_is_added_under_the_name_that_the_file_has_and_can_be_taken_back() {
        let dir = tempfile::tempdir().unwrap();
        let file = file(dir.path(), PLAIN);
        let added = file.missing(&server("a\"b"), &["shop".into(), "postgres".into()]).unwrap();
        assert_eq!(added, "[tenants.\"a\\\"b\"]\nserver = \"old\"\n[tenants.\"*\"]\nserver = \"old\"\n");
        file.extend(&added).unwrap();
        let path = dir.path().join("proxy.toml");
        let extended = File::read(&path).unwrap();
        assert!(extended.text.starts_with("# ours\n") && extended.config.tenants.len() == 3);
        file.restore().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), PLAIN);
    }

    /// The proxy's own user may own its configuration, but must not make root write to a place of that user's choice.
    #[test]
    fn a_file_that_another_user_can_lead_elsewhere_is_not_changed() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let file = file(dir.path(), PLAIN);
        let path = dir.path().join("proxy.toml");
        fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        let outside = dir.path().join("outside");
        fs::write(&outside, "stays").unwrap();
        for planted in ["proxy.toml.new".to_owned(), format!(".proxy.toml.{}", std::process::id())] {
            symlink(&outside, dir.path().join(planted)).unwrap();
        }
        file.extend("# more\n").unwrap();
        assert_eq!(
            (fs::read(&outside).unwrap(), fs::metadata(&path).unwrap().mode() & 0o777),
            (b"stays".into(), 0o640)
        );
        fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        for refused in [File::read(&path).unwrap_err(), file.restore().unwrap_err()] {
            assert!(refused.to_string().contains("others can write"), "{refused}");
        }
    }

    #[test]
    fn a_server_that_the_file_does_not_know_is_described() {
        let dir = tempfile::tempdir().unwrap();
        let other = Server::parse("source", "host=db sslmode=require dbname=x", None).unwrap();
        let added = file(dir.path(), PLAIN).missing(&other, &[]).unwrap();
        assert!(added.starts_with("[servers.\"db:5432\"]\nhost = \"db\"\nport = 5432\ntls = \"require\"\n"), "{added}");
    }
}

//! Checks of files that hold secrets: their permissions and their contents.

use crate::verifiers;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use stillpoint_migrate_control::Config;

/// Mode bits by which other users may read or change a file, or its group may change it. A group that may only read it
/// is the operator's choice.
const UNSAFE_MODE: u32 = 0o027;

/// Problems of the files of secrets that a configuration names, one line each.
pub(crate) fn warnings(config: &Config) -> Vec<String> {
    let mut warnings = Vec::new();
    if let Some(tls) = &config.tls {
        warnings.extend(unsafe_mode("the TLS key", &tls.key));
    }
    for (name, tenant) in &config.tenants {
        let Some(path) = &tenant.verifiers else { continue };
        match verifiers::read(path) {
            Ok(text) => {
                warnings.extend(unsafe_mode("the file of verifiers", path));
                let faults = verifiers::faults(&text).into_iter();
                warnings.extend(faults.map(|fault| format!("{}: {fault}", path.display())));
            }
            Err(error) => {
                let path = path.display();
                warnings.push(format!("clients of tenant `{name}` cannot log in: cannot read {path}: {error}"));
            }
        }
    }
    warnings
}

fn unsafe_mode(what: &str, path: &Path) -> Option<String> {
    let mode = path.metadata().ok()?.permissions().mode() & 0o7777;
    let unsafe_mode = mode & UNSAFE_MODE != 0;
    let path = path.display();
    unsafe_mode.then(|| format!("{what} {path} has mode {mode:04o}, others may read or change it: chmod 0600 {path}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn files_that_others_may_read_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| dir.path().join(name);
        let text = format!(
            "listen = ['/x/s']\ncontrol = '/x/c'\nroutes = '/x/r'\ntls = {{ certificate = '/x/crt', key = {:?} }}\n\
             [servers.a]\nhost = 'h'\n[tenants.shop]\nserver = 'a'\nverifiers = {:?}\n",
            file("key"),
            file("verifiers")
        );
        let config = Config::parse(&text).unwrap();
        let found = warnings(&config);
        assert!(found.len() == 1 && found[0].contains("cannot read"), "{found:?}");
        for name in ["key", "verifiers"] {
            fs::write(file(name), "# none\n").unwrap();
        }
        for (mode, count) in [(0o600, 0), (0o400, 0), (0o640, 0), (0o644, 2), (0o660, 2), (0o604, 2), (0o602, 2)] {
            for name in ["key", "verifiers"] {
                fs::set_permissions(file(name), fs::Permissions::from_mode(mode)).unwrap();
            }
            let found = warnings(&config);
            assert_eq!(found.len(), count, "{mode:o}: {found:?}");
            assert!(found.iter().all(|line| line.contains(&format!("{mode:04o}"))), "{found:?}");
        }
        fs::set_permissions(file("verifiers"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(file("verifiers"), "alice md5x\n").unwrap();
        assert!(warnings(&config).iter().any(|line| line.contains("line 1 is not a role")));
    }
}

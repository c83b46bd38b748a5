//! Names of services, as in systemd.unit(5).

use crate::Error;
use std::fmt;

const SUFFIX: &str = ".service";
/// `UNIT_NAME_MAX` of systemd, bytes.
const LENGTH_MAX: usize = 255;
const QUOTED_MAX: usize = 64;

/// Suffixes of units that are not services.
const OTHER_SUFFIXES: [&str; 10] =
    ["automount", "device", "mount", "path", "scope", "slice", "socket", "swap", "target", "timer"];

/// Controllers of control groups: the kernel's files begin with one of these and a dot, so systemd avoids such names for groups.
const CONTROLLERS: [&str; 8] = ["blkio", "cpu", "cpuacct", "cpuset", "devices", "io", "memory", "pids"];

/// Complete name of a service, for instance `redis-server.service` or `postgresql@15-main.service`; as a path it stays in its directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ServiceName(String);

impl ServiceName {
    /// Parses a name as an operator writes it: `.service` may be left out.
    ///
    /// # Errors
    /// [`Error::ServiceName`] for a text that systemd would refuse, for `..`, and for units that are not services.
    pub fn parse(text: &str) -> Result<ServiceName, Error> {
        let suffix = text.rsplit_once('.').map(|(_, suffix)| suffix);
        match suffix {
            Some("service") => ServiceName::complete(text),
            Some(other) if OTHER_SUFFIXES.contains(&other) => Err(bad(text, "that unit is not a service")),
            _ => ServiceName::complete(&format!("{text}{SUFFIX}")).map_err(|error| match error {
                Error::ServiceName { why, .. } => bad(text, why),
                other => other,
            }),
        }
    }

    /// Parses a name that ends in `.service`.
    ///
    /// # Errors
    /// [`Error::ServiceName`] as for [`ServiceName::parse`].
    pub fn complete(text: &str) -> Result<ServiceName, Error> {
        let is_valid = |c: char| c.is_ascii_alphanumeric() || ":-_.\\@".contains(c);
        let stem = text.strip_suffix(SUFFIX).ok_or_else(|| bad(text, "it does not end in .service"))?;
        let why = if stem.is_empty() {
            "it is empty"
        } else if text.len() > LENGTH_MAX {
            "it is longer than 255 bytes"
        } else if !stem.chars().all(is_valid) {
            "only letters, digits and :-_.\\@ may be in it"
        } else if stem.starts_with(['.', '@']) || text.contains("..") {
            "it begins with a dot or @, or holds two dots"
        } else {
            return Ok(ServiceName(text.to_owned()));
        };
        Err(bad(text, why))
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn stem(&self) -> &str {
        self.0.strip_suffix(SUFFIX).unwrap_or(&self.0)
    }

    /// Template of an instance: `postgresql@.service` for `postgresql@15-main.service`; `None` for a service that is not an instance.
    pub fn template(&self) -> Option<ServiceName> {
        let (prefix, instance) = self.stem().split_once('@')?;
        (!instance.is_empty()).then(|| ServiceName(format!("{prefix}@{SUFFIX}")))
    }

    /// Returns true for a template such as `postgresql@.service`: only its instances run.
    pub fn is_template(&self) -> bool {
        self.stem().split_once('@').is_some_and(|(_, instance)| instance.is_empty())
    }

    /// Path of the control group that the system's manager makes, unless the unit has a `Slice=`.
    pub(super) fn default_group(&self) -> String {
        let folder = self.folder();
        match self.stem().split_once('@') {
            Some((prefix, _)) => format!("/system.slice/system-{}.slice/{folder}", escaped(prefix)),
            None => format!("/system.slice/{folder}"),
        }
    }

    /// Name of the service's folder among the control groups.
    fn folder(&self) -> String {
        let is_file = |word: &str| self.0.strip_prefix(word).is_some_and(|rest| rest.starts_with('.'));
        let reserved = self.0.starts_with('_') || is_file("cgroup") || CONTROLLERS.iter().any(|word| is_file(word));
        format!("{}{}", if reserved { "_" } else { "" }, self.0)
    }

    /// Returns the service of a folder among the control groups.
    pub(super) fn of_folder(folder: &str) -> Option<ServiceName> {
        let name = ServiceName::complete(folder.strip_prefix('_').unwrap_or(folder)).ok()?;
        (!name.is_template() && name.folder() == folder).then_some(name)
    }
}

impl fmt::Display for ServiceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn bad(text: &str, why: &'static str) -> Error {
    let name = match text.char_indices().nth(QUOTED_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    };
    Error::ServiceName { name, why }
}

/// Escapes a dash, which separates a slice from its parent in the slice's name, and the escape character itself.
fn escaped(prefix: &str) -> String {
    prefix.replace('\\', "\\x5c").replace('-', "\\x2d")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> ServiceName {
        ServiceName::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn names_are_completed_with_the_suffix() {
        for (text, complete) in [
            ("redis-server", "redis-server.service"),
            ("redis-server.service", "redis-server.service"),
            ("php8.2-fpm", "php8.2-fpm.service"),
            ("postgresql@15-main", "postgresql@15-main.service"),
            ("a:b_c\\x2d", "a:b_c\\x2d.service"),
        ] {
            assert_eq!(name(text).as_str(), complete);
        }
        let longest = "x".repeat(LENGTH_MAX - SUFFIX.len());
        assert_eq!(name(&longest).as_str().len(), LENGTH_MAX);
    }

    #[test]
    fn what_is_no_name_of_a_service_is_refused_in_one_line() {
        let long = "x".repeat(300);
        let bad =
            ["", ".service", "..", "../x", "a/b", "/x", "a..b", ".hidden", "@x", "a b", "a\nb", "*", "a\0", "é", &long];
        for text in bad {
            let error = ServiceName::parse(text).expect_err(text).to_string();
            assert!(!error.contains('\n') && error.len() < 200, "{error}");
        }
        for text in ["x.slice", "user.slice", "a.scope", "b.socket", "c.timer"] {
            let error = ServiceName::parse(text).expect_err(text).to_string();
            assert!(error.contains(text) && error.contains("not a service"), "{error}");
        }
        assert!(ServiceName::complete("redis-server").is_err());
    }

    #[test]
    fn instances_know_their_template() {
        assert_eq!(name("postgresql@15-main").template(), Some(name("postgresql@")));
        assert_eq!(name("postgresql").template(), None);
        assert_eq!(name("postgresql@").template(), None);
        assert!(name("postgresql@").is_template() && !name("postgresql@15-main").is_template());
    }

    #[test]
    fn groups_lie_where_systemd_puts_them() {
        for (text, group) in [
            ("redis-server", "/system.slice/redis-server.service"),
            ("postgresql@15-main", "/system.slice/system-postgresql.slice/postgresql@15-main.service"),
            ("foo-bar@1", "/system.slice/system-foo\\x2dbar.slice/foo-bar@1.service"),
            ("a\\x2d@b@c", "/system.slice/system-a\\x5cx2d.slice/a\\x2d@b@c.service"),
            ("memory", "/system.slice/_memory.service"),
            ("_x", "/system.slice/__x.service"),
        ] {
            assert_eq!(name(text).default_group(), group);
            let folder = group.rsplit('/').next().unwrap_or_default();
            assert_eq!(ServiceName::of_folder(folder), Some(name(text)));
        }
        for folder in ["memory.service", "_redis.service", "postgresql@.service", "x.slice", "..", ""] {
            assert_eq!(ServiceName::of_folder(folder), None, "{folder}");
        }
    }
}

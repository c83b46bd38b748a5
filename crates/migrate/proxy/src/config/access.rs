//! Who may connect from where: the servers see the proxy's address, so the proxy has to look at the clients'.

use serde::Deserialize;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// What happens to who fits.
    #[serde(default)]
    pub action: Action,
    /// Names of databases; none means all.
    #[serde(default)]
    pub databases: Vec<String>,
    /// Names of users; none means all.
    #[serde(default)]
    pub users: Vec<String>,
    /// Networks (`10.0.0.0/8`) and addresses, `local` for sockets; none means everywhere.
    #[serde(default)]
    pub from: Vec<Network>,
    /// Whether the rule is about encrypted connections only.
    #[serde(default)]
    pub tls: TlsNeed,
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// The client may connect; the server still asks it for its password.
    #[default]
    Allow,
    /// It may not.
    Reject,
}

/// Which connections a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TlsNeed {
    /// All.
    #[default]
    Any,
    /// Those with TLS, and sockets of this machine.
    Required,
}

/// Where a connection comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Origin {
    /// A socket of this machine.
    Local,
    /// An address.
    Address(IpAddr),
}

/// A network of this length is one host's or one customer's, with all of its addresses.
const IPV6_HOST_BITS: u32 = 64;

impl Origin {
    /// The same for all addresses that one host can have.
    pub(crate) fn host(self) -> Origin {
        match self {
            Origin::Local => Origin::Local,
            Origin::Address(address) => Origin::Address(match address.to_canonical() {
                IpAddr::V4(address) => IpAddr::V4(address),
                IpAddr::V6(address) => {
                    let ignored = u128::BITS - IPV6_HOST_BITS;
                    IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> ignored << ignored))
                }
            }),
        }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Local => f.write_str("local"),
            Origin::Address(address) => address.fmt(f),
        }
    }
}

/// A set of origins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub enum Network {
    /// Sockets of this machine.
    Local,
    /// Addresses that agree in so many bits.
    Bits(IpAddr, u8),
}

impl TryFrom<String> for Network {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text == "local" {
            return Ok(Network::Local);
        }
        let wrong = || format!("{text:?} is no network: write 10.0.0.0/8, an address, or local");
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse::<u8>().map_err(|_| wrong())?)),
            None => (text.as_str(), None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(most);
        if bits > most { Err(wrong()) } else { Ok(Network::Bits(address, bits)) }
    }
}

impl Network {
    fn contains(self, origin: Origin) -> bool {
        match (self, origin) {
            (Network::Local, Origin::Local) => true,
            (Network::Bits(network, bits), Origin::Address(address)) => match (network, address.to_canonical()) {
                (IpAddr::V4(a), IpAddr::V4(b)) => agree(a.to_bits().into(), b.to_bits().into(), 32, bits),
                (IpAddr::V6(a), IpAddr::V6(b)) => agree(a.to_bits(), b.to_bits(), 128, bits),
                _ => false,
            },
            _ => false,
        }
    }
}

fn agree(a: u128, b: u128, width: u32, bits: u8) -> bool {
    let ignored = width - u32::from(bits);
    a.checked_shr(ignored).unwrap_or(0) == b.checked_shr(ignored).unwrap_or(0)
}

impl Rule {
    fn fits(&self, database: &str, user: &str, origin: Origin, tls: bool) -> bool {
        let among = |names: &[String], name: &str| names.is_empty() || names.iter().any(|known| known == name);
        among(&self.databases, database)
            && among(&self.users, user)
            && (self.from.is_empty() || self.from.iter().any(|network| network.contains(origin)))
            && (self.tls == TlsNeed::Any || tls || origin == Origin::Local)
    }
}

/// Whether a client may connect. Without rules, those of this machine may.
pub(crate) fn allows(rules: &[Rule], database: &str, user: &str, origin: Origin, tls: bool) -> bool {
    if rules.is_empty() {
        return match origin {
            Origin::Local => true,
            Origin::Address(address) => address.to_canonical().is_loopback(),
        };
    }
    let rule = rules.iter().find(|rule| rule.fits(database, user, origin, tls));
    rule.is_some_and(|rule| rule.action == Action::Allow)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Origin {
        Origin::Address(text.parse().unwrap())
    }

    fn rules(text: &str) -> Vec<Rule> {
        #[derive(Deserialize)]
        struct Rules {
            allow: Vec<Rule>,
        }
        toml::from_str::<Rules>(text).unwrap().allow
    }

    #[test]
    fn without_rules_only_this_machine_is_let_in() {
        for (origin, allowed) in [
            (Origin::Local, true),
            (address("127.0.0.1"), true),
            (address("::1"), true),
            (address("::ffff:127.0.0.1"), true),
            (address("10.0.0.1"), false),
        ] {
            assert_eq!(allows(&[], "d", "u", origin, true), allowed, "{origin:?}");
        }
    }

    #[test]
    fn the_first_rule_that_fits_decides() {
        let rules = rules(
            r#"
            [[allow]]
            action = "reject"
            users = ["postgres"]
            from = ["0.0.0.0/0", "::/0"]
            [[allow]]
            databases = ["shop"]
            from = ["10.1.0.0/16", "local"]
            tls = "required"
            "#,
        );
        for (database, user, origin, tls, allowed) in [
            ("shop", "alice", address("10.1.2.3"), true, true),
            ("shop", "alice", address("10.1.2.3"), false, false),
            ("shop", "alice", address("10.2.2.3"), true, false),
            ("shop", "postgres", address("10.1.2.3"), true, false),
            ("shop", "postgres", Origin::Local, false, true),
            ("other", "alice", Origin::Local, false, false),
        ] {
            assert_eq!(allows(&rules, database, user, origin, tls), allowed, "{database} {user} {origin:?} {tls}");
        }
    }

    #[test]
    fn networks_that_are_none_are_refused() {
        for text in ["", "10.0.0.0/33", "::/129", "example", "10.0.0.0/x"] {
            assert!(Network::try_from(text.to_owned()).is_err(), "{text:?}");
        }
    }
}

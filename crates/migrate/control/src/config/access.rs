//! Rules for clients' connections: the servers see only the proxy's address, so the proxy must check the clients'
//! addresses.

use serde::Deserialize;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Rule for connections.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    /// Result for a connection that matches.
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
    /// Encryption that the rule needs to match.
    #[serde(default)]
    pub tls: TlsRequirement,
}

/// Result of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// The client may connect; the server still asks it for its password.
    #[default]
    Allow,
    /// The client may not connect.
    Reject,
}

/// Connections that a rule is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TlsRequirement {
    /// All connections.
    #[default]
    Any,
    /// Connections with TLS, and sockets of this machine.
    Required,
}

/// Origin of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// A socket of this machine.
    Local,
    /// TCP address of the client.
    Address(IpAddr),
}

/// An IPv6 network of this length belongs to one host or one customer, with all of its addresses.
const IPV6_HOST_BITS: u32 = 64;

impl Origin {
    /// Returns the same origin for all addresses that one host can have.
    pub fn host(self) -> Origin {
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
    /// Addresses that agree in this many leading bits.
    Bits(IpAddr, u8),
}

/// Length in bits of the prefix before the IPv4 address in `::ffff:10.0.0.1`.
const MAPPED_BITS: u8 = 96;

impl TryFrom<String> for Network {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text == "local" {
            return Ok(Network::Local);
        }
        let wrong = || format!("{text:?} is not a network: write 10.0.0.0/8, an address, or local");
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse::<u8>().map_err(|_| wrong())?)),
            None => (text.as_str(), None),
        };
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let most = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(most);
        if bits > most {
            return Err(wrong());
        }
        // Clients' addresses are compared in their short form: an IPv4 address in IPv6 form would match none.
        match address.to_canonical() {
            short @ IpAddr::V4(_) if address.is_ipv6() => match bits.checked_sub(MAPPED_BITS) {
                Some(bits) => Ok(Network::Bits(short, bits)),
                None => Err(format!(
                    "{text:?} contains IPv4 and IPv6 addresses: write two networks, 0.0.0.0/0 and an IPv6 network"
                )),
            },
            address => Ok(Network::Bits(address, bits)),
        }
    }
}

impl Network {
    const EVERYWHERE: [Network; 3] = [
        Network::Local,
        Network::Bits(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
        Network::Bits(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0),
    ];

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
    /// Returns true if it matches every connection, so that no rule after it has an effect.
    pub(crate) fn fits_all(&self) -> bool {
        let everywhere = self.from.is_empty() || Network::EVERYWHERE.iter().all(|network| self.from.contains(network));
        self.databases.is_empty() && self.users.is_empty() && everywhere && self.tls == TlsRequirement::Any
    }

    fn fits(&self, database: &str, user: &str, origin: Origin, tls: bool) -> bool {
        let among = |names: &[String], name: &str| names.is_empty() || names.iter().any(|known| known == name);
        among(&self.databases, database)
            && among(&self.users, user)
            && (self.from.is_empty() || self.from.iter().any(|network| network.contains(origin)))
            && (self.tls == TlsRequirement::Any || tls || origin == Origin::Local)
    }
}

/// Problems of the rules that may surprise the operator, one line each.
pub(crate) fn warnings(rules: &[Rule]) -> Vec<String> {
    let mut warnings = Vec::new();
    let deciding = rules.iter().position(Rule::fits_all).map_or(rules.len(), |at| at + 1);
    if !rules.is_empty() && rules[..deciding].iter().all(|rule| rule.action == Action::Reject) {
        warnings.push("no client may connect: no effective rule in `[[allow]]` has action = \"allow\"".into());
    }
    if deciding < rules.len() {
        warnings.push(format!(
            "rule {deciding} in `[[allow]]` matches every connection: the {} rules after it have no effect",
            rules.len() - deciding
        ));
    }
    warnings
}

/// Returns true if a client may connect. Without rules, only clients of this machine may.
pub fn allows(rules: &[Rule], database: &str, user: &str, origin: Origin, tls: bool) -> bool {
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
    fn an_ipv4_address_is_one_however_it_is_written() {
        let rules = rules("[[allow]]\nfrom = ['::ffff:10.0.0.1', '::ffff:192.168.0.0/112', '2001:db8::/32']");
        for (text, allowed) in [
            ("10.0.0.1", true),
            ("::ffff:10.0.0.1", true),
            ("10.0.0.2", false),
            ("192.168.7.7", true),
            ("192.169.0.1", false),
            ("2001:db8::7", true),
            ("::1", false),
        ] {
            assert_eq!(allows(&rules, "d", "u", address(text), false), allowed, "{text}");
        }
        for text in ["::ffff:0.0.0.0/95", "::ffff:10.0.0.1/0", "::ffff:10.0.0.1/129"] {
            assert!(Network::try_from(text.to_owned()).is_err(), "{text}");
        }
        let all: Network = "::ffff:0.0.0.0/96".to_owned().try_into().unwrap();
        assert_eq!(all, "0.0.0.0/0".to_owned().try_into().unwrap());
    }

    #[test]
    fn addresses_of_one_host_are_alike() {
        for (one, other, alike) in [
            ("10.0.0.1", "::ffff:10.0.0.1", true),
            ("10.0.0.1", "10.0.0.2", false),
            ("2001:db8::1", "2001:db8::ffff:ffff:ffff:ffff", true),
            ("2001:db8::1", "2001:db8:0:1::1", false),
        ] {
            assert_eq!(address(one).host() == address(other).host(), alike, "{one} {other}");
        }
    }

    #[test]
    fn rules_that_let_no_client_in_or_never_decide_are_named() {
        let (reject, allow) = ("[[allow]]\naction = 'reject'\n", "[[allow]]\n");
        for (text, count) in [
            (allow.to_owned(), 0),
            (reject.to_owned(), 1),
            (format!("{reject}users = ['a']\n{reject}databases = ['d']\n"), 1),
            (format!("{reject}users = ['a']\n{allow}"), 0),
            (format!("{reject}{allow}"), 2),
            (format!("{reject}from = ['0.0.0.0/0', '::/0', 'local']\n{allow}"), 2),
            (format!("{reject}from = ['0.0.0.0/0', '::/0']\n{allow}"), 0),
            (format!("{allow}{reject}"), 1),
        ] {
            assert_eq!(warnings(&rules(&text)).len(), count, "{text}");
        }
        assert_eq!(warnings(&[]), [""; 0]);
    }

    #[test]
    fn networks_that_are_none_are_refused() {
        for text in ["", "10.0.0.0/33", "::/129", "example", "10.0.0.0/x"] {
            assert!(Network::try_from(text.to_owned()).is_err(), "{text:?}");
        }
    }
}

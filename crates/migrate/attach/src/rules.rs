//! The rules of nftables that redirect new connections to one server's port to the proxy.
//!
//! ```text
//! client of another machine --prerouting--> proxy            client of this machine --output--> proxy
//!                                           proxy and manager, recognized by user --output--> server
//! ```
//!
//! The chains stay when the rules are removed, with one rule that does nothing: a redirected connection works only while the
//! kernel translates its addresses. The kernel does so as long as a chain for it exists, and tracks connections as long as a
//! rule uses their state. Otherwise the connection is reset.

use crate::Error;
use std::net::{IpAddr, SocketAddr};
use std::process::Stdio;
use stillpoint_migrate_control::Endpoint;
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// Condition for a connection's first packet. The kernel may begin to track connections with these very rules, and would take
/// the next packet of an existing connection for a beginning.
const FIRST_PACKET: &str = "tcp flags & (fin | syn | rst | ack) == syn";

/// Connections to redirect, and their destination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Redirection {
    /// Port of the server.
    pub(super) port: u16,
    /// Addresses of the server; empty if they are this machine's, so that all its addresses are meant.
    pub(super) addresses: Vec<IpAddr>,
    /// Address at which the proxy listens.
    pub(super) to: SocketAddr,
    /// Users whose connections are not redirected.
    pub(super) exempt: Vec<u32>,
}

impl Redirection {
    /// Returns true if clients of other machines are redirected too: they cannot reach a loopback address.
    pub(super) fn reaches_other_machines(&self) -> bool {
        !self.to.ip().is_loopback()
    }

    /// The table with its chains, and the rule that keeps redirected connections working; other rules are removed.
    fn chains(port: u16) -> String {
        let table = table(port);
        let chain = |hook: &str| {
            format!(
                "add chain inet {table} {hook} {{ type nat hook {hook} priority -100; policy accept; }}\n\
                 flush chain inet {table} {hook}\n"
            )
        };
        let carrying = format!("add rule inet {table} output ct state established accept\n");
        format!("add table inet {table}\n{}{}{carrying}", chain("prerouting"), chain("output"))
    }

    /// The script for nft; all its rules become active at the same moment.
    pub(super) fn script(&self) -> String {
        let (table, port) = (table(self.port), self.port);
        let exempt: Vec<String> = self.exempt.iter().map(u32::to_string).collect();
        let mut script = Redirection::chains(port);
        script += &format!("add rule inet {table} output meta skuid {{ {} }} accept\n", exempt.join(", "));
        let hooks = if self.reaches_other_machines() { &["prerouting", "output"][..] } else { &["output"] };
        for (family, destination) in self.destinations() {
            for hook in hooks {
                let to = self.translation(family);
                let rule = format!("{destination} tcp dport {port} {FIRST_PACKET} counter {to}");
                script += &format!("add rule inet {table} {hook} {rule}\n");
            }
        }
        script
    }

    /// Conditions on the server's addresses, for each address family on which the proxy listens.
    fn destinations(&self) -> Vec<(&'static str, String)> {
        // A socket for all IPv6 addresses accepts IPv4 too.
        let both = self.to.ip().is_unspecified() && self.to.is_ipv6();
        let families = [("ip", self.to.is_ipv4() || both), ("ip6", self.to.is_ipv6())];
        let mut destinations = Vec::new();
        for (family, _) in families.into_iter().filter(|(_, listens)| *listens) {
            let of_family = |address: &&IpAddr| address.is_ipv4() == (family == "ip");
            let named: Vec<String> = self.addresses.iter().filter(of_family).map(ToString::to_string).collect();
            if self.addresses.is_empty() {
                let protocol = if family == "ip" { "ipv4" } else { "ipv6" };
                destinations.push((family, format!("meta nfproto {protocol} fib daddr type local")));
            } else if !named.is_empty() {
                destinations.push((family, format!("{family} daddr {{ {} }}", named.join(", "))));
            }
        }
        destinations
    }

    fn translation(&self, family: &str) -> String {
        let (address, port) = (self.to.ip(), self.to.port());
        match address {
            // Redirects to the address of this machine at which the connection arrives.
            _ if address.is_unspecified() || address.is_loopback() => format!("redirect to :{port}"),
            IpAddr::V4(_) => format!("dnat {family} to {address}:{port}"),
            IpAddr::V6(_) => format!("dnat {family} to [{address}]:{port}"),
        }
    }
}

/// The proxy's listening address that most clients can reach.
pub(super) fn reachable_address(listen: &[Endpoint]) -> Option<SocketAddr> {
    let addresses = listen.iter().filter_map(|at| match at {
        Endpoint::Tcp(address) => Some(*address),
        Endpoint::Unix(_) => None,
    });
    let reach = |at: &SocketAddr| (at.ip().is_unspecified(), !at.ip().is_loopback(), at.is_ipv6());
    addresses.max_by_key(reach)
}

fn table(port: u16) -> String {
    format!("stillpoint_{port}")
}

/// Number of connections redirected so far by the active rules for a port; `None` if there are none.
pub(super) async fn count_redirected(port: u16) -> Result<Option<u64>, Error> {
    match nft(&["list", "table", "inet", &table(port)], "").await {
        Ok(listing) => Ok(count(&listing)),
        Err(Error::Nft(why)) if why.contains("No such file") => Ok(None),
        Err(error) => Err(error),
    }
}

fn count(listing: &str) -> Option<u64> {
    let mut counters = listing.lines().filter_map(|line| line.split_once("counter packets ")).peekable();
    counters.peek()?;
    let number = |(_, rest): (&str, &str)| rest.split(' ').next().and_then(|number| number.parse::<u64>().ok());
    Some(counters.filter_map(number).sum())
}

/// Makes the rules active, and replaces earlier ones.
pub(super) async fn load(redirection: &Redirection) -> Result<(), Error> {
    nft(&["-f", "-"], &redirection.script()).await.map(drop)
}

/// Stops the redirection of new connections; redirected ones continue.
pub(super) async fn unload(port: u16) -> Result<(), Error> {
    nft(&["-f", "-"], &Redirection::chains(port)).await.map(drop)
}

/// Removes the chains too: connections that are still redirected hang.
pub(super) async fn remove(port: u16) -> Result<(), Error> {
    // Created first, so that the deletion finds a table.
    nft(&["-f", "-"], &format!("{}delete table inet {}\n", Redirection::chains(port), table(port))).await.map(drop)
}

async fn nft(arguments: &[&str], script: &str) -> Result<String, Error> {
    let mut command = Command::new("nft");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let mut child = command.spawn().map_err(|error| Error::Nft(format!("{error}; Debian's package is nftables")))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(script.as_bytes()).await.map_err(|error| Error::Nft(error.to_string()))?;
    }
    let output = child.wait_with_output().await.map_err(|error| Error::Nft(error.to_string()))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::Nft(said.lines().next().unwrap_or("it ended without a message").to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redirection(to: &str, addresses: &[&str]) -> Redirection {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        Redirection { port: 5432, addresses, to: to.parse().unwrap(), exempt: vec![0, 998] }
    }

    #[test]
    fn the_exempt_come_before_those_who_are_led_and_each_hook_has_its_rule() {
        let script = redirection("0.0.0.0:6432", &[]).script();
        let rules: Vec<&str> = script.lines().filter(|line| line.starts_with("add rule")).collect();
        let led =
            format!("meta nfproto ipv4 fib daddr type local tcp dport 5432 {FIRST_PACKET} counter redirect to :6432");
        assert_eq!(
            rules,
            [
                "add rule inet stillpoint_5432 output ct state established accept".to_owned(),
                "add rule inet stillpoint_5432 output meta skuid { 0, 998 } accept".to_owned(),
                format!("add rule inet stillpoint_5432 prerouting {led}"),
                format!("add rule inet stillpoint_5432 output {led}"),
            ]
        );
    }

    #[test]
    fn a_proxy_of_this_machine_alone_redirects_no_client_from_outside() {
        let redirection = redirection("127.0.0.1:6432", &[]);
        assert!(!redirection.reaches_other_machines());
        assert!(!redirection.script().contains("prerouting meta"));
    }

    #[test]
    fn families_are_kept_apart() {
        let script = redirection("[::]:6432", &["10.0.0.7", "fd00::7"]).script();
        assert!(script.contains("output ip daddr { 10.0.0.7 } tcp dport 5432"), "{script}");
        assert!(script.contains("output ip6 daddr { fd00::7 } tcp dport 5432"), "{script}");
        let script = redirection("10.0.0.9:6432", &["10.0.0.7", "fd00::7"]).script();
        assert!(script.contains("counter dnat ip to 10.0.0.9:6432") && !script.contains("ip6"), "{script}");
    }

    #[test]
    fn the_place_that_most_clients_reach_is_taken() {
        let places = |texts: &[&str]| {
            let listen: Vec<Endpoint> =
                texts.iter().map(|text| Endpoint::try_from((*text).to_owned()).unwrap()).collect();
            reachable_address(&listen).map(|at| at.to_string())
        };
        assert_eq!(places(&["127.0.0.1:1", "0.0.0.0:2", "10.0.0.1:3"]).as_deref(), Some("0.0.0.0:2"));
        assert_eq!(places(&["127.0.0.1:1", "10.0.0.1:3"]).as_deref(), Some("10.0.0.1:3"));
        assert_eq!(places(&["/run/x"]), None);
    }

    #[test]
    fn connections_are_counted_over_all_rules() {
        assert_eq!(count("tcp dport 1 counter packets 3 bytes 180 redirect\ncounter packets 4 bytes 1 x"), Some(7));
        assert_eq!(count("chain output {\n}"), None);
    }
}

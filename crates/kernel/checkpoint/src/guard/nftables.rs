//! Tables of nftables, by netlink, that drop the packets of connections whose processes do not run.
//!
//! A table with the flag `owner` (Linux 5.12) belongs to the socket that made it. `nft flush ruleset` and other
//! processes cannot remove it, and it ends when the socket is closed. A table without the flag stays when its maker
//! ends.

use crate::Error;
use crate::error::ErrorContext;
use crate::netlink::{ACK, DUMP, ERROR, REQUEST, attributes, messages, put, put_attribute, put_nested, u32_at};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, netlink, recv, send, socket_with, sockopt,
};
use std::net::{IpAddr, SocketAddr};

/// `NFNL_SUBSYS_NFTABLES`.
const NFTABLES: u16 = 10;
const NEW_TABLE: u16 = NFTABLES << 8;
const GET_TABLE: u16 = NFTABLES << 8 | 1;
const DEL_TABLE: u16 = NFTABLES << 8 | 2;
const NEW_CHAIN: u16 = NFTABLES << 8 | 3;
const NEW_RULE: u16 = NFTABLES << 8 | 6;
const GET_RULE: u16 = NFTABLES << 8 | 7;
const NEW_SET: u16 = NFTABLES << 8 | 9;
const NEW_ELEMENTS: u16 = NFTABLES << 8 | 12;
const BATCH_BEGIN: u16 = 16;
const BATCH_END: u16 = 17;
/// `NLM_F_CREATE`.
const CREATE: u16 = 0x400;
/// `NLM_F_APPEND`.
const APPEND: u16 = 0x800;
/// `NFPROTO_INET`.
const INET: u8 = 1;
/// `NFTA_TABLE_NAME`, and the table's name in chains, rules, sets and elements.
const TABLE_NAME: u16 = 1;
/// `NFTA_TABLE_FLAGS`.
const TABLE_FLAGS: u16 = 2;
/// `NFT_TABLE_F_OWNER`.
const OWNER: u32 = 2;
/// The group that is notified of changes (`NFNLGRP_NFTABLES`), as a bit.
const CHANGES: u32 = 1 << 6;
/// Priority before the rules of all other tables; connections are not tracked yet.
const PRIORITY: i32 = -300;
/// Maximum of bytes in a batch: it is one message to the kernel.
const BATCH_MAX: usize = 16 << 20;
/// Maximum of elements in a message: an attribute has 64 KiB at most.
const ELEMENTS_MAX: usize = 1000;
/// Longest part of an answer, in bytes.
const ANSWER_MAX: usize = 1 << 16;

/// Kinds of packets of guarded ports that are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DropScope {
    /// Requests for new connections: handshakes that have begun can finish.
    Syn,
    /// All packets.
    All,
    /// All packets except those that this machine sends to itself.
    Outside,
}

/// Packets that a table drops, in both directions.
#[derive(Debug, Clone)]
pub(crate) enum Filter {
    /// Packets of these local TCP ports.
    Ports(DropScope, Vec<u16>),
    /// Packets of these TCP connections: the local end, and the peer's.
    Connections(Vec<(SocketAddr, SocketAddr)>),
}

/// A socket to nftables; the tables that it owns end with it.
pub(crate) struct Nftables(OwnedFd);

impl Nftables {
    /// Opens a socket.
    ///
    /// # Errors
    /// The kernel has no nftables.
    pub(crate) fn open() -> Result<Self, Error> {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::NETFILTER))
            .with_action("open nftables")?;
        // without the right to do so a batch must be shorter
        let _ = sockopt::set_socket_send_buffer_size_force(&socket, BATCH_MAX);
        Ok(Nftables(socket))
    }

    /// Opens a socket that is notified of each change of the rules.
    ///
    /// # Errors
    /// The kernel has no nftables.
    pub(crate) fn listen() -> Result<Self, Error> {
        let nftables = Nftables::open()?;
        bind(&nftables.0, &SocketAddrNetlink::new(0, CHANGES)).with_action("listen to nftables")?;
        Ok(nftables)
    }

    /// Discards the pending notifications.
    pub(crate) fn drain(&self) {
        let mut buffer = vec![0; ANSWER_MAX];
        // ENOBUFS means that some were lost: it counts like one
        while !matches!(recv(&self.0, buffer.as_mut_slice(), RecvFlags::DONTWAIT), Err(Errno::AGAIN)) {}
    }

    /// Returns the socket, to wait for notifications.
    pub(crate) fn socket(&self) -> &OwnedFd {
        &self.0
    }

    /// Replaces the table of that name, or makes it, in one step: at no moment is there no table.
    ///
    /// # Errors
    /// Another process owns a table of that name, or the kernel refuses.
    pub(crate) fn replace(&self, name: &str, is_owned: bool, filter: &Filter) -> Result<(), Error> {
        let mut batch = Batch::begin();
        batch.table(name, is_owned);
        batch.remove(name);
        batch.table(name, is_owned);
        let (sets, rules) = (Set::all(filter), Rule::all(filter));
        for set in sets.iter().filter(|set| !set.keys.is_empty()) {
            batch.set(name, set);
        }
        for (chain, hook) in [("input", LOCAL_IN), ("output", LOCAL_OUT)] {
            batch.chain(name, chain, hook);
            for rule in rules.iter().filter(|rule| rule.chain == hook) {
                batch.rule(name, chain, rule);
            }
        }
        self.commit(batch, "raise the guard")
    }

    /// Removes these tables, in one step; it is no error if some do not exist.
    ///
    /// # Errors
    /// Another process owns one of them.
    pub(crate) fn remove(&self, names: &[(&str, bool)]) -> Result<(), Error> {
        let mut batch = Batch::begin();
        for (name, is_owned) in names {
            // one that does not exist is made first, so there is no gap in which another process could make it
            batch.table(name, *is_owned);
            batch.remove(name);
        }
        self.commit(batch, "lower the guard")
    }

    /// Removes one table; returns false if it did not exist.
    ///
    /// # Errors
    /// Another process owns it.
    pub(crate) fn remove_if_exists(&self, name: &str) -> Result<bool, Error> {
        let mut batch = Batch::begin();
        batch.remove(name);
        match self.commit(batch, "remove a table of nftables") {
            Ok(()) => Ok(true),
            // another process was faster
            Err(Error::System { source, .. }) if source.raw_os_error() == Some(Errno::NOENT.raw_os_error()) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn commit(&self, batch: Batch, action: &'static str) -> Result<(), Error> {
        send(&self.0, &batch.end(), SendFlags::empty()).with_action(action)?;
        let (mut first, mut buffer) = (None, vec![0; ANSWER_MAX]);
        // the kernel has answered when the call returns; an unread answer would be taken for that to the next change
        let ended = loop {
            match recv(&self.0, buffer.as_mut_slice(), RecvFlags::DONTWAIT) {
                Ok((n, _)) => {
                    let answers = messages(&buffer[..n]).filter(|(kind, _)| *kind == ERROR);
                    for errno in answers.filter_map(|(_, payload)| u32_at(payload, 0)) {
                        first = first.filter(|first| *first != 0).or(Some(errno));
                    }
                }
                Err(error) => break error,
            }
        };
        match first {
            Some(0) => Ok(()),
            Some(errno) => {
                Err(std::io::Error::from_raw_os_error(errno.wrapping_neg().cast_signed())).with_action(action)
            }
            None => Err(ended).with_action(action),
        }
    }

    /// Returns the names of the tables of the family `inet`.
    ///
    /// # Errors
    /// The kernel does not list them.
    pub(crate) fn tables(&self) -> Result<Vec<String>, Error> {
        self.names(GET_TABLE)
    }

    /// Returns true if a table exists and has rules.
    ///
    /// # Errors
    /// The kernel does not list them.
    pub(crate) fn is_active(&self, name: &str) -> Result<bool, Error> {
        Ok(self.names(GET_RULE)?.iter().any(|table| table == name))
    }

    /// Returns the tables of all objects of one kind.
    fn names(&self, kind: u16) -> Result<Vec<String>, Error> {
        const ACTION: &str = "query nftables";
        let mut request = Vec::new();
        put(&mut request, kind, REQUEST | DUMP, &nfgenmsg(INET, 0));
        send(&self.0, &request, SendFlags::empty()).with_action(ACTION)?;
        let (mut names, mut buffer) = (Vec::new(), vec![0; ANSWER_MAX]);
        loop {
            let n = recv(&self.0, buffer.as_mut_slice(), RecvFlags::empty()).with_action(ACTION)?.0;
            for (kind, payload) in messages(&buffer[..n]) {
                match kind {
                    crate::netlink::DONE => return Ok(names),
                    ERROR => {
                        let errno = u32_at(payload, 0).unwrap_or_default().wrapping_neg().cast_signed();
                        if errno == Errno::INVAL.raw_os_error() {
                            // a kernel without nftables has no tables
                            return Ok(names);
                        }
                        return Err(std::io::Error::from_raw_os_error(errno)).with_action(ACTION);
                    }
                    _ => {}
                }
                let mut found =
                    attributes(payload.get(4..).unwrap_or_default()).filter(|(kind, _)| *kind == TABLE_NAME);
                if let (Some(&INET), Some((_, name))) = (payload.first(), found.next()) {
                    names.push(String::from_utf8_lossy(name).trim_end_matches('\0').to_owned());
                }
            }
            if n == 0 {
                return Err(Errno::CONNRESET).with_action(ACTION);
            }
        }
    }
}

/// `struct nfgenmsg`.
fn nfgenmsg(family: u8, resource: u16) -> Vec<u8> {
    [&[family, 0][..], &resource.to_be_bytes()].concat()
}

/// Changes that become active together, or not at all.
struct Batch(Vec<u8>);

impl Batch {
    fn begin() -> Self {
        let mut bytes = Vec::new();
        put(&mut bytes, BATCH_BEGIN, REQUEST, &nfgenmsg(0, NFTABLES));
        Batch(bytes)
    }

    fn end(mut self) -> Vec<u8> {
        put(&mut self.0, BATCH_END, REQUEST, &nfgenmsg(0, NFTABLES));
        self.0
    }

    fn change(&mut self, kind: u16, flags: u16, table: &str, more: &[u8]) {
        let mut payload = nfgenmsg(INET, 0);
        put_text(&mut payload, TABLE_NAME, table);
        payload.extend_from_slice(more);
        put(&mut self.0, kind, REQUEST | ACK | flags, &payload);
    }

    fn table(&mut self, name: &str, is_owned: bool) {
        let mut more = Vec::new();
        put_number(&mut more, TABLE_FLAGS, if is_owned { OWNER } else { 0 });
        self.change(NEW_TABLE, CREATE, name, &more);
    }

    fn remove(&mut self, name: &str) {
        self.change(DEL_TABLE, 0, name, &[]);
    }

    fn chain(&mut self, table: &str, name: &str, hook: u32) {
        let mut more = Vec::new();
        // NFTA_CHAIN_NAME, and NFTA_CHAIN_HOOK with its number and priority
        put_text(&mut more, 3, name);
        put_nested(&mut more, 4, |hooked| {
            put_number(hooked, 1, hook);
            put_number(hooked, 2, PRIORITY.cast_unsigned());
        });
        // NFTA_CHAIN_POLICY: NF_ACCEPT; NFTA_CHAIN_TYPE
        put_number(&mut more, 5, ACCEPT);
        put_text(&mut more, 7, "filter");
        self.change(NEW_CHAIN, CREATE, table, &more);
    }

    fn set(&mut self, table: &str, set: &Set) {
        let mut more = Vec::new();
        // NFTA_SET_NAME, FLAGS, KEY_TYPE, KEY_LEN and ID
        put_text(&mut more, 2, set.name);
        put_number(&mut more, 3, 0);
        put_number(&mut more, 4, set.kind);
        put_number(&mut more, 5, set.keys.first().map_or(0, |key| key.len() as u32));
        put_number(&mut more, 10, set.id);
        self.change(NEW_SET, CREATE, table, &more);
        for keys in set.keys.chunks(ELEMENTS_MAX) {
            let mut more = Vec::new();
            // NFTA_SET_ELEM_LIST_SET and SET_ELEMENTS: of each its key, of that its value
            put_text(&mut more, 2, set.name);
            put_nested(&mut more, 3, |elements| {
                for key in keys {
                    put_nested(elements, 1, |element| put_nested(element, 1, |value| put_attribute(value, 1, key)));
                }
            });
            put_number(&mut more, 4, set.id);
            self.change(NEW_ELEMENTS, CREATE, table, &more);
        }
    }

    fn rule(&mut self, table: &str, chain: &str, rule: &Rule) {
        let mut more = Vec::new();
        // NFTA_RULE_CHAIN and RULE_EXPRESSIONS
        put_text(&mut more, 2, chain);
        put_nested(&mut more, 4, |list| list.extend_from_slice(&rule.expressions));
        self.change(NEW_RULE, CREATE | APPEND, table, &more);
    }
}

fn put_text(into: &mut Vec<u8>, kind: u16, text: &str) {
    put_attribute(into, kind, format!("{text}\0").as_bytes());
}

fn put_number(into: &mut Vec<u8>, kind: u16, number: u32) {
    put_attribute(into, kind, &number.to_be_bytes());
}

/// `NF_INET_LOCAL_IN`.
const LOCAL_IN: u32 = 1;
/// `NF_INET_LOCAL_OUT`.
const LOCAL_OUT: u32 = 3;
/// `NF_DROP`.
const DROP: u32 = 0;
/// `NF_ACCEPT`.
const ACCEPT: u32 = 1;
/// `NFT_REG_VERDICT`.
const VERDICT: u32 = 0;
/// `NFT_REG32_00`: the first register of four bytes.
const REGISTER: u32 = 8;
/// `NFT_META_IIF`.
const IN_DEVICE: u32 = 4;
/// `NFT_META_OIF`.
const OUT_DEVICE: u32 = 5;
/// `NFT_META_NFPROTO`.
const FAMILY: u32 = 15;
/// `NFT_META_L4PROTO`.
const PROTOCOL: u32 = 16;
/// `NFT_PAYLOAD_NETWORK_HEADER`.
const NETWORK: u32 = 1;
/// `NFT_PAYLOAD_TRANSPORT_HEADER`.
const TRANSPORT: u32 = 2;
/// The interface `lo`, in each network namespace.
const LOOPBACK: u32 = 1;
const TCP: u8 = 6;
/// `NFPROTO_IPV4`.
const V4: u8 = 2;
/// `NFPROTO_IPV6`.
const V6: u8 = 10;
/// nft's number for keys of type `ipv4_addr`; with these numbers nft can print the sets.
const TYPE_V4: u32 = 7;
/// nft's number for keys of type `ipv6_addr`.
const TYPE_V6: u32 = 8;
/// nft's number for keys of type `inet_service`.
const TYPE_PORT: u32 = 13;

/// Keys that a rule looks up.
struct Set {
    name: &'static str,
    id: u32,
    kind: u32,
    keys: Vec<Vec<u8>>,
}

impl Set {
    const PORTS: (&'static str, u32) = ("ports", 1);
    const V4: (&'static str, u32) = ("connections4", 2);
    const V6: (&'static str, u32) = ("connections6", 3);

    fn all(filter: &Filter) -> Vec<Set> {
        match filter {
            Filter::Ports(_, ports) => {
                let keys = ports.iter().map(|port| port.to_be_bytes().to_vec()).collect();
                vec![Set { name: Set::PORTS.0, id: Set::PORTS.1, kind: TYPE_PORT, keys }]
            }
            Filter::Connections(connections) => {
                let (v4, v6): (Vec<_>, Vec<_>) = connections.iter().partition(|(local, _)| local.is_ipv4());
                let of = |(name, id), address, ends: Vec<&(SocketAddr, SocketAddr)>| Set {
                    name,
                    id,
                    kind: [address, TYPE_PORT, address, TYPE_PORT].iter().fold(0, |kind, part| kind << 6 | part),
                    keys: ends
                        .into_iter()
                        .map(|(local, peer)| [encode_endpoint(*local), encode_endpoint(*peer)].concat())
                        .collect(),
                };
                vec![of(Set::V4, TYPE_V4, v4), of(Set::V6, TYPE_V6, v6)]
            }
        }
    }
}

/// Encodes address and port, each padded to whole registers.
fn encode_endpoint(end: SocketAddr) -> Vec<u8> {
    let address = match end.ip() {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    [&address[..], &end.port().to_be_bytes(), &[0; 2]].concat()
}

/// Expressions of one rule, in the order in which the kernel evaluates them.
struct Rule {
    chain: u32,
    expressions: Vec<u8>,
}

impl Rule {
    fn all(filter: &Filter) -> Vec<Rule> {
        match filter {
            Filter::Ports(_, ports) if ports.is_empty() => Vec::new(),
            Filter::Ports(scope, _) => {
                [LOCAL_IN, LOCAL_OUT].into_iter().flat_map(|chain| Rule::for_ports(chain, *scope)).collect()
            }
            Filter::Connections(ends) => {
                let has = |v4: bool| ends.iter().any(|(local, _)| local.is_ipv4() == v4);
                let families = [(V4, Set::V4), (V6, Set::V6)].into_iter().filter(|(family, _)| has(*family == V4));
                let both = |(family, set)| [LOCAL_IN, LOCAL_OUT].map(|chain| Rule::for_connections(chain, family, set));
                families.flat_map(both).collect()
            }
        }
    }

    fn for_ports(chain: u32, scope: DropScope) -> Vec<Rule> {
        // offsets of the source and destination port: ours is the one or the other
        let (device, port) = if chain == LOCAL_IN { (IN_DEVICE, 2) } else { (OUT_DEVICE, 0) };
        let guarded = || Rule::new(chain).meta(PROTOCOL).equals(&[TCP]).load(TRANSPORT, port, 2, 0).lookup(Set::PORTS);
        match scope {
            DropScope::Syn if chain == LOCAL_OUT => Vec::new(),
            // of the flags SYN and ACK, only SYN is set
            DropScope::Syn => vec![guarded().load(TRANSPORT, 13, 1, 0).mask(0x12).equals(&[0x02]).verdict(DROP)],
            DropScope::All => vec![guarded().verdict(DROP)],
            DropScope::Outside => vec![
                Rule::new(chain).meta(device).equals(&LOOPBACK.to_ne_bytes()).verdict(ACCEPT),
                guarded().verdict(DROP),
            ],
        }
    }

    fn for_connections(chain: u32, family: u8, set: (&str, u32)) -> Rule {
        let (source, destination, length) = if family == V4 { (12, 16, 4) } else { (8, 24, 16) };
        let [(local, local_port), (peer, peer_port)] = match chain {
            LOCAL_IN => [(destination, 2), (source, 0)],
            _ => [(source, 0), (destination, 2)],
        };
        let port = length / 4;
        Rule::new(chain)
            .meta(FAMILY)
            .equals(&[family])
            .meta(PROTOCOL)
            .equals(&[TCP])
            .load(NETWORK, local, length, 0)
            .load(TRANSPORT, local_port, 2, port)
            .load(NETWORK, peer, length, port + 1)
            .load(TRANSPORT, peer_port, 2, 2 * port + 1)
            .lookup(set)
            .verdict(DROP)
    }

    fn new(chain: u32) -> Self {
        Rule { chain, expressions: Vec::new() }
    }

    fn with(mut self, name: &str, data: impl FnOnce(&mut Vec<u8>)) -> Self {
        put_nested(&mut self.expressions, 1, |expression| {
            put_text(expression, 1, name);
            put_nested(expression, 2, data);
        });
        self
    }

    fn meta(self, key: u32) -> Self {
        self.with("meta", |data| {
            put_number(data, 1, REGISTER);
            put_number(data, 2, key);
        })
    }

    /// Loads bytes of a packet; `register` counts from the first one.
    fn load(self, base: u32, offset: u32, length: u32, register: u32) -> Self {
        self.with("payload", |data| {
            for (kind, number) in [(1, REGISTER + register), (2, base), (3, offset), (4, length)] {
                put_number(data, kind, number);
            }
        })
    }

    fn mask(self, mask: u8) -> Self {
        self.with("bitwise", |data| {
            for (kind, number) in [(1, REGISTER), (2, REGISTER), (3, 1)] {
                put_number(data, kind, number);
            }
            put_nested(data, 4, |value| put_attribute(value, 1, &[mask]));
            put_nested(data, 5, |value| put_attribute(value, 1, &[0]));
        })
    }

    fn equals(self, value: &[u8]) -> Self {
        self.with("cmp", |data| {
            put_number(data, 1, REGISTER);
            put_number(data, 2, 0);
            put_nested(data, 3, |data| put_attribute(data, 1, value));
        })
    }

    fn lookup(self, (set, id): (&str, u32)) -> Self {
        self.with("lookup", |data| {
            put_text(data, 1, set);
            put_number(data, 2, REGISTER);
            put_number(data, 4, id);
        })
    }

    fn verdict(self, verdict: u32) -> Self {
        self.with("immediate", |data| {
            put_number(data, 1, VERDICT);
            put_nested(data, 2, |value| put_nested(value, 2, |code| put_number(code, 1, verdict)));
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_direction_looks_for_the_local_port() {
        let drops = |scope| Rule::all(&Filter::Ports(scope, vec![6379])).len();
        assert_eq!([DropScope::Syn, DropScope::All, DropScope::Outside].map(drops), [1, 2, 4]);
        assert!(Rule::all(&Filter::Ports(DropScope::All, Vec::new())).is_empty());
        let ends = |a: &str, b: &str| (a.parse().unwrap(), b.parse().unwrap());
        let both = Filter::Connections(vec![ends("10.0.0.1:1", "10.0.0.2:2"), ends("[::1]:1", "[::2]:2")]);
        assert_eq!(Rule::all(&both).len(), 4);
        let lengths: Vec<usize> = Set::all(&both).iter().map(|set| set.keys[0].len()).collect();
        assert_eq!(lengths, [16, 40]);
    }
}

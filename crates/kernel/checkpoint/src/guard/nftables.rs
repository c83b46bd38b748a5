//! Tables of nftables, by netlink, that drop the packets of connections whose processes do not run.
//!
//! A table with the flag `owner` (Linux 5.12) belongs to the socket that made it. `nft flush ruleset` and other
//! processes cannot remove it, and it ends when the socket is closed. A table without the flag stays when its maker
//! ends.

use crate::Error;
use crate::error::ErrorContext;
use crate::netlink::{messages, put};
use netlink_packet_core::{
    ErrorBuffer, NLM_F_ACK, NLM_F_APPEND, NLM_F_CREATE, NLM_F_DUMP, NLM_F_REQUEST, NLMSG_DONE, NLMSG_ERROR,
    NetlinkBuffer, NlasIterator,
};
use netlink_packet_netfilter::nftables::{
    Bitwise, ChainAttribute, ChainMessage, Cmp, DataAttribute, ExpressionAttribute, Expressions, Hook, Immediate,
    InetHookNumber, ListAttribute, Lookup, Meta, MetaKey, NfTablesMessage, Operator, Payload, Register, RuleAttribute,
    RuleMessage, SetAttribute, SetElementAttribute, SetElementList, SetElementMessage, SetFlags, SetMessage,
    TableAttribute, TableFlags, TableMessage, Verdict, VerdictAttribute,
};
use netlink_packet_netfilter::none::ControlMessage;
use netlink_packet_netfilter::{NetfilterHeader, NetfilterMessage, NetfilterProtoFamily, NetfilterSubsystem};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, netlink, recv, send, socket_with, sockopt,
};
use std::io;
use std::net::{IpAddr, SocketAddr};

/// `NFPROTO_INET`.
const INET: u8 = 1;
/// `NFTA_TABLE_NAME`, and the table's name in rules.
const TABLE_NAME: u16 = 1;
/// Bytes of `struct nfgenmsg`, before the attributes.
const NFGENMSG_LEN: usize = 4;
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
        for (chain, hook) in [("input", InetHookNumber::LocalIn), ("output", InetHookNumber::LocalOut)] {
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
                    for errno in messages(&buffer[..n]).filter_map(|message| errno(&message)) {
                        first = first.filter(|first| *first != 0).or(Some(errno));
                    }
                }
                Err(error) => break error,
            }
        };
        match first {
            Some(0) => Ok(()),
            Some(errno) => Err(io::Error::from_raw_os_error(errno)).with_action(action),
            None => Err(ended).with_action(action),
        }
    }

    /// Returns the names of the tables of the family `inet`.
    ///
    /// # Errors
    /// The kernel does not list them.
    pub(crate) fn tables(&self) -> Result<Vec<String>, Error> {
        self.names(NfTablesMessage::GetTable(TableMessage { attributes: Vec::new() }))
    }

    /// Returns true if a table exists and has rules.
    ///
    /// # Errors
    /// The kernel does not list them.
    pub(crate) fn is_active(&self, name: &str) -> Result<bool, Error> {
        let all = NfTablesMessage::GetRule(RuleMessage { attributes: Vec::new() });
        Ok(self.names(all)?.iter().any(|table| table == name))
    }

    /// Returns the tables of all objects of one kind. Objects of others are not decoded, as they may have any attributes.
    fn names(&self, query: NfTablesMessage) -> Result<Vec<String>, Error> {
        const ACTION: &str = "query nftables";
        let mut request = Vec::new();
        put(&mut request, NLM_F_REQUEST | NLM_F_DUMP, of_inet(query));
        send(&self.0, &request, SendFlags::empty()).with_action(ACTION)?;
        let (mut names, mut buffer) = (Vec::new(), vec![0; ANSWER_MAX]);
        loop {
            let n = recv(&self.0, buffer.as_mut_slice(), RecvFlags::empty()).with_action(ACTION)?.0;
            for message in messages(&buffer[..n]) {
                match errno(&message) {
                    // a kernel without nftables has no tables
                    Some(errno) if errno == Errno::INVAL.raw_os_error() => return Ok(names),
                    Some(errno) => return Err(io::Error::from_raw_os_error(errno)).with_action(ACTION),
                    None if message.message_type() == NLMSG_DONE => return Ok(names),
                    None => {}
                }
                let payload = message.payload();
                let mut attributes = NlasIterator::new(payload.get(NFGENMSG_LEN..).unwrap_or_default()).flatten();
                if let (Some(&INET), Some(name)) =
                    (payload.first(), attributes.find(|found| found.kind() == TABLE_NAME))
                {
                    names.push(String::from_utf8_lossy(name.value()).trim_end_matches('\0').to_owned());
                }
            }
            if n == 0 {
                return Err(Errno::CONNRESET).with_action(ACTION);
            }
        }
    }
}

/// Returns the error of an `NLMSG_ERROR`, 0 for a confirmation; `None` for other messages.
fn errno(message: &NetlinkBuffer<&[u8]>) -> Option<i32> {
    let error = (message.message_type() == NLMSG_ERROR).then(|| ErrorBuffer::new_checked(message.payload()).ok())??;
    Some(error.code().map_or(0, |code| -code.get()))
}

fn of_inet(message: NfTablesMessage) -> NetfilterMessage {
    NetfilterMessage::new(NetfilterHeader::new(NetfilterProtoFamily::Inet, 0, 0), message)
}

/// Changes that become active together, or not at all.
struct Batch(Vec<u8>);

impl Batch {
    fn begin() -> Self {
        let mut batch = Batch(Vec::new());
        batch.control(ControlMessage::BatchBegin);
        batch
    }

    fn end(mut self) -> Vec<u8> {
        self.control(ControlMessage::BatchEnd);
        self.0
    }

    fn control(&mut self, message: ControlMessage) {
        let subsystem = u8::from(NetfilterSubsystem::NfTables);
        let header = NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, subsystem.into());
        put(&mut self.0, NLM_F_REQUEST, NetfilterMessage::new(header, message));
    }

    fn change(&mut self, flags: u16, message: NfTablesMessage) {
        put(&mut self.0, NLM_F_REQUEST | NLM_F_ACK | flags, of_inet(message));
    }

    fn table(&mut self, name: &str, is_owned: bool) {
        let flags = if is_owned { TableFlags::Owner } else { TableFlags::empty() };
        let attributes = vec![TableAttribute::Name(name.into()), TableAttribute::Flags(flags)];
        self.change(NLM_F_CREATE, NfTablesMessage::NewTable(TableMessage { attributes }));
    }

    fn remove(&mut self, name: &str) {
        let attributes = vec![TableAttribute::Name(name.into())];
        self.change(0, NfTablesMessage::DeleteTable(TableMessage { attributes }));
    }

    fn chain(&mut self, table: &str, name: &str, hook: InetHookNumber) {
        let attributes = vec![
            ChainAttribute::Table(table.into()),
            ChainAttribute::Name(name.into()),
            ChainAttribute::Hook(vec![Hook::Number(hook.into()), Hook::Priority(PRIORITY.cast_unsigned())]),
            ChainAttribute::Policy(ACCEPT),
            ChainAttribute::Type("filter".into()),
        ];
        self.change(NLM_F_CREATE, NfTablesMessage::NewChain(ChainMessage { attributes }));
    }

    fn set(&mut self, table: &str, set: &Set) {
        let attributes = vec![
            SetAttribute::Table(table.into()),
            SetAttribute::Name(set.name.into()),
            SetAttribute::Flags(SetFlags::empty()),
            SetAttribute::KeyType(set.kind),
            SetAttribute::KeyLen(set.keys.first().map_or(0, |key| key.len() as u32)),
            SetAttribute::Id(set.id),
        ];
        self.change(NLM_F_CREATE, NfTablesMessage::NewSet(SetMessage { attributes }));
        for keys in set.keys.chunks(ELEMENTS_MAX) {
            let element = |key: &Vec<u8>| SetElementAttribute::Key(DataAttribute::Value(key.clone()));
            let attributes = vec![
                SetElementList::Table(table.into()),
                SetElementList::Set(set.name.into()),
                SetElementList::Elements(keys.iter().map(|key| ListAttribute::Element(vec![element(key)])).collect()),
                SetElementList::SetId(set.id),
            ];
            self.change(NLM_F_CREATE, NfTablesMessage::NewSetElement(SetElementMessage { attributes }));
        }
    }

    fn rule(&mut self, table: &str, chain: &str, rule: &Rule) {
        let attributes = vec![
            RuleAttribute::Table(table.into()),
            RuleAttribute::Chain(chain.into()),
            RuleAttribute::Expressions(rule.expressions.clone()),
        ];
        self.change(NLM_F_CREATE | NLM_F_APPEND, NfTablesMessage::NewRule(RuleMessage { attributes }));
    }
}

/// `NF_DROP`.
const DROP: u32 = 0;
/// `NF_ACCEPT`.
const ACCEPT: u32 = 1;
/// `NFT_REG32_00`: the first register of four bytes.
const REGISTER: u32 = 8;
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
    chain: InetHookNumber,
    expressions: Vec<ListAttribute<ExpressionAttribute>>,
}

impl Rule {
    fn all(filter: &Filter) -> Vec<Rule> {
        const CHAINS: [InetHookNumber; 2] = [InetHookNumber::LocalIn, InetHookNumber::LocalOut];
        match filter {
            Filter::Ports(_, ports) if ports.is_empty() => Vec::new(),
            Filter::Ports(scope, _) => CHAINS.into_iter().flat_map(|chain| Rule::for_ports(chain, *scope)).collect(),
            Filter::Connections(ends) => {
                let has = |v4: bool| ends.iter().any(|(local, _)| local.is_ipv4() == v4);
                let families = [(V4, Set::V4), (V6, Set::V6)].into_iter().filter(|(family, _)| has(*family == V4));
                families
                    .flat_map(|(family, set)| CHAINS.map(|chain| Rule::for_connections(chain, family, set)))
                    .collect()
            }
        }
    }

    fn for_ports(chain: InetHookNumber, scope: DropScope) -> Vec<Rule> {
        // offsets of the source and destination port: ours is the one or the other
        let (device, port) = if chain == InetHookNumber::LocalIn { (MetaKey::Iif, 2) } else { (MetaKey::Oif, 0) };
        let guarded =
            || Rule::new(chain).meta(MetaKey::L4Proto).equals(&[TCP]).load(TRANSPORT, port, 2, 0).lookup(Set::PORTS);
        match scope {
            DropScope::Syn if chain == InetHookNumber::LocalOut => Vec::new(),
            // of the flags SYN and ACK, only SYN is set
            DropScope::Syn => vec![guarded().load(TRANSPORT, 13, 1, 0).mask(0x12).equals(&[0x02]).verdict(DROP)],
            DropScope::All => vec![guarded().verdict(DROP)],
            DropScope::Outside => vec![
                Rule::new(chain).meta(device).equals(&LOOPBACK.to_ne_bytes()).verdict(ACCEPT),
                guarded().verdict(DROP),
            ],
        }
    }

    fn for_connections(chain: InetHookNumber, family: u8, set: (&str, u32)) -> Rule {
        let (source, destination, length) = if family == V4 { (12, 16, 4) } else { (8, 24, 16) };
        let [(local, local_port), (peer, peer_port)] = match chain {
            InetHookNumber::LocalIn => [(destination, 2), (source, 0)],
            _ => [(source, 0), (destination, 2)],
        };
        let port = length / 4;
        Rule::new(chain)
            .meta(MetaKey::Nfproto)
            .equals(&[family])
            .meta(MetaKey::L4Proto)
            .equals(&[TCP])
            .load(NETWORK, local, length, 0)
            .load(TRANSPORT, local_port, 2, port)
            .load(NETWORK, peer, length, port + 1)
            .load(TRANSPORT, peer_port, 2, 2 * port + 1)
            .lookup(set)
            .verdict(DROP)
    }

    fn new(chain: InetHookNumber) -> Self {
        Rule { chain, expressions: Vec::new() }
    }

    fn with(mut self, expression: Expressions) -> Self {
        self.expressions.push(expression.into());
        self
    }

    fn meta(self, key: MetaKey) -> Self {
        self.with(Expressions::Meta(vec![Meta::DestinationRegister(REGISTER.into()), Meta::Key(key)]))
    }

    /// Loads bytes of a packet; `register` counts from the first one.
    fn load(self, base: u32, offset: u32, length: u32, register: u32) -> Self {
        self.with(Expressions::Payload(vec![
            Payload::DestinationRegister((REGISTER + register).into()),
            Payload::Base(base),
            Payload::Offset(offset),
            Payload::Len(length),
        ]))
    }

    fn mask(self, mask: u8) -> Self {
        self.with(Expressions::Bitwise(vec![
            Bitwise::SourceRegister(REGISTER.into()),
            Bitwise::DestinationRegister(REGISTER.into()),
            Bitwise::Length(1),
            Bitwise::Mask(DataAttribute::Value(vec![mask])),
            Bitwise::Xor(DataAttribute::Value(vec![0])),
        ]))
    }

    fn equals(self, value: &[u8]) -> Self {
        self.with(Expressions::Cmp(vec![
            Cmp::SourceRegister(REGISTER.into()),
            Cmp::Op(Operator::Equal),
            Cmp::Data(DataAttribute::Value(value.to_vec())),
        ]))
    }

    fn lookup(self, (set, id): (&str, u32)) -> Self {
        self.with(Expressions::Lookup(vec![
            Lookup::Set(set.into()),
            Lookup::SourceRegister(REGISTER.into()),
            Lookup::SetId(id),
        ]))
    }

    fn verdict(self, verdict: u32) -> Self {
        let verdict = vec![VerdictAttribute::Code(Verdict::Other(verdict))];
        self.with(Expressions::Immediate(vec![
            Immediate::DestinationRegister(Register::Verdict),
            Immediate::Data(DataAttribute::Verdict(verdict)),
        ]))
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

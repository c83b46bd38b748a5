//! The proxy in front of real servers.

mod capture;
mod drivers;
mod hostile_clients;
mod large_messages;
mod logins;
mod metrics;
mod page;
mod passthrough;
mod pool;
mod process_ids;
mod regress;
mod replication;
mod signals;
mod silent_connections;
mod startup;
mod support;
mod switch;
mod tls;

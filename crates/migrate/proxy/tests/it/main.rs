//! The proxy in front of real servers.
//!
//! Each module runs as a process of its own: `cargo test -p stillpoint-migrate-proxy --test it hostile::`.

mod capture;
mod drivers;
mod hostile;
mod large;
mod logins;
mod metrics;
mod pass;
mod regress;
mod replication;
mod signals;
mod silent;
mod startup;
mod support;
mod switch;
mod tls;

//! The proxy in front of real servers.

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

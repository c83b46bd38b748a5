//! Migrations between real servers, with a stand-in for the proxy or the proxy itself.

mod attach;
mod check;
mod comparison;
mod definitions;
mod faults;
mod database_contents;
mod database_names;
mod operators;
mod regress;
mod rehearsal;
mod roles;
mod run;
mod settings;
mod ddl_changes;
mod statements;
mod support;
mod targets;
mod throttle;
mod through_proxy;
mod tls;
mod copy_without_snapshot;

//! Migrations between real servers, with a stand-in for the proxy or the proxy itself.

mod attach;
mod check;
mod compared;
mod definitions;
mod faults;
mod holds;
mod names;
mod operators;
mod regress;
mod rehearsal;
mod roles;
mod run;
mod settings;
mod since;
mod statements;
mod support;
mod targets;
mod throttle;
mod through_proxy;
mod tls;
mod unheld;

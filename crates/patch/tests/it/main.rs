//! Tests of live patching: of real servers and programs through the `stillpoint` binary, and of each crate in the folder of its name.
//!
//! Each module, in a folder each of its modules, is a unit of scheduling: `xtask test` runs it as a process of its own.

#[macro_use]
mod differ;

mod builder;
mod engine;
mod format;
mod insn;
mod integrations;
mod tracee;
mod unwind;

mod apache_live;
mod apache_quiescence;
mod bad_input;
mod crash;
mod data_changes;
mod earlier_version;
mod eintr;
mod exceptions_live;
mod exec_helper;
mod from_process;
mod gdb;
mod kernel_live;
mod library_live;
mod library_sweep;
mod live;
mod mariadb_counts;
mod mariadb_live;
mod mariadb_quiescence;
mod measure;
mod memcached_live;
mod memcached_quiescence;
mod multi_process;
mod namespaces;
mod node_live;
mod policy;
mod postgres_live;
mod programs_cxx_live;
mod programs_live;
mod quiescence;
mod quiescence_crash;
mod quiescence_server;
mod redis_live;
mod redis_quiescence;
mod samba_live;
mod samba_quiescence;
mod scan;
mod servers;
mod shadow_members;
mod slapd_live;
mod slapd_quiescence;
mod storm;
mod survival;
mod systemd;
mod upgrade;
mod victims;

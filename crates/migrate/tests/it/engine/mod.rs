//! Migrations between real servers, with a stand-in for the proxy or the proxy itself.

mod attach;
mod check;
mod comparison;
mod copy_resume;
mod copy_without_snapshot;
mod database_contents;
mod database_names;
mod ddl_changes;
mod definitions;
mod faults;
mod hold;
mod managed_roles;
mod moved_slots;
mod object_kinds;
mod operators;
mod placement;
mod poolers;
mod random_definitions;
mod redefinition;
mod regress;
mod rehearsal;
mod roles;
mod run;
pub(crate) mod selection;
mod settings;
mod statements;
mod support;
mod targets;
mod throttle;
mod through_proxy;
mod tls;
mod whole_definitions;

pub(crate) use managed_roles::PROVIDER_ROLES;

//! Settings of our own sessions and of the programs that we start, all in one place.
//!
//! An ALTER DATABASE or ALTER ROLE that is meant for clients sets our sessions too: a time-out ends them; another isolation
//! level or role makes them fail or behave differently. Settings given at login take precedence. Each setting that a session
//! may have is pinned here, or known to be harmless: a test compares both with the server's own list.

/// Condition under which a setting can be sent to a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Availability {
    /// Always: every supported server accepts it from every role.
    AtLogin,
    /// The server has this major version or a newer one.
    Since(u32),
    /// Our role is a superuser, and the server has this major version or a newer one.
    AsSuperuserSince(u32),
    /// Our role may set it: it is a superuser, was granted that right (PostgreSQL 15), or the server is one that lets it.
    WithRight,
}

/// A setting, with the value that our sessions use.
struct PinnedSetting {
    name: &'static str,
    value: &'static str,
    when: Availability,
}

const fn pinned(name: &'static str, value: &'static str, when: Availability) -> PinnedSetting {
    PinnedSetting { name, value, when }
}

/// Setting of sessions on which the user's triggers, rules and foreign keys do not act.
const REPLICATION_ROLE: &str = "session_replication_role";

/// Statement that shows whether our role may set [`REPLICATION_ROLE`]: only trying does, because servers of hosting providers let
/// roles that are no superusers.
pub(super) fn trial_of_replication_role() -> String {
    format!("SET {REPLICATION_ROLE} = replica")
}

/// Settings that could end a session, make a statement fail, or change its effect.
const BEHAVIOUR_SETTINGS: [PinnedSetting; 23] = [
    pinned("statement_timeout", "0", Availability::AtLogin),
    pinned("lock_timeout", "0", Availability::AtLogin),
    pinned("idle_session_timeout", "0", Availability::AtLogin),
    pinned("idle_in_transaction_session_timeout", "0", Availability::AtLogin),
    pinned("transaction_timeout", "0", Availability::Since(17)),
    pinned("tcp_user_timeout", "0", Availability::AtLogin),
    // PostgreSQL's default: without a time-out, a sender whose reader is gone would keep its slot.
    pinned("wal_sender_timeout", "60s", Availability::AtLogin),
    pinned("exit_on_error", "off", Availability::AtLogin),
    pinned("temp_file_limit", "-1", Availability::AsSuperuserSince(0)),
    pinned("default_transaction_isolation", "read committed", Availability::AtLogin),
    // A database or a role with this default (a fenced one) must still accept what is replayed.
    pinned("default_transaction_read_only", "off", Availability::AtLogin),
    pinned("default_transaction_deferrable", "off", Availability::AtLogin),
    pinned("role", "none", Availability::AtLogin),
    pinned("row_security", "off", Availability::AtLogin),
    // Neither triggers nor event triggers of the user fire on what we define or repeat: their effects are repeated too. Newer
    // servers can prevent even those that are enabled always.
    pinned(REPLICATION_ROLE, "replica", Availability::WithRight),
    pinned("event_triggers", "off", Availability::AsSuperuserSince(17)),
    pinned("default_tablespace", "", Availability::AtLogin),
    pinned("default_table_access_method", "heap", Availability::AtLogin),
    pinned("xmloption", "content", Availability::AtLogin),
    pinned("icu_validation_level", "warning", Availability::Since(16)),
    // The time to compile would be part of the pause.
    pinned("jit", "off", Availability::AtLogin),
    pinned("zero_damaged_pages", "off", Availability::AsSuperuserSince(0)),
    pinned("ignore_checksum_failure", "off", Availability::AsSuperuserSince(0)),
];

/// Settings for the text form of values, the same on both servers. Programs of PostgreSQL set their own.
const OUTPUT_SETTINGS: [(&str, &str); 13] = [
    ("client_encoding", "UTF8"),
    ("DateStyle", "ISO"),
    ("IntervalStyle", "postgres"),
    ("TimeZone", "UTC"),
    ("extra_float_digits", "3"),
    ("bytea_output", "hex"),
    ("lc_monetary", "C"),
    ("array_nulls", "on"),
    ("standard_conforming_strings", "on"),
    ("transform_null_equals", "off"),
    ("quote_all_identifiers", "off"),
    ("xmlbinary", "base64"),
    ("search_path", "pg_catalog"),
];

/// Rights of our role on a server, as far as settings depend on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionRights {
    /// Major version of the server.
    pub major: u32,
    /// True if the role is a superuser.
    pub is_superuser: bool,
    /// True if its sessions can keep the user's triggers, rules and foreign keys from acting on them.
    pub may_replicate: bool,
}

impl SessionRights {
    /// Returns true if the role may set one of the settings for which a right is needed.
    fn may_set_own(self, name: &str) -> bool {
        let pinned = BEHAVIOUR_SETTINGS.iter().find(|pinned| pinned.name == name);
        pinned.map_or(self.is_superuser, |pinned| self.may_set(pinned))
    }

    fn may_set(self, pinned: &PinnedSetting) -> bool {
        match pinned.when {
            Availability::AtLogin => true,
            Availability::Since(first) => self.major >= first,
            Availability::AsSuperuserSince(first) => self.is_superuser && self.major >= first,
            Availability::WithRight => self.may_replicate,
        }
    }
}

/// Other settings that only superusers may set.
const OF_SUPERUSERS: [&str; 2] = ["deadlock_timeout", "lc_messages"];

/// Returns true for a setting that not every role may set.
fn needs_right(name: &str) -> bool {
    let needs =
        |pinned: &PinnedSetting| matches!(pinned.when, Availability::AsSuperuserSince(_) | Availability::WithRight);
    OF_SUPERUSERS.contains(&name) || BEHAVIOUR_SETTINGS.iter().any(|pinned| pinned.name == name && needs(pinned))
}

/// Settings for the login of one of our sessions; those in `own` take precedence over pinned ones.
pub(super) fn at_login<'s>(own: &[(&'s str, &'s str)]) -> Vec<(&'s str, &'s str)> {
    let behaviour = BEHAVIOUR_SETTINGS.iter().filter(|pinned| pinned.when == Availability::AtLogin);
    let all = OUTPUT_SETTINGS.into_iter().chain(behaviour.map(|pinned| (pinned.name, pinned.value)));
    let mut settings: Vec<(&'s str, &'s str)> = all.filter(|(name, _)| !is_among(own, name)).collect();
    settings.extend(own.iter().filter(|(name, _)| !needs_right(name)));
    settings
}

/// Statement for the settings that can be sent only when the server's version and our role there are known. It is one
/// statement, because a session that sends changes accepts only one at a time. A database whose text may be bytes in any
/// encoding (`is_bytes`) would otherwise reject its own text that is not UTF-8.
pub(super) fn after_login(rights: SessionRights, is_bytes: bool, own: &[(&str, &str)]) -> Option<String> {
    let may = |pinned: &&PinnedSetting| pinned.when != Availability::AtLogin && rights.may_set(pinned);
    let due = BEHAVIOUR_SETTINGS.iter().filter(may).filter(|pinned| !is_among(own, pinned.name));
    let own = own.iter().copied().filter(|(name, _)| needs_right(name) && rights.may_set_own(name));
    let due = due
        .map(|pinned| (pinned.name, pinned.value))
        .chain(own)
        .chain(is_bytes.then_some(("client_encoding", "SQL_ASCII")));
    let each: Vec<String> = due.map(|(name, value)| format!("set_config('{name}', '{value}', false)")).collect();
    (!each.is_empty()).then(|| format!("SELECT {}", each.join(", ")))
}

/// `PGOPTIONS` of a program that connects to a server as our role; `own` takes precedence over pinned settings, except for those
/// that the role may not set.
pub fn options(rights: SessionRights, own: &[(&str, &str)]) -> String {
    let known = BEHAVIOUR_SETTINGS.iter().filter(|pinned| rights.may_set(pinned));
    let known = known.map(|pinned| (pinned.name, pinned.value)).filter(|(name, _)| !is_among(own, name));
    let own: Vec<_> = own.iter().filter(|(name, _)| !needs_right(name) || rights.may_set_own(name)).collect();
    let option = |(name, value): (&str, &str)| format!("-c {name}={}", value.replace('\\', "\\\\").replace(' ', "\\ "));
    known.chain(own.into_iter().copied()).map(option).collect::<Vec<_>>().join(" ")
}

fn is_among(own: &[(&str, &str)], name: &str) -> bool {
    own.iter().any(|(known, _)| *known == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{Link, Purpose, Server, text};
    use std::collections::BTreeSet;
    use stillpoint_testing::postgresql::{Cluster, NEWER_MAJOR, available, newer_available};

    /// Kinds of settings for planning, logging or statistics; none of them ends or changes a session.
    const HARMLESS_KINDS: [&str; 9] = [
        "Customized Options",
        "Preset Options",
        "Query Tuning / ",
        "Reporting and Logging / ",
        "Resource Usage / Asynchronous Behavior",
        "Resource Usage / Cost-Based Vacuum Delay",
        "Resource Usage / I/O",
        "Resource Usage / Memory",
        "Statistics / ",
    ];

    /// Other settings that a session may have and that are harmless to ours.
    const HARMLESS: &[&str] = &[
        // Names of our own connections, and messages to them.
        "application_name",
        "client_min_messages",
        "lc_messages",
        "escape_string_warning",
        // Settings for features that our statements do not use.
        "default_text_search_config",
        "gin_fuzzy_search_limit",
        "lc_numeric",
        "lc_time",
        "backslash_quote",
        "lo_compat_privileges",
        "password_encryption",
        "scram_iterations",
        "createrole_self_grant",
        // Times are written with their offset from UTC.
        "timezone_abbreviations",
        // Settings of one transaction, which begins with the session's defaults.
        "transaction_deferrable",
        "transaction_isolation",
        "transaction_read_only",
        // Programs of PostgreSQL set them, and our statements create no functions.
        "check_function_bodies",
        "restrict_nonsystem_relation_kind",
        // Storage and maintenance of what is written.
        "default_toast_compression",
        "gin_pending_list_limit",
        "temp_tablespaces",
        "synchronize_seqscans",
        "vacuum_failsafe_age",
        "vacuum_freeze_min_age",
        "vacuum_freeze_table_age",
        "vacuum_multixact_failsafe_age",
        "vacuum_multixact_freeze_min_age",
        "vacuum_multixact_freeze_table_age",
        // Sessions whose commits must be on disk, or need not be, set this themselves; all others would wait for a standby of
        // the source that is gone.
        "synchronous_commit",
        "commit_delay",
        "commit_siblings",
        "wal_compression",
        "wal_init_zero",
        "wal_recycle",
        "wal_skip_threshold",
        "deadlock_timeout",
        // They detect a peer that is gone.
        "client_connection_check_interval",
        "tcp_keepalives_count",
        "tcp_keepalives_idle",
        "tcp_keepalives_interval",
        // Libraries that a server loads, and their directories; pgoutput is the server's own.
        "dynamic_library_path",
        "extension_destdir",
        "jit_provider",
        "local_preload_libraries",
        "output_plugin_libraries",
        "session_preload_libraries",
        // Settings for developers of PostgreSQL.
        "allow_in_place_tablespaces",
        "allow_system_table_mods",
        "backtrace_functions",
        "composite_type_mismatch",
        "debug_deadlocks",
        "debug_discard_caches",
        "debug_logical_replication_streaming",
        "debug_parallel_query",
        "force_parallel_mode",
        "ignore_system_indexes",
        "jit_debugging_support",
        "jit_dump_bitcode",
        "jit_expressions",
        "jit_profiling_support",
        "jit_tuple_deforming",
        "log_btree_build_stats",
        "logical_replication_mode",
        "optimize_bounded_sort",
        "post_auth_delay",
        "send_abort_for_crash",
        "send_abort_for_kill",
        "stats_fetch_consistency",
        "trace_connection_negotiation",
        "trace_lock_oidmin",
        "trace_lock_table",
        "trace_locks",
        "trace_lwlocks",
        "trace_notify",
        "trace_sort",
        "trace_syncscan",
        "trace_userlocks",
        "wal_consistency_checking",
    ];

    const SESSIONS_OWN: &str = "SELECT name, category FROM pg_settings \
         WHERE context IN ('user', 'superuser', 'backend', 'superuser-backend') ORDER BY name";

    async fn compared(cluster: &Cluster) {
        let server = Server::parse("source", &cluster.conninfo("postgres"), None).unwrap();
        let mut link = Link::connect(&server, Purpose::Statements, &[]).await.unwrap();
        let ours =
            BEHAVIOUR_SETTINGS.iter().map(|pinned| pinned.name).chain(OUTPUT_SETTINGS.iter().map(|(name, _)| *name));
        let ours: BTreeSet<&str> = ours.collect();
        let mut unknown = Vec::new();
        for row in link.query(SESSIONS_OWN).await.unwrap() {
            let (name, kind) = (text(&row, 0), text(&row, 1));
            let harmless = HARMLESS.contains(&&name[..]) || HARMLESS_KINDS.iter().any(|known| kind.starts_with(known));
            if !harmless && !ours.contains(&&name[..]) {
                unknown.push(format!("{name} ({kind})"));
            }
        }
        assert_eq!(unknown, Vec::<String>::new(), "neither pinned nor known to do no harm");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn every_setting_of_a_session_is_pinned_or_harmless() {
        if !available() {
            return;
        }
        compared(&Cluster::start(&[])).await;
        if newer_available() {
            compared(&Cluster::of_major(NEWER_MAJOR, &[])).await;
        }
    }

    fn superuser(major: u32) -> SessionRights {
        SessionRights { major, is_superuser: true, may_replicate: true }
    }

    fn plain(major: u32) -> SessionRights {
        SessionRights { major, is_superuser: false, may_replicate: false }
    }

    async fn have_what_is_pinned(cluster: &Cluster, major: u32) {
        cluster.sql("postgres", "CREATE ROLE mover SUPERUSER LOGIN; CREATE ROLE guest; CREATE ROLE plain LOGIN");
        let other = |pinned: &PinnedSetting| match pinned.name {
            "default_transaction_isolation" => "serializable",
            "role" => "guest",
            "session_replication_role" => "origin",
            "default_tablespace" => "pg_global",
            "default_table_access_method" => "other",
            "xmloption" => "document",
            "icu_validation_level" => "error",
            "temp_file_limit" | "wal_sender_timeout" => "10000",
            _ => match pinned.value {
                "off" => "on",
                _ => "10000",
            },
        };
        cluster.sql("postgres", "CREATE ACCESS METHOD other TYPE TABLE HANDLER heap_tableam_handler");
        let known: Vec<&PinnedSetting> =
            BEHAVIOUR_SETTINGS.iter().filter(|pinned| superuser(major).may_set(pinned)).collect();
        for pinned in &known {
            cluster.sql("postgres", &format!("ALTER ROLE mover SET {} = '{}'", pinned.name, other(pinned)));
        }
        cluster
            .sql("postgres", "ALTER ROLE mover SET DateStyle = 'SQL, DMY'; ALTER ROLE mover SET search_path = public");
        let place = format!("host=127.0.0.1 port={} dbname=postgres user=", cluster.port());
        let server = |user: &str| Server::parse("source", &format!("{place}{user}"), None).unwrap();
        for purpose in [Purpose::Statements, Purpose::Replication] {
            let mut link = Link::connect(&server("mover"), purpose, &[("lock_timeout", "2s")]).await.unwrap();
            for pinned in &known {
                let expected = if pinned.name == "lock_timeout" { "2s" } else { pinned.value };
                let sql = format!("SELECT current_setting('{}')", pinned.name);
                let value = link.text(&sql).await.unwrap();
                assert_eq!(value.replace("1min", "60s"), expected, "{} ({purpose:?})", pinned.name);
            }
            assert_eq!(link.text("SHOW search_path").await.unwrap(), "pg_catalog");
        }
        // A role that may not set all of it can connect; the check reports the rights that it lacks.
        let mut link = Link::connect(&server("plain"), Purpose::Statements, &[]).await.unwrap();
        assert_eq!(link.text("SHOW is_superuser").await.unwrap(), "off");

        let mut psql = cluster.client("psql");
        psql.env("PGOPTIONS", options(superuser(major), &[("lock_timeout", "2s")])).env("PGUSER", "mover");
        for pinned in &known {
            psql.args(["-c", &format!("SELECT current_setting('{}')", pinned.name)]);
        }
        let output = psql.args(["-X", "-A", "-t", "-d", "postgres"]).output().unwrap();
        let told = String::from_utf8(output.stdout).unwrap().replace("1min", "60s");
        let expected = known.iter().map(|pinned| match pinned.name {
            "lock_timeout" => "2s",
            _ => pinned.value,
        });
        let told: Vec<&str> = told.lines().collect();
        assert_eq!(told, expected.collect::<Vec<_>>(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn sessions_and_programs_have_what_is_pinned_against_settings_of_their_role() {
        if !available() {
            return;
        }
        have_what_is_pinned(&Cluster::start(&[]), 15).await;
        if newer_available() {
            have_what_is_pinned(&Cluster::of_major(NEWER_MAJOR, &[]), NEWER_MAJOR).await;
        }
    }

    #[test]
    fn a_session_s_own_settings_come_before_what_is_pinned() {
        let settings = at_login(&[("search_path", "a, b"), ("lock_timeout", "5")]);
        let of = |name: &str| {
            settings.iter().filter(|(known, _)| *known == name).map(|(_, value)| *value).collect::<Vec<_>>()
        };
        assert_eq!(
            (of("search_path"), of("lock_timeout"), of("statement_timeout")),
            (vec!["a, b"], vec!["5"], vec!["0"])
        );
        assert_eq!(of("transaction_timeout"), Vec::<&str>::new(), "not every server knows it");
        assert_eq!(after_login(plain(15), false, &[]), None);
        let bytes = after_login(plain(15), true, &[]).unwrap();
        assert_eq!(bytes, "SELECT set_config('client_encoding', 'SQL_ASCII', false)");
        let told = after_login(plain(17), false, &[]).unwrap();
        assert!(told.starts_with("SELECT set_config('transaction_timeout', '0', false), "), "{told}");
        let own = [("session_replication_role", "origin"), ("deadlock_timeout", "10ms")];
        assert!(at_login(&own).iter().all(|(name, _)| !needs_right(name)));
        let told = after_login(superuser(15), false, &own).unwrap();
        assert!(told.contains("'session_replication_role', 'origin'") && !told.contains("'replica'"), "{told}");
        assert!(told.contains("'deadlock_timeout', '10ms'"), "{told}");
        assert_eq!(after_login(plain(15), false, &own), None);
        let granted = SessionRights { may_replicate: true, ..plain(15) };
        assert_eq!(
            after_login(granted, false, &[]).unwrap(),
            "SELECT set_config('session_replication_role', 'replica', false)"
        );
        let wanted = [("session_replication_role", "origin"), ("synchronous_commit", "off")];
        assert!(!options(plain(15), &wanted).contains("session_replication_role"));
        assert!(options(granted, &wanted).contains("-c session_replication_role=origin"));
        let options = options(superuser(16), &[("synchronous_commit", "off")]);
        assert!(options.contains("-c default_transaction_isolation=read\\ committed "), "{options}");
        assert!(
            options.ends_with("-c synchronous_commit=off") && !options.contains(" transaction_timeout="),
            "{options}"
        );
    }
}

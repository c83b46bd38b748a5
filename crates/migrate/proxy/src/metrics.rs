//! Metrics in Prometheus' text format.

use crate::counters::Counters;
use crate::migration_view::MigrationView;
use crate::proxy::Proxy;
use std::fmt::Write;
use std::sync::atomic::Ordering;
use stillpoint_migrate_control::{Activity, MirrorReport, PoolStatus};

/// Text of all metrics.
pub(crate) fn text(proxy: &Proxy) -> String {
    let sum = proxy.sum();
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let Counters { statements, bytes_up, bytes_down } = &sum;
    let mut text = String::new();
    let metrics = [
        ("statements_total", "counter", "Answers of ReadyForQuery.", load(statements)),
        ("bytes_from_clients_total", "counter", "Bytes received from clients.", load(bytes_up)),
        ("bytes_to_clients_total", "counter", "Bytes received for clients.", load(bytes_down)),
        (
            "unnamed_turned_away_total",
            "counter",
            "Connections closed before login to admit other clients.",
            proxy.unnamed.evictions(),
        ),
        (
            "logins_turned_away_total",
            "counter",
            "Logins ended to admit other clients, because their clients did not answer.",
            proxy.logins.evictions(),
        ),
        ("logins", "gauge", "Unauthenticated clients that have named their user.", proxy.logins.count() as u64),
        ("unnamed", "gauge", "Connections that have not named their user.", proxy.unnamed.count() as u64),
        ("standby", "gauge", "1 if another proxy is on standby, else 0.", proxy.standby.taken_by().is_some().into()),
    ];
    for (name, kind, help, value) in metrics {
        let _ = write!(text, "# HELP stillpoint_proxy_{name} {help}\n# TYPE stillpoint_proxy_{name} {kind}\n");
        let _ = writeln!(text, "stillpoint_proxy_{name} {value}");
    }
    let (entries, tenants) = (proxy.directory.all(), proxy.tenants());
    text +=
        "# HELP stillpoint_proxy_sessions Sessions by tenant and activity.\n# TYPE stillpoint_proxy_sessions gauge\n";
    for tenant in &tenants {
        for (name, activity) in [
            ("starting", Activity::Starting),
            ("idle", Activity::Idle),
            ("active", Activity::Active),
            ("in_transaction", Activity::InTransaction),
            ("parked", Activity::Parked),
        ] {
            let count =
                entries.iter().filter(|entry| entry.tenant == tenant.name && entry.activity() == activity).count();
            let _ = writeln!(
                text,
                "stillpoint_proxy_sessions{{tenant=\"{}\",state=\"{name}\"}} {count}",
                label(&tenant.name)
            );
        }
    }
    let pools: Vec<_> =
        tenants.iter().filter_map(|tenant| Some((label(&tenant.name), tenant.pool_status(&entries)?))).collect();
    put_pools(&mut text, &pools);
    let shown = tenants.iter().filter_map(|tenant| Some((label(&tenant.name), tenant.migration()?)));
    put_migrations(&mut text, &shown.collect::<Vec<_>>());
    let mirrored = tenants.iter().filter_map(|tenant| Some((label(&tenant.name), tenant.mirror()?.report())));
    put_mirrors(&mut text, &mirrored.collect::<Vec<_>>());
    text
}

/// Value of a label.
fn label(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

/// Name of a metric of a pool after its prefix, its help, and its value.
type PoolMetric = (&'static str, &'static str, fn(&PoolStatus) -> usize);

fn put_pools(text: &mut String, pools: &[(String, PoolStatus)]) {
    let metrics: [PoolMetric; 4] = [
        ("open", "Server connections that sessions share.", |pool| pool.open),
        ("idle", "Shared server connections without a session.", |pool| pool.idle),
        ("waiting", "Sessions that wait for a server connection.", |pool| pool.waiting),
        ("kept", "Sessions that keep a server connection of their own.", |pool| pool.kept),
    ];
    for (name, help, value) in metrics.into_iter().filter(|_| !pools.is_empty()) {
        let _ = write!(text, "# HELP stillpoint_proxy_pool_{name} {help}\n# TYPE stillpoint_proxy_pool_{name} gauge\n");
        for (tenant, pool) in pools {
            let _ = writeln!(text, "stillpoint_proxy_pool_{name}{{tenant=\"{tenant}\"}} {}", value(pool));
        }
    }
}

/// Name of a metric after its prefix, its help, and its value, if there is one.
type MigrationMetric = (&'static str, &'static str, fn(&MigrationView) -> Option<f64>);

/// Metrics of commands that move tenants, as they report them.
const MIGRATION_METRICS: [MigrationMetric; 12] = [
    ("report_age_seconds", "Time since the command's last report.", |view| Some(view.age.as_secs_f64())),
    ("ended", "1 if the command has ended, else 0.", |view| Some(f64::from(view.progress.ended.is_some()))),
    ("holding", "1 if the command waits for an order to switch, else 0.", |view| {
        Some(f64::from(view.progress.holding.is_some()))
    }),
    ("copied_bytes", "Bytes copied.", |view| Some(view.progress.copying?.bytes as f64)),
    ("copy_size_bytes", "Size of the tables on the source.", |view| Some(view.progress.copying?.bytes_total as f64)),
    ("copy_bytes_per_second", "Rate of the copy.", |view| Some(view.progress.copying?.bytes_per_s as f64)),
    ("compared_rows", "Rows in the last comparison, all equal.", |view| Some(view.progress.compared?.rows as f64)),
    ("lag_seconds", "Time from a commit on the source to its repetition.", |view| {
        Some(view.progress.following?.lag_ms as f64 / 1e3)
    }),
    ("lag_bytes", "Bytes of the source's log that are not repeated.", |view| {
        Some(view.progress.following?.lag_bytes as f64)
    }),
    ("applied_transactions_per_second", "Transactions that the apply workers repeat per second.", |view| {
        Some(view.progress.following?.tps as f64)
    }),
    ("clients_kept_ratio", "Share of their usual throughput that clients keep.", |view| {
        Some(view.progress.kept_percent? as f64 / 100.0)
    }),
    ("pause_seconds", "Time for which clients were paused at the switch.", |view| {
        Some(view.progress.switched?.paused_us as f64 / 1e6)
    }),
];

/// Name of a metric of a mirror after its prefix, its help, and its value.
type MirrorMetric = (&'static str, &'static str, fn(&MirrorReport) -> u64);

const MIRROR_METRICS: [MirrorMetric; 4] = [
    ("statements", "Statements of clients since the mirror began.", |report| report.seen),
    ("compared", "Statements that were run on both servers.", MirrorReport::compared),
    ("different", "Statements with another answer on the target.", |report| report.different),
    ("failed", "Statements that only the target refused.", |report| report.failed),
];

fn put_mirrors(text: &mut String, shown: &[(String, MirrorReport)]) {
    if shown.is_empty() {
        return;
    }
    for (name, help, value) in MIRROR_METRICS {
        let _ = write!(text, "# HELP stillpoint_mirror_{name} {help}\n# TYPE stillpoint_mirror_{name} gauge\n");
        for (tenant, report) in shown {
            let _ = writeln!(text, "stillpoint_mirror_{name}{{tenant=\"{tenant}\"}} {}", value(report));
        }
    }
}

fn put_migrations(text: &mut String, shown: &[(String, MigrationView)]) {
    if shown.is_empty() {
        return;
    }
    let head = |text: &mut String, name: &str, help: &str| {
        let _ = write!(text, "# HELP stillpoint_migration_{name} {help}\n# TYPE stillpoint_migration_{name} gauge\n");
    };
    head(text, "phase", "Phases that are under way.");
    for (tenant, view) in shown {
        let operation = label(&view.progress.operation);
        for phase in view.progress.phases.present() {
            let phase = label(&phase.name);
            let labels = format!("{{tenant=\"{tenant}\",operation=\"{operation}\",phase=\"{phase}\"}}");
            let _ = writeln!(text, "stillpoint_migration_phase{labels} 1");
        }
    }
    for (name, help, value) in MIGRATION_METRICS {
        let values: Vec<_> = shown.iter().filter_map(|(tenant, view)| Some((tenant, value(view)?))).collect();
        if !values.is_empty() {
            head(text, name, help);
        }
        for (tenant, value) in values {
            let _ = writeln!(text, "stillpoint_migration_{name}{{tenant=\"{tenant}\"}} {value}");
        }
    }
}

//! Preflight: checks everything that can be known before anything is changed.
//!
//! Each kind of object that a database can hold has one row in [`SURVEY`]; its query returns the objects of that kind, and for
//! each a note about its handling.

use crate::large_objects::LargeObjects;
use crate::object_names::check_object_columns;
use crate::options::AcceptedRestrictions;
use crate::placement::Placement;
use crate::proxy_client::ProxyClient;
use crate::report::{Coverage, Finding, Report, SourceCoverage, TableSources, Verdict, refuse};
use crate::selection::{LeftOut, findings};
use crate::{
    Capture, Options, Roles, Settings, copied_settings, definitions, fence, moved_slots, owner, poolers, rehearsal,
    rights, roles, server_settings,
};
use std::collections::HashSet;
use std::time::Instant;
use stillpoint_migrate_apply::inventory::{Inventory, NOT_OF_EXTENSION, TableDef, USER_SCHEMA};
use stillpoint_migrate_apply::{Error, replication_objects};
use stillpoint_migrate_capture::facts::{Capturable, QUESTION, capturable};
use stillpoint_migrate_postgres::link::{APPLICATION, Link, Purpose, Server, identifier, literal, number, text};

/// Name of a source of changes, for messages.
fn name(by: Capture) -> &'static str {
    match by {
        Capture::Log => "C (pgoutput)",
        Capture::Rows => "A (row images)",
        Capture::Statements => "B (statements)",
    }
}

/// Examines both servers and the proxy. It changes nothing, except for a rehearsal ([`Options::rehearse`]), which creates a
/// database of another name on each target and drops it again.
///
/// # Errors
///
/// [`Error::Interrupted`], and errors of the connections to the servers.
pub async fn check(options: &Options) -> Result<Report, Error> {
    let mut report = tokio::select! {
        report = examine(options) => report?,
        () = options.interrupt.notified() => return Err(Error::Interrupted),
    };
    rehearsal::rehearse(options, &mut report).await?;
    report.findings.sort_by(|a, b| (&a.kind, &a.name).cmp(&(&b.kind, &b.name)));
    Ok(report)
}

/// Examines everything without a rehearsal.
async fn examine(options: &Options) -> Result<Report, Error> {
    let Options { source, accepted, .. } = options;
    poolers::refuse_poolers(options).await?;
    let mut link = Link::connect(source, Purpose::Statements, &[]).await?;
    let mut findings = Vec::new();
    if let Some(owner) = owner::owner(&mut fence::connect_beside(source).await?, &source.database).await? {
        refuse(&mut findings, "migration", &owner.migration, format!("{owner}, has not ended"));
    }
    let wanted = options.targets().count() as i64;
    let copying = options.copy_jobs as i64 * wanted;
    rights::check_connections(&mut link, "source", (copying, 0), &mut findings).await?;
    let clients = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend' \
                   AND application_name <> ";
    let clients = link.text(&format!("{clients}{}", literal(APPLICATION))).await?.parse().unwrap_or(0);
    let (by, mut capture) = check_source(&mut link, options, wanted, &mut findings).await?;
    check_role_names(&mut link, "source", &mut findings).await?;
    let selected = options.selection.resolve(&mut link).await?;
    findings::report(&mut link, &options.selection, by, &selected, &mut findings).await?;
    let left_out = &selected.left_out;
    let (mut clusters, mut targets, mut made_roles) = (Vec::new(), Vec::new(), Vec::new());
    for target in options.targets() {
        let mut there = Link::connect(&target.database("postgres"), Purpose::Statements, &[]).await?;
        let mut of_target = Vec::new();
        rehearsal::drop_remains(options, target).await?;
        let cluster = check_target(&mut link, &mut there, source, target, *accepted, &mut of_target).await?;
        if clusters.contains(&cluster) {
            refuse(&mut of_target, "server", "target", "this is the same cluster as another target");
        }
        clusters.push(cluster);
        let writing = options.players.max(options.copy_jobs) as i64;
        rights::check_connections(&mut there, "target", (writing, clients), &mut of_target).await?;
        check_role_names(&mut there, "target", &mut of_target).await?;
        check_needed_objects((&mut link, &mut there), left_out, &options.placement, &mut of_target).await?;
        server_settings::compare(&mut link, &mut there, &mut of_target).await?;
        roles::compare(&mut link, &mut there, source, options.roles, &mut of_target).await?;
        if options.roles == Roles::Create {
            made_roles.extend(roles::missing(source, target).await?);
        } else {
            findings::spare_roles(&mut link, left_out, &mut of_target).await?;
        }
        if options.settings == Settings::Copy {
            copied_settings::check(&mut link, &mut there, &mut of_target).await?;
        }
        if wanted > 1 {
            of_target.iter_mut().for_each(|finding| finding.note = format!("{target}: {}", finding.note));
        }
        findings.extend(of_target);
        targets.push(there);
    }
    // A selection that is refused has no inventory of its own.
    if selected.decision.problems.is_empty() {
        let by_name = by == Capture::Log;
        check_object_columns(options, left_out, &mut targets, &made_roles, by_name, &mut findings).await?;
    }
    let mut inventory = Inventory::read(&mut link).await?;
    left_out.remove_from(&mut inventory);
    let plain = inventory.measure(&mut link).await?;
    let can = capturable(&link.query(&QUESTION).await?);
    let mut sources = table_sources(&mut link, &inventory, by, &can).await?;
    report_tables(&inventory, &sources, &plain, &mut findings);
    survey(&mut link, *accepted, left_out, &mut findings).await?;
    check_large_objects(&mut link, options, &mut findings).await?;
    check_slots(&mut link, options, &mut targets, &mut findings).await?;
    check_names_are_text(&mut link, &inventory, &mut findings).await?;
    match replication_objects::check_ownership(&mut link, replication_objects::SCHEMA).await {
        Err(Error::Refused(why)) => refuse(&mut findings, "schema", replication_objects::SCHEMA, why.join("; ")),
        looked => looked?,
    }
    find_direct_sessions(&mut link, options, by, &mut findings).await?;
    poolers::look_behind_proxy(options, &mut findings).await;
    if by.is_by_proxy() {
        refuse_uncapturable(can, wanted, &mut findings);
    }
    if by != Capture::Statements {
        let fit = sources.iter().filter(|table| table.statements.carries != Coverage::Nothing).count();
        capture += &format!(
            "; {} (--capture statements) is possible for {fit} of {}",
            name(Capture::Statements),
            sources.len()
        );
    }
    sources.sort_by(|a, b| a.table.cmp(&b.table));
    Ok(Report { capture, source: by, tables: sources, bytes: inventory.bytes(), findings })
}

/// Adds refusals for changes that only the proxy captures; statements are captured together with their rows.
fn refuse_uncapturable(can: Capturable, targets: i64, findings: &mut Vec<Finding>) {
    if targets > 1 {
        refuse(findings, "server", "target", "several targets require capture by pgoutput (--capture log)");
    }
    if let Some(why) = can.refused {
        refuse(findings, "database", "capture", why);
    }
    for limit in can.tables {
        let note = if limit.added_to {
            "new rows are captured; an UPDATE or DELETE ends the migration, as it has no key whose values can be \
             hashed"
        } else {
            &limit.why
        };
        let found = findings.iter_mut().find(|finding| finding.kind == "table" && finding.name == limit.table);
        if let Some(finding) = found {
            finding.note = format!("{}; {note}", finding.note);
        }
        if !limit.added_to {
            refuse(findings, "capture", limit.table, format!("{}: its rows cannot be captured as images", limit.why));
        }
    }
}

/// Determines the sources of changes for each table.
async fn table_sources(
    link: &mut Link,
    inventory: &Inventory,
    by: Capture,
    can: &Capturable,
) -> Result<Vec<TableSources>, Error> {
    let level = link.text("SHOW wal_level").await?;
    let log = if level == "logical" {
        SourceCoverage::all()
    } else {
        SourceCoverage::nothing(format!("wal_level is {level} on the source"))
    };
    // Statements name the partitioned table.
    let partitions = "SELECT c.oid, n.nspname || '.' || r.relname FROM pg_class c JOIN pg_class r ON r.oid = \
                      pg_partition_root(c.oid) JOIN pg_namespace n ON n.oid = r.relnamespace WHERE c.relispartition";
    let partitions = link.query(partitions).await?;
    let root = |table: &TableDef| {
        let root = partitions.iter().find(|row| number::<u32>(row, 0) == table.oid).map(|row| text(row, 1));
        root.unwrap_or_else(|| table.display())
    };
    let rows = |table: &TableDef| {
        if let Some(why) = &can.refused {
            return SourceCoverage::nothing(why);
        }
        let name = root(table);
        can.tables.iter().find(|limit| limit.table == name).map_or_else(SourceCoverage::all, |limit| SourceCoverage {
            carries: if limit.added_to { Coverage::NewRows } else { Coverage::Nothing },
            why: Some(limit.why.clone()),
        })
    };
    let statements = |table: &TableDef| {
        let (rows, name) = (rows(table), root(table));
        match can.defaults.iter().find(|(of, _)| *of == name) {
            Some((_, column)) if rows.carries == Coverage::All => SourceCoverage {
                carries: Coverage::Given,
                why: Some(format!("a statement that leaves column {column} to its default cannot be replayed")),
            },
            _ => rows,
        }
    };
    let of = |table: &TableDef| TableSources {
        table: table.display(),
        by,
        log: log.clone(),
        rows: rows(table),
        statements: statements(table),
    };
    Ok(inventory.tables.iter().map(of).collect())
}

/// Adds findings about direct sessions, which bypass the proxy. They are not a reason to refuse if changes are read from the
/// log: what they write meanwhile is repeated like everything else.
async fn find_direct_sessions(
    link: &mut Link,
    options: &Options,
    by: Capture,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    let asking = async {
        let mut proxy = ProxyClient::connect(&options.proxy, &options.tenant).await?;
        if proxy.serving().await?.is_none() {
            return Ok(None);
        }
        let backends = proxy.backends().await?;
        proxy.check_backends_at(&backends, link, &options.source).await?;
        fence::find_direct_sessions(link, &mut proxy, &options.source.database).await.map(Some)
    };
    let sessions = match asking.await {
        Ok(Some(sessions)) => sessions,
        Ok(None) => {
            refuse(findings, "tenant", &options.tenant, "the proxy's configuration has no such tenant");
            return Ok(());
        }
        Err(error @ Error::ServedElsewhere { .. }) => {
            refuse(findings, "proxy", &options.tenant, error.to_string());
            return Ok(());
        }
        Err(error @ (Error::Proxy(_) | Error::ProxyGone(_))) => {
            let why = format!(
                "{error}; `run` requires the proxy, and sessions that bypass it cannot be listed; try: --proxy SOCKET, \
                 the `control` of the proxy's configuration"
            );
            findings.push(Finding::new("proxy", &options.tenant, Verdict::NotMoved, why));
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    for row in sessions {
        let (verdict, why) = match by {
            Capture::Log => (
                Verdict::NotMoved,
                "direct session: it bypasses the proxy, is terminated at the switch-over, and must then connect to \
                 the proxy",
            ),
            Capture::Rows | Capture::Statements => {
                (Verdict::Refused, "direct session: it bypasses the proxy, and only the proxy captures writes")
            }
        };
        let name = format!("{} (process {})", text(&row, 1), text(&row, 0));
        findings.push(Finding::new("session", name, verdict, why));
    }
    Ok(())
}

/// Adds a finding about large objects, and refuses them if a look at all of them does not fit into the pause.
async fn check_large_objects(link: &mut Link, options: &Options, findings: &mut Vec<Finding>) -> Result<(), Error> {
    let unreadable = LargeObjects::unreadable(link).await?;
    for (owner, count) in &unreadable {
        let (owner, role) = (identifier(owner), identifier(&options.source.user));
        let why = format!("stillpoint's role may not read their contents; try: GRANT {owner} TO {role}");
        refuse(findings, "large objects", count.to_string(), why);
    }
    if !unreadable.is_empty() {
        return Ok(());
    }
    let begun = Instant::now();
    let (count, bytes) = LargeObjects::of(link).await?.size();
    let took = begun.elapsed();
    if count == 0 {
        return Ok(());
    }
    let ms = took.as_millis();
    let note = format!("{count} of {bytes} bytes: changed ones are found by a look at all, which took {ms} ms");
    if took > options.pause_limit / 2 {
        let why = format!("{note}, and must fit into half of the pause; try: a longer --pause-timeout");
        refuse(findings, "large objects", count.to_string(), why);
    } else {
        findings.push(Finding::new(
            "large objects",
            count.to_string(),
            Verdict::Moved,
            format!("{note}, in the pause too"),
        ));
    }
    Ok(())
}

/// Adds a finding about each logical slot of another reader.
async fn check_slots(
    link: &mut Link,
    options: &Options,
    targets: &mut [Link],
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    const KIND: &str = "replication slot";
    let of_others = moved_slots::OF_OTHERS;
    let slots =
        link.query(&format!("SELECT s.slot_name, s.plugin FROM pg_replication_slots s WHERE {of_others}")).await?;
    for slot in slots {
        let (name, plugin) = (text(&slot, 0), text(&slot, 1));
        if !options.move_slots {
            let note = "its reader must start again on the target; with --move-slots it is made there";
            findings.push(Finding::new(KIND, name, Verdict::NotMoved, note));
            continue;
        }
        let mut obstacle = None;
        for there in targets.iter_mut() {
            obstacle = obstacle.or(moved_slots::obstacle(there, &name, &plugin).await?);
        }
        match obstacle {
            Some(why) => refuse(findings, KIND, name, why),
            None => {
                let note = "made on the target before the switch-over: its reader goes on there from the slot's beginning, and \
                            gets the last changes before the switch twice";
                findings.push(Finding::new(KIND, name, Verdict::Moved, note));
            }
        }
    }
    Ok(())
}

/// Refuses names that are not text: a database that keeps bytes in any encoding (SQL_ASCII) may have such names.
async fn check_names_are_text(
    link: &mut Link,
    inventory: &Inventory,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    if link.text("SHOW server_encoding").await? != "SQL_ASCII" {
        return Ok(());
    }
    let tables = inventory.tables.iter().chain(&inventory.partitioned);
    let names = tables.flat_map(|table| {
        std::iter::once(table.display()).chain(table.columns.iter().map(|column| column.name.clone()))
    });
    let names = names.chain(inventory.sequences.iter().cloned());
    for name in names.filter(|name| name.contains(char::REPLACEMENT_CHARACTER)) {
        let note = "the name is not valid UTF-8, in a database whose encoding is SQL_ASCII: rename it first";
        refuse(findings, "name", name, note);
    }
    Ok(())
}

async fn check_source(
    link: &mut Link,
    options: &Options,
    targets: i64,
    findings: &mut Vec<Finding>,
) -> Result<(Capture, String), Error> {
    let wanted = options.capture;
    let rows = link
        .query(
            "SELECT current_setting('wal_level'), current_setting('server_version_num')::int, \
             (SELECT rolsuper FROM pg_roles WHERE rolname = current_user), pg_is_in_recovery(), \
             current_setting('max_replication_slots')::int - (SELECT count(*) FROM pg_replication_slots), \
             current_setting('max_wal_senders')::int - (SELECT count(*) FROM pg_stat_replication), \
             current_setting('max_slot_wal_keep_size'), current_setting('server_version')",
        )
        .await?;
    let row = rows.into_iter().next().unwrap_or_default();
    if text(&row, 3) == "t" {
        refuse(findings, "server", "source", "this server is a standby; name the primary");
    }
    if number::<u32>(&row, 1) < 140_000 {
        refuse(findings, "server", "source", format!("PostgreSQL {} is older than 14", text(&row, 7)));
    }
    let wal_level = text(&row, 0);
    let logical = wal_level == "logical";
    let by = wanted.unwrap_or(if logical { Capture::Log } else { Capture::Rows });
    rights::check_source(link, options, by, findings).await?;
    let why = match wanted {
        Some(_) => "as requested by --capture".to_owned(),
        None => format!("because wal_level is {wal_level} on the source"),
    };
    match by {
        Capture::Log => {}
        Capture::Rows => return Ok((by, format!("A (row images, by the proxy) for every table, {why}"))),
        Capture::Statements => {
            let schedule = options.schedule.name();
            if !options.schedule.needs_snapshots() {
                let note = "transactions are replayed one after another: if two ran concurrently and one read what \
                            the other wrote, the second may read a different row at replay; a difference that the \
                            comparison finds ends the migration";
                findings.push(Finding::new("schedule", schedule, Verdict::NotMoved, note));
            }
            let needed = "REPEATABLE READ, statements without parameters, and no values that depend on the time";
            let how =
                format!("B (statements, by the proxy, replayed in the schedule {schedule}) for every table, {why}");
            return Ok((by, format!("{how}; this requires {needed}: any other write ends the migration")));
        }
    }
    if logical {
        for (at, name) in [(4, "max_replication_slots"), (5, "max_wal_senders")] {
            let free = number::<i64>(&row, at);
            if free < targets {
                refuse(findings, "setting", name, format!("{free} are free on the source, and {targets} are required"));
            }
        }
        let keep = text(&row, 6);
        if keep != "-1" {
            let note = format!(
                "the source keeps {keep} of log for the migration: if the lag exceeds this, the migration must start \
                 again"
            );
            findings.push(Finding::new("setting", "max_slot_wal_keep_size", Verdict::NotMoved, note));
        }
    } else {
        let note = format!("it is {wal_level}; capture by pgoutput requires logical (a restart of the source)");
        refuse(findings, "setting", "wal_level", note);
    }
    Ok((by, format!("C (pgoutput) for every table, {why}")))
}

/// Refuses a server before version 17 that changes a client's role according to the database it names.
async fn check_role_names(link: &mut Link, side: &str, findings: &mut Vec<Finding>) -> Result<(), Error> {
    const SETTING: &str = "db_user_namespace";
    if link.value(&format!("SELECT current_setting('{SETTING}', true)")).await?.as_deref() == Some("on") {
        let note = format!("it is on at the {side}: the server changes the role names that clients and the proxy send");
        refuse(findings, "setting", SETTING, note);
    }
    Ok(())
}

async fn check_target(
    link: &mut Link,
    there: &mut Link,
    source: &Server,
    target: &Server,
    accepted: AcceptedRestrictions,
    findings: &mut Vec<Finding>,
) -> Result<Option<String>, Error> {
    if source.database != target.database {
        let note = format!("it is named {} on the source: a migration keeps the name of the database", source.database);
        refuse(findings, "database", &target.database, note);
    }
    let identity = "SELECT system_identifier FROM pg_control_system()";
    let cluster = there.value(identity).await?;
    if link.value(identity).await? == cluster {
        refuse(findings, "server", "target", "source and target are the same cluster");
    }
    let rows = there
        .query(&format!(
            "SELECT current_setting('wal_level'), current_setting('server_version_num')::int / 10000, \
             (SELECT rolsuper FROM pg_roles WHERE rolname = current_user), pg_is_in_recovery(), \
             EXISTS (SELECT FROM pg_database WHERE datname = {}), \
             current_setting('max_replication_slots')::int, (SELECT count(*) FROM pg_replication_slots)",
            literal(&target.database)
        ))
        .await?;
    let row = rows.into_iter().next().unwrap_or_default();
    rights::check_target(link, there, target, !accepted.no_fallback, findings).await?;
    if text(&row, 3) == "t" {
        refuse(findings, "server", "target", "this server is a standby; name the primary");
    }
    if text(&row, 4) == "t" {
        refuse(findings, "database", &target.database, "it already exists on the target; drop it there first");
    }
    let major: u32 = number(&row, 1);
    if let Some(why) = definitions::cannot_dump(major).await {
        let note = format!("if they change while the target follows, the migration ends: {why}");
        findings.push(Finding::new("definitions", &target.database, Verdict::NotMoved, note));
    }
    let from = link.text("SELECT current_setting('server_version_num')::int / 10000").await?;
    if major < from.parse().unwrap_or(u32::MAX) {
        refuse(findings, "server", "target", format!("PostgreSQL {major} is older than the source's {from}"));
    }
    let (wal_level, used) = (text(&row, 0), number::<i64>(&row, 6));
    let unsuitable = [
        (wal_level != "logical", "wal_level", format!("it is {wal_level}"), "logical".to_owned()),
        (number::<i64>(&row, 5) <= used, "max_replication_slots", "no slot is free".into(), (used + 1).to_string()),
    ];
    for (_, setting, why, needed) in
        unsuitable.into_iter().filter(|(unsuitable, ..)| *unsuitable && !accepted.no_fallback)
    {
        let note = format!(
            "{why}, so `fallback` would not be possible; try: ALTER SYSTEM SET {setting} = {needed}, and restart the \
             target; or --no-fallback"
        );
        refuse(findings, "setting", format!("target's {setting}"), note);
    }
    Ok(cluster)
}

/// Adds a finding for each table. `plain` are tables without large values stored elsewhere.
fn report_tables(inventory: &Inventory, sources: &[TableSources], plain: &HashSet<u32>, findings: &mut Vec<Finding>) {
    for (table, sources) in inventory.tables.iter().zip(sources) {
        let (other, way) = match sources.by {
            Capture::Log => (Capture::Rows, &sources.rows),
            Capture::Rows | Capture::Statements => (Capture::Log, &sources.log),
        };
        let not =
            |by: Capture, way: &SourceCoverage| way.why.as_ref().map(|why| format!("; not by {}: {why}", name(by)));
        let mut other = not(other, way).unwrap_or_default();
        if sources.by == Capture::Statements && sources.statements.carries == Coverage::Given {
            other = format!("; {}{other}", sources.statements.why.as_deref().unwrap_or_default());
        }
        let by = name(sources.by);
        let (verdict, how) = match table.identity_wanted() {
            None => (Verdict::Moved, String::new()),
            Some("FULL") => (
                Verdict::Changed,
                "; it has no key: REPLICA IDENTITY FULL until the migration ends, and each update or delete scans \
                 the whole table on the target"
                    .to_owned(),
            ),
            Some(wanted) => (Verdict::Changed, format!("; REPLICA IDENTITY {wanted} until the migration ends")),
        };
        let form = if table.binary() { "binary" } else { "text" };
        let apart = sources.by == Capture::Log && table.upserts() && plain.contains(&table.oid);
        let held = if apart { "" } else { " while a snapshot is held" };
        let own = if table.own_rows.is_some() { "; rows that come with its extension are not copied" } else { "" };
        let note = format!("copied in {form} ({} MiB){held}, then {by}{how}{other}{own}", table.bytes >> 20);
        findings.push(Finding::new("table", table.display(), verdict, note));
    }
}

/// Kinds of relations: kind, verdict, a condition for `pg_class`, and the note.
const RELATIONS: &[(&str, Verdict, &str, &str)] = &[
    ("partitioned table", Verdict::Moved, "c.relkind = 'p'", "its partitions are moved separately"),
    ("view", Verdict::Moved, "c.relkind = 'v'", "its definition is moved"),
    (
        "materialized view",
        Verdict::Moved,
        "c.relkind = 'm'",
        "its definition is moved; if it is filled, REFRESH fills it on the target before the switch-over, and again after it \
         if it was refreshed meanwhile",
    ),
    (
        "foreign table",
        Verdict::Moved,
        "c.relkind = 'f'",
        "its definition is moved; its rows are on a third server, which the target must be able to reach",
    ),
    ("sequence", Verdict::Moved, "c.relkind = 'S'", "its value is set on the target at the switch-over"),
    (
        "unlogged table",
        Verdict::Refused,
        "c.relpersistence = 'u' AND c.relkind IN ('r', 'S')",
        "its changes are not in the log; with --unlogged-empty it is moved empty",
    ),
];

/// Other kinds: kind, verdict, and a query for names and notes, and for catalog and number of the object or its table where a
/// selection may leave it out.
const SURVEY: &[(&str, Verdict, &str)] = &[
    (
        "trigger",
        Verdict::Moved,
        "SELECT {table} || '.' || t.tgname, 'fires on the source; its effects are replayed, and it does not fire \
         again on the target', c.tableoid, c.oid FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = \
         c.relnamespace WHERE NOT t.tgisinternal AND t.tgenabled IN ('O', 'D') AND {user}",
    ),
    (
        "trigger",
        Verdict::Moved,
        "SELECT {table} || '.' || t.tgname, 'ENABLE ALWAYS or REPLICA: it is disabled on the target until the switch-over', \
         c.tableoid, c.oid FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE \
         NOT t.tgisinternal AND t.tgenabled IN ('A', 'R') AND {user}",
    ),
    (
        "rule",
        Verdict::Moved,
        "SELECT {table} || '.' || r.rulename, 'ENABLE ALWAYS or REPLICA: it is disabled on the target until the switch-over', \
         c.tableoid, c.oid FROM pg_rewrite r JOIN pg_class c ON c.oid = r.ev_class JOIN pg_namespace n ON n.oid = c.relnamespace WHERE \
         r.rulename <> '_RETURN' AND r.ev_enabled IN ('A', 'R') AND {user}",
    ),
    (
        "event trigger",
        Verdict::Moved,
        "SELECT e.evtname, 'it does not fire on what stillpoint defines', e.tableoid, e.oid FROM pg_event_trigger e WHERE {event_triggers}",
    ),
    (
        "event trigger",
        Verdict::Refused,
        "SELECT e.evtname, 'ENABLE ALWAYS or REPLICA: before PostgreSQL 17 it would fire on what stillpoint defines' FROM \
         pg_event_trigger e WHERE NOT {event_triggers}",
    ),
    (
        "extension",
        Verdict::Moved,
        "SELECT extname || ' ' || extversion, 'created on the target' FROM pg_extension WHERE extname <> 'plpgsql'",
    ),
    (
        "type",
        Verdict::Moved,
        "SELECT n.nspname || '.' || t.typname, CASE t.typtype WHEN 'e' THEN 'enum' WHEN 'd' THEN 'domain' WHEN 'c' \
         THEN 'composite' WHEN 'r' THEN 'range' ELSE 'base' END || ': its type number will differ on the target', t.tableoid, t.oid FROM \
         pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace LEFT JOIN pg_class c ON c.oid = t.typrelid WHERE \
         t.typtype IN ('e', 'd', 'c', 'r') AND coalesce(c.relkind, 'c') = 'c' AND {user} AND NOT EXISTS (SELECT FROM \
         pg_depend x WHERE x.classid = 'pg_type'::regclass AND x.objid = t.oid AND x.deptype = 'e')",
    ),
    (
        "function",
        Verdict::Moved,
        "SELECT CASE WHEN pg_function_is_visible(p.oid) THEN n.nspname || '.' ELSE '' END || p.oid::regprocedure, 'its definition is moved', p.tableoid, p.oid FROM pg_proc p JOIN pg_namespace n \
         ON n.oid = p.pronamespace WHERE {user} AND NOT EXISTS (SELECT FROM pg_depend x WHERE x.classid = \
         'pg_proc'::regclass AND x.objid = p.oid AND x.deptype = 'e')",
    ),
    (
        "transaction number",
        Verdict::NotMoved,
        "SELECT {table} || '.' || a.attname, 'numbers of the source''s transactions (' || format_type(a.atttypid, NULL) || ') are \
         copied as they are, and the target counts its own: reset what compares them with current ones', c.tableoid, c.oid FROM pg_attribute a \
         JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_type t ON t.oid = a.atttypid \
         WHERE coalesce(nullif(t.typelem, 0), t.oid) IN (28, 5069, 2970, 5038) AND a.attnum > 0 AND NOT a.attisdropped \
         AND c.relkind = 'r' AND {user}",
    ),
    (
        "publication",
        Verdict::Moved,
        "SELECT pubname::text, 'it is made on the target; subscribers must connect there and start again' FROM \
         pg_publication WHERE pubname !~ '^stillpoint_'",
    ),
    (
        "subscription",
        Verdict::Refused,
        "SELECT s.subname::text, 'changes that it receives would arrive only on the source; drop it first' FROM \
         pg_subscription s JOIN pg_database d ON d.oid = s.subdbid WHERE d.datname = current_database()",
    ),
    (
        "prepared transaction",
        Verdict::Refused,
        "SELECT gid, 'commit or roll it back first: it is ' || justify_interval(date_trunc('second', now() - \
         prepared)) || ' old, and the snapshot would wait for it' FROM pg_prepared_xacts WHERE database = \
         current_database()",
    ),
];

/// SQL condition for event triggers `e` that can be kept from firing on our sessions; those that an extension makes belong to it.
const EVENT_TRIGGERS_HELD: &str =
    "(e.evtenabled IN ('O', 'D') OR current_setting('server_version_num')::int >= 170000)";

async fn survey(
    link: &mut Link,
    accepted: AcceptedRestrictions,
    left_out: &LeftOut,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    let relations = RELATIONS.iter().map(|(kind, verdict, which, note)| {
        let from = "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace";
        let note = literal(note);
        (
            kind,
            verdict,
            format!("SELECT {{table}}, {note}, c.tableoid, c.oid {from} WHERE {which} AND {{user}} AND {{own}}"),
        )
    });
    let others = SURVEY.iter().map(|(kind, verdict, query)| (kind, verdict, (*query).to_owned()));
    for (kind, verdict, query) in relations.chain(others) {
        let query = query
            .replace("{table}", "n.nspname || '.' || c.relname")
            .replace("{user}", USER_SCHEMA)
            .replace("{event_triggers}", EVENT_TRIGGERS_HELD)
            .replace("{own}", NOT_OF_EXTENSION);
        for row in link.query(&query).await? {
            if left_out.has((number(&row, 2), number(&row, 3))) {
                continue;
            }
            let (mut verdict, mut note) = (*verdict, text(&row, 1));
            if *kind == "unlogged table" && accepted.unlogged_empty {
                (verdict, note) = (Verdict::NotMoved, "it is moved empty, as --unlogged-empty accepts".into());
            }
            findings.push(Finding::new(kind, text(&row, 0), verdict, note));
        }
    }
    Ok(())
}

/// Refuses tablespaces and extensions that definitions need and the target lacks. Roles are compared separately.
async fn check_needed_objects(
    (link, there): (&mut Link, &mut Link),
    left_out: &LeftOut,
    placement: &Placement,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    check_tablespaces(link, there, left_out, placement, findings).await?;
    let present = there.query("SELECT name FROM pg_available_extensions").await?;
    for row in link.query("SELECT extname FROM pg_extension").await? {
        if !present.contains(&row) {
            refuse(findings, "extension", text(&row, 0), "its files are not installed on the target");
        }
    }
    Ok(())
}

async fn check_tablespaces(
    link: &mut Link,
    there: &mut Link,
    left_out: &LeftOut,
    placement: &Placement,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    let tablespaces = format!(
        "SELECT DISTINCT t.spcname FROM pg_class c JOIN pg_tablespace t ON t.oid = c.reltablespace \
         WHERE t.spcname NOT IN ('pg_default', 'pg_global') AND {} UNION SELECT t.spcname FROM pg_database d \
         JOIN pg_tablespace t ON t.oid = d.dattablespace WHERE d.datname = current_database() AND t.spcname <> 'pg_default'",
        left_out.condition("c.oid")
    );
    let present: Vec<String> =
        there.query("SELECT spcname FROM pg_tablespace").await?.iter().map(|row| text(row, 0)).collect();
    for row in link.query(&tablespaces).await? {
        let name = text(&row, 0);
        match placement.tablespace(&name) {
            "" => {}
            space if present.iter().any(|known| known == space) => {}
            space if space == name => refuse(
                findings,
                "tablespace",
                name,
                "it is not on the target: make it there, or give it a place with --tablespace OLD=NEW or --no-tablespaces",
            ),
            space => refuse(findings, "tablespace", name.clone(), format!("its place {space} is not on the target")),
        }
    }
    let own: Vec<String> =
        link.query("SELECT spcname FROM pg_tablespace").await?.iter().map(|row| text(row, 0)).collect();
    for name in placement.named().filter(|name| own.iter().all(|known| known != name)) {
        refuse(findings, "tablespace", name.to_owned(), "--tablespace names it, and the source does not have it");
    }
    Ok(())
}

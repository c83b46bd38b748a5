//! Definitions that change on the source while the target follows.
//!
//! ```text
//!  source:  tables are published -> dump N ........................ snapshot S, same definitions as N?
//!                                     |                                |                    \ no: again
//!  target:              what writes need: columns, types, ...   replay up to S -> the rest, copies at S -> compared
//! ```
//!
//! Clients do not wait. Two dumps of the source, before and now, show what changed; a dump of the target shows what is missing
//! or too much there, so a round that was ended in its middle is simply made again.
//!
//! - First the target gets what the changes in the log may need (new columns and types), and loses what they may violate.
//!   Nothing that must hold for all rows is made yet, because the target may be behind.
//! - Changes of a table that is new, or whose rows the source wrote again without a trace in the log (`ALTER TYPE`, a volatile
//!   default, a renamed table), are left out until it is copied.
//! - At a snapshot of the source that the replay has reached exactly, the rest is made, and these tables are copied. From then
//!   on, changes of a copied table are repeated if that snapshot does not see them.
//! - At the end a scratch database is made from the same dump: the target must not differ from it in one definition.
//!
//! The order in which definitions and rows changed is not repeated: what counts is the state at the snapshot, and each row
//! that was written between has the same values in both orders, or its table is copied.

mod changes;
mod enum_labels;
mod replaced;
mod table_copies;
mod table_shape;

use crate::archive::{self, DATABASE_SETTINGS, Entry};
use crate::catalogs::{self, Definitions};
use crate::definitions::{self, Dump, RejectedDefinition};
use crate::follow_state::{FollowState, compare_between};
use crate::journal::SharedJournal;
use crate::large_objects::LargeObjects;
use crate::options::Options;
use crate::progress::Reporter;
use crate::reactions::Reactions;
use crate::rehearsal::ScratchDatabase;
use crate::report::short_message;
use crate::selection::LeftOut;
use crate::{Capture, Roles, fence, roles};

use replaced::Replaced;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use stillpoint_events::migrate;
use stillpoint_host::kernel_files;
use stillpoint_migrate_apply::inventory::Inventory;
use stillpoint_migrate_apply::partial_tables::{CopySnapshot, PartialTables};
use stillpoint_migrate_apply::replication_objects::{self, PUBLICATIONS};
use stillpoint_migrate_apply::throttle::Throttle;
use stillpoint_migrate_apply::{BARRIER_TIMEOUT, Error, Feed, Follower, Plan, SourceSnapshot};
use stillpoint_migrate_postgres::link::{Link, Purpose, ServerError, SessionRights, identifier, literal, number, text};
use table_shape::TableShape;

/// Attempts to find a moment at which no definition changes.
const ROUNDS_MAX: usize = 40;
/// Time between the first two attempts, and at most: a job that defines for a minute or two is outlasted.
const ROUND_PAUSES: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(5)];
/// Times that differences are made, each with a new dump of the target: what fails because of another difference is made in the
/// next one.
const PASSES_MAX: usize = 12;
/// Kinds of entries that must hold for rows of existing tables.
const OF_ALL_ROWS: [&str; 6] = ["INDEX", "CONSTRAINT", "CHECK CONSTRAINT", FOREIGN_KEY, "TABLE ATTACH", "INDEX ATTACH"];
const FOREIGN_KEY: &str = "FK CONSTRAINT";
/// Kinds of entries that may hold rows, or whose removal with all that needs them might drop columns.
const NOT_CASCADED: [&str; 7] = ["TABLE", "TYPE", "DOMAIN", "SCHEMA", "SEQUENCE", "EXTENSION", "DATABASE"];
/// Another object needs the one that is to be dropped.
const IS_NEEDED: &str = "2BP01";
/// The server cannot do that, in most cases because of another object.
const IS_UNSUPPORTED: &str = "0A000";
/// Objects that are not there: columns, tables, functions, schemas, others.
const IS_ABSENT: [&str; 5] = ["42703", "42P01", "42883", "3F000", "42704"];

/// Returns true if an error of following may come from definitions that changed.
pub(crate) fn may_be_cause(error: &Error) -> bool {
    match error {
        Error::SchemaChanged(_) | Error::CatalogsChanged(_) => true,
        // A value, a constraint, a name.
        _ => {
            error.sqlstate().is_some_and(|state| ["22", "23", "42", "0A"].iter().any(|class| state.starts_with(class)))
        }
    }
}

/// Returns true if an error of looking at the source may come from an object that was dropped or locked at that moment.
fn passes(error: &Error) -> bool {
    const LOCKED: [&str; 3] = ["55P03", "40P01", "XX000"];
    match error {
        Error::Program { .. } => true,
        _ if error.is_time_out() => true,
        Error::Server(_) => error.sqlstate().is_some_and(|state| IS_ABSENT.contains(&state) || LOCKED.contains(&state)),
        _ => false,
    }
}

/// Definitions of the source at one moment.
struct SourceDefinitions {
    inventory: Inventory,
    definitions: Definitions,
    shapes: Vec<TableShape>,
    entries: Vec<Entry>,
    /// File of the dump.
    file: std::path::PathBuf,
}

/// A round for one target.
pub(crate) struct Redefinition<'r, 'j> {
    options: Options,
    number: usize,
    journal: &'r SharedJournal<'j>,
    reporter: Reporter,
    /// Major versions of source and target.
    rights: (SessionRights, SessionRights),
    /// Definitions of which the target was made.
    before: Arc<[Entry]>,
    known: Definitions,
    /// Shapes of the tables as the target has them.
    shapes: Vec<TableShape>,
    /// Connection that holds the snapshot of the source.
    source: Link,
    /// Connection that sees the source as it is now.
    asking: Link,
    target: Link,
    /// Changed entries of this round that are made.
    done: HashSet<u32>,
    /// Statements about tables that the target accepted in this round; what it prints in another way than the source is not
    /// attempted again and again.
    made: HashSet<String>,
    /// Tables that were copied in this round.
    copied: Vec<u32>,
    /// Extensions whose version may have changed.
    extensions: Vec<String>,
    /// Objects that are dropped on the target at the beginning of the next attempt, and made again.
    replaced: Replaced,
}

impl<'r, 'j> Redefinition<'r, 'j> {
    /// Looks for changes of definitions; `None` if there are none and no earlier round was ended in its middle.
    pub(crate) async fn find(
        options: &Options,
        number: usize,
        journal: &'r SharedJournal<'j>,
        reporter: &Reporter,
    ) -> Result<Option<Redefinition<'r, 'j>>, Error> {
        if journal.record().capture != Capture::Log {
            return Ok(None);
        }
        let mut source = Link::connect(&options.source, Purpose::Statements, &[("synchronous_commit", "on")]).await?;
        let mut target = Link::connect(&options.target, Purpose::Statements, &[("synchronous_commit", "on")]).await?;
        let known = journal.lock().definitions_of(number)?;
        let now = catalogs::read(&mut source, &options.selection).await?;
        let changes = catalogs::changes(&known, &now);
        if changes.is_empty() && PartialTables::read(&mut target).await?.copying.is_empty() {
            return Ok(None);
        }
        refuse_others(&changes, options)?;
        let rights = (definitions::rights(&options.source).await?, definitions::rights(&options.target).await?);
        if let Some(why) = definitions::cannot_dump(rights.1.major).await {
            return Err(Error::SchemaChanged(format!("{}; they cannot be repeated: {why}", changes.join("; "))));
        }
        let extensions: Vec<String> =
            changes.iter().filter_map(|change| change.strip_prefix("changed extension ")).map(str::to_owned).collect();
        for name in &extensions {
            let [here, there] = extension_versions(&mut source, &mut target, name).await?;
            if here == there {
                // No dump holds its members, its schema's name or its owner.
                return Err(Error::SchemaChanged(format!("changed extension {name}, and not its version")));
            }
        }
        reporter.report(migrate::Event::Redefining { changes: changes.clone() });
        let before = entries(&journal.lock().read_dump(number)?)?.into();
        let shapes = kept_shapes(&mut target).await?;
        Ok(Some(Redefinition {
            options: options.clone(),
            number,
            journal,
            reporter: reporter.clone(),
            rights,
            before,
            known,
            shapes,
            source,
            asking: Link::connect(&options.source, Purpose::Statements, &[]).await?,
            target,
            done: HashSet::new(),
            made: HashSet::new(),
            copied: Vec::new(),
            extensions,
            replaced: Replaced::default(),
        }))
    }

    /// Makes the target what the source is now, and returns the state in which it follows on. `horizon` and `with_foreign_keys`
    /// say how far the migration was.
    pub(crate) async fn make(
        mut self,
        horizon: u64,
        with_foreign_keys: bool,
        large_objects: Option<LargeObjects>,
    ) -> Result<FollowState, Error> {
        let large_objects = match large_objects {
            Some(known) => known,
            None => LargeObjects::present(&mut self.target).await?,
        };
        definitions::terminate_makers(&self.options.target, &mut self.target).await?;
        // Without that right they are made in the pause.
        let with_foreign_keys = with_foreign_keys && self.target.rights.may_replicate;
        let (mut last, mut pause) = (None, ROUND_PAUSES[0]);
        for _ in 0..ROUNDS_MAX {
            match self.round(horizon, with_foreign_keys).await {
                Ok(Some((inventory, definitions))) => {
                    let follower = self.follower(&inventory, horizon).await?;
                    let mut state = FollowState { follower, inventory, definitions, large_objects, controller: None };
                    if horizon == 0 {
                        self.compare_rows(&mut state).await?;
                    }
                    return Ok(state);
                }
                Ok(None) => {}
                Err(error) if passes(&error) => last = Some(error),
                Err(error) => return Err(error),
            }
            let _ = self.source.query("ROLLBACK").await;
            tokio::time::sleep(pause).await;
            pause = (pause * 5 / 4).min(ROUND_PAUSES[1]);
        }
        let changes = catalogs::changes(&self.known, &catalogs::read(&mut self.source, &self.options.selection).await?);
        let last = last.map(|error| format!(" ({})", short_message(&error))).unwrap_or_default();
        Err(Error::SchemaChanged(format!("again and again: {}{last}", changes.join("; "))))
    }

    /// Compares the rows of the tables that were copied in this round.
    async fn compare_rows(&self, state: &mut FollowState) -> Result<(), Error> {
        let (options, all) = (&self.options, state.inventory.clone());
        state.inventory.tables.retain(|table| self.copied.contains(&table.oid));
        let compared = match state.inventory.tables.is_empty() {
            true => Ok(()),
            false => {
                compare_between(options, state, &options.source, &options.target, &options.selection, &self.reporter)
                    .await
            }
        };
        state.inventory = all;
        compared
    }

    /// Makes one attempt; `None` if definitions changed again meanwhile.
    async fn round(
        &mut self,
        horizon: u64,
        with_foreign_keys: bool,
    ) -> Result<Option<(Inventory, Definitions)>, Error> {
        let (_memory, file) = crate::rehearsal::memory_file()?;
        self.done.clear();
        self.made.clear();
        let now = match self.publish_and_look(file).await {
            Err(Error::SchemaChanged(_)) => return Ok(None),
            looked => looked?,
        };
        self.record_partial(&now).await?;
        let foreign_keys = |entry: &Entry| with_foreign_keys || !may_be_of_foreign_key(entry);
        self.converge(&now, false, &foreign_keys).await?;

        let mut follower = self.follower(&now.inventory, horizon).await?;
        let reached = self.reach_snapshot(&mut follower, &now).await;
        let snapshot = match reached {
            Ok(Some(snapshot)) => snapshot,
            Ok(None) => return Ok(None),
            // The stream met a later definition.
            Err(error) if may_be_cause(&error) && self.have_changed(&now).await? => return Ok(None),
            Err(error) => return Err(error),
        };
        self.replaced.clear();
        let left = self.converge(&now, true, &|entry: &Entry| foreign_keys(entry) && entry.kind != FOREIGN_KEY).await?;
        // What could not be made explains it.
        let explained = |left: Vec<String>, replaced: &Replaced| match replaced.is_empty() {
            true => Err(Error::SchemaChanged(left.join("; "))),
            false => Ok(None),
        };
        match self.copy_tables(&now, &snapshot).await {
            Err(error) if left.is_empty() => return Err(error),
            Err(_) => return explained(left, &self.replaced),
            Ok(false) => return Ok(None),
            Ok(true) => {}
        }
        self.replaced.clear();
        let left = self.converge(&now, true, &foreign_keys).await?;
        if !left.is_empty() {
            return explained(left, &self.replaced);
        }
        self.replaced.clear();
        match self.compare(&now, with_foreign_keys).await {
            // What came and went between two attempts is in no dump of the source.
            Err(Error::SchemaChanged(_)) if !self.replaced.is_empty() => return Ok(None),
            compared => compared?,
        }
        keep_shapes(&mut self.target, &now.shapes).await?;
        let dump = read_memory(&now.file)?;
        self.journal.lock().record_redefined(self.number, &dump, &now.definitions)?;
        self.source.query("ROLLBACK").await?;
        let tables = now.inventory.tables.len() as u64;
        self.reporter.report(migrate::Event::Redefined { tables });
        Ok(Some((now.inventory, now.definitions)))
    }

    /// Publishes all tables of the source, and reads its definitions after that.
    async fn publish_and_look(&mut self, file: std::path::PathBuf) -> Result<SourceDefinitions, Error> {
        let (options, journal) = (self.options.clone(), self.journal);
        if options.roles == Roles::Create {
            let made = journal.lock().record.roles_of(self.number).to_vec();
            roles::create_and_update(&options.source, &options.target, &made, |made| {
                journal.lock().record_roles(self.number, made)
            })
            .await?;
        }
        let tables = options.selection.inventory(&mut self.source).await?;
        replication_objects::widen_identities(&mut self.source, &tables, options.snapshot_limit, |change| {
            journal.lock().update(|record| record.identities.push(change))
        })
        .await?;
        // Before the log can have changes of a table that is gone when it is looked at again.
        let new = tables.tables.iter().map(|table| table.oid);
        let new = new.filter(|oid| self.shapes.iter().all(|before| before.relation != *oid));
        let sql = PartialTables::record_copying(new);
        if !sql.is_empty() {
            self.target.query(&format!("BEGIN; {sql} COMMIT")).await?;
        }
        let is_new = replication_objects::publish_new(&mut self.source, &tables).await?;
        replication_objects::withdraw_others(&mut self.source, &tables).await?;
        // The snapshot must see all of a transaction of which the log reports a part.
        if is_new || !PartialTables::read(&mut self.target).await?.copying.is_empty() {
            replication_objects::wait_for_transactions(&mut self.source, options.snapshot_limit).await?;
        }
        let mut holder = Link::connect(&options.source, Purpose::Statements, &[]).await?;
        holder.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        let snapshot = holder.text("SELECT pg_export_snapshot()").await?;
        let inventory = options.selection.inventory(&mut holder).await?;
        let left_out = options.selection.left_out(&mut holder).await?;
        replication_objects::check_all_published(&mut self.source, &inventory).await?;
        let definitions = catalogs::read(&mut holder, &options.selection).await?;
        let (from, to) = (self.rights.0, self.rights.1.major);
        definitions::dump_source(&options, from, to, &snapshot, &left_out, &file).await?;
        let mut shapes = table_shape::read(&mut holder).await?;
        shapes.retain(|shape| !left_out.has_relation(shape.relation));
        let entries = entries(&read_memory(&file)?)?;
        Ok(SourceDefinitions { inventory, definitions, shapes, entries, file })
    }

    /// Starts to follow with these tables.
    async fn follower(&self, inventory: &Inventory, horizon: u64) -> Result<Follower, Error> {
        let slot = self.journal.record().slot_of(self.number);
        Follower::start(Plan {
            source: &self.options.source,
            target: &self.options.target,
            feed: Feed::Log { slot: &slot, publications: &PUBLICATIONS, from: 0, horizon },
            inventory,
            players: self.options.players,
            pace: Arc::new(Throttle::unlimited()),
        })
        .await
    }

    /// Brings the target to a snapshot of the source with these definitions, and returns the snapshot's name and contents; the
    /// connection to the source holds it. `None` if definitions have changed.
    async fn reach_snapshot(
        &mut self,
        follower: &mut Follower,
        now: &SourceDefinitions,
    ) -> Result<Option<(String, CopySnapshot)>, Error> {
        self.source.query("ROLLBACK").await?;
        let wanted = follower.mark().await?;
        while follower.status().position < wanted {
            if let Some(error) = follower.failure().await {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        follower.pause_at_snapshot(&mut self.source, BARRIER_TIMEOUT).await?;
        if !catalogs::changes(&now.definitions, &catalogs::read(&mut self.source, &self.options.selection).await?)
            .is_empty()
        {
            self.source.query("ROLLBACK").await?;
            return Ok(None);
        }
        let row = self
            .source
            .query("SELECT pg_export_snapshot(), pg_current_snapshot(), pg_current_wal_insert_lsn()")
            .await?;
        let row = row.into_iter().next().unwrap_or_default();
        let until = replication_objects::lsn(&text(&row, 2));
        Ok(Some((text(&row, 0), CopySnapshot { snapshot: SourceSnapshot::parse(&text(&row, 1))?, until })))
    }

    async fn have_changed(&mut self, now: &SourceDefinitions) -> Result<bool, Error> {
        let _ = self.source.query("ROLLBACK").await;
        Ok(!catalogs::changes(&now.definitions, &catalogs::read(&mut self.source, &self.options.selection).await?)
            .is_empty())
    }

    /// Makes the target's definitions those of the source, as far as they are `wanted`; what must hold for all rows only if
    /// `whole`. Returns what could not be made.
    async fn converge(
        &mut self,
        now: &SourceDefinitions,
        whole: bool,
        wanted: &dyn Fn(&Entry) -> bool,
    ) -> Result<Vec<String>, Error> {
        let mut left = Vec::new();
        let before = Arc::clone(&self.before);
        for _ in 0..PASSES_MAX {
            left.clear();
            let (_memory, file) = crate::rehearsal::memory_file()?;
            let (rights, all) = (self.rights.1, LeftOut::default());
            definitions::dump(&self.options.target, rights, rights.major, None, &all, &file).await?;
            let there = entries(&read_memory(&file)?)?;
            let changes = changes::between(&before, &now.entries, &there);
            let may_be_made = |entry: &&Entry| wanted(entry) && (whole || !OF_ALL_ROWS.contains(&entry.kind.as_str()));
            let mut tried = 0;
            let mut is_database_changed = false;
            // Of a database without settings only the target has such an entry: it is read-only for others until clients move.
            let is_of_fence = |entry: &Entry| {
                entry.kind == DATABASE_SETTINGS && before.iter().all(|before| before.kind != DATABASE_SETTINGS)
            };
            for entry in changes.removed.iter().filter(|entry| wanted(entry) && !is_of_fence(entry)) {
                tried += 1;
                is_database_changed |= entry.is_of_database();
                left.extend(self.remove(entry).await?);
            }
            for (table, statement) in self.table_statements(now, whole).await? {
                tried += 1;
                match self.change_table(&table, &statement).await? {
                    Some(failed) => {
                        left.push(failed);
                        self.replaced.add_table(table);
                    }
                    None => drop(self.made.insert(statement)),
                }
            }
            if whole {
                left.extend(self.update_extensions().await?);
            }
            for (before, entry) in changes.changed.iter().filter(|(_, entry)| wanted(entry)) {
                if self.done.contains(&entry.id) {
                    continue;
                }
                tried += 1;
                is_database_changed |= entry.is_of_database();
                match self.change(before, entry).await? {
                    Some(failed) => left.push(failed),
                    None => drop(self.done.insert(entry.id)),
                }
            }
            let (of_database, added): (Vec<&Entry>, Vec<&Entry>) =
                changes.added.iter().copied().filter(may_be_made).partition(|entry| entry.is_of_database());
            for entry in of_database {
                tried += 1;
                is_database_changed = true;
                left.extend(self.attempt(&entry.definition, &entry.display()).await?);
            }
            if !added.is_empty() {
                tried += added.len();
                let list: String = added.iter().map(|entry| format!("{};\n", entry.id)).collect();
                let dump = Dump { target: &self.options.target, rights: self.rights.1, file: &now.file };
                let rejected = dump.attempt_entries(&list).await?;
                self.done.extend(added.iter().map(|entry| entry.id));
                left.extend(rejected.into_iter().map(|RejectedDefinition { of, why }| format!("{of}: {why}")));
            }
            if is_database_changed {
                fence::make_read_only(&self.options.target).await?;
            }
            // Nothing succeeds any more.
            if left.len() >= tried {
                break;
            }
        }
        // They would fire on what is repeated and copied.
        let reactions = Reactions::read(&mut self.source, &self.options.selection, self.target.rights).await?;
        reactions.disable_present(&mut self.target).await?;
        Ok(left)
    }

    /// Statements for tables that exist on both sides and differ.
    async fn table_statements(&mut self, now: &SourceDefinitions, whole: bool) -> Result<Vec<(String, String)>, Error> {
        let there = table_shape::read(&mut self.target).await?;
        let mut all = Vec::new();
        // Statements about a partitioned table change its partitions, which are looked at again in the next pass.
        for partitioned in [true, false] {
            for shape in now.shapes.iter().filter(|shape| shape.partitioned == partitioned) {
                if let Some(target) = there.iter().find(|target| target.has_name_of(shape)) {
                    let before = self.shapes.iter().find(|before| before.relation == shape.relation);
                    let statements = shape.statements(before, target, &mut self.asking, whole).await?;
                    let new = statements.into_iter().filter(|statement| !self.made.contains(statement));
                    all.extend(new.map(|statement| (shape.qualified(), statement)));
                }
            }
            if !all.is_empty() {
                break;
            }
        }
        Ok(all)
    }

    /// Runs a statement about a table. If views, rules, policies or triggers are in its way, they are dropped, and made again in
    /// the next pass.
    async fn change_table(&mut self, table: &str, statement: &str) -> Result<Option<String>, Error> {
        match self.target.query(statement).await {
            Err(ServerError::Sql { code, .. }) if code == IS_UNSUPPORTED => {}
            Err(error @ ServerError::Sql { .. }) => {
                return Ok(Some(format!("{statement}: {}", short_message(&error.into()))));
            }
            done => return Ok(done.map(|_| None)?),
        }
        let users = format!(
            "SELECT DISTINCT CASE d.classid WHEN 'pg_policy'::regclass THEN (SELECT format('DROP POLICY IF EXISTS %I ON %s', \
             p.polname, p.polrelid::regclass) FROM pg_policy p WHERE p.oid = d.objid) WHEN 'pg_trigger'::regclass THEN \
             (SELECT format('DROP TRIGGER IF EXISTS %I ON %s', t.tgname, t.tgrelid::regclass) FROM pg_trigger t WHERE \
             t.oid = d.objid AND NOT t.tgisinternal) ELSE (SELECT CASE WHEN r.rulename <> '_RETURN' THEN format('DROP RULE IF \
             EXISTS %I ON %s', r.rulename, r.ev_class::regclass) ELSE format('DROP %s IF EXISTS %s CASCADE', CASE c.relkind \
             WHEN 'm' THEN 'MATERIALIZED VIEW' ELSE 'VIEW' END, c.oid::regclass) END FROM pg_rewrite r JOIN pg_class c ON \
             c.oid = r.ev_class WHERE r.oid = d.objid) END FROM pg_depend d WHERE d.refclassid = 'pg_class'::regclass AND \
             d.refobjid = {}::regclass AND d.refobjsubid > 0 AND d.classid IN ('pg_policy'::regclass, 'pg_trigger'::regclass, \
             'pg_rewrite'::regclass)",
            literal(table)
        );
        for row in self.target.query(&users).await? {
            if row[0].is_some() {
                self.target.query(&text(&row, 0)).await?;
            }
        }
        self.attempt(statement, statement).await
    }

    /// Updates extensions to the source's version.
    async fn update_extensions(&mut self) -> Result<Vec<String>, Error> {
        let mut failed = Vec::new();
        for name in self.extensions.clone() {
            let [wanted, there] = extension_versions(&mut self.asking, &mut self.target, &name).await?;
            if let Some(version) = wanted.filter(|version| there.is_some() && there.as_ref() != Some(version)) {
                let statement = format!("ALTER EXTENSION {name} UPDATE TO {}", literal(&version));
                failed.extend(self.attempt(&statement, &format!("extension {name}")).await?);
            }
        }
        Ok(failed)
    }

    /// Runs a statement; returns the server's refusal.
    async fn attempt(&mut self, statement: &str, of: &str) -> Result<Option<String>, Error> {
        match self.target.query(statement).await {
            Ok(_) => Ok(None),
            Err(error @ ServerError::Sql { .. }) => Ok(Some(format!("{of}: {}", short_message(&error.into())))),
            Err(error) => Err(error.into()),
        }
    }

    async fn remove(&mut self, entry: &Entry) -> Result<Option<String>, Error> {
        let database = identifier(&self.options.target.database);
        let Some(statement) = changes::removal(entry, &database) else { return Ok(None) };
        match self.target.query(&statement).await {
            Ok(_) => Ok(None),
            Err(ServerError::Sql { code, .. }) if IS_ABSENT.contains(&code.as_str()) => Ok(None),
            Err(ServerError::Sql { code, .. }) if code == IS_NEEDED && !NOT_CASCADED.contains(&entry.kind.as_str()) => {
                let statement = statement.trim_end().trim_end_matches(';');
                self.attempt(&format!("{statement} CASCADE"), &entry.display()).await
            }
            Err(error @ ServerError::Sql { .. }) => {
                Ok(Some(format!("{}: {}", entry.display(), short_message(&error.into()))))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Gives an entry its new text: in place, or by removing it, so that the next pass makes it.
    async fn change(&mut self, before: &Entry, entry: &Entry) -> Result<Option<String>, Error> {
        if let Some(labels) = self.new_labels(entry).await? {
            let failed = self.attempt(&labels, &entry.display()).await?;
            if failed.is_some() {
                self.replaced.add(before, &mut self.target).await?;
            }
            return Ok(failed);
        }
        let database = identifier(&self.options.target.database);
        if let Some(statement) = changes::replacement(before, entry, &database)
            && (statement.is_empty() || self.attempt(&statement, "").await?.is_none())
        {
            return Ok(None);
        }
        if NOT_CASCADED.contains(&entry.kind.as_str()) {
            self.replaced.add(before, &mut self.target).await?;
            return Ok(Some(format!("{} changed in a way that cannot be repeated", entry.display())));
        }
        self.remove(before).await
    }

    /// Statements that add the labels that an enum has on the source and lacks on the target; `None` for anything else.
    async fn new_labels(&mut self, entry: &Entry) -> Result<Option<String>, Error> {
        if entry.kind != "TYPE" || !entry.definition.contains(" AS ENUM (") {
            return Ok(None);
        }
        let sql = format!(
            "SELECT e.enumlabel, e.oid, format('%I.%I', n.nspname, t.typname) FROM pg_enum e JOIN pg_type t ON t.oid = \
             e.enumtypid JOIN pg_namespace n ON n.oid = t.typnamespace WHERE n.nspname = {} AND t.typname = {} ORDER BY \
             e.enumsortorder",
            literal(&entry.schema),
            literal(&entry.tag)
        );
        let (wanted, there) = (self.asking.query(&sql).await?, self.target.query(&sql).await?);
        let name = wanted.first().map(|row| text(row, 2));
        let wanted: Vec<(String, u32)> = wanted.iter().map(|row| (text(row, 0), number(row, 1))).collect();
        let there: Vec<String> = there.iter().map(|row| text(row, 0)).collect();
        Ok(name.map(|name| enum_labels::statements(&name, &wanted, &there)))
    }

    /// Compares the target with a database that is made from the source's definitions alone.
    async fn compare(&mut self, now: &SourceDefinitions, with_foreign_keys: bool) -> Result<(), Error> {
        let scratch = ScratchDatabase::make(&self.options, &now.file).await?;
        let compared = async {
            let mut dumps = Vec::new();
            for server in [&self.options.target, scratch.server()] {
                let (_memory, file) = crate::rehearsal::memory_file()?;
                definitions::dump(server, self.rights.1, self.rights.1.major, None, &LeftOut::default(), &file).await?;
                let mut entries = entries(&read_memory(&file)?)?;
                entries.retain(|entry| !entry.is_of_database());
                entries.retain(|entry| with_foreign_keys || !may_be_of_foreign_key(entry));
                dumps.push(entries);
            }
            let differing = changes::differing(&dumps[0], &dumps[1]);
            if differing.is_empty() {
                return Ok(());
            }
            for entry in changes::differing_there(&dumps[0], &dumps[1]) {
                self.replaced.add(entry, &mut self.target).await?;
            }
            Err(Error::SchemaChanged(format!("the target does not become the same: {}", differing.join("; "))))
        };
        let compared = compared.await;
        scratch.remove().await?;
        compared
    }
}

/// Returns true for foreign keys and comments that may be about them.
fn may_be_of_foreign_key(entry: &Entry) -> bool {
    entry.kind == FOREIGN_KEY || entry.kind == "COMMENT" && entry.tag.starts_with("CONSTRAINT ")
}

/// Changes that no round repeats end the migration by name.
fn refuse_others(changes: &[String], options: &Options) -> Result<(), Error> {
    let of = |change: &&String| {
        let (_, what) = change.split_once(' ').unwrap_or_default();
        ["subscription", "tablespace", "parameter ACL"].iter().any(|kind| what.starts_with(kind))
            || what.starts_with("role ") && options.roles != Roles::Create
    };
    catalogs::fail_if_changed(changes.iter().filter(of).cloned().collect())
}

/// Versions of an extension on the source and on the target; `None` where it is not there.
async fn extension_versions(source: &mut Link, target: &mut Link, name: &str) -> Result<[Option<String>; 2], Error> {
    let sql = format!("SELECT extversion FROM pg_extension WHERE {} IN (extname, quote_ident(extname))", literal(name));
    Ok([source.value(&sql).await?, target.value(&sql).await?])
}

/// Reads a file in memory, by its path in `/proc`.
fn read_memory(file: &Path) -> Result<Vec<u8>, Error> {
    kernel_files::bytes(file).map_err(|source| Error::Journal { path: file.into(), source })
}

/// Numbers of the entries of a dump, whose bytes are `archive`, that its target lacks.
///
/// # Errors
///
/// Errors of the program that dumps the target.
pub(crate) async fn missing_on(dump: &Dump<'_>, archive: &[u8]) -> Result<HashSet<u32>, Error> {
    let wanted = entries(archive)?;
    let (_memory, file) = crate::rehearsal::memory_file()?;
    definitions::dump(dump.target, dump.rights, dump.rights.major, None, &LeftOut::default(), &file).await?;
    let there = entries(&read_memory(&file)?)?;
    Ok(changes::between(&wanted, &wanted, &there).added.iter().map(|entry| entry.id).collect())
}

/// Definitions in an archive, without our own publications.
fn entries(archive: &[u8]) -> Result<Vec<Entry>, Error> {
    let mut entries = archive::read(archive)?;
    let is_ours = |entry: &Entry| {
        let publication = entry.tag.split(' ').next().unwrap_or_default();
        entry.kind.starts_with("PUBLICATION") && PUBLICATIONS.contains(&publication)
    };
    entries.retain(|entry| !is_ours(entry));
    Ok(entries)
}

/// Reads the shapes of the source's tables of which the target was made.
async fn kept_shapes(target: &mut Link) -> Result<Vec<TableShape>, Error> {
    if target.value("SELECT to_regclass('stillpoint.shape')").await?.is_none() {
        return Ok(Vec::new());
    }
    let rows = target.query("SELECT shape FROM stillpoint.shape").await?;
    let shape =
        |row| serde_json::from_str(&text(row, 0)).map_err(|error| Error::Pgoutput(format!("a kept shape: {error}")));
    rows.iter().map(shape).collect()
}

/// Keeps the shapes of the source's tables beside the tables that were made of them.
async fn keep_shapes(target: &mut Link, shapes: &[TableShape]) -> Result<(), Error> {
    let mut sql =
        "BEGIN; CREATE TABLE IF NOT EXISTS stillpoint.shape (shape text NOT NULL); TRUNCATE stillpoint.shape; "
            .to_owned();
    for shape in shapes {
        let shape = serde_json::to_string(shape).map_err(|error| Error::Pgoutput(error.to_string()))?;
        sql += &format!("INSERT INTO stillpoint.shape VALUES ({}); ", literal(&shape));
    }
    target.query(&(sql + "COMMIT")).await?;
    Ok(())
}

/// Keeps the shapes of the source's tables as a snapshot sees them; `from` is in a transaction with that snapshot.
pub(crate) async fn keep_first_shapes(from: &mut Link, left_out: &LeftOut, target: &mut Link) -> Result<(), Error> {
    let mut shapes = table_shape::read(from).await?;
    shapes.retain(|shape| !left_out.has_relation(shape.relation));
    keep_shapes(target, &shapes).await
}

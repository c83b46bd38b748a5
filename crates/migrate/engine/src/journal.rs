//! The journal of a migration: one small file, replaced as a whole, and on disk before the step that it describes is done.

use crate::catalogs::Definitions;
use crate::copied_pages::CopyState;
use crate::fence::Grant;
use crate::placement::Placement;
use crate::roles::Roles;
use crate::selection::Selection;
use crate::setting_changes::SettingChange;
use crate::state_files::{
    DEFINITIONS_EXTENSION, FILE_BYTES_MAX, HOLDING, ORDER, copying_name, lock, peek, read, remove, try_lock,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use stillpoint_host::trusted::Directory;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::replication_objects::IdentityChange;

/// Progress of a migration.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Objects are about to be created on the servers.
    #[default]
    Begun,
    /// Step 1 of the paper: the snapshot is taken, and changes are kept.
    Snapshotted,
    /// Step 2: the target is being filled.
    Copying,
    /// Step 3: the target holds the snapshot and follows.
    Following,
    /// Step 4 is under way: the proxy knows which side serves.
    Switching,
    /// Clients are on the target; a return to the source is possible.
    Switched,
    /// Clients are moving back to the source.
    Returning,
    /// Clients are on the source for good: again, or because the migration was aborted. The next command removes everything
    /// that is left of it.
    Returned,
}

/// Source of captured changes ("Capture" of the design), one for all tables of a migration: two streams have no common order.
///
/// The log is the first choice: it has the effects of triggers, cascades, COPY and functions, and survives the death of the tool.
/// Statements are repeated on request only.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Capture {
    /// The source's log.
    ///
    /// It is read by pgoutput (source C).
    #[default]
    Log,
    /// Rows that statements write, captured by the proxy.
    ///
    /// Images of these rows (source A).
    Rows,
    /// The statements themselves, captured by the proxy.
    ///
    /// With the snapshots of their transactions (source B).
    Statements,
}

impl Capture {
    /// Returns true if the proxy captures; it sees only what passes through it.
    pub(crate) fn is_by_proxy(self) -> bool {
        self != Capture::Log
    }
}

/// A target that is not the one to which clients are to go.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OtherTarget {
    /// Number of the target; part of the name of its slot.
    pub(crate) number: usize,
    /// Name of its server for messages.
    pub server: String,
    /// True if a database that this migration made may be there.
    pub made_database: bool,
    /// Roles made on this target, see [`Record::made_roles`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    made_roles: Vec<String>,
    /// True if it holds the snapshot and repeats the commits of the source.
    #[serde(default)]
    following: bool,
    /// Position in the source's log, see [`Record::horizon`].
    #[serde(default)]
    horizon: u64,
    /// Reason why it was dropped; `None` while clients may still go to it.
    pub dropped: Option<String>,
}

impl OtherTarget {
    /// Makes a target that was named and for which nothing has been done.
    pub(crate) fn new(number: usize, server: String) -> OtherTarget {
        OtherTarget { number, server, ..OtherTarget::default() }
    }

    /// Returns true if it holds the snapshot and repeats the commits of the source.
    pub fn is_following(&self) -> bool {
        self.following
    }
}

/// Everything that a later command, or the next run after a crash, must know. It holds no secrets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Version of the record's format.
    pub v: u32,
    /// Identifier of the migration; part of every name that it leaves on a server.
    pub migration: String,
    /// Name of the database.
    pub database: String,
    /// Name of the proxy's tenant.
    pub tenant: String,
    /// Name of the source's server for messages.
    pub source: String,
    /// Name of the target's server for messages.
    pub target: String,
    /// Number of this target among those that were named.
    #[serde(default)]
    pub(crate) number: usize,
    /// The other targets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<OtherTarget>,
    /// Source of captured changes.
    #[serde(default)]
    pub capture: Capture,
    /// Progress of the migration.
    pub phase: Phase,
    /// True if this migration made the target's database and may drop it.
    pub made_database: bool,
    /// Roles that this migration made on the target; they are removed with the database.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) made_roles: Vec<String>,
    /// Slots of other readers that were made on the target, or are about to be.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) moved_slots: Vec<String>,
    /// Handling of the roles that the database needs.
    #[serde(default)]
    pub(crate) roles: Roles,
    /// Server settings that were written to targets, or are about to be, by the number of the target.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) settings_written: BTreeMap<usize, Vec<SettingChange>>,
    /// The part of the database that is moved.
    #[serde(default, skip_serializing_if = "Selection::is_all")]
    pub selection: Selection,
    /// Properties of the target's database that are not the source's.
    #[serde(default, skip_serializing_if = "Placement::is_same")]
    pub placement: Placement,
    /// True if a way back is kept open.
    pub way_back: bool,
    /// True if the source names this migration as the owner of the database, until it has ended.
    #[serde(default)]
    pub(crate) claimed: bool,
    /// Position in the target's log at which the way back begins.
    pub back_from: u64,
    /// True if, after the switch, the source is in its final state; where a slot exists, its absence shows that.
    #[serde(default)]
    pub(crate) settled: bool,
    /// Host and port at which the proxy served the tenant when the migration began, and (`leads_to`) those to which it is to
    /// redirect it.
    pub(crate) served_from: Option<(String, u16)>,
    pub(crate) leads_to: Option<(String, u16)>,
    /// Position in the source's log by which the rows are present that the copy left to the log. Up to this position a change
    /// may find no row; foreign keys are made after it. 0 when that is done, or if the copy left no rows.
    #[serde(default)]
    pub(crate) horizon: u64,
    /// Materialized views that were refreshed before the last switch: their names, and marks of their contents on the side that
    /// clients left.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) refreshed: Vec<(String, String)>,
    /// Facts by which the copy of rows goes on if its command is killed; `None` before it begins, and when the target follows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) copy: Option<CopyState>,
    /// Replica identities that this migration changed.
    pub(crate) identities: Vec<IdentityChange>,
    /// Connect privileges on the source before it was fenced; `None` if it never was.
    pub(crate) fenced: Option<Vec<Grant>>,
    /// Connect privileges on the target before it was fenced, on the way back; `None` if it never was.
    pub(crate) fenced_target: Option<Vec<Grant>>,
}

impl Record {
    /// Name of the slot on the source.
    pub(crate) fn slot(&self) -> String {
        self.slot_of(self.number)
    }

    /// Name of the slot of one of several targets.
    pub(crate) fn slot_of(&self, number: usize) -> String {
        match number {
            0 => format!("stillpoint_{}", self.migration),
            _ => format!("stillpoint_{}_{}", self.migration, number + 1),
        }
    }

    /// Names of the slots of all targets.
    pub(crate) fn slots(&self) -> impl Iterator<Item = String> {
        std::iter::once(self.slot()).chain(self.others.iter().map(|other| self.slot_of(other.number)))
    }

    /// Returns true if this target follows.
    pub(crate) fn is_followed_by(&self, number: usize) -> bool {
        let other = || self.others.iter().any(|other| other.number == number && other.following);
        if number == self.number { self.phase == Phase::Following } else { other() }
    }

    /// Position that a target that follows must reach in the log; see [`Record::horizon`].
    pub(crate) fn horizon_of(&self, number: usize) -> u64 {
        let other = self.others.iter().find(|other| other.number == number);
        if number == self.number { self.horizon } else { other.map_or(0, |other| other.horizon) }
    }

    /// Makes another target the one to which clients go; the previous one becomes one of the others.
    fn put_first(&mut self, number: usize) {
        let Some(at) = self.others.iter().position(|other| other.number == number) else { return };
        let next = self.others.remove(at);
        let following = self.phase == Phase::Following;
        let (number, made_database, horizon) = (self.number, self.made_database, self.horizon);
        let made_roles = std::mem::replace(&mut self.made_roles, next.made_roles);
        let (server, dropped) = (self.target.clone(), None);
        self.others.push(OtherTarget { number, server, made_database, made_roles, following, horizon, dropped });
        self.others.sort_by_key(|other| other.number);
        (self.number, self.target, self.made_database) = (next.number, next.server, next.made_database);
        self.phase = if next.following { Phase::Following } else { Phase::Begun };
        self.horizon = next.horizon;
    }

    /// Roles that this migration made on one of the targets.
    pub(crate) fn roles_of(&self, number: usize) -> &[String] {
        let other = || self.others.iter().find(|other| other.number == number);
        if number == self.number { &self.made_roles } else { other().map_or(&[], |other| other.made_roles.as_slice()) }
    }

    /// Name of the slot on the target, for the way back.
    pub(crate) fn back_slot(&self) -> String {
        format!("stillpoint_{}_back", self.migration)
    }
}

/// A journal on disk, held by one process at a time.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    pub(crate) record: Record,
    _lock: File,
}

/// A journal that several tasks write.
pub(crate) struct SharedJournal<'j>(Mutex<&'j mut Journal>);

impl<'j> SharedJournal<'j> {
    pub(crate) fn new(journal: &'j mut Journal) -> SharedJournal<'j> {
        SharedJournal(Mutex::new(journal))
    }

    /// Returns the present record.
    pub(crate) fn record(&self) -> Record {
        self.lock().record.clone()
    }

    /// Locks the journal for one read or change.
    pub(crate) fn lock(&self) -> MutexGuard<'_, &'j mut Journal> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Journal {
    /// Begins a new journal; there must be none.
    pub(crate) fn begin(state: &Path, record: Record) -> Result<Journal, Error> {
        let (path, lock) = lock(state, &record.database)?;
        if let Some(there) = peek(state, &record.database)? {
            return Err(Error::WrongPhase(format!(
                "a migration of {} already exists ({:?}); `stillpoint migrate status` shows it",
                there.database, there.phase
            )));
        }
        let journal = Journal { path, record, _lock: lock };
        journal.write()?;
        Ok(journal)
    }

    /// Opens and locks an existing journal.
    pub(crate) fn open(state: &Path, database: &str) -> Result<Journal, Error> {
        let (path, lock) = lock(state, database)?;
        let record = peek(state, database)?.ok_or_else(|| Error::NoMigration(database.into()))?;
        Ok(Journal { path, record, _lock: lock })
    }

    /// Opens and locks an existing journal without waiting; `None` if there is none, or if another process works on it.
    pub(crate) fn try_open(state: &Path, database: &str) -> Result<Option<Journal>, Error> {
        let Some((path, lock)) = try_lock(state, database, Duration::ZERO)? else { return Ok(None) };
        Ok(peek(state, database)?.map(|record| Journal { path, record, _lock: lock }))
    }

    /// Changes the record; the change is on disk when this returns.
    pub(crate) fn update(&mut self, change: impl FnOnce(&mut Record)) -> Result<(), Error> {
        change(&mut self.record);
        self.write()
    }

    /// Records the progress of a target. For a target other than the migration's own, it records only what must be removed
    /// later.
    pub(crate) fn record_phase(&mut self, number: usize, phase: Phase) -> Result<(), Error> {
        let makes = phase == Phase::Copying;
        self.update(|record| {
            if number == record.number {
                record.phase = phase;
                record.made_database |= makes;
            }
            if let Some(other) = record.others.iter_mut().find(|other| other.number == number) {
                other.made_database |= makes;
            }
        })
    }

    /// Records that these roles are about to be made on a target, or were made.
    ///
    /// # Errors
    ///
    /// An error if the journal cannot be written.
    pub(crate) fn record_roles(&mut self, number: usize, roles: &[String]) -> Result<(), Error> {
        self.update(|record| {
            if number == record.number {
                record.made_roles = roles.to_vec();
            } else if let Some(other) = record.others.iter_mut().find(|other| other.number == number) {
                other.made_roles = roles.to_vec();
            }
        })
    }

    /// Records that a target follows, with the definitions it was made of and its horizon.
    pub(crate) fn record_following(&mut self, number: usize, made_of: &Definitions, horizon: u64) -> Result<(), Error> {
        self.replace(&self.definitions_path(number), made_of)?;
        self.update(|record| {
            if number == record.number {
                (record.phase, record.horizon, record.copy) = (Phase::Following, horizon, None);
            }
            if let Some(other) = record.others.iter_mut().find(|other| other.number == number) {
                (other.following, other.horizon) = (true, horizon);
            }
        })
    }

    /// Records that the copy of rows begins, on a target with these definitions.
    pub(crate) fn record_copy(&mut self, number: usize, made_of: &Definitions, copy: CopyState) -> Result<(), Error> {
        self.replace(&self.definitions_path(number), made_of)?;
        self.update(|record| record.copy = Some(copy))
    }

    /// Replaces the definitions of which a target was made, after it was given later ones.
    pub(crate) fn record_redefined(&self, number: usize, dump: &[u8], made_of: &Definitions) -> Result<(), Error> {
        let path = self.dump_path(number);
        let (directory, name) = Directory::of_file(&path)?;
        directory.write_synced(name, dump)?;
        self.replace(&self.definitions_path(number), made_of)
    }

    /// The definitions of which a target that follows was made.
    ///
    /// # Errors
    ///
    /// An error if there is no such file, or it cannot be read.
    pub(crate) fn definitions_of(&self, number: usize) -> Result<Definitions, Error> {
        let path = self.definitions_path(number);
        let missing = || Error::Journal { path: path.clone(), source: std::io::ErrorKind::NotFound.into() };
        read(&path)?.ok_or_else(missing)
    }

    /// Records that a target has passed its horizon.
    pub(crate) fn record_horizon_passed(&mut self, number: usize) -> Result<(), Error> {
        self.update(|record| {
            if number == record.number {
                record.horizon = 0;
            }
            if let Some(other) = record.others.iter_mut().find(|other| other.number == number) {
                other.horizon = 0;
            }
        })
    }

    /// Drops a target. If it was the migration's own, the first target that follows replaces it, or else the first that is
    /// left.
    pub(crate) fn drop_target(&mut self, number: usize, reason: String) -> Result<(), Error> {
        self.update(|record| {
            let left = || record.others.iter().filter(|other| other.dropped.is_none());
            let next = left().find(|other| other.is_following()).or_else(|| left().next()).map(|next| next.number);
            if let Some(next) = next.filter(|_| number == record.number) {
                record.put_first(next);
            }
            if let Some(other) = record.others.iter_mut().find(|other| other.number == number) {
                (other.dropped, other.following) = (Some(reason), false);
            }
        })
    }

    /// Records that everything made for another target has been removed.
    pub(crate) fn record_removal(&mut self, number: usize) -> Result<(), Error> {
        self.update(|record| {
            if let Some(other) = record.others.iter_mut().find(|other| other.number == number) {
                (other.made_database, other.following) = (false, false);
                other.made_roles.clear();
            }
        })
    }

    /// Records that clients are to go to this target.
    pub(crate) fn choose_target(&mut self, number: usize) -> Result<(), Error> {
        if number == self.record.number { Ok(()) } else { self.update(|record| record.put_first(number)) }
    }

    /// Records the definitions on the target when clients move there.
    pub(crate) fn keep_definitions(&self, definitions: &Definitions) -> Result<(), Error> {
        self.replace(&self.path.with_extension(DEFINITIONS_EXTENSION), definitions)
    }

    fn write(&self) -> Result<(), Error> {
        self.replace(&self.path, &self.record)
    }

    fn replace(&self, path: &Path, content: &impl Serialize) -> Result<(), Error> {
        let wrong = |source| Error::Journal { path: path.into(), source };
        let text = serde_json::to_vec_pretty(content).map_err(|error| wrong(error.into()))?;
        let (directory, name) = Directory::of_file(path)?;
        directory.write_synced(name, &text)?;
        Ok(())
    }

    /// Path of the dumped definitions from which a target is made.
    pub(crate) fn dump_path(&self, number: usize) -> PathBuf {
        match number {
            0 => self.path.with_extension("dump"),
            _ => self.path.with_extension(format!("dump-{}", number + 1)),
        }
    }

    /// Creates the dump file so that no other user can read it: definitions hold passwords of foreign servers, and `pg_dump`
    /// would create it with the umask's permissions.
    ///
    /// # Errors
    /// An error if the file cannot be created.
    pub(crate) fn create_dump(&self, number: usize) -> Result<PathBuf, Error> {
        let path = self.dump_path(number);
        let (directory, name) = Directory::of_file(&path)?;
        directory.create(name)?;
        Ok(path)
    }

    /// Reads the dump of which a target was made.
    ///
    /// # Errors
    /// There is no such file, or it cannot be read.
    pub(crate) fn read_dump(&self, number: usize) -> Result<Vec<u8>, Error> {
        let path = self.dump_path(number);
        let (directory, name) = Directory::of_file(&path)?;
        Ok(directory.read(name, FILE_BYTES_MAX)?)
    }

    /// Path of the definitions of which a target was made.
    fn definitions_path(&self, number: usize) -> PathBuf {
        self.path.with_extension(format!("{DEFINITIONS_EXTENSION}-{}", number + 1))
    }

    /// Ends the migration: removes the journal and all files beside it.
    pub(crate) fn end(self) -> Result<(), Error> {
        for number in std::iter::once(self.record.number).chain(self.record.others.iter().map(|other| other.number)) {
            let _ = remove(&self.dump_path(number));
            let _ = remove(&self.definitions_path(number));
            let _ = remove(&self.path.with_extension(copying_name(number)));
        }
        for name in [DEFINITIONS_EXTENSION, HOLDING, ORDER] {
            let _ = remove(&self.path.with_extension(name));
        }
        Ok(remove(&self.path)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state_files::*;
    use std::fs;

    fn record() -> Record {
        Record {
            v: 1,
            migration: "abc".into(),
            database: "a/b".into(),
            tenant: "a/b".into(),
            source: "s".into(),
            target: "t".into(),
            number: 0,
            others: Vec::new(),
            capture: Capture::Log,
            phase: Phase::Begun,
            made_database: false,
            made_roles: Vec::new(),
            moved_slots: Vec::new(),
            roles: Roles::Check,
            settings_written: BTreeMap::new(),
            selection: Selection::default(),
            placement: Placement::default(),
            way_back: true,
            claimed: false,
            back_from: 0,
            settled: false,
            served_from: None,
            leads_to: None,
            horizon: 0,
            copy: None,
            refreshed: Vec::new(),
            identities: Vec::new(),
            fenced: None,
            fenced_target: None,
        }
    }

    fn of_three() -> (tempfile::TempDir, Journal) {
        let dir = tempfile::tempdir().unwrap();
        let others = [1, 2].map(|number| OtherTarget::new(number, format!("t{number}")));
        let journal = Journal::begin(dir.path(), Record { others: others.into(), ..record() }).unwrap();
        (dir, journal)
    }

    #[test]
    fn the_next_target_takes_the_place_of_one_that_is_dropped() {
        let (dir, mut journal) = of_three();
        let made_of = Definitions::new();
        journal.record_following(0, &made_of, 0).unwrap();
        journal.record_phase(2, Phase::Copying).unwrap();
        journal.drop_target(1, "slow".into()).unwrap();
        assert_eq!((&journal.record.target[..], journal.record.phase), ("t", Phase::Following));
        journal.drop_target(0, "gone".into()).unwrap();
        let record = &journal.record;
        assert_eq!((&record.target[..], record.made_database, &record.slot()[..]), ("t2", true, "stillpoint_abc_3"));
        assert_eq!(record.phase, Phase::Begun, "it is being copied");
        let dropped: Vec<_> =
            record.others.iter().map(|other| (&other.server[..], other.dropped.as_deref().unwrap())).collect();
        assert_eq!(dropped, [("t", "gone"), ("t1", "slow")]);
        assert_eq!(peek(dir.path(), "a/b").unwrap().as_ref(), Some(record), "all of it is on disk");
        assert!(journal.definitions_of(2).is_err(), "it is not told of what it is made");
        journal.record_following(2, &made_of, 0).unwrap();
        assert_eq!((journal.record.phase, journal.definitions_of(2).unwrap()), (Phase::Following, made_of));
    }

    #[test]
    fn one_that_follows_comes_before_one_that_is_being_copied_until_both_do() {
        let (_dir, mut journal) = of_three();
        let made_of = Definitions::new();
        journal.record_following(2, &made_of, 0).unwrap();
        journal.drop_target(0, "gone".into()).unwrap();
        let record = &journal.record;
        assert_eq!((record.number, record.phase), (2, Phase::Following));
        journal.record_following(1, &made_of, 0).unwrap();
        journal.choose_target(1).unwrap();
        let record = &journal.record;
        assert_eq!((record.number, record.phase), (1, Phase::Following));
        assert!(record.others[1].is_following() && record.is_followed_by(2), "{record:?}");
    }

    #[test]
    fn what_a_copy_told_is_read_while_it_is_fresh() {
        let dir = tempfile::tempdir().unwrap();
        let told = CopyProgress { bytes: 1, bytes_total: 2, bytes_per_s: 3, estimate_s: None };
        assert_eq!(copying(dir.path(), "a/b", 1), None);
        publish_copying(dir.path(), "a/b", 1, &told);
        assert_eq!((copying(dir.path(), "a/b", 1), copying(dir.path(), "a/b", 0)), (Some(told), None));
        let file = File::options()
            .append(true)
            .open(journal_path(dir.path(), "a/b").unwrap().with_extension(copying_name(1)))
            .unwrap();
        file.set_modified(std::time::SystemTime::now() - PROGRESS_AGE_MAX).unwrap();
        assert_eq!(copying(dir.path(), "a/b", 1), None, "the process that wrote it has died");
        remove_copying(dir.path(), "a/b", 1);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_lies_beside_a_journal_is_for_its_owner_alone() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let journal = Journal::begin(&state, record()).unwrap();
        publish_copying(&state, "a/b", 0, &CopyProgress { bytes: 1, bytes_total: 2, bytes_per_s: 3, estimate_s: None });
        // One file that an earlier version made readable for all, and one symbolic link to elsewhere.
        let outside = dir.path().join("outside");
        fs::write(&outside, "stays").unwrap();
        fs::write(journal.dump_path(0), "old").unwrap();
        symlink(&outside, journal.dump_path(1)).unwrap();
        let mode = |path: &Path| fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777;
        for number in [0, 1] {
            // The way pg_dump writes it.
            fs::write(journal.create_dump(number).unwrap(), "new").unwrap();
            assert_eq!(
                (mode(&journal.dump_path(number)), fs::read(journal.dump_path(number)).unwrap()),
                (0o600, b"new".into())
            );
        }
        assert_eq!(fs::read(&outside).unwrap(), b"stays");
        assert_eq!(mode(&state), 0o700);
        for entry in fs::read_dir(&state).unwrap() {
            let path = entry.unwrap().path();
            assert_eq!(mode(&path), 0o600, "{}", path.display());
        }
    }

    #[test]
    fn a_directory_that_another_user_can_change_holds_no_journal() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let (state, link) = (dir.path().join("state"), dir.path().join("link"));
        drop(Journal::begin(&state, record()).unwrap());
        symlink("state", &link).unwrap();
        fs::set_permissions(&state, PermissionsExt::from_mode(0o777)).unwrap();
        for (at, why) in [(&state, "others can write to it"), (&link, "symbolic link")] {
            for refused in [
                peek(at, "a/b").unwrap_err(),
                all(at).unwrap_err(),
                Journal::open(at, "a/b").unwrap_err(),
                Journal::begin(at, record()).unwrap_err(),
            ] {
                assert!(refused.is_refusal() && refused.to_string().contains(why), "{refused}");
            }
        }
    }

    #[test]
    fn a_journal_is_one_process_s_and_survives_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::begin(dir.path(), record()).unwrap();
        journal.update(|record| record.phase = Phase::Following).unwrap();
        assert!(Journal::open(dir.path(), "a/b").unwrap_err().to_string().contains("another process"));
        assert!(Journal::try_open(dir.path(), "a/b").unwrap().is_none());
        drop(journal);
        assert!(Journal::begin(dir.path(), record()).unwrap_err().to_string().contains("already exists"));
        let journal = Journal::open(dir.path(), "a/b").unwrap();
        assert_eq!(journal.record.phase, Phase::Following);
        journal.end().unwrap();
        assert_eq!(peek(dir.path(), "a/b").unwrap(), None);
    }

    fn of(database: &str) -> Record {
        Record { database: database.into(), ..record() }
    }

    /// Names that were one file before, that equal another file's name, or that point to another directory.
    fn names() -> Vec<String> {
        let mut names: Vec<String> = [
            "a'b",
            "a\"b",
            "a=b",
            "a b",
            "a\\b",
            "a\nb",
            "a%b",
            "a%27b",
            "a%2527b",
            "a/b",
            "a.b",
            "a.json",
            "ab",
            "a_b",
            "a-b",
            "A'b",
            "a\u{e4}b",
            "a\u{1f}b",
            "%",
            "%%",
            ".",
            "..",
            "../a",
            "/etc/x",
            "-x",
            "--file=x",
            "host=x dbname=y",
        ]
        .map(str::to_owned)
        .to_vec();
        names.extend(["'".repeat(63), "'".repeat(62), format!("{}b", "'".repeat(62))]);
        names
    }

    #[test]
    fn each_database_has_a_journal_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let begun: Vec<Journal> = names().iter().map(|name| Journal::begin(&state, of(name)).unwrap()).collect();
        drop(begun);
        for name in names() {
            assert_eq!(peek(&state, &name).unwrap().map(|record| record.database), Some(name.clone()));
            publish_copying(
                &state,
                &name,
                0,
                &CopyProgress { bytes: 1, bytes_total: 2, bytes_per_s: 3, estimate_s: None },
            );
            assert!(copying(&state, &name, 0).is_some(), "{name}");
            assert!(copying(&state, &format!("{name}?"), 0).is_none(), "{name}");
        }
        let found: std::collections::BTreeSet<String> =
            all(&state).unwrap().into_iter().map(|record| record.database).collect();
        assert_eq!(found, names().into_iter().collect());
        for name in names() {
            Journal::open(&state, &name).unwrap().end().unwrap();
            remove_copying(&state, &name, 0);
        }
        let left = fs::read_dir(&state).unwrap().map(|entry| entry.unwrap().path());
        assert!(left.into_iter().all(|path| path.extension().is_some_and(|kind| kind == "lock")));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was written elsewhere");
    }

    #[test]
    fn a_file_name_says_which_database_it_is_of() {
        assert_eq!(file_name("a-b_C9"), "a-b_C9");
        assert_eq!(file_name("a'b%.\u{e4}"), "a%27b%25%2E%C3%A4");
        let read = |name: &str| {
            let mut parts = name.split('%');
            let mut bytes = parts.next().unwrap().as_bytes().to_vec();
            for part in parts {
                bytes.push(u8::from_str_radix(&part[..2], 16).unwrap());
                bytes.extend(part[2..].bytes());
            }
            String::from_utf8(bytes).unwrap()
        };
        for name in names() {
            assert_eq!(read(&file_name(&name)), name);
            assert!(file_name(&name).len() <= 189);
        }
    }

    #[test]
    fn a_journal_with_an_old_name_is_found_by_its_database_alone() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path();
        let path = state.join("a%b.json");
        fs::write(&path, serde_json::to_vec(&of("a'b")).unwrap()).unwrap();
        assert_eq!(peek(state, "a\"b").unwrap(), None, "it is of another one, which had the same name");
        assert!(peek(state, "a'b").unwrap().is_some());
        let mut journal = Journal::open(state, "a'b").unwrap();
        journal.update(|record| record.phase = Phase::Following).unwrap();
        assert!(Journal::try_open(state, "a'b").unwrap().is_none(), "another process is working");
        let other = Journal::begin(state, of("a\"b")).unwrap();
        assert!(path.exists(), "it keeps its name while it lasts");
        journal.end().unwrap();
        assert!(!path.exists() && peek(state, "a'b").unwrap().is_none());
        let journal = Journal::begin(state, of("a'b")).unwrap();
        assert!(state.join("a%27b.json").exists());
        drop((journal, other));
    }

    #[test]
    fn a_journal_of_another_database_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path();
        // The old file name of one database that equals the new file name of another.
        fs::write(state.join("a%27b.json"), serde_json::to_vec(&of("a/27b")).unwrap()).unwrap();
        assert!(peek(state, "a/27b").unwrap().is_some());
        for refused in [
            peek(state, "a'b").unwrap_err(),
            Journal::open(state, "a'b").unwrap_err(),
            Journal::begin(state, of("a'b")).unwrap_err(),
            Journal::try_open(state, "a'b").unwrap_err(),
        ] {
            assert!(refused.is_refusal());
            let text = refused.to_string();
            assert!(text.ends_with("a%27b.json is of database \"a/27b\", not of \"a'b\""), "{text}");
        }
        fs::write(state.join("shop.json"), serde_json::to_vec(&of("other")).unwrap()).unwrap();
        assert!(matches!(peek(state, "shop"), Err(Error::ForeignJournal { .. })));
    }
}

//! Definitions: `pg_dump` reads them from the snapshot, `pg_restore` creates them; indexes and constraints follow after the
//! rows.

use crate::archive;
use crate::options::Options;
use crate::selection::LeftOut;
use crate::state_files::FILE_BYTES_MAX;
use crate::{extensions, fence};
use std::collections::HashSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use stillpoint_host::kernel_files;
use stillpoint_host::trusted::Directory;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::replication_objects::PUBLICATIONS;
use stillpoint_migrate_postgres::link::{
    Link, Purpose, Server, ServerError, SessionRights, literal, of_database, session_settings,
};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;

/// Major version of a server, and our role's rights there.
pub(crate) async fn rights(server: &Server) -> Result<SessionRights, Error> {
    Ok(Link::connect(&server.database("postgres"), Purpose::Statements, &[]).await?.rights)
}

/// Dumps definitions, as the snapshot shows them if there is one, from a server on which we have the rights `from`, for one of
/// major version `major`.
pub(crate) async fn dump(
    source: &Server,
    from: SessionRights,
    major: u32,
    snapshot: Option<&str>,
    left_out: &LeftOut,
    into: &Path,
) -> Result<(), Error> {
    let mut command = client("pg_dump", major, source).await?;
    command.env("PGOPTIONS", session_settings::options(from, &[]));
    command.args(["--format=custom", "--schema-only", "--no-subscriptions"]);
    command.args(["--exclude-schema=stillpoint", "--lock-wait-timeout=2000"]);
    command.args(snapshot.map(|snapshot| format!("--snapshot={snapshot}")));
    command.args(left_out.dump_options());
    command.arg("--file").arg(into).arg(format!("--dbname={}", of_database(&source.database)));
    run(command, "pg_dump", "").await?;
    if left_out.is_empty() { Ok(()) } else { edit(into, |bytes| without(bytes, left_out)) }
}

/// Dumps definitions of the source as the snapshot shows them, for a target of major version `major`: without what is left out, and
/// placed as the options say.
pub(crate) async fn dump_source(
    options: &Options,
    from: SessionRights,
    major: u32,
    snapshot: &str,
    left_out: &LeftOut,
    into: &Path,
) -> Result<(), Error> {
    dump(&options.source, from, major, Some(snapshot), left_out, into).await?;
    match &options.placement {
        placement if placement.is_same() => Ok(()),
        placement => edit(into, |bytes| placement.write_into(bytes)),
    }
}

/// Removes what is left out from a dump: pg_dump itself leaves out tables and whole schemas only.
fn without(dump: &[u8], left_out: &LeftOut) -> Result<Vec<u8>, Error> {
    archive::without(dump, &left_out.entries_of(&archive::read(dump)?))
}

/// Replaces a dump in its file.
fn edit(dump: &Path, change: impl FnOnce(&[u8]) -> Result<Vec<u8>, Error>) -> Result<(), Error> {
    let failed = |source| Error::Journal { path: dump.into(), source };
    // A file in memory has no name but that of the process that has it open.
    let is_in_memory = dump.starts_with("/proc");
    let bytes = if is_in_memory {
        kernel_files::bytes(dump).map_err(failed)?
    } else {
        let (directory, name) = Directory::of_file(dump)?;
        directory.read(name, FILE_BYTES_MAX)?
    };
    let changed = change(&bytes)?;
    if is_in_memory {
        return kernel_files::write(dump, changed).map_err(failed);
    }
    let (directory, name) = Directory::of_file(dump)?;
    directory.write_synced(name, &changed).map(drop)?;
    Ok(())
}

/// Application name of sessions that create definitions of a database at a target. A server keeps only 63 bytes of it, and
/// replaces characters that are not ASCII.
fn maker_name(target: &Server) -> String {
    let mut hasher = DefaultHasher::new();
    target.database.hash(&mut hasher);
    format!("{} makes {:016x}", stillpoint_migrate_postgres::link::APPLICATION, hasher.finish())
}

/// SQL condition that finds such sessions among those of a server.
pub(crate) fn makers_condition(target: &Server) -> String {
    format!("application_name = {}", literal(&maker_name(target)))
}

/// Terminates such sessions: a server continues a statement after its client was killed.
pub(crate) async fn terminate_makers(target: &Server, link: &mut Link) -> Result<(), ServerError> {
    let which = makers_condition(target);
    link.query(&format!("SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {which}")).await.map(drop)
}

/// Program that creates definitions.
const RESTORE: &str = "pg_restore";

/// Setting: commits do not wait for the disk; a later commit does, before the migration relies on what was written.
const ASYNCHRONOUS_COMMIT: (&str, &str) = ("synchronous_commit", "off");

/// Settings of sessions that create extensions, whose scripts may rely on triggers of their own. The user's event triggers are
/// not there yet.
const PRE_DATA_SETTINGS: [(&str, &str); 2] = [ASYNCHRONOUS_COMMIT, ("session_replication_role", "origin")];

/// Kinds of entries of a dump's list that are about the database itself.
const OF_DATABASE: [&str; 5] =
    ["DATABASE - ", "DATABASE PROPERTIES - ", "ACL - DATABASE ", "COMMENT - DATABASE ", "SECURITY LABEL - DATABASE "];

/// A definition that a target rejects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RejectedDefinition {
    /// Kind, name and owner, as pg_restore prints them.
    pub(crate) of: String,
    /// First line of the server's error.
    pub(crate) why: String,
}

/// Errors in the output of pg_restore, the first for each entry of its list.
fn rejections(told: &str) -> Vec<RejectedDefinition> {
    let (mut rejections, mut entry, mut is_new) = (Vec::new(), String::new(), true);
    for line in told.lines() {
        if let Some(of) = line.strip_prefix("pg_restore: from TOC entry ") {
            // An entry has: number in the dump, number of its catalog, its own number, and the rest.
            of.splitn(4, ' ').nth(3).unwrap_or(of).clone_into(&mut entry);
            is_new = true;
        } else if let Some(error) = line.strip_prefix("pg_restore: error: ")
            && is_new
        {
            let why = error.strip_prefix("could not execute query: ").unwrap_or(error);
            let why = why.strip_prefix("ERROR:").unwrap_or(why).trim().to_owned();
            rejections.push(RejectedDefinition { of: entry.clone(), why });
            is_new = false;
        }
    }
    rejections
}

/// A dump of definitions, and the target that they are for.
pub(crate) struct Dump<'d> {
    /// Server and database.
    pub(crate) target: &'d Server,
    /// Major version of the target, and our role's rights there.
    pub(crate) rights: SessionRights,
    /// File of the dump.
    pub(crate) file: &'d Path,
}

impl Dump<'_> {
    /// Creates the database with its types, tables and functions, without indexes. Until [`fence::lift_read_only`], sessions of
    /// others cannot write there.
    pub(crate) async fn create(&self) -> Result<(), Error> {
        // pg_restore connects to the database that the dump names by that name, and does not read the name as a connection
        // string.
        let how = ["--create", "--use-list=/dev/stdin", "--exit-on-error"];
        let list = self.entries(&OF_DATABASE).await?;
        run(self.restorer(&how, "postgres", self.pre_data_settings()).await?, RESTORE, &list).await?;
        // Before any extension is there: its background processes would act on rows that clients have on the source.
        fence::make_read_only(self.target).await?;
        self.create_relocated_extensions().await?;
        let how = ["--section=pre-data", "--exit-on-error"];
        let command = self.restorer(&how, &of_database(&self.target.database), self.pre_data_settings()).await?;
        run(command, RESTORE, "").await.map(drop)
    }

    /// The part of [`PRE_DATA_SETTINGS`] that our role may set.
    fn pre_data_settings(&self) -> &'static [(&'static str, &'static str)] {
        if self.rights.may_replicate { &PRE_DATA_SETTINGS } else { &PRE_DATA_SETTINGS[..1] }
    }

    /// Creates extensions that the target has in another schema than the source.
    async fn create_relocated_extensions(&self) -> Result<(), Error> {
        let list = self.entries(&["EXTENSION - "]).await?;
        if list.is_empty() {
            return Ok(());
        }
        let script = self.print(&["--use-list=/dev/stdin", "--file=-"], &list).await?;
        let mut to = Link::connect(self.target, Purpose::Statements, self.pre_data_settings()).await?;
        extensions::create_relocated(&mut to, &script).await
    }

    /// Returns the lines of the dump's list for entries of some kinds.
    async fn entries(&self, kinds: &[&str]) -> Result<String, Error> {
        // Without --create, the list lacks entries about the database itself.
        let list = self.print(&["--create", "--list"], "").await?;
        let is_of_them = |line: &&str| {
            let entry = line.splitn(4, ' ').nth(3).unwrap_or_default();
            kinds.iter().any(|kind| entry.starts_with(kind))
        };
        let list = list.lines().filter(|line| !line.starts_with(';')).filter(is_of_them);
        Ok(list.collect::<Vec<_>>().join("\n"))
    }

    /// Returns a script that creates the database itself, with its settings and rights; it uses the name in the dump.
    pub(crate) async fn of_database_itself(&self) -> Result<String, Error> {
        let list = self.entries(&OF_DATABASE).await?;
        self.print(&["--create", "--use-list=/dev/stdin", "--file=-"], &list).await
    }

    /// Reads the list of the definitions that follow after the rows.
    pub(crate) async fn deferred(&self) -> Result<DeferredDefinitions, Error> {
        Ok(DeferredDefinitions::of(&self.print(&["--section=post-data", "--list"], "").await?))
    }

    /// Creates types, tables and functions in an existing database, and returns those that it rejects.
    pub(crate) async fn attempt(&self) -> Result<Vec<RejectedDefinition>, Error> {
        // The dump's own statement reports why it cannot be created.
        match self.create_relocated_extensions().await {
            Ok(()) | Err(Error::Server(ServerError::Sql { .. })) => {}
            Err(error) => return Err(error),
        }
        self.attempt_with("--section=pre-data", "").await
    }

    /// Creates the entries of a list, as many as possible; returns those that the database rejects.
    pub(crate) async fn attempt_entries(&self, list: &str) -> Result<Vec<RejectedDefinition>, Error> {
        self.attempt_with("--use-list=/dev/stdin", list).await
    }

    /// Creates as many indexes, constraints and triggers as possible in a database without foreign keys; returns those that
    /// it rejects.
    pub(crate) async fn attempt_most(&self, of: &DeferredDefinitions) -> Result<Vec<RejectedDefinition>, Error> {
        self.attempt_entries(&of.most).await
    }

    /// Creates as many foreign keys as possible; returns those that the database rejects.
    pub(crate) async fn attempt_foreign_keys(
        &self,
        of: &DeferredDefinitions,
    ) -> Result<Vec<RejectedDefinition>, Error> {
        self.attempt_entries(&of.foreign_keys).await
    }

    async fn attempt_with(&self, which: &str, list: &str) -> Result<Vec<RejectedDefinition>, Error> {
        // Without --verbose, pg_restore does not report which entry an error belongs to.
        let settings = [ASYNCHRONOUS_COMMIT, ("lc_messages", "C")];
        let command = self.restorer(&["--verbose", which], &of_database(&self.target.database), &settings).await?;
        let output = run_to_end(command, RESTORE, list).await?;
        let told = String::from_utf8_lossy(&output.stderr);
        let rejections = rejections(&told);
        if output.status.success() || !rejections.is_empty() {
            Ok(rejections)
        } else {
            Err(program_error(RESTORE, &told))
        }
    }

    /// Creates indexes, constraints and triggers, several at a time; foreign keys only if `too`. If `alone`, only one process
    /// of the server does the work and leaves the other processors to clients.
    pub(crate) async fn complete(
        &self,
        of: &DeferredDefinitions,
        jobs: usize,
        too: bool,
        alone: bool,
    ) -> Result<(), Error> {
        let jobs = if alone { 1 } else { jobs };
        let alone = alone.then_some(("max_parallel_maintenance_workers", "0"));
        let settings: Vec<_> = [ASYNCHRONOUS_COMMIT].into_iter().chain(alone).collect();
        let list = if too { format!("{}{}", of.most, of.foreign_keys) } else { of.most.clone() };
        self.restore(&list, &format!("--jobs={jobs}"), &settings).await
    }

    /// Creates all foreign keys or none; they are on disk when this returns.
    pub(crate) async fn create_foreign_keys(&self, of: &DeferredDefinitions, alone: bool) -> Result<(), Error> {
        let settings = alone.then_some(("max_parallel_workers_per_gather", "0"));
        self.restore(&of.foreign_keys, "--single-transaction", settings.as_slice()).await
    }

    /// Creates the entries of a list.
    async fn restore(&self, list: &str, how: &str, settings: &[(&str, &str)]) -> Result<(), Error> {
        let how = ["--use-list=/dev/stdin", "--exit-on-error", how];
        let command = self.restorer(&how, &of_database(&self.target.database), settings).await?;
        run(command, RESTORE, list).await.map(drop)
    }

    /// Makes a command that creates definitions on the target, from a session with `settings`.
    async fn restorer(&self, how: &[&str], database: &str, settings: &[(&str, &str)]) -> Result<Command, ServerError> {
        let mut command = client(RESTORE, self.rights.major, self.target).await?;
        command.args(how).arg(format!("--dbname={database}")).arg("--").arg(self.file);
        command.env("PGAPPNAME", maker_name(self.target));
        command.env("PGOPTIONS", session_settings::options(self.rights, settings));
        Ok(command)
    }

    /// Returns what `pg_restore` prints about the dump, without a server.
    async fn print(&self, how: &[&str], input: &str) -> Result<String, Error> {
        let mut command = Command::new(program(RESTORE, self.rights.major));
        command.args(how).arg("--").arg(self.file);
        run(command, RESTORE, input).await
    }
}

/// Definitions that follow after the rows: lines of the dump's list, those of foreign keys and their comments apart.
pub(crate) struct DeferredDefinitions {
    most: String,
    foreign_keys: String,
}

impl DeferredDefinitions {
    /// Splits the list, without our own publications. The comment on an entry follows directly after it.
    fn of(list: &str) -> DeferredDefinitions {
        let (mut most, mut foreign_keys, mut of_key) = (String::new(), String::new(), false);
        for line in list.lines().filter(|line| !line.starts_with(';')) {
            // A line has: number in the dump, number of its catalog, its own number, and its kind.
            let is = |kind: &str| line.splitn(4, ' ').nth(3).is_some_and(|entry| entry.starts_with(kind));
            if is("PUBLICATION ") && line.split(' ').any(|word| PUBLICATIONS.contains(&word)) {
                continue;
            }
            of_key = is("FK CONSTRAINT ") || of_key && is("COMMENT ");
            let into = if of_key { &mut foreign_keys } else { &mut most };
            into.push_str(line);
            into.push('\n');
        }
        DeferredDefinitions { most, foreign_keys }
    }

    /// Leaves out what an earlier command has made.
    pub(crate) fn keep_missing(&mut self, missing: &HashSet<u32>) {
        self.most = missing_entries(missing, &self.most);
        self.foreign_keys = missing_entries(missing, &self.foreign_keys);
    }

    /// Returns true if there are foreign keys.
    pub(crate) fn has_foreign_keys(&self) -> bool {
        !self.foreign_keys.is_empty()
    }
}

/// Lines of a dump's list for entries that are `missing` on the target: an earlier command made the others.
fn missing_entries(missing: &HashSet<u32>, list: &str) -> String {
    let is_missing = |line: &&str| {
        line.split(';').next().and_then(|id| id.trim().parse::<u32>().ok()).is_some_and(|id| missing.contains(&id))
    };
    list.lines().filter(is_missing).map(|line| format!("{line}\n")).collect()
}

/// Makes a command for a program that connects to `server`, and to no other server that the environment names.
async fn client(name: &str, major: u32, server: &Server) -> Result<Command, ServerError> {
    let mut command = Command::new(program(name, major));
    for variable in CONNECTION_VARIABLES {
        command.env_remove(variable);
    }
    command.envs(server.environment().await?);
    Ok(command)
}

/// Variables that would direct such a program to another server or database than ours.
const CONNECTION_VARIABLES: [&str; 4] = ["PGHOSTADDR", "PGSERVICE", "PGDATABASE", "PGTARGETSESSIONATTRS"];

/// Path of the program of one major version as Debian installs it, or of the next newer one, or else its name for a search on
/// the path.
fn program(name: &str, major: u32) -> PathBuf {
    let installed = (major..major + 10).map(|major| PathBuf::from(format!("/usr/lib/postgresql/{major}/bin/{name}")));
    installed.into_iter().find(|path| path.exists()).unwrap_or_else(|| name.into())
}

/// Reason why no program here can dump a server of this major version; `None` if one can.
pub(crate) async fn cannot_dump(major: u32) -> Option<String> {
    let mut command = Command::new(program("pg_dump", major));
    command.arg("--version");
    let told = match run(command, "pg_dump", "").await {
        Ok(told) => told,
        Err(error) => return Some(error.to_string()),
    };
    let version = told.split_whitespace().find_map(|word| word.split('.').next()?.parse::<u32>().ok());
    let is_old = version.is_none_or(|version| version < major);
    is_old.then(|| format!("pg_dump of version {major} or newer is not installed here"))
}

/// Runs a program with `input`, and returns what it prints.
async fn run(command: Command, program: &str, input: &str) -> Result<String, Error> {
    let output = run_to_end(command, program, input).await?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(program_error(program, &String::from_utf8_lossy(&output.stderr)))
}

/// Makes an error from the output of a program that failed.
fn program_error(program: &str, told: &str) -> Error {
    let why = told.lines().find(|line| line.contains("error")).unwrap_or(told.trim()).to_owned();
    Error::Program { program: program.into(), why }
}

/// Runs a program with `input` to its end.
async fn run_to_end(mut command: Command, program: &str, input: &str) -> Result<std::process::Output, Error> {
    // Its messages are parsed, so they must be in English.
    command.env("LC_ALL", "C");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let failed = |why: String| Error::Program { program: program.into(), why };
    let mut child = command.spawn().map_err(|error| failed(error.to_string()))?;
    let mut stdin = child.stdin.take();
    let give = async move {
        // A program that does not read its input ends anyway, and reports the reason.
        if let Some(stdin) = &mut stdin {
            let _ = stdin.write_all(input.as_bytes()).await;
        }
    };
    let ((), output) = tokio::join!(give, child.wait_with_output());
    output.map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_definition_that_fails_is_told_once() {
        let told = "pg_restore: while PROCESSING TOC:\n\
                    pg_restore: from TOC entry 215; 1259 16386 VIEW v me\n\
                    pg_restore: error: could not execute query: ERROR:  column s.gone does not exist\nLINE 2: s.gone\n\
                    Command was: CREATE VIEW public.v AS\n SELECT s.gone;\n\n\
                    pg_restore: error: could not execute query: ERROR:  relation \"public.v\" does not exist\n\
                    Command was: ALTER TABLE public.v OWNER TO me;\n\n\
                    pg_restore: from TOC entry 216; 0 0 ACL VIEW v me\n\
                    pg_restore: error: could not execute query: ERROR:  relation \"public.v\" does not exist\n\
                    pg_restore: warning: errors ignored on restore: 3\n";
        let fault = |of: &str, why: &str| RejectedDefinition { of: of.into(), why: why.into() };
        assert_eq!(
            rejections(told),
            [
                fault("VIEW v me", "column s.gone does not exist"),
                fault("ACL VIEW v me", "relation \"public.v\" does not exist"),
            ]
        );
        assert_eq!(
            rejections("pg_restore: error: could not open input file"),
            [fault("", "could not open input file")]
        );
    }

    #[test]
    fn foreign_keys_are_told_apart_with_their_comments() {
        let list = ";\n; Archive created at 2026-11-23\n;\n3215; 2606 16397 CONSTRAINT public FK CONSTRAINT t_pkey me\n\
                    3333; 0 0 COMMENT public CONSTRAINT t_pkey ON t me\n3216; 2606 16404 FK CONSTRAINT public u u_t_fkey me\n\
                    3334; 0 0 COMMENT public CONSTRAINT u_t_fkey ON u me\n3217; 1259 16500 INDEX public more me\n\
                    3335; 0 0 COMMENT public INDEX more me\n";
        let behind = DeferredDefinitions::of(list);
        let numbers = |lines: &str| lines.lines().map(|line| line[..4].to_owned()).collect::<Vec<_>>();
        assert_eq!(numbers(&behind.foreign_keys), ["3216", "3334"]);
        assert_eq!(numbers(&behind.most), ["3215", "3333", "3217", "3335"]);
    }
}

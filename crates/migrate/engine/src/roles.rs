//! Roles of the source that a database needs: compared with those of the target, and created there on request.
//!
//! A role goes with the database if a definition names it (an owner, a right, a setting in the database), if it may log in and
//! connect and is not a superuser, or if a role that goes is its member. Roles that the target already has stay unchanged,
//! except for those that this migration created: they are updated from the source until clients change sides, and dropped with
//! the target's database if the migration is aborted.
//!
//! ```text
//!  copy: missing roles created     before each pause: created ones updated     in the pause: marks
//!        |  undo: dropped                                                                      |  differ: clients go on, and retry
//! ```
//!
//! Passwords are sent as the verifiers that the source stores. The session that sends them turns off everything that could log
//! or show its statements.

use crate::fence;
use crate::report::{Finding, Verdict};
use serde::{Deserialize, Serialize};
use std::fmt;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_postgres::link::{Link, Row, Server, ServerError, SessionRights, identifier, literal, text};

/// Handling of the roles that go with the database.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Roles {
    /// Create the roles that the target lacks, with attributes, password, memberships and settings.
    Create,
    /// Compare roles, and report differences.
    #[default]
    Check,
    /// Check only roles that definitions require.
    Ignore,
}

/// Verifier of a password; no message shows it.
#[derive(Clone, PartialEq, Eq)]
struct Verifier(String);

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Verifier")
    }
}

/// Password of a role, as far as it is known.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Password {
    /// Our role may not read it.
    Unreadable,
    None,
    Stored(Verifier),
}

impl Password {
    fn differs(&self, other: &Password) -> bool {
        *self != Password::Unreadable && *other != Password::Unreadable && self != other
    }
}

/// Membership in another role. Servers before version 16 have no separate INHERIT and SET options for each membership.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Membership {
    role: String,
    admin: bool,
    inherits: Option<bool>,
    may_set: Option<bool>,
}

impl Membership {
    fn is_like(&self, other: &Membership) -> bool {
        let same = |one: Option<bool>, other: Option<bool>| one.is_none() || other.is_none() || one == other;
        (&self.role, self.admin) == (&other.role, other.admin)
            && same(self.inherits, other.inherits)
            && same(self.may_set, other.may_set)
    }

    /// Options of the GRANT that creates it.
    fn options(&self) -> String {
        match (self.inherits, self.may_set) {
            (Some(inherits), Some(may_set)) => {
                format!(" WITH ADMIN {}, INHERIT {inherits}, SET {may_set}", self.admin)
            }
            _ if self.admin => " WITH ADMIN OPTION".into(),
            _ => String::new(),
        }
    }
}

impl fmt::Display for Membership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.role)?;
        f.write_str(if self.admin { " with admin option" } else { "" })?;
        f.write_str(if self.inherits == Some(false) { " without inherit option" } else { "" })?;
        f.write_str(if self.may_set == Some(false) { " without set option" } else { "" })
    }
}

/// A role of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Role {
    name: String,
    /// Keywords of CREATE ROLE, the same number of them for each role.
    attributes: Vec<String>,
    connection_limit: String,
    valid_until: String,
    password: Password,
    memberships: Vec<Membership>,
    /// Settings in all databases, as `name=value`, in the order in which they were made.
    settings: Vec<String>,
    comment: Option<String>,
    /// True if a definition of the database names it.
    is_named: bool,
    /// True if it goes with the database.
    is_moved: bool,
    /// True if it may log in and connect to the database.
    can_connect: bool,
}

/// Expiry of passwords that do not expire.
const NO_EXPIRY: &str = "infinity";

/// Query for all roles except the server's own; only superusers may read passwords.
fn roles_sql(database: &str, is_superuser: bool) -> String {
    let (readable, password) = if is_superuser { ("pg_authid", "r.rolpassword") } else { ("pg_roles", "NULL") };
    format!(
        include_str!("roles.sql"),
        database = literal(database),
        expiry = NO_EXPIRY,
        readable = readable,
        password = password
    )
}

/// Query for the mark of roles, and for a role that is no superuser.
const AUTHID_MARK_SQL: &str =
    "SELECT 'pg_authid', count(*), sum(hashtextextended(concat(ctid, ' ', xmin), 0)) FROM pg_authid";
const ROLES_MARK_SQL: &str =
    "SELECT 'pg_authid', count(*), sum(hashtextextended(to_jsonb(r)::text, 0)) FROM pg_roles r";

/// Query for marks of the other catalogs that hold roles: a different mark means that a row was added, removed or changed.
const MARKS_SQL: &str = "\
     UNION ALL SELECT 'pg_auth_members', count(*), sum(hashtextextended(concat(ctid, ' ', xmin), 0)) FROM \
     pg_auth_members \
     UNION ALL SELECT 'pg_db_role_setting', count(*), sum(hashtextextended(concat(ctid, ' ', xmin), 0)) \
     FROM pg_db_role_setting WHERE setdatabase = 0";

/// Reads the marks of a server's roles.
pub(crate) async fn marks(link: &mut Link) -> Result<Vec<Row>, ServerError> {
    let roles = if link.rights.is_superuser { AUTHID_MARK_SQL } else { ROLES_MARK_SQL };
    link.query(&format!("{roles} {MARKS_SQL}")).await
}

/// Names of the catalogs whose marks differ.
pub(crate) fn outdated(then: &[Row], now: &[Row]) -> Vec<String> {
    now.iter().filter(|mark| !then.contains(mark)).map(|mark| text(mark, 0)).collect()
}

async fn read(link: &mut Link, database: &str) -> Result<Vec<Role>, Error> {
    let is_superuser = link.rights.is_superuser;
    let rows = link.query(&roles_sql(database, is_superuser)).await?;
    let broken = |why: &serde_json::Error| link.receiver.protocol(format!("a broken list of roles: {why}"));
    let role = |row: &Row| -> Result<Role, Error> {
        let value = |at: usize| row.get(at).cloned().flatten();
        Ok(Role {
            name: text(row, 0),
            attributes: text(row, 1).split(' ').map(str::to_owned).collect(),
            connection_limit: text(row, 2),
            valid_until: text(row, 3),
            password: match value(4) {
                Some(stored) => Password::Stored(Verifier(stored)),
                None if is_superuser => Password::None,
                None => Password::Unreadable,
            },
            memberships: serde_json::from_str(&text(row, 5)).map_err(|error| broken(&error))?,
            settings: serde_json::from_str(&text(row, 6)).map_err(|error| broken(&error))?,
            comment: value(7),
            is_named: text(row, 8) == "t",
            is_moved: text(row, 9) == "t",
            can_connect: text(row, 10) == "t",
        })
    };
    rows.iter().map(role).collect()
}

fn of<'r>(roles: &'r [Role], name: &str) -> Option<&'r Role> {
    roles.iter().find(|role| role.name == name)
}

impl Role {
    /// Differences of the target's role, for messages; of a password it shows only that it differs.
    fn differences(&self, there: &Role) -> Vec<String> {
        let mut each: Vec<String> = Vec::new();
        let mut differ = |kind: &str, here: &str, there: &str| {
            if here != there {
                each.push(format!("{kind}{there} instead of {here}"));
            }
        };
        for (here, there) in self.attributes.iter().zip(&there.attributes) {
            differ("", here, there);
        }
        differ("CONNECTION LIMIT ", &self.connection_limit, &there.connection_limit);
        differ("VALID UNTIL ", &self.valid_until, &there.valid_until);
        let alike = self.memberships.len() == there.memberships.len()
            && self.memberships.iter().zip(&there.memberships).all(|(here, there)| here.is_like(there));
        if !alike {
            differ("memberships ", &join_or_none(&self.memberships), &join_or_none(&there.memberships));
        }
        let settings = |of: &Role| {
            let mut settings = of.settings.clone();
            settings.sort();
            join_or_none(&settings)
        };
        differ("settings ", &settings(self), &settings(there));
        if self.password.differs(&there.password) {
            each.push("a different password".into());
        }
        each
    }

    fn password_sql(&self) -> String {
        match &self.password {
            Password::Unreadable => String::new(),
            Password::None => " PASSWORD NULL".into(),
            Password::Stored(Verifier(stored)) => format!(" PASSWORD {}", literal(stored)),
        }
    }

    /// Statements that create the role as `maker` on the server.
    fn create_sql(&self, maker: SessionRights) -> String {
        let until = if self.valid_until == NO_EXPIRY { String::new() } else { self.valid_until_sql() };
        let (name, attributes, limit) = (identifier(&self.name), self.attributes.join(" "), &self.connection_limit);
        // Only a superuser can keep the server from logging the statement.
        let password = if maker.is_superuser { self.password_sql() } else { String::new() };
        let mut sql = format!("CREATE ROLE {name} WITH {attributes} CONNECTION LIMIT {limit}{password}{until}; ");
        if !maker.is_superuser {
            // What it owns can then be given to it.
            let options = if maker.major >= 16 { " WITH INHERIT TRUE, SET TRUE" } else { "" };
            sql += &format!("GRANT {name} TO CURRENT_USER{options}; ");
        }
        sql
    }

    fn valid_until_sql(&self) -> String {
        format!(" VALID UNTIL {}", literal(&self.valid_until))
    }

    /// Statements that make the target's role equal to this one, without those of [`Role::equip_sql`].
    fn alter_sql(&self, there: &Role) -> String {
        let name = identifier(&self.name);
        // No statement removes an expiry, so one that was never set is not touched.
        let until = if self.valid_until == there.valid_until { String::new() } else { self.valid_until_sql() };
        let pairs = self.attributes.iter().zip(&there.attributes);
        let attributes: String =
            pairs.filter(|(here, there)| here != there).map(|(here, _)| format!(" {here}")).collect();
        let password = if self.password.differs(&there.password) { self.password_sql() } else { String::new() };
        let limit = &self.connection_limit;
        let mut sql = format!(
            "ALTER ROLE {name} WITH{attributes} CONNECTION LIMIT {limit}{password}{until}; ALTER ROLE {name} RESET ALL; "
        );
        for membership in &there.memberships {
            sql += &format!("REVOKE {} FROM {name}; ", identifier(&membership.role));
        }
        sql
    }

    /// Statements that give a role of the target the memberships, settings and comment of this one.
    fn equip_sql(&self) -> String {
        let name = identifier(&self.name);
        let mut sql = String::new();
        for membership in &self.memberships {
            sql += &format!("GRANT {} TO {name}{}; ", identifier(&membership.role), membership.options());
        }
        for setting in &self.settings {
            let (setting, value) = setting.split_once('=').unwrap_or((setting, ""));
            sql += &format!("ALTER ROLE {name} SET {} TO {}; ", identifier(setting), setting_value_sql(setting, value));
        }
        let comment = self.comment.as_ref().map_or_else(|| "NULL".into(), |comment| literal(comment));
        sql + &format!("COMMENT ON ROLE {name} IS {comment}; ")
    }
}

fn join_or_none(all: &[impl ToString]) -> String {
    let all: Vec<String> = all.iter().map(ToString::to_string).collect();
    if all.is_empty() { "none".into() } else { all.join(", ") }
}

/// Settings whose values are lists of quoted names: SET takes each name as a separate value, but the value of another setting
/// as one text.
const LIST_SETTINGS: &str = "local_preload_libraries search_path session_preload_libraries shared_preload_libraries \
    temp_tablespaces unix_socket_directories";

/// The value of a setting in the syntax of SET.
pub(crate) fn setting_value_sql(setting: &str, value: &str) -> String {
    if LIST_SETTINGS.split(' ').all(|known| known != setting) {
        return literal(value);
    }
    let names = names(value);
    if names.is_empty() { literal("") } else { names.iter().map(|name| literal(name)).collect::<Vec<_>>().join(", ") }
}

/// Splits such a list into names: each is quoted, or ends at a comma.
fn names(list: &str) -> Vec<String> {
    let (mut names, mut name, mut quoted) = (Vec::new(), String::new(), false);
    let mut letters = list.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' if quoted && letters.peek() == Some(&'"') => name.extend(letters.next()),
            '"' => quoted = !quoted,
            ',' if !quoted => names.push(std::mem::take(&mut name)),
            letter if letter.is_whitespace() && !quoted => {}
            letter => name.push(letter),
        }
    }
    if !list.is_empty() {
        names.push(name);
    }
    names
}

/// Settings that a server knows but does not list.
const UNLISTED_SETTINGS: [&str; 2] = ["role", "session_authorization"];

/// Adds findings about the source's roles.
///
/// # Errors
///
/// An error if a server cannot be asked.
pub(crate) async fn compare(
    here: &mut Link,
    there: &mut Link,
    source: &Server,
    wanted: Roles,
    findings: &mut Vec<Finding>,
) -> Result<(), Error> {
    let (ours, theirs) = (read(here, &source.database).await?, read(there, &source.database).await?);
    let maker = there.rights;
    compare_parameter_rights(here, there, findings).await?;
    let known = there.query("SELECT name FROM pg_settings").await?;
    let known: Vec<String> = known.iter().map(|row| text(row, 0)).collect();
    let mut find = |role: &Role, verdict: Verdict, note: &str| {
        findings.push(Finding::new("role", &role.name, verdict, note));
    };
    for role in &ours {
        match (wanted, of(&theirs, &role.name)) {
            (Roles::Create, None) if role.is_moved => {
                let password = match &role.password {
                    Password::Unreadable => "without its password, which only a superuser may read",
                    Password::Stored(_) if !maker.is_superuser => {
                        "without its password, because only a superuser can keep the target from logging it"
                    }
                    Password::None | Password::Stored(_) => "password",
                };
                let note = format!(
                    "created on the target with its attributes, {password}, memberships ({}) and settings",
                    join_or_none(&role.memberships)
                );
                find(role, Verdict::Moved, &note);
                let settings = role.settings.iter().filter_map(|setting| setting.split_once('=')).map(|(name, _)| name);
                let unknown =
                    |name: &&str| !known.iter().any(|known| known == name) && !UNLISTED_SETTINGS.contains(name);
                for setting in settings.filter(|name| !name.contains('.')).filter(unknown) {
                    find(role, Verdict::Refused, &format!("the target does not know its setting {setting}"));
                }
            }
            (Roles::Create, None) if role.can_connect => {
                let note = "a superuser that no definition names: it is not created on the target";
                find(role, Verdict::NotMoved, note);
            }
            (_, None) if role.is_named => {
                let note = "it owns objects or has rights on them, and the target lacks it; --roles create creates it";
                find(role, Verdict::Refused, note);
            }
            (Roles::Check, None) if role.can_connect => {
                find(role, Verdict::NotMoved, "it may log in, and the target lacks it; --roles create creates it");
            }
            (Roles::Create | Roles::Check, Some(other)) if role.is_moved || role.can_connect => {
                let each = role.differences(other);
                if !each.is_empty() {
                    find(role, Verdict::NotMoved, &format!("on the target it has {}", each.join("; ")));
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Adds findings about rights on settings that the target lacks: they are of the whole server.
async fn compare_parameter_rights(here: &mut Link, there: &mut Link, findings: &mut Vec<Finding>) -> Result<(), Error> {
    /// First version that has such rights.
    const SINCE: u32 = 15;
    if here.rights.major < SINCE || there.rights.major < SINCE {
        return Ok(());
    }
    // Those of the server's own superuser are in each list.
    let all = "SELECT p.parname, CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(a.grantee)) END, \
               a.privilege_type FROM pg_parameter_acl p, aclexplode(p.paracl) a WHERE a.grantee <> 10 ORDER BY 1, 2, 3";
    let theirs = there.query(all).await?;
    for row in here.query(all).await?.iter().filter(|row| !theirs.contains(row)) {
        let (name, grantee, right) = (text(row, 0), text(row, 1), text(row, 2));
        let note = format!("a right of the whole server; try there: GRANT {right} ON PARAMETER {name} TO {grantee}");
        findings.push(Finding::new("right on a setting", name, Verdict::NotMoved, note));
    }
    Ok(())
}

/// Statement that prevents later statements of its session from being logged and shown.
const DISABLE_LOGGING_SQL: &str = "SELECT set_config(name, silent.value, false) FROM (VALUES ('log_statement', 'none'), \
     ('log_min_duration_statement', '-1'), ('log_min_duration_sample', '-1'), ('log_duration', 'off'), \
     ('log_transaction_sample_rate', '0'), ('log_min_error_statement', 'panic'), ('debug_print_parse', 'off'), \
     ('debug_print_raw_parse', 'off'), ('debug_print_rewritten', 'off'), ('debug_print_plan', 'off'), \
     ('track_activities', 'off'), ('pg_stat_statements.track', 'none'), ('pg_stat_statements.track_utility', 'off'), \
     ('pgaudit.log', 'none'), ('pgaudit.role', '')) AS silent (name, value) JOIN pg_settings USING (name)";

/// Creates all roles on the target that go with the source's database and are missing, and updates those that were `made`
/// before. Before a role is created, `keep` records the names of all created roles.
///
/// # Errors
///
/// An error if a server cannot be asked or refuses a role, or if `keep` fails.
pub(crate) async fn create_and_update(
    source: &Server,
    target: &Server,
    made: &[String],
    mut keep: impl FnMut(&[String]) -> Result<(), Error>,
) -> Result<(), Error> {
    let (mut here, mut there) = (fence::connect_beside(source).await?, fence::connect_beside(target).await?);
    let ours = read(&mut here, &source.database).await?;
    let theirs = read(&mut there, &target.database).await?;
    let missing: Vec<&Role> = ours.iter().filter(|role| role.is_moved && of(&theirs, &role.name).is_none()).collect();
    let changed = |role: &&Role| made.contains(&role.name);
    let changed = ours.iter().filter(changed).filter_map(|role| Some((role, of(&theirs, &role.name)?)));
    let changed = changed.filter(|(role, other)| !role.differences(other).is_empty() || role.comment != other.comment);
    let changed: Vec<(&Role, &Role)> = changed.collect();
    let is_gone = |name: &&String| of(&ours, name).is_none() && of(&theirs, name).is_some();
    let gone: Vec<&String> = made.iter().filter(is_gone).collect();
    let mut sql = String::new();
    gone.iter().for_each(|name| sql += &format!("DROP ROLE {}; ", identifier(name)));
    missing.iter().for_each(|role| sql += &role.create_sql(there.rights));
    changed.iter().for_each(|(role, other)| sql += &role.alter_sql(other));
    let whole = missing.iter().copied().chain(changed.iter().map(|(role, _)| *role));
    whole.for_each(|role| sql += &role.equip_sql());
    if sql.is_empty() {
        return Ok(());
    }
    // Others send no secrets.
    if there.rights.is_superuser {
        there.query(DISABLE_LOGGING_SQL).await?;
    }
    let all: Vec<String> = made.iter().cloned().chain(missing.iter().map(|role| role.name.clone())).collect();
    keep(&all)?;
    let names = missing.iter().chain(changed.iter().map(|(role, _)| role)).map(|role| role.name.as_str());
    let doing =
        format!("creating roles {}", names.chain(gone.iter().map(|name| name.as_str())).collect::<Vec<_>>().join(", "));
    // One transaction: all statements take effect, or none.
    let done = there.query_secret(&sql, &doing).await;
    if let Err(ServerError::Sql { .. }) = done {
        keep(made)?;
    }
    done?;
    Ok(())
}

/// Names of the roles that [`create_and_update`] would create.
///
/// # Errors
///
/// An error if a server cannot be asked.
pub(crate) async fn missing(source: &Server, target: &Server) -> Result<Vec<String>, Error> {
    let (mut here, mut there) = (fence::connect_beside(source).await?, fence::connect_beside(target).await?);
    let theirs = read(&mut there, &target.database).await?;
    let ours = read(&mut here, &source.database).await?.into_iter();
    Ok(ours.filter(|role| role.is_moved && of(&theirs, &role.name).is_none()).map(|role| role.name).collect())
}

/// Drops roles that a migration created on a server, except for those that another object there depends on now.
///
/// # Errors
///
/// An error if the server cannot be asked.
pub(crate) async fn drop_created(link: &mut Link, made: &[String]) -> Result<(), ServerError> {
    let statement = |names: &[String]| {
        let names: Vec<String> = names.iter().map(|name| identifier(name)).collect();
        format!("SET client_min_messages = error; DROP ROLE IF EXISTS {}", names.join(", "))
    };
    if made.is_empty() {
        return Ok(());
    }
    // Together, because a role may depend on the membership of another.
    let dropped = link.query(&statement(made)).await;
    if !is_needed(&dropped) {
        return dropped.map(drop);
    }
    for role in made {
        let dropped = link.query(&statement(std::slice::from_ref(role))).await;
        match is_needed(&dropped) {
            true => tracing::warn!(role, "a role that the migration created is kept: another object depends on it"),
            false => drop(dropped?),
        }
    }
    Ok(())
}

fn is_needed(dropped: &Result<Vec<Row>, ServerError>) -> bool {
    dropped.as_ref().is_err_and(|error| error.sqlstate() == Some("2BP01"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_names_are_given_name_by_name() {
        for (list, wanted) in [
            ("\"$user\", public", "'$user', 'public'"),
            ("\"a, \"\"b\"\"\",c", "'a, \"b\"', 'c'"),
            ("\"\"", "''"),
            ("", "''"),
            ("o'clock", "'o''clock'"),
        ] {
            assert_eq!(setting_value_sql("search_path", list), wanted, "{list}");
        }
        assert_eq!(setting_value_sql("DateStyle", "SQL, DMY"), "'SQL, DMY'");
    }

    #[test]
    fn memberships_of_older_servers_are_like_those_of_newer_ones() {
        let of = |admin, inherits, may_set| Membership { role: "staff".into(), admin, inherits, may_set };
        let (old, new) = (of(false, None, None), of(false, Some(true), Some(false)));
        assert!(old.is_like(&new) && new.is_like(&old) && !old.is_like(&of(true, None, None)));
        assert!(!new.is_like(&of(false, Some(true), Some(true))));
        assert_eq!(new.options(), " WITH ADMIN false, INHERIT true, SET false");
        assert_eq!((old.options(), of(true, None, None).options()), (String::new(), " WITH ADMIN OPTION".into()));
        assert_eq!(join_or_none(&[new]), "staff without set option");
    }

    #[test]
    fn no_message_shows_a_verifier() {
        assert_eq!(format!("{:?}", Some(Verifier("SCRAM-SHA-256$4096:x".into()))), "Some(Verifier)");
    }
}

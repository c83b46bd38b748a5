//! Definitions: all contents of a database except the rows of its tables, compared with those at a later moment.
//!
//! The server lists its catalogs, and each one is compared, even if this code does not know it, except for [`NO_DEFINITIONS`].
//! A row of a catalog counts as part of an object: a column as part of its table, a comment as part of the object it describes.
//! [`read`] computes a checksum for each object, by name. That takes about a second for ten thousand tables, which is too long
//! for a pause. For the pause there are marks, one for each catalog: they show that a row was added, removed or changed since a
//! [`CatalogState`], but not of which object.
//!
//! ```text
//!  snapshot of the copy        before the pause                     in the pause, connections disabled
//!  read: names, checksums ==   State: names, checksums, marks   ==   marks
//!                          |  differs: ends by name            |  differs: clients go on, and another one reports
//! ```
//!
//! A role that is no superuser may not read all catalogs: of these it compares what is shown to it ([`READABLE_PARTS`]).
//!
//! Not compared: temporary and TOAST relations, our own schema and publications, columns that the server changes in its own
//! maintenance (VACUUM, ANALYZE, REINDEX, TRUNCATE), and rows of shared catalogs that belong to other databases.

use crate::fence::OWN_READ_ONLY;
use crate::selection::{LeftOut, Selection};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::LazyLock;
use stillpoint_migrate_apply::Error;
use stillpoint_migrate_apply::replication_objects::PUBLICATIONS;
use stillpoint_migrate_postgres::link::{Link, Row, text};

/// Catalogs whose rows define nothing.
const NO_DEFINITIONS: [&str; 6] = [
    // Large objects are moved like rows.
    "pg_largeobject",
    "pg_largeobject_metadata",
    // Results of ANALYZE.
    "pg_statistic",
    "pg_statistic_ext_data",
    // Owners, rights and tablespaces again, which are compared in the catalogs that define them.
    "pg_shdepend",
    // Progress of subscriptions of all databases.
    "pg_replication_origin",
];

/// Columns that change while the definition stays: the server's own bookkeeping, and those that our fence changes and restores.
const BOOKKEEPING_COLUMNS: [(&str, &str); 7] = [
    (
        "pg_class",
        "relfilenode relpages reltuples relallvisible relallfrozen reltoastrelid relhasindex relhasrules \
         relhastriggers relhassubclass relrewrite relfrozenxid relminmxid",
    ),
    ("pg_attribute", "attcacheoff atthasmissing attmissingval"),
    ("pg_index", "indcheckxmin indisready indislive"),
    ("pg_constraint", "conindid"),
    ("pg_database", "datallowconn datacl datfrozenxid datminmxid"),
    ("pg_db_role_setting", "setconfig"),
    ("pg_subscription_rel", "srsubstate srsublsn"),
];

/// Columns that [`READABLE_PARTS`] do not show, and the place of a role's password, which they show as asterisks.
const HIDDEN_COLUMNS: [&str; 1] = ["rolpassword"];

/// Columns that name the object a row is part of, in catalogs whose rows have numbers of their own.
const OWNER_COLUMNS: [&str; 9] =
    ["adrelid", "tgrelid", "ev_class", "polrelid", "enumtypid", "prpubid", "pnpubid", "amopfamily", "amprocfamily"];

/// Catalogs of objects that `pg_identify_object` can name.
const NAMEABLE_CATALOGS: &str = "pg_am pg_attrdef pg_authid pg_cast pg_class pg_collation pg_constraint pg_conversion \
    pg_database pg_default_acl pg_event_trigger pg_extension pg_foreign_data_wrapper pg_foreign_server pg_language \
    pg_largeobject pg_namespace pg_opclass pg_operator pg_opfamily pg_parameter_acl pg_policy pg_proc pg_publication \
    pg_rewrite pg_statistic_ext pg_subscription pg_tablespace pg_transform pg_trigger pg_ts_config pg_ts_dict \
    pg_ts_parser pg_ts_template pg_type pg_user_mapping";

/// Catalogs whose rows the fence or a TRUNCATE writes again without a new definition: their marks are made from the contents of
/// the rows.
const CONTENT_MARKED_CATALOGS: [&str; 3] = ["pg_class", "pg_database", "pg_db_role_setting"];

/// Shared catalogs whose objects belong to one database.
const OF_DATABASE: [&str; 2] = ["pg_database", "pg_subscription"];

/// SQL expression for settings without the effect of a fence: a fence keeps the database's own `default_transaction_read_only`
/// under another name.
static SETTINGS_SQL: LazyLock<String> = LazyLock::new(|| {
    let (name, of_fence) = ("default_transaction_read_only", format!("{OWN_READ_ONLY}="));
    let is_of_fence = |setting: &str| format!("starts_with({setting}, '{of_fence}')");
    format!(
        "ARRAY(SELECT own FROM unnest(x.setconfig) s, LATERAL (SELECT CASE WHEN {} THEN '{name}' || \
         nullif(substr(s, {}), '') WHEN starts_with(s, '{name}=') AND EXISTS (SELECT FROM unnest(x.setconfig) f \
         WHERE {}) \
         THEN NULL ELSE s END) o (own) WHERE own IS NOT NULL ORDER BY 1)",
        is_of_fence("s"),
        of_fence.len() + 1,
        is_of_fence("f"),
    )
});

/// The same for a role that is no superuser: the database has no such setting of its own then.
const SETTINGS_WITHOUT_FENCE_SQL: &str = "ARRAY(SELECT s FROM unnest(x.setconfig) s WHERE x.setrole <> 0 OR x.setdatabase = 0 OR \
     NOT starts_with(s, 'default_transaction_read_only=') ORDER BY 1)";

/// Owner of an object's lifetime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Belonging {
    /// It is created and dropped with the database.
    Database,
    /// It belongs to an extension, which is reported by name.
    Extension,
    /// It is a role, compared only while it owns something in the database or has rights there.
    Role,
    /// It belongs to the cluster.
    Cluster,
}

/// One defined object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Definition {
    sum: String,
    belonging: Belonging,
}

/// Definitions by kind and name.
pub(crate) type Definitions = BTreeMap<String, Definition>;

/// A column of a catalog.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Column {
    name: String,
    /// Catalog that its values refer to; empty if they refer to none.
    refers_to: String,
    /// True if it holds numbers of functions; the server writes them as names, which is slow.
    of_functions: bool,
}

/// A catalog of a server.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Catalog {
    name: String,
    /// True if it holds rows of all databases.
    shared: bool,
    /// True if our role is a superuser.
    as_superuser: bool,
    /// True if our role may read all of it, and so the place and writer of each row too.
    is_readable: bool,
    /// Columns that our role may read.
    columns: Vec<Column>,
}

/// Catalogs that only superusers may read, and what others read in their place; passwords and some options are hidden there.
const READABLE_PARTS: [(&str, &str); 2] = [
    ("pg_authid", "pg_roles"),
    ("pg_user_mapping", "(SELECT umid AS oid, umuser, srvid AS umserver, umoptions FROM pg_user_mappings)"),
];

impl Catalog {
    /// Lists all catalogs of the server, without those that have no definitions.
    async fn all(link: &mut Link) -> Result<Vec<Catalog>, Error> {
        let rows = link
            .query(
                "SELECT c.relname, c.relisshared, a.attname, coalesce(k.pktable::text, ''), \
                 a.atttypid = 'regproc'::regtype, has_table_privilege(c.oid, 'SELECT'), \
                 has_column_privilege(c.oid, a.attnum, 'SELECT') FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid \
                 LEFT JOIN pg_get_catalog_foreign_keys() k ON k.fktable = c.oid AND k.fkcols = \
                 ARRAY[a.attname::text] \
                 WHERE c.relkind = 'r' AND c.oid < 16384 AND c.relnamespace = 'pg_catalog'::regnamespace \
                 AND a.attnum > 0 AND NOT a.attisdropped ORDER BY c.relname, a.attnum",
            )
            .await?;
        let mut catalogs: Vec<Catalog> = Vec::new();
        for row in rows.iter().filter(|row| !NO_DEFINITIONS.contains(&text(row, 0).as_str())) {
            let name = text(row, 0);
            let is = |at: usize| text(row, at) == "t";
            let column = Column { name: text(row, 2), refers_to: text(row, 3), of_functions: is(4) };
            let has_readable_part = READABLE_PARTS.iter().any(|(known, _)| *known == name);
            if !is(6) && !has_readable_part
                || has_readable_part && !is(5) && HIDDEN_COLUMNS.contains(&column.name.as_str())
            {
                continue;
            }
            match catalogs.last_mut().filter(|last| last.name == name) {
                Some(last) => last.columns.push(column),
                None => catalogs.push(Catalog {
                    name,
                    shared: is(1),
                    as_superuser: link.rights.is_superuser,
                    is_readable: is(5),
                    columns: vec![column],
                }),
            }
        }
        Ok(catalogs)
    }

    fn settings_sql(&self) -> &str {
        if self.as_superuser { &SETTINGS_SQL } else { SETTINGS_WITHOUT_FENCE_SQL }
    }

    /// Relation or query that its rows are read from.
    fn place(&self) -> &str {
        let part = READABLE_PARTS.iter().find(|(name, _)| !self.is_readable && *name == self.name);
        part.map_or(&self.name, |(_, part)| part)
    }

    fn has(&self, column: &str) -> bool {
        self.columns.iter().any(|known| known.name == column)
    }

    /// The column that names the object a row is part of.
    fn owner(&self) -> Option<&Column> {
        let first = self.columns.first().filter(|first| !self.has("oid") && !first.refers_to.is_empty());
        self.columns.iter().find(|column| OWNER_COLUMNS.contains(&column.name.as_str())).or(first)
    }

    /// The column that names the schema of the objects.
    fn schema(&self) -> Option<&str> {
        self.columns.iter().find(|column| column.refers_to == "pg_namespace").map(|column| column.name.as_str())
    }

    /// SQL expressions for the object that a row is part of: the number of its catalog, and its number there.
    fn object_sql(&self) -> [String; 2] {
        let of = |catalog: &str, column: &str| [class(catalog), format!("x.{column}::oid")];
        match self.name.as_str() {
            // Row types of tables and array types belong to their table or element type.
            "pg_type" => {
                let relation = "coalesce(e.typrelid, x.typrelid)";
                [
                    format!("CASE {relation} WHEN 0 THEN {} ELSE {} END", class("pg_type"), class("pg_class")),
                    format!("CASE {relation} WHEN 0 THEN coalesce(e.oid, x.oid) ELSE {relation} END"),
                ]
            }
            "pg_constraint" => [
                format!("CASE x.conrelid WHEN 0 THEN {} ELSE {} END", class("pg_type"), class("pg_class")),
                "CASE x.conrelid WHEN 0 THEN x.contypid ELSE x.conrelid END".into(),
            ],
            // A setting for all roles counts as one of this database.
            "pg_db_role_setting" => [
                format!(
                    "CASE WHEN x.setdatabase = 0 AND x.setrole <> 0 THEN {} ELSE {} END",
                    class("pg_authid"),
                    class("pg_database")
                ),
                "CASE WHEN x.setdatabase = 0 AND x.setrole <> 0 THEN x.setrole ELSE (SELECT oid FROM here) END".into(),
            ],
            "pg_auth_members" => of("pg_authid", "member"),
            // The members of an extension count as its definition.
            "pg_depend" => {
                ["class", "obj"].map(|part| format!("CASE x.deptype WHEN 'e' THEN x.ref{part}id ELSE x.{part}id END"))
            }
            "pg_largeobject" => of("pg_largeobject", "loid"),
            "pg_largeobject_metadata" => of("pg_largeobject", "oid"),
            _ if self.has("objoid") => ["x.classoid".into(), "x.objoid".into()],
            _ => match self.owner() {
                Some(owner) => of(&owner.refers_to, &owner.name),
                None if self.has("oid") => [class(&self.name), "x.oid".into()],
                None => [class(&self.name), "0::oid".into()],
            },
        }
    }

    /// SQL conditions for the rows that are definitions.
    fn conditions_sql(&self, is_all: bool) -> String {
        let roles = "(SELECT role FROM roles)";
        let here = "(SELECT oid FROM here)";
        let mut conditions = match self.name.as_str() {
            "pg_authid" => vec![format!("x.oid IN {roles}")],
            "pg_auth_members" => vec![format!("x.member IN {roles}")],
            "pg_database" => vec![format!("x.oid = {here}")],
            "pg_subscription" => vec![format!("x.subdbid = {here}")],
            // Foreign keys are made again by a role that may not quiet them, first on each partition: their numbers and states say
            // nothing.
            "pg_trigger" if !self.as_superuser => vec!["NOT x.tgisinternal".into()],
            "pg_constraint" if !self.as_superuser => vec![
                "(x.contype <> 'f' OR (SELECT c.relkind FROM pg_class c WHERE c.oid = x.conrelid) = 'r' AND NOT EXISTS \
                 (SELECT FROM pg_constraint up WHERE up.oid = x.conparentid AND up.conrelid = x.conrelid))"
                    .into(),
            ],
            "pg_db_role_setting" => vec![
                format!("(x.setdatabase = {here} OR x.setdatabase = 0 AND (x.setrole = 0 OR x.setrole IN {roles}))"),
                format!("cardinality({}) > 0", self.settings_sql()),
            ],
            "pg_shdescription" | "pg_shseclabel" => vec![format!(
                "CASE x.classoid WHEN {} THEN x.objoid = {here} WHEN {} THEN x.objoid IN {roles} ELSE true END",
                class("pg_database"),
                class("pg_authid")
            )],
            // System columns belong to their table.
            "pg_attribute" => vec!["(x.attnum > 0 OR x.attacl IS NOT NULL)".into()],
            // Other dependencies follow from the definitions of the objects.
            "pg_depend" => {
                let both = ["x.classid", "x.refclassid"].map(|column| format!("{column} = {}", class("pg_class")));
                vec![format!("(x.deptype IN ('e', 'x') OR {})", both.join(" AND "))]
            }
            _ => Vec::new(),
        };
        let [class, object] = match self.schema() {
            Some(schema) => [class("pg_namespace"), format!("x.{schema}")],
            None if self.has("objid") => ["x.classid".into(), "x.objid".into()],
            None => self.object_sql(),
        };
        if !self.shared {
            conditions
                .push(format!("NOT EXISTS (SELECT FROM left_out l WHERE l.class = {class} AND l.object = {object})"));
        }
        // A selection leaves out single objects of a schema.
        if !self.shared && !is_all {
            let is_left_out = |[class, object]: [String; 2]| {
                format!("NOT EXISTS (SELECT FROM left_out l WHERE l.class = {class} AND l.object = {object})")
            };
            conditions.push(is_left_out(self.object_sql()));
            conditions.extend(self.has("oid").then(|| is_left_out(["x.tableoid".into(), "x.oid".into()])));
        }
        if self.has("classoid") {
            conditions.push("x.classoid <> 'pg_largeobject'::regclass".into());
        }
        if conditions.is_empty() { "true".into() } else { conditions.join(" AND ") }
    }

    /// SQL expression for all that a row says about its object; `with_connect` includes CONNECT rights, which a fence removes.
    fn content_sql(&self, with_connect: bool) -> String {
        let passing =
            BOOKKEEPING_COLUMNS.iter().find(|(name, _)| *name == self.name).map_or("", |(_, columns)| columns);
        let owner = self.owner().map(|owner| owner.name.as_str());
        let says = |column: &&Column| {
            let name = column.name.as_str();
            let is_address = ["oid", "objid", "classid", "objoid", "classoid"].contains(&name) || Some(name) == owner;
            !is_address && passing.split(' ').all(|passing| passing != name)
        };
        let value = |column: &Column| {
            let number = if column.of_functions { "::oid" } else { "" };
            format!("x.{}{number}", column.name)
        };
        let mut columns: Vec<String> = self.columns.iter().filter(says).map(value).collect();
        if self.name == "pg_constraint" && !self.as_superuser {
            let key = "replace(pg_get_constraintdef(x.oid), ' NOT VALID', '')";
            let all = columns.join(", ");
            columns = vec![format!(
                "CASE x.contype WHEN 'f' THEN ROW(x.conname, x.conrelid, {key})::text ELSE ROW({all})::text END"
            )];
        }
        match self.name.as_str() {
            "pg_database" => {
                let kinds = if with_connect { "" } else { " WHERE a.privilege_type <> 'CONNECT'" };
                columns.push(format!(
                    "ARRAY(SELECT a::text FROM aclexplode(coalesce(x.datacl, acldefault('d', x.datdba))) a{kinds} \
                     ORDER BY 1)"
                ));
            }
            "pg_db_role_setting" => columns.push(self.settings_sql().to_owned()),
            // ALTER TABLE may write all rows again, and leave the column's type as it was (`TYPE text USING upper(a)`). Then the
            // only trace is that the column was written.
            "pg_attribute" => columns.push("x.xmin".into()),
            "pg_depend" => {
                columns.push("CASE x.deptype WHEN 'e' THEN ROW(x.classid, x.objid, x.objsubid)::text END".into());
            }
            _ => {}
        }
        format!("hashtextextended(ROW({})::text, 0)", columns.join(", "))
    }

    /// Joins what [`Self::object_sql`] needs.
    fn elements_sql(&self, is_unused: bool) -> &'static str {
        match self.name.as_str() {
            "pg_type" if !is_unused => " LEFT JOIN pg_type e ON e.oid = x.typelem AND e.typarray = x.oid",
            _ => "",
        }
    }

    /// Query for each row: catalog and number of its object, and the row's contents.
    fn definitions(&self, is_all: bool) -> String {
        let ([class, object], content, place) = (self.object_sql(), self.content_sql(true), self.place());
        let elements = self.elements_sql(false);
        format!("SELECT {class}, {object}, {content} FROM {place} x{elements} WHERE {}", self.conditions_sql(is_all))
    }

    /// Query for the catalog's mark: the number of rows, and a checksum of rows whose writer is not older than `oldest`, the
    /// oldest transaction that was running then. A row is identified by its place and its writer, independent of other rows.
    fn mark(&self, oldest: u32, is_all: bool) -> String {
        let sum = if CONTENT_MARKED_CATALOGS.contains(&self.name.as_str()) || !self.is_readable {
            format!("sum({})", self.content_sql(false))
        } else {
            format!(
                "sum(hashtextextended(concat(x.ctid, ' ', x.xmin), 0)) \
                 FILTER (WHERE age(x.xmin) BETWEEN 0 AND age('{oldest}'::xid))"
            )
        };
        // For TOAST relations their number is enough: excluding them everywhere takes as long as all the rest.
        let toast = if self.name == "pg_class" { " AND x.relnamespace <> 'pg_toast'::regnamespace" } else { "" };
        let (name, place, elements) = (&self.name, self.place(), self.elements_sql(is_all));
        let conditions = self.conditions_sql(is_all);
        format!("SELECT '{name}', count(*), {sum} FROM {place} x{elements} WHERE {conditions}{toast}")
    }

    /// Query for catalog and number of objects that are not compared, in `schemas` or our own; `None` if the catalog has no
    /// such objects.
    fn uncompared_query(&self, schemas: &str) -> Option<String> {
        let schemas = format!("(SELECT oid FROM pg_namespace WHERE nspname ~ '{schemas}' OR nspname = 'stillpoint')");
        let name = &self.name;
        let condition = match name.as_str() {
            "pg_namespace" => format!("x.oid IN {schemas}"),
            "pg_publication" => format!("x.pubname IN ('{}')", PUBLICATIONS.join("', '")),
            _ => format!("x.{} IN {schemas}", self.schema()?),
        };
        self.has("oid").then(|| format!("SELECT {}, x.oid FROM {name} x WHERE {condition}", class(name)))
    }
}

/// SQL expression for the number of a catalog.
fn class(name: &str) -> String {
    format!("'{name}'::regclass::oid")
}

/// Patterns for schemas: of temporary objects, and of temporary objects and TOAST tables.
const TEMPORARY: &str = "^pg_(temp|toast_temp)_";
const TEMPORARY_OR_TOAST: &str = "^pg_(temp_|toast)";

/// Combines a query about each catalog into one that sees all at the same moment. Returns its WITH part and the rest.
fn of_all(
    catalogs: &[Catalog],
    schemas: &str,
    left_out: &LeftOut,
    question: impl Fn(&Catalog) -> String,
) -> (String, String) {
    let uncompared = catalogs.iter().filter_map(|catalog| catalog.uncompared_query(schemas));
    let uncompared: Vec<String> = uncompared.chain(left_out.objects_sql()).collect();
    let with = format!(
        "WITH here (oid) AS MATERIALIZED (SELECT oid FROM pg_database WHERE datname = current_database()), \
         left_out (class, object) AS MATERIALIZED ({}), \
         roles (role) AS MATERIALIZED (SELECT s.refobjid FROM pg_shdepend s WHERE s.dbid = (SELECT oid FROM here) \
         AND s.refclassid = 'pg_authid'::regclass AND NOT EXISTS (SELECT FROM left_out l WHERE l.class = s.classid \
         AND l.object = s.objid) UNION SELECT datdba FROM pg_database WHERE datname = current_database() \
         UNION SELECT setrole FROM pg_db_role_setting WHERE setdatabase = (SELECT oid FROM here) AND setrole <> 0)",
        uncompared.join(" UNION ALL ")
    );
    (with, catalogs.iter().map(question).collect::<Vec<_>>().join(" UNION ALL "))
}

/// Reads all selected definitions of the database, as one statement sees them.
pub(crate) async fn read(link: &mut Link, selection: &Selection) -> Result<Definitions, Error> {
    let catalogs = Catalog::all(link).await?;
    selection.look(link, async |link, left_out| definitions(link, &catalogs, left_out).await).await
}

async fn definitions(link: &mut Link, catalogs: &[Catalog], left_out: &LeftOut) -> Result<Definitions, Error> {
    let is_all = left_out.is_empty();
    let (with, rows) = of_all(catalogs, TEMPORARY_OR_TOAST, left_out, |catalog| catalog.definitions(is_all));
    let classes = |is: &dyn Fn(&&Catalog) -> bool| {
        let classes: Vec<String> = catalogs.iter().filter(is).map(|catalog| class(&catalog.name)).collect();
        classes.join(", ")
    };
    let named = classes(&|catalog| NAMEABLE_CATALOGS.split(' ').any(|name| name == catalog.name));
    let cluster = classes(&|catalog| catalog.shared && !OF_DATABASE.contains(&catalog.name.as_str()));
    let sql = format!(
        "{with} SELECT concat_ws(' ', coalesce(n.type, t.class::regclass::text), coalesce(n.identity, \
         t.object::text)), \
         t.sum, CASE WHEN t.class = {role} THEN 'role' WHEN t.class IN ({cluster}) THEN 'cluster' WHEN EXISTS \
         (SELECT FROM pg_depend d WHERE d.classid = t.class AND d.objid = t.object AND d.deptype = 'e') \
         THEN 'extension' ELSE 'database' END \
         FROM (SELECT class, object, sum(said)::text FROM ({rows}) AS r (class, object, said) GROUP BY class, \
         object) AS t (class, object, sum), \
         LATERAL pg_identify_object(CASE WHEN t.class IN ({named}) THEN t.class END, t.object, 0) AS n ORDER BY 1, 2",
        role = class("pg_authid")
    );
    let mut definitions = Definitions::new();
    for row in link.query(&sql).await? {
        let belonging = match text(&row, 2).as_str() {
            "role" => Belonging::Role,
            "cluster" => Belonging::Cluster,
            "extension" => Belonging::Extension,
            _ => Belonging::Database,
        };
        let (name, sum) = (text(&row, 0), text(&row, 1));
        // Two objects with the same name become one entry with both checksums.
        let same = definitions.entry(name).or_insert_with(|| Definition { sum: String::new(), belonging });
        same.sum = format!("{} {sum}", same.sum).trim_start().into();
    }
    Ok(definitions)
}

/// Names of all objects that were added, removed or changed, as messages.
fn differences(
    then: &Definitions,
    now: &Definitions,
    comes: impl Fn(Belonging) -> bool,
    changes: impl Fn(Belonging) -> bool,
) -> Vec<String> {
    let told = now.iter().filter_map(|(name, definition)| match then.get(name) {
        None => comes(definition.belonging).then(|| format!("new {name}")),
        Some(before) => (before != definition && changes(definition.belonging)).then(|| format!("changed {name}")),
    });
    let gone = then.iter().filter(|(name, definition)| !now.contains_key(*name) && comes(definition.belonging));
    told.chain(gone.map(|(name, _)| format!("dropped {name}"))).collect()
}

/// Changes that are missing in a copy of the database made from the definitions `then`.
pub(crate) fn changes(then: &Definitions, now: &Definitions) -> Vec<String> {
    differences(then, now, |belonging| matches!(belonging, Belonging::Database | Belonging::Cluster), |_| true)
}

/// Definitions that would be dropped with the database and are new or changed since `then`.
pub(crate) fn changes_since(then: &Definitions, now: &Definitions) -> Vec<String> {
    let dropped_with_it = |belonging| matches!(belonging, Belonging::Database | Belonging::Extension);
    differences(then, now, |belonging| belonging == Belonging::Database, dropped_with_it)
}

/// Makes an error of the changes, if there are any; it lists only the first of many.
pub(crate) fn fail_if_changed(mut changes: Vec<String>) -> Result<(), Error> {
    const LISTED_MAX: usize = 30;
    if changes.is_empty() {
        return Ok(());
    }
    if changes.len() > LISTED_MAX {
        let more = format!("{} more", changes.len() - LISTED_MAX);
        changes.truncate(LISTED_MAX);
        changes.push(more);
    }
    Err(Error::SchemaChanged(changes.join("; ")))
}

/// Definitions at one moment, with marks that show later changes at little cost. It is valid only on the connection that took
/// it.
pub(crate) struct CatalogState {
    pub(crate) definitions: Definitions,
    marks: Vec<Row>,
}

/// Query for the marks. It is prepared beforehand, because planning takes longer than executing it.
const MARKS_SQL: &str = "EXECUTE stillpoint_marks";

impl CatalogState {
    /// Takes a look; only once on each connection.
    pub(crate) async fn take(link: &mut Link, selection: &Selection) -> Result<CatalogState, Error> {
        link.query("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY").await?;
        let catalogs = Catalog::all(link).await?;
        let left_out = selection.left_out(link).await?;
        let definitions = definitions(link, &catalogs, &left_out).await?;
        // A subtransaction has its own number, and a snapshot does not show if that has ended. So every row whose writer is not
        // older than the oldest running transaction is compared one by one.
        let oldest = link.text("SELECT pg_snapshot_xmin(pg_current_snapshot())").await?;
        let oldest =
            oldest.parse::<u64>().map_err(|_| link.receiver.protocol(format!("`{oldest}` as a transaction number")))?;
        let is_all = left_out.is_empty();
        let (with, marks) = of_all(&catalogs, TEMPORARY, &left_out, |catalog| catalog.mark(oldest as u32, is_all));
        link.query(&format!("PREPARE stillpoint_marks AS {with} {marks}")).await?;
        let marks = link.query(MARKS_SQL).await?;
        link.query("COMMIT").await?;
        Ok(CatalogState { definitions, marks })
    }

    /// Returns the catalogs in which a row was added, removed or changed since; `link` must be the connection that took the
    /// look.
    pub(crate) async fn outdated(&self, link: &mut Link) -> Result<Vec<String>, Error> {
        let now = link.query(MARKS_SQL).await?;
        Ok(now.iter().filter(|mark| !self.marks.contains(mark)).map(|mark| text(mark, 0)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use stillpoint_migrate_postgres::link::{Purpose, Server};
    use stillpoint_testing::postgresql::{Cluster, NEWER_MAJOR, available, newer_available};

    const SETUP: &str = "CREATE TABLE goods (id serial PRIMARY KEY, note text, price numeric); CREATE SEQUENCE \
                         tickets; CREATE FUNCTION e() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'; \
         CREATE FUNCTION t() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; \
         CREATE TYPE mood AS ENUM ('ok'); CREATE FOREIGN DATA WRAPPER far; CREATE TABLE parts (a int) PARTITION BY \
         LIST (a)";

    /// Statements that define something, and the message expected for each.
    const DEFINING: &[(&str, &str)] = &[
        ("ALTER DATABASE shop SET work_mem = '5MB'", "changed database shop"),
        ("ALTER ROLE guest IN DATABASE shop SET work_mem = '5MB'", "changed database shop"),
        ("ALTER ROLE ALL SET work_mem = '7MB'", "changed database shop"),
        ("ALTER DATABASE shop CONNECTION LIMIT 99", "changed database shop"),
        ("GRANT CREATE ON DATABASE shop TO guest", "changed database shop"),
        ("GRANT CONNECT ON DATABASE shop TO guest", "changed database shop"),
        ("COMMENT ON DATABASE shop IS 'x'", "changed database shop"),
        ("GRANT CREATE ON SCHEMA public TO guest", "changed schema public"),
        ("ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO guest", "new default acl for role postgres on tables"),
        ("CREATE TEXT SEARCH CONFIGURATION words (COPY = simple)", "new text search configuration public.words"),
        (
            "ALTER TEXT SEARCH CONFIGURATION words DROP MAPPING FOR word",
            "changed text search configuration public.words",
        ),
        ("CREATE TEXT SEARCH DICTIONARY d (TEMPLATE = simple)", "new text search dictionary public.d"),
        (
            "CREATE TEXT SEARCH PARSER p (START = prsd_start, GETTOKEN = prsd_nexttoken, END = prsd_end, \
             LEXTYPES = prsd_lextype)",
            "new text search parser public.p",
        ),
        ("CREATE TEXT SEARCH TEMPLATE l (LEXIZE = dsimple_lexize)", "new text search template public.l"),
        ("CREATE COLLATION c (locale = 'C')", "new collation public.c"),
        (
            "CREATE OPERATOR === (LEFTARG = int, RIGHTARG = int, FUNCTION = int4eq)",
            "new operator public.===(integer,integer)",
        ),
        ("CREATE OPERATOR FAMILY f USING btree", "new operator family public.f USING btree"),
        (
            "ALTER OPERATOR FAMILY f USING btree ADD OPERATOR 1 < (int4, int8), FUNCTION 1 btint48cmp(int4, int8)",
            "changed operator family public.f USING btree",
        ),
        (
            "CREATE OPERATOR CLASS o FOR TYPE int4 USING hash AS OPERATOR 1 =, FUNCTION 1 hashint4(int4)",
            "new operator class public.o USING hash",
        ),
        ("CREATE SERVER there FOREIGN DATA WRAPPER far", "new server there"),
        ("CREATE USER MAPPING FOR guest SERVER there", "new user mapping guest on server there"),
        ("CREATE FOREIGN TABLE afar (a int) SERVER there", "new foreign table public.afar"),
        ("CREATE FOREIGN DATA WRAPPER farther", "new foreign-data wrapper farther"),
        ("CREATE STATISTICS s ON id, note FROM goods", "new statistics object public.s"),
        ("ALTER SEQUENCE tickets INCREMENT 5", "changed sequence public.tickets"),
        ("ALTER SEQUENCE tickets OWNED BY goods.id", "changed sequence public.tickets"),
        ("CREATE PUBLICATION p FOR TABLE goods", "new publication p"),
        ("CREATE PUBLICATION s FOR TABLES IN SCHEMA public", "new publication s"),
        ("CREATE SCHEMA more", "new schema more"),
        ("CREATE CAST (mood AS int) WITH INOUT", "new cast (public.mood AS integer)"),
        ("COMMENT ON TABLE goods IS 'x'", "changed table public.goods"),
        ("COMMENT ON COLUMN goods.note IS 'x'", "changed table public.goods"),
        ("ALTER TABLE goods ALTER note SET DEFAULT 'x'", "changed table public.goods"),
        ("ALTER TABLE goods ALTER note SET STATISTICS 7", "changed table public.goods"),
        ("ALTER TABLE goods ADD CHECK (price > 0)", "changed table public.goods"),
        ("CREATE TRIGGER t BEFORE INSERT ON goods EXECUTE FUNCTION t()", "changed table public.goods"),
        ("CREATE POLICY p ON goods", "changed table public.goods"),
        ("GRANT SELECT ON goods TO guest", "changed table public.goods"),
        ("GRANT SELECT (note) ON goods TO guest", "changed table public.goods"),
        ("CREATE INDEX by_note ON goods (note)", "new index public.by_note"),
        ("CREATE VIEW seen AS SELECT * FROM goods", "new view public.seen"),
        ("CREATE TABLE heir () INHERITS (goods)", "new table public.heir"),
        ("CREATE TABLE part PARTITION OF parts DEFAULT", "new table public.part"),
        ("DROP TABLE parts", "dropped table public.parts"),
        ("ALTER TYPE mood ADD VALUE 'bad'", "changed type public.mood"),
        ("CREATE TYPE span AS RANGE (subtype = int)", "new type public.span"),
        ("CREATE AGGREGATE total (int) (SFUNC = int4pl, STYPE = int)", "new aggregate public.total(integer)"),
        ("CREATE FUNCTION two() RETURNS int LANGUAGE sql AS 'SELECT 2'", "new function public.two()"),
        ("REVOKE EXECUTE ON FUNCTION pg_sleep FROM PUBLIC", "changed function pg_catalog.pg_sleep(double precision)"),
        ("CREATE CONVERSION c FOR 'LATIN1' TO 'UTF8' FROM iso8859_1_to_utf8", "new conversion public.c"),
        ("CREATE LANGUAGE l HANDLER plpgsql_call_handler", "new language l"),
        (
            "CREATE TRANSFORM FOR int LANGUAGE sql (FROM SQL WITH FUNCTION prsd_lextype(internal), \
             TO SQL WITH FUNCTION int4recv(internal))",
            "new transform for integer on language sql",
        ),
        ("CREATE ACCESS METHOD heap2 TYPE TABLE HANDLER heap_tableam_handler", "new access method heap2"),
        ("CREATE EXTENSION citext", "new extension citext"),
        ("ALTER EXTENSION citext DROP FUNCTION replace(citext, citext, citext)", "changed extension citext"),
        ("ALTER ROLE guest VALID UNTIL '2040-01-01'", "changed role guest"),
        ("ALTER ROLE guest SET work_mem = '6MB'", "changed role guest"),
        ("GRANT pg_monitor TO guest", "changed role guest"),
        ("ALTER TABLESPACE pg_default SET (random_page_cost = 2)", "changed tablespace pg_default"),
        ("GRANT SET ON PARAMETER work_mem TO guest", "new parameter ACL work_mem"),
        (
            "CREATE SUBSCRIPTION s CONNECTION 'dbname=nowhere' PUBLICATION p WITH (connect = false)",
            "new subscription s",
        ),
        // Definitions that need a module of the server, or another server.
        (
            "SET allow_system_table_mods = on; INSERT INTO pg_seclabel VALUES ('goods'::regclass, \
             'pg_class'::regclass, 0, 'p', 'x')",
            "changed table public.goods",
        ),
        (
            "SET allow_system_table_mods = on; INSERT INTO pg_shseclabel SELECT oid, 'pg_database'::regclass, 'p', \
             'x' FROM pg_database WHERE datname = 'shop'",
            "changed database shop",
        ),
        (
            "SET allow_system_table_mods = on; INSERT INTO pg_init_privs VALUES ('goods'::regclass, \
             'pg_class'::regclass, \
             0, 'e', '{=r/postgres}'); INSERT INTO pg_subscription_rel SELECT oid, 'goods'::regclass, 'r' FROM \
             pg_subscription",
            "changed table public.goods",
        ),
        ("CREATE EVENT TRIGGER e ON ddl_command_end EXECUTE FUNCTION e()", "new event trigger e"),
    ];

    /// Statements of servers and clients that define nothing.
    const PASSING_BY: [&str; 10] = [
        "SELECT lo_from_bytea(4711, 'x'); COMMENT ON LARGE OBJECT 4711 IS 'x'",
        "ANALYZE",
        "VACUUM",
        "TRUNCATE goods",
        "SELECT nextval('tickets')",
        "CREATE TEMP TABLE passing (a serial PRIMARY KEY, b text DEFAULT 'x' CHECK (b <> '')); COMMENT ON TABLE \
         passing IS 'x'",
        "CREATE TEMP VIEW passing AS SELECT 1 AS a",
        "CREATE TYPE pg_temp.passing AS ENUM ('x'); CREATE FUNCTION pg_temp.f() RETURNS int LANGUAGE sql AS 'SELECT \
         1'",
        "SET ROLE other; CREATE TEMP TABLE passing (a int)",
        "INSERT INTO goods (note) VALUES ('x'); BEGIN; CREATE TABLE passing (a int); ROLLBACK",
    ];

    async fn shop(cluster: &Cluster) -> Link {
        let server = Server::parse("source", &cluster.conninfo("shop"), None).unwrap();
        Link::connect(&server, Purpose::Statements, &[("max_parallel_workers_per_gather", "0")]).await.unwrap()
    }

    fn cluster(major: Option<u32>) -> Cluster {
        let settings = ["wal_level=logical", "autovacuum=off"];
        let cluster = major.map_or_else(|| Cluster::start(&settings), |major| Cluster::of_major(major, &settings));
        for sql in ["CREATE ROLE guest; CREATE ROLE other", "CREATE DATABASE elsewhere", "CREATE DATABASE shop"] {
            cluster.sql("postgres", sql);
        }
        cluster.sql("shop", SETUP);
        cluster
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn every_definition_is_reported_by_name_and_no_catalog_is_left_out() {
        if !available() {
            return;
        }
        let cluster = cluster(None);
        let (mut seen, mut untold) = (BTreeSet::new(), Vec::new());
        for &(sql, name) in DEFINING {
            let mut link = shop(&cluster).await;
            let look = CatalogState::take(&mut link, &Selection::default()).await.unwrap();
            assert_eq!(look.outdated(&mut link).await.unwrap(), Vec::<String>::new(), "before {sql}");
            cluster.sql("shop", sql);
            let outdated = look.outdated(&mut link).await.unwrap();
            let told = changes(&look.definitions, &read(&mut link, &Selection::default()).await.unwrap());
            // The fence removes and restores this one; it is compared when connections are disabled.
            let marked = !outdated.is_empty() || sql.starts_with("GRANT CONNECT");
            if !marked || !told.iter().any(|told| told == name) {
                untold.push(format!("{sql}: {told:?}, in {outdated:?}"));
            }
            seen.extend(outdated);
        }
        assert_eq!(untold, Vec::<String>::new());
        // A catalog without a statement in the list is missing here.
        let there = "SELECT relname FROM pg_class WHERE relnamespace = 11 AND relkind = 'r' ORDER BY relname";
        let there: BTreeSet<String> = cluster.sql("shop", there).lines().map(str::to_owned).collect();
        let kept: BTreeSet<String> = seen.iter().cloned().chain(NO_DEFINITIONS.map(str::to_owned)).collect();
        assert_eq!(kept, there, "a change of each catalog was seen");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_defines_nothing_is_no_change() {
        if !available() {
            return;
        }
        let cluster = cluster(None);
        let mut link = shop(&cluster).await;
        let look = CatalogState::take(&mut link, &Selection::default()).await.unwrap();
        for sql in PASSING_BY {
            // Compared while its session exists, and afterwards.
            let mut psql = cluster.client("psql");
            psql.args(["-X", "-q", "-d", "shop", "-c", sql, "-c", "SELECT 'ready', pg_sleep(600)"]);
            let mut session = psql.stdout(std::process::Stdio::null()).spawn().unwrap();
            let slept = "SELECT pid FROM pg_stat_activity WHERE query ~ 'pg_sleep' AND pid <> pg_backend_pid() AND \
                         state = 'active'";
            let pid = stillpoint_testing::wait::until("a session to be done", || {
                let pid = cluster.sql("postgres", slept);
                assert!(session.try_wait().unwrap().is_none(), "{sql} fails");
                (!pid.is_empty()).then_some(pid)
            });
            assert_eq!(look.outdated(&mut link).await.unwrap(), Vec::<String>::new(), "{sql}");
            assert_eq!(
                changes(&look.definitions, &read(&mut link, &Selection::default()).await.unwrap()),
                Vec::<String>::new(),
                "{sql}"
            );
            cluster.sql("postgres", &format!("SELECT pg_terminate_backend({pid}, 10000)"));
            session.wait().unwrap();
            assert_eq!(look.outdated(&mut link).await.unwrap(), Vec::<String>::new(), "behind {sql}");
        }
        // These write rows of catalogs again, so that another look is needed; it finds no difference.
        for sql in ["VACUUM FULL", "REINDEX TABLE goods", "CLUSTER goods USING goods_pkey; CLUSTER goods"] {
            let before = read(&mut link, &Selection::default()).await.unwrap();
            cluster.sql("shop", sql);
            let told = changes(&before, &read(&mut link, &Selection::default()).await.unwrap());
            assert!(told.is_empty() || sql.starts_with("CLUSTER") && told.len() == 1, "{sql}: {told:?}");
        }
        // Other databases are not compared, and neither are roles that own nothing here.
        let before = read(&mut link, &Selection::default()).await.unwrap();
        cluster.sql("postgres", "ALTER DATABASE elsewhere SET work_mem = '5MB'; COMMENT ON DATABASE elsewhere IS 'x'");
        cluster.sql("postgres", "CREATE ROLE passing LOGIN PASSWORD 'x'; ALTER ROLE guest PASSWORD 'y'");
        assert_eq!(changes(&before, &read(&mut link, &Selection::default()).await.unwrap()), Vec::<String>::new());
    }

    /// A transaction that has not ended may have done anything, in subtransactions too.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_under_way_while_it_is_looked_is_found_afterwards() {
        if !available() {
            return;
        }
        let cluster = cluster(None);
        let (maker, connection) =
            tokio_postgres::connect(&cluster.conninfo("shop"), tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        for (sql, in_catalog) in [
            ("SAVEPOINT a; COMMENT ON TABLE goods IS 'one'; RELEASE a", "pg_description"),
            ("SAVEPOINT a; COMMENT ON TABLE goods IS 'two'; RELEASE a", "pg_description"),
            ("DROP SEQUENCE tickets", "pg_sequence"),
        ] {
            maker.batch_execute(&format!("BEGIN; {sql}")).await.unwrap();
            let mut link = shop(&cluster).await;
            let look = CatalogState::take(&mut link, &Selection::default()).await.unwrap();
            maker.batch_execute("COMMIT").await.unwrap();
            let outdated = look.outdated(&mut link).await.unwrap();
            assert!(outdated.iter().any(|catalog| catalog == in_catalog), "{sql}: {outdated:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_newer_server_is_looked_at_too() {
        if !newer_available() {
            return;
        }
        let cluster = cluster(Some(NEWER_MAJOR));
        let mut link = shop(&cluster).await;
        let look = CatalogState::take(&mut link, &Selection::default()).await.unwrap();
        cluster.sql("shop", "COMMENT ON TABLE goods IS 'x'");
        assert_eq!(look.outdated(&mut link).await.unwrap(), ["pg_description"]);
        assert_eq!(
            changes(&look.definitions, &read(&mut link, &Selection::default()).await.unwrap()),
            ["changed table public.goods"]
        );
    }

    #[test]
    fn new_changed_and_dropped_are_told_apart() {
        let of = |all: &[(&str, &str, Belonging)]| -> Definitions {
            let all = all.iter();
            all.map(|(name, sum, belonging)| ((*name).into(), Definition { sum: (*sum).into(), belonging: *belonging }))
                .collect()
        };
        use Belonging::{Cluster, Database, Extension, Role};
        let then = of(&[("a", "1", Database), ("b", "1", Database), ("c", "1", Database), ("r", "1", Role)]);
        let now = of(&[
            ("a", "1", Database),
            ("b", "2", Database),
            ("d", "1", Database),
            ("e", "1", Extension),
            ("r", "2", Role),
            ("s", "1", Role),
            ("t", "1", Cluster),
        ]);
        assert_eq!(changes(&then, &now), ["changed b", "new d", "changed r", "new t", "dropped c"]);
        assert_eq!(changes_since(&then, &now), ["changed b", "new d", "dropped c"]);
        assert!(changes(&then, &then).is_empty() && fail_if_changed(Vec::new()).is_ok());
        let many = (0..99).map(|number| format!("new {number}")).collect();
        assert!(fail_if_changed(many).unwrap_err().to_string().ends_with("; new 29; 69 more"));
    }
}

//! Contents of a database that the migration acts on: tables with their columns and unique indexes, and sequences.

use crate::Error;
use std::collections::{BTreeMap, HashSet};
use stillpoint_migrate_postgres::link::{Link, identifier, number, text};

/// SQL condition for schemas of the user, neither PostgreSQL's nor ours.
pub const USER_SCHEMA: &str = "n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' AND n.nspname <> 'stillpoint'";
/// SQL condition for relations that no extension made.
pub const NOT_OF_EXTENSION: &str = "NOT EXISTS (SELECT FROM pg_depend x WHERE x.classid = 'pg_class'::regclass \
     AND x.objid = c.oid AND x.deptype = 'e')";

/// Types with equal text for equal values; values of other types give no row token.
/// bool, bytea, "char", name, int8, int2, int4, text, oid, char(n), varchar, date, time, timestamp, timestamptz, uuid.
const PLAIN_TYPES: [u32; 16] = [16, 17, 18, 19, 20, 21, 23, 25, 26, 1042, 1043, 1082, 1083, 1114, 1184, 2950];
/// Types that every server sorts in the same order, independent of its libraries and their versions:
/// int8, int2, int4, oid, date, time, timestamp, timestamptz, uuid.
const ORDERED_TYPES: [u32; 9] = [20, 21, 23, 26, 1082, 1083, 1114, 1184, 2950];
/// OID alias types, whose binary form is a number that names another object on the other server; their text is a name:
/// regproc, regprocedure, regoper, regoperator, regclass, regtype, regconfig, regdictionary, regnamespace, regrole, regcollation.
pub const ALIAS_TYPES: [u32; 11] = [24, 2202, 2203, 2204, 2205, 2206, 3734, 3769, 4089, 4096, 4191];
/// Types with this number or a higher one are the user's, and have other numbers on the other server.
const FIRST_USER_OID: u32 = 16384;

/// A column that is copied and replayed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ColumnDef {
    /// Name of the column.
    pub name: String,
    /// True for GENERATED ALWAYS AS IDENTITY: an update can only set it to its next number, and an insert must override it.
    pub identity_always: bool,
    /// True if equal values have equal text.
    plain: bool,
    /// True if both servers sort its values in the same order.
    ordered: bool,
    /// True if its binary form means the same on both servers.
    binary: bool,
    /// Its type, if values of many rows can be sent as one array.
    pub element: Option<String>,
    /// Its type, if it prints names of objects: a parameter that is compared with it must be cast, and its text depends on the
    /// search path.
    pub named_type: Option<String>,
}

/// A unique index other than the replica identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UniqueIndex {
    /// Object identifier of the index.
    pub oid: u32,
    /// Positions in [`TableDef::columns`]; `None` if equality is not visible in the text (expressions, numeric, user-defined
    /// collations).
    pub columns: Option<Vec<usize>>,
    /// True if two NULLs count as equal.
    pub nulls_equal: bool,
}

/// A table whose rows are moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableDef {
    /// Object identifier on the source.
    pub oid: u32,
    /// Name of its schema.
    pub schema: String,
    /// Name of the table.
    pub name: String,
    /// True if its rows are in its partitions.
    pub partitioned: bool,
    /// Size in pages of 8 KiB when it was last measured.
    pub pages: u64,
    /// Size in bytes, including large values that are stored outside the table (TOAST).
    pub bytes: u64,
    /// Columns in their order.
    pub columns: Vec<ColumnDef>,
    /// Positions of the primary key's columns, if there is a primary key.
    pub key: Option<Vec<usize>>,
    /// Replica identity as in `pg_class.relreplident`: `d`, `n`, `f` or `i`.
    pub identity: char,
    /// Unique and exclusion indexes that are not the primary key.
    pub uniques: Vec<UniqueIndex>,
    /// SQL condition for the rows that are the user's, of a table in which an extension keeps its configuration: the others come
    /// with the extension. `None` for all other tables.
    pub own_rows: Option<String>,
    /// True if it has rules; for such tables PostgreSQL does not support `ON CONFLICT`.
    pub rules: bool,
}

/// Tables and sequences of a database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inventory {
    /// Tables that hold rows themselves.
    pub tables: Vec<TableDef>,
    /// Partitioned tables.
    pub partitioned: Vec<TableDef>,
    /// Qualified names, quoted.
    pub sequences: Vec<String>,
}

impl Inventory {
    /// Removes everything that `other` does not have.
    pub fn retain_tables_of(&mut self, other: &Inventory) {
        let is_there =
            |of: &[TableDef], table: &TableDef| of.iter().any(|known| known.qualified() == table.qualified());
        self.tables.retain(|table| is_there(&other.tables, table));
        self.partitioned.retain(|table| is_there(&other.partitioned, table));
        self.sequences.retain(|name| other.sequences.contains(name));
    }
}

impl TableDef {
    /// `"schema"."table"`.
    pub fn qualified(&self) -> String {
        format!("{}.{}", identifier(&self.schema), identifier(&self.name))
    }

    /// The table as UPDATE and DELETE name it: without tables that inherit from it, but with all partitions.
    pub fn alone(&self) -> String {
        if self.partitioned { self.qualified() } else { format!("ONLY {}", self.qualified()) }
    }

    /// Name for messages, not quoted.
    pub fn display(&self) -> String {
        format!("{}.{}", self.schema, self.name)
    }

    /// SQL condition for the rows that are moved.
    pub fn moved_rows(&self) -> &str {
        self.own_rows.as_deref().unwrap_or("true")
    }

    /// Returns true if it has a column of that name.
    pub fn has_column(&self, name: &str) -> bool {
        self.columns.iter().any(|column| column.name == name)
    }

    /// The same table with only these columns, in this order. Keys and indexes of other columns are unknown then.
    pub(crate) fn with_columns(&self, names: &[&String]) -> TableDef {
        let place = |at: &usize| names.iter().position(|name| **name == self.columns[*at].name);
        let places = |columns: &Vec<usize>| columns.iter().map(place).collect::<Option<Vec<_>>>();
        let of_name = |name: &&String| self.columns.iter().find(|column| column.name == **name).cloned();
        let of_index =
            |index: &UniqueIndex| UniqueIndex { columns: index.columns.as_ref().and_then(places), ..index.clone() };
        TableDef {
            columns: names.iter().filter_map(of_name).collect(),
            key: self.key.as_ref().and_then(places),
            uniques: self.uniques.iter().map(of_index).collect(),
            ..self.clone()
        }
    }

    /// The names of all columns, quoted and separated.
    pub fn column_list(&self) -> String {
        self.columns.iter().map(|column| identifier(&column.name)).collect::<Vec<_>>().join(", ")
    }

    /// Returns true if COPY may use the binary form.
    pub fn binary(&self) -> bool {
        self.columns.iter().all(|column| column.binary)
    }

    /// The REPLICA IDENTITY that the table needs so that updates and deletes are logged; `None` if it need not change.
    pub fn identity_wanted(&self) -> Option<&'static str> {
        match (self.identity, &self.key) {
            ('d', Some(_)) | ('f' | 'i', _) => None,
            (_, Some(_)) => Some("DEFAULT"),
            (_, None) => Some("FULL"),
        }
    }

    /// Returns true if a row can be written by its key, independent of the key's presence.
    pub fn upserts(&self) -> bool {
        !self.rules && (self.key.is_some() || self.identity == 'i')
    }

    /// The columns of the primary key, if both servers sort the values of each in the same order.
    pub fn ordered_key(&self) -> Option<Vec<&str>> {
        let columns = self.key.as_ref()?.iter().map(|at| &self.columns[*at]);
        columns.map(|column| column.ordered.then_some(column.name.as_str())).collect()
    }

    /// Returns true if equal values of the column have equal text.
    pub fn plain(&self, column: usize) -> bool {
        self.columns[column].plain
    }
}

impl Inventory {
    /// Reads the inventory of `link`'s database.
    ///
    /// # Errors
    ///
    /// An error if the server cannot be asked.
    pub async fn read(link: &mut Link) -> Result<Inventory, Error> {
        let mut tables = read_tables(link).await?;
        let positions = read_columns(link, &mut tables).await?;
        read_indexes(link, &mut tables, &positions).await?;
        let sequences = link
            .query(&format!(
                "SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname) FROM pg_class c \
                 JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'S' AND c.relpersistence <> 't' \
                 AND {USER_SCHEMA} ORDER BY 1"
            ))
            .await?;
        let sequences = sequences.into_iter().filter_map(|row| row.into_iter().next().flatten()).collect();
        let (partitioned, tables) = tables.into_values().partition(|table| table.partitioned);
        Ok(Inventory { tables, partitioned, sequences })
    }

    /// Measures the pages of the tables again; returns the numbers of tables without large values stored elsewhere.
    ///
    /// # Errors
    ///
    /// An error if the server cannot be asked.
    pub async fn measure(&mut self, link: &mut Link) -> Result<HashSet<u32>, Error> {
        let numbers: Vec<String> = self.tables.iter().map(|table| table.oid.to_string()).collect();
        let rows = link
            .query(&format!(
                "SELECT oid, pg_relation_size(oid) / 8192, reltoastrelid = 0 OR pg_relation_size(reltoastrelid) = 0 \
                 FROM pg_class WHERE oid = ANY ('{{{}}}')",
                numbers.join(",")
            ))
            .await?;
        for row in &rows {
            let measured = self.tables.iter_mut().find(|table| table.oid == number::<u32>(row, 0));
            measured.into_iter().for_each(|table| table.pages = number(row, 1));
        }
        Ok(rows.iter().filter(|row| text(row, 2) == "t").map(|row| number(row, 0)).collect())
    }

    /// Total size of the tables in bytes.
    pub fn bytes(&self) -> u64 {
        self.tables.iter().map(|table| table.bytes).sum()
    }
}

/// Tables by object identifier, which indexes and columns refer to; the copy sorts them by size.
async fn read_tables(link: &mut Link) -> Result<BTreeMap<u32, TableDef>, Error> {
    let rows = link
        .query(&format!(
            "SELECT c.oid, n.nspname, c.relname, pg_relation_size(c.oid) / 8192, c.relreplident, \
             c.relkind = 'p', pg_relation_size(c.oid) + coalesce(pg_total_relation_size(nullif(c.reltoastrelid, 0)), 0), \
             EXISTS (SELECT FROM pg_rewrite r WHERE r.ev_class = c.oid), \
             CASE WHEN x.relation IS NOT NULL THEN coalesce(x.condition, '') END \
             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             LEFT JOIN (SELECT o.relation, o.condition FROM pg_extension e, \
             unnest(e.extconfig, e.extcondition) o (relation, condition)) x ON x.relation = c.oid AND c.relkind = 'r' \
             WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND {USER_SCHEMA} \
             AND (x.relation IS NOT NULL OR {NOT_OF_EXTENSION}) ORDER BY 2, 3"
        ))
        .await?;
    let mut tables = BTreeMap::new();
    for row in rows {
        let (oid, schema, name) = (number(&row, 0), text(&row, 1), text(&row, 2));
        // The condition of an extension is a clause, WHERE included.
        let own_rows = row[8].as_ref().map(|clause| {
            let name = format!("{}.{}", identifier(&schema), identifier(&name));
            format!("ctid IN (SELECT ctid FROM ONLY {name} {clause})")
        });
        tables.insert(
            oid,
            TableDef {
                oid,
                schema,
                name,
                own_rows,
                partitioned: text(&row, 5) == "t",
                pages: number(&row, 3),
                bytes: number(&row, 6),
                columns: Vec::new(),
                key: None,
                identity: text(&row, 4).chars().next().unwrap_or('d'),
                uniques: Vec::new(),
                rules: text(&row, 7) == "t",
            },
        );
    }
    Ok(tables)
}

/// Adds the columns; returns the position of each table's attribute numbers.
async fn read_columns(
    link: &mut Link,
    tables: &mut BTreeMap<u32, TableDef>,
) -> Result<BTreeMap<(u32, i32), usize>, Error> {
    let rows = link
        .query(
            "SELECT a.attrelid, a.attnum, a.attname, a.attidentity = 'a', t.oid, t.typtype, t.typelem <> 0, \
             t.typsend <> 0 AND coalesce(e.typsend <> 0, true), coalesce(l.collisdeterministic, true), b.oid, \
             CASE WHEN t.typtype IN ('b', 'e') AND t.typelem = 0 AND t.typarray <> 0 AND t.typdelim = ',' \
             THEN t.typnamespace::regnamespace::text || '.' || quote_ident(t.typname) END, coalesce(b.typelem, t.typelem), \
             t.typnamespace::regnamespace::text || '.' || quote_ident(t.typname) FROM pg_attribute a \
             JOIN pg_type t ON t.oid = a.atttypid LEFT JOIN pg_type b ON b.oid = t.typbasetype \
             LEFT JOIN pg_type e ON e.oid = t.typelem \
             LEFT JOIN pg_collation l ON l.oid = a.attcollation \
             WHERE a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = '' ORDER BY 1, 2",
        )
        .await?;
    let mut positions = BTreeMap::new();
    for row in rows {
        let Some(table) = tables.get_mut(&number(&row, 0)) else { continue };
        let flag = |at: usize| text(&row, at) == "t";
        let (oid, kind): (u32, String) = (number(&row, 4), text(&row, 5));
        // A domain is compared and sent like its base type.
        let compared: u32 = if kind == "d" { number(&row, 9) } else { oid };
        let of_user = compared >= FIRST_USER_OID;
        let is_alias = ALIAS_TYPES.contains(&compared) || ALIAS_TYPES.contains(&number(&row, 11));
        positions.insert((table.oid, number(&row, 1)), table.columns.len());
        table.columns.push(ColumnDef {
            name: text(&row, 2),
            identity_always: flag(3),
            ordered: ORDERED_TYPES.contains(&compared),
            plain: (PLAIN_TYPES.contains(&compared) || kind == "e") && flag(8),
            // Enums are sent by label; user-defined composites, arrays and ranges carry type numbers.
            binary: flag(7) && !is_alias && (!of_user || kind == "e" || (kind == "b" && !flag(6))),
            element: row[10].clone(),
            named_type: row[12].clone().filter(|_| is_alias),
        });
    }
    Ok(positions)
}

async fn read_indexes(
    link: &mut Link,
    tables: &mut BTreeMap<u32, TableDef>,
    positions: &BTreeMap<(u32, i32), usize>,
) -> Result<(), Error> {
    // A deferrable key identifies no row in the log, and no row can be written by it. A session that replays does not check
    // deferrable constraints, so no order of changes violates them. NULLS NOT DISTINCT exists since version 15; this query works on older servers too.
    let rows = link
        .query(
            "SELECT i.indrelid, i.indexrelid, i.indisprimary AND i.indimmediate, i.indisexclusion OR i.indexprs IS NOT NULL, \
             array_to_string((i.indkey::int2[])[0:i.indnkeyatts - 1], ' '), \
             coalesce((to_jsonb(i) ->> 'indnullsnotdistinct')::bool, false) \
             FROM pg_index i WHERE (i.indisunique OR i.indisexclusion) AND i.indisvalid ORDER BY 1, 2",
        )
        .await?;
    for row in rows {
        let Some(table) = tables.get_mut(&number(&row, 0)) else { continue };
        let columns: Vec<usize> = text(&row, 4)
            .split_whitespace()
            .filter_map(|attribute| positions.get(&(table.oid, attribute.parse().ok()?)).copied())
            .collect();
        let whole = columns.len() == text(&row, 4).split_whitespace().count();
        if text(&row, 2) == "t" && whole {
            table.key = Some(columns);
            continue;
        }
        let told = whole && text(&row, 3) == "f" && columns.iter().all(|column| table.columns[*column].plain);
        table.uniques.push(UniqueIndex {
            oid: number(&row, 1),
            columns: told.then_some(columns),
            nulls_equal: text(&row, 5) == "t",
        });
    }
    Ok(())
}

#[cfg(test)]
impl ColumnDef {
    /// Makes a column for tests.
    pub(crate) fn of(name: &str, plain: bool) -> ColumnDef {
        ColumnDef {
            name: name.into(),
            identity_always: false,
            plain,
            ordered: plain,
            binary: true,
            element: Some("text".into()),
            named_type: None,
        }
    }
}

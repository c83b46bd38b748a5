//! What a database holds, as far as the migration acts on it: tables with their columns and unique indexes, sequences.

use crate::Error;
use crate::link::{Link, Row, identifier};
use std::collections::{BTreeMap, HashSet};

/// Schemas of the user: not PostgreSQL's, not ours.
pub(crate) const USER_SCHEMA: &str =
    "n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' AND n.nspname <> 'stillpoint'";
/// Relations that no extension made.
pub(crate) const NOT_OF_EXTENSION: &str = "NOT EXISTS (SELECT FROM pg_depend x WHERE x.classid = 'pg_class'::regclass \
     AND x.objid = c.oid AND x.deptype = 'e')";

/// Types whose equality is equality of their text: values of other types lead to no row token.
/// bool, bytea, "char", name, int8, int2, int4, text, oid, char(n), varchar, date, time, timestamp, timestamptz, uuid.
const PLAIN_TYPES: [u32; 16] = [16, 17, 18, 19, 20, 21, 23, 25, 26, 1042, 1043, 1082, 1083, 1114, 1184, 2950];
/// Types of which every server sorts values alike, whatever its libraries and their versions:
/// int8, int2, int4, oid, date, time, timestamp, timestamptz, uuid.
const ORDERED_TYPES: [u32; 9] = [20, 21, 23, 26, 1082, 1083, 1114, 1184, 2950];
/// Types numbered from here on are the user's, and have other numbers on the other server.
const FIRST_USER_OID: u32 = 16384;

/// A column that is copied and replayed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ColumnDef {
    pub(crate) name: String,
    /// GENERATED ALWAYS AS IDENTITY: an update can set it to its next number alone, and an insert must override it.
    pub(crate) identity_always: bool,
    /// Whether equal values have equal text.
    plain: bool,
    /// Whether both servers sort its values alike.
    ordered: bool,
    /// Whether its binary form means the same on both servers.
    binary: bool,
    /// Its type, where values of many rows can be sent as one array.
    pub(crate) element: Option<String>,
}

/// A unique index other than the replica identity.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UniqueIndex {
    pub(crate) oid: u32,
    /// Positions in [`TableDef::columns`]; `None` where equality cannot be told from the text (expressions, numeric,
    /// collations of one's own).
    pub(crate) columns: Option<Vec<usize>>,
    /// Whether two NULLs are the same.
    pub(crate) nulls_equal: bool,
}

/// A table whose rows are moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TableDef {
    /// Its number on the source.
    pub(crate) oid: u32,
    pub(crate) schema: String,
    pub(crate) name: String,
    /// Its rows lie in its partitions.
    pub(crate) partitioned: bool,
    /// Pages of 8 KiB at this moment.
    pub(crate) pages: u64,
    /// With large values, which lie elsewhere.
    pub(crate) bytes: u64,
    pub(crate) columns: Vec<ColumnDef>,
    /// Positions of the primary key's columns, where there is one.
    pub(crate) key: Option<Vec<usize>>,
    /// `d`, `n`, `f`, `i`.
    pub(crate) identity: char,
    /// Unique and exclusion indexes that are not the primary key.
    pub(crate) uniques: Vec<UniqueIndex>,
    /// Whether rules stand on it, beside which PostgreSQL takes no `ON CONFLICT`.
    pub(crate) rules: bool,
}

/// Tables and sequences of a database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Inventory {
    /// Those that hold rows.
    pub(crate) tables: Vec<TableDef>,
    /// Partitioned ones.
    pub(crate) partitioned: Vec<TableDef>,
    /// Qualified names, quoted.
    pub(crate) sequences: Vec<String>,
}

impl Inventory {
    /// Leaves out what another one has not.
    pub(crate) fn keep_those_of(&mut self, other: &Inventory) {
        let is_there =
            |of: &[TableDef], table: &TableDef| of.iter().any(|known| known.qualified() == table.qualified());
        self.tables.retain(|table| is_there(&other.tables, table));
        self.partitioned.retain(|table| is_there(&other.partitioned, table));
        self.sequences.retain(|name| other.sequences.contains(name));
    }
}

impl TableDef {
    /// `"schema"."table"`.
    pub(crate) fn qualified(&self) -> String {
        format!("{}.{}", identifier(&self.schema), identifier(&self.name))
    }

    /// The same as what is updated or deleted from: no table that inherits from it, but all partitions.
    pub(crate) fn alone(&self) -> String {
        if self.partitioned { self.qualified() } else { format!("ONLY {}", self.qualified()) }
    }

    /// Its name for people.
    pub(crate) fn display(&self) -> String {
        format!("{}.{}", self.schema, self.name)
    }

    /// The names of all columns, quoted and separated.
    pub(crate) fn column_list(&self) -> String {
        self.columns.iter().map(|column| identifier(&column.name)).collect::<Vec<_>>().join(", ")
    }

    /// Whether COPY may use the binary form.
    pub(crate) fn binary(&self) -> bool {
        self.columns.iter().all(|column| column.binary)
    }

    /// What REPLICA IDENTITY must become for updates and deletes to be told, if it must change.
    pub(crate) fn identity_wanted(&self) -> Option<&'static str> {
        match (self.identity, &self.key) {
            ('d', Some(_)) | ('f' | 'i', _) => None,
            (_, Some(_)) => Some("DEFAULT"),
            (_, None) => Some("FULL"),
        }
    }

    /// Whether a row can be brought by its key, be it there or not.
    pub(crate) fn upserts(&self) -> bool {
        !self.rules && (self.key.is_some() || self.identity == 'i')
    }

    /// The columns that name rows, where both servers sort the values of each alike.
    pub(crate) fn ordered_key(&self) -> Option<Vec<&str>> {
        let columns = self.key.as_ref()?.iter().map(|at| &self.columns[*at]);
        columns.map(|column| column.ordered.then_some(column.name.as_str())).collect()
    }

    /// Whether equal values of the column have equal text.
    pub(crate) fn plain(&self, column: usize) -> bool {
        self.columns[column].plain
    }
}

impl Inventory {
    /// Reads it from `link`'s database.
    pub(crate) async fn read(link: &mut Link) -> Result<Inventory, Error> {
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

    /// Takes the pages of the tables anew, and tells, by number, which of them have no large values that lie elsewhere.
    pub(crate) async fn measure(&mut self, link: &mut Link) -> Result<HashSet<u32>, Error> {
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

    /// How many bytes the tables take.
    pub(crate) fn bytes(&self) -> u64 {
        self.tables.iter().map(|table| table.bytes).sum()
    }
}

/// Tables by number, which is also how the indexes and columns name them; ordered by size is the copy's business.
async fn read_tables(link: &mut Link) -> Result<BTreeMap<u32, TableDef>, Error> {
    let rows = link
        .query(&format!(
            "SELECT c.oid, n.nspname, c.relname, pg_relation_size(c.oid) / 8192, c.relreplident, \
             c.relkind = 'p', pg_relation_size(c.oid) + coalesce(pg_total_relation_size(nullif(c.reltoastrelid, 0)), 0), \
             EXISTS (SELECT FROM pg_rewrite r WHERE r.ev_class = c.oid) \
             FROM pg_class c \
             JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND {USER_SCHEMA} AND {NOT_OF_EXTENSION} ORDER BY 2, 3"
        ))
        .await?;
    let mut tables = BTreeMap::new();
    for row in rows {
        let oid = number(&row, 0);
        tables.insert(
            oid,
            TableDef {
                oid,
                schema: text(&row, 1),
                name: text(&row, 2),
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

/// Adds the columns, and tells for each table and attribute number the position.
async fn read_columns(
    link: &mut Link,
    tables: &mut BTreeMap<u32, TableDef>,
) -> Result<BTreeMap<(u32, i32), usize>, Error> {
    let rows = link
        .query(
            "SELECT a.attrelid, a.attnum, a.attname, a.attidentity = 'a', t.oid, t.typtype, t.typelem <> 0, \
             t.typsend <> 0 AND coalesce(e.typsend <> 0, true), coalesce(l.collisdeterministic, true), b.oid, \
             CASE WHEN t.typtype IN ('b', 'e') AND t.typelem = 0 AND t.typarray <> 0 AND t.typdelim = ',' \
             THEN t.typnamespace::regnamespace::text || '.' || quote_ident(t.typname) END FROM pg_attribute a \
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
        // A domain is compared and sent like its base.
        let compared: u32 = if kind == "d" { number(&row, 9) } else { oid };
        let of_user = compared >= FIRST_USER_OID;
        positions.insert((table.oid, number(&row, 1)), table.columns.len());
        table.columns.push(ColumnDef {
            name: text(&row, 2),
            identity_always: flag(3),
            ordered: ORDERED_TYPES.contains(&compared),
            plain: (PLAIN_TYPES.contains(&compared) || kind == "e") && flag(8),
            // Enums go by label; composites, arrays and ranges of the user's carry type numbers.
            binary: flag(7) && (!of_user || kind == "e" || (kind == "b" && !flag(6))),
            element: row[10].clone(),
        });
    }
    Ok(positions)
}

async fn read_indexes(
    link: &mut Link,
    tables: &mut BTreeMap<u32, TableDef>,
    positions: &BTreeMap<(u32, i32), usize>,
) -> Result<(), Error> {
    // NULLS NOT DISTINCT came with 15: asked for in a way that older servers understand.
    let rows = link
        .query(
            "SELECT i.indrelid, i.indexrelid, i.indisprimary, i.indisexclusion OR i.indexprs IS NOT NULL, \
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

/// A column of a catalogue's row, empty for NULL.
pub(crate) fn text(row: &Row, at: usize) -> String {
    row.get(at).cloned().flatten().unwrap_or_default()
}

/// A number of a catalogue's row, 0 for NULL.
pub(crate) fn number<T: std::str::FromStr + Default>(row: &Row, at: usize) -> T {
    text(row, at).parse().unwrap_or_default()
}

#[cfg(test)]
impl ColumnDef {
    /// A column for tests.
    pub(crate) fn of(name: &str, plain: bool) -> ColumnDef {
        ColumnDef {
            name: name.into(),
            identity_always: false,
            plain,
            ordered: plain,
            binary: true,
            element: Some("text".into()),
        }
    }
}

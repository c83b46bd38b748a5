//! Facts about the database that capture needs; the caller reads them from the server and fills them in.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// A relation: a table, or something that a statement names like one ([`Table::kind`]).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    /// Object identifier.
    pub oid: u32,
    /// Name of its schema.
    pub schema: String,
    /// Name without the schema.
    pub name: String,
    /// Kind of relation if it is not a table: `view`, `foreign table`.
    pub kind: Option<&'static str>,
    /// True if it belongs to one session; such a table is not moved.
    pub temporary: bool,
    /// Stored columns, in their order.
    pub columns: Vec<Column>,
    /// Positions of the columns of the replica identity.
    pub key: Option<Vec<usize>>,
    /// Unique indexes whose values matter: all but the key's index, and the key's index too if foreign keys refer to it.
    pub uniques: Vec<Unique>,
    /// Foreign keys of this table.
    pub references: Vec<Reference>,
    /// Triggers, rules and cascades, as text for messages.
    pub writes_more: Vec<WritesMore>,
    /// Reason why it cannot be read in full: `no SELECT right`, `row security`.
    pub unreadable: Option<&'static str>,
}

/// A column.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Column {
    /// Name as the server stores it.
    pub name: String,
    /// True if it is computed from other columns; then it is not part of an image.
    pub generated: bool,
    /// True for `GENERATED ALWAYS AS IDENTITY`: a value is assigned at INSERT only.
    pub identity_always: bool,
    /// True if its default is computed at the moment of the write: a function, an identity.
    pub computed_default: bool,
}

/// A unique index.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unique {
    /// Object identifier of the index.
    pub oid: u32,
    /// Positions of its columns; `None` if it has expressions.
    pub columns: Option<Vec<usize>>,
    /// True if its values can be compared by hash and the index is checked immediately.
    pub by_hash: bool,
    /// True if NULLs count as equal.
    pub nulls_equal: bool,
}

/// A foreign key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reference {
    /// Positions of the referring columns, in the order of the referred ones.
    pub columns: Vec<usize>,
    /// Object identifier of the table that is referred to.
    pub table: u32,
    /// Object identifier of the unique index that is referred to.
    pub index: u32,
}

/// A further write that the server does when this table is written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WritesMore {
    /// `trigger NAME`, `rule NAME`, `foreign key NAME that cascades`.
    pub what: String,
    /// True if it happens at INSERT.
    pub insert: bool,
    /// True if it happens at UPDATE.
    pub update: bool,
    /// True if it happens at DELETE.
    pub delete: bool,
}

/// All facts about one database.
#[derive(Debug, Clone, Default)]
pub struct Catalogue {
    /// Schemas in which names without a schema are looked up, in this order.
    pub search_path: Vec<String>,
    /// Names of functions that may write.
    pub may_write: HashSet<String>,
    tables: HashMap<(String, String), Arc<Table>>,
}

impl Catalogue {
    /// Makes a catalogue without tables and without functions that may write.
    pub fn new(search_path: impl IntoIterator<Item = String>) -> Catalogue {
        Catalogue { search_path: search_path.into_iter().collect(), ..Catalogue::default() }
    }

    /// Adds a table.
    pub fn add(&mut self, table: Table) {
        self.tables.insert((table.schema.clone(), table.name.clone()), Arc::new(table));
    }

    /// Returns all tables, in no particular order.
    pub fn tables(&self) -> impl Iterator<Item = &Arc<Table>> {
        self.tables.values()
    }

    /// Finds a table by the parts of the name that a statement gives it.
    pub(crate) fn table(&self, name: &[String]) -> Option<&Arc<Table>> {
        let find = |schema: &String, name: &String| self.tables.get(&(schema.clone(), name.clone()));
        match name {
            [name] => self.search_path.iter().find_map(|schema| find(schema, name)),
            [schema, name] => find(schema, name),
            _ => None,
        }
    }
}

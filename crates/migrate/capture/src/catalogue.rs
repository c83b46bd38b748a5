//! What must be known of the database: facts, filled in by whoever can ask it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// A relation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    /// Object identifier.
    pub oid: u32,
    /// Schema.
    pub schema: String,
    /// Name.
    pub name: String,
    /// What it is, when it is not a table: `view`, `foreign table`.
    pub kind: Option<&'static str>,
    /// It belongs to one session, and is not moved.
    pub temporary: bool,
    /// Columns that are stored, in their order.
    pub columns: Vec<Column>,
    /// Positions of the columns of the replica identity.
    pub key: Option<Vec<usize>>,
    /// Unique indexes whose values matter: all but the key's, and the key's if foreign keys refer to it.
    pub uniques: Vec<Unique>,
    /// Foreign keys of this table.
    pub references: Vec<Reference>,
    /// Triggers, rules and cascades, in words.
    pub writes_more: Vec<WritesMore>,
    /// Why it cannot be read in full: `no SELECT right`, `row security`.
    pub unreadable: Option<&'static str>,
}

/// A column.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Column {
    /// Its name.
    pub name: String,
    /// Computed from the others: not part of an image.
    pub generated: bool,
    /// `GENERATED ALWAYS AS IDENTITY`: it is given at INSERT only.
    pub identity_always: bool,
    /// What it gets when no value is given is computed at that moment: a function, an identity.
    pub computed_default: bool,
}

/// A unique index.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unique {
    /// Object identifier of the index.
    pub oid: u32,
    /// Positions of its columns; none when it has expressions.
    pub columns: Option<Vec<usize>>,
    /// Its values can be compared by hash, and it is checked at once.
    pub by_hash: bool,
    /// NULLs count as equal.
    pub nulls_equal: bool,
}

/// A foreign key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reference {
    /// Positions of the referring columns, in the order of the referred ones.
    pub columns: Vec<usize>,
    /// The table that is referred to.
    pub table: u32,
    /// Its unique index.
    pub index: u32,
}

/// What else writes when this table is written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WritesMore {
    /// `trigger NAME`, `rule NAME`, `foreign key NAME that cascades`.
    pub what: String,
    /// Happens at INSERT.
    pub insert: bool,
    /// Happens at UPDATE.
    pub update: bool,
    /// Happens at DELETE.
    pub delete: bool,
}

/// All facts.
#[derive(Debug, Clone, Default)]
pub struct Catalogue {
    /// Schemas in which names without one are looked up.
    pub search_path: Vec<String>,
    /// Names of functions that may write.
    pub may_write: HashSet<String>,
    tables: HashMap<(String, String), Arc<Table>>,
}

impl Catalogue {
    /// No tables yet, and no function that may write.
    pub fn new(search_path: impl IntoIterator<Item = String>) -> Catalogue {
        Catalogue { search_path: search_path.into_iter().collect(), ..Catalogue::default() }
    }

    /// Adds a table.
    pub fn add(&mut self, table: Table) {
        self.tables.insert((table.schema.clone(), table.name.clone()), Arc::new(table));
    }

    /// All tables, in no order.
    pub fn tables(&self) -> impl Iterator<Item = &Arc<Table>> {
        self.tables.values()
    }

    /// Finds a table by the name that a statement gives it.
    pub fn table(&self, schema: Option<&str>, name: &str) -> Option<&Arc<Table>> {
        let find = |schema: &str| self.tables.get(&(schema.to_owned(), name.to_owned()));
        match schema {
            Some(schema) => find(schema),
            None => self.search_path.iter().find_map(|schema| find(schema)),
        }
    }
}

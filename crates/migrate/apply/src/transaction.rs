//! Assembles messages of the stream into whole transactions with their tokens; data only.

use crate::Error;
use crate::inventory::{Inventory, TableDef};
use crate::partial_tables::{CopySnapshot, PartialTables};
use crate::pgoutput::{Lsn, Message, Relation, Tuple, Value};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use stillpoint_migrate_replay::Token;

/// The schema of our own tables, on both servers.
const OUR_SCHEMA: &str = "stillpoint";
/// Prefix of our messages in the log.
pub const MARKER_PREFIX: &str = "stillpoint";

/// A table in the stream: its definition from the inventory, and the columns that identify a row.
#[derive(Debug)]
pub(crate) struct Table {
    pub(crate) def: TableDef,
    /// Positions of the columns that identify a row; `None` if all columns are needed.
    pub(crate) key: Option<Vec<usize>>,
    /// Differs between descriptions of one table with other columns; 0 if they are those of the inventory.
    pub(crate) version: u64,
}

/// One description of a table, as key of its statements: its number, and [`Table::version`].
pub(crate) type Described = (u32, u64);

impl Table {
    pub(crate) fn described(&self) -> Described {
        (self.def.oid, self.version)
    }

    /// Returns true if a row can be written that may be present or not.
    pub(crate) fn can_upsert(&self) -> bool {
        self.def.upserts() && self.key.as_ref().is_some_and(|key| !key.is_empty())
    }
}

/// A change of one row, or of whole tables.
#[derive(Debug, Clone)]
pub(crate) enum Write {
    Insert {
        table: Arc<Table>,
        new: Tuple,
    },
    Update {
        table: Arc<Table>,
        old: Option<Tuple>,
        new: Tuple,
    },
    /// The row is new or changed; these are its values now.
    Upsert {
        table: Arc<Table>,
        new: Tuple,
    },
    Delete {
        table: Arc<Table>,
        old: Tuple,
    },
    Truncate {
        tables: Vec<Arc<Table>>,
        restart_identity: bool,
    },
}

/// A committed transaction of the source.
#[derive(Debug)]
pub(crate) struct Transaction {
    /// The end of its commit record: its stamp, and the position that may be confirmed once it has been applied.
    pub(crate) stamp: Lsn,
    pub(crate) xid: u32,
    pub(crate) writes: Vec<Write>,
    pub(crate) bytes: u64,
    /// Tokens that arrived with it; `None` if they follow from the rows.
    pub(crate) told: Option<Vec<Token>>,
    /// True if it committed while rows were copied that it may have changed before they were read: some rows that it deletes
    /// may not be present.
    pub(crate) early: bool,
}

/// Content of the stream.
#[derive(Debug)]
pub(crate) enum Item<T = Transaction> {
    Transaction(T),
    /// One of our markers; everything committed before it has arrived.
    Marker {
        text: String,
        end: Lsn,
    },
    /// The stream has nothing to apply up to this position.
    Position(Lsn),
}

/// A relation in the stream.
#[derive(Debug)]
enum Streamed {
    /// A table of our own.
    Ours,
    /// It is gone.
    Skipped,
    /// Its rows are copied later.
    CopiedLater,
    Table {
        table: Arc<Table>,
        /// Places in the stream of the columns of the table; `None` if they are all, in their order.
        places: Option<Vec<usize>>,
        /// Snapshot with which the table was copied while others were followed.
        copied: Option<CopySnapshot>,
    },
}

/// A table and rows of it.
type RowsOf<const N: usize> = (Arc<Table>, [Tuple; N]);

/// Assembles transactions.
#[derive(Debug)]
pub(crate) struct Assembler {
    inventory: HashMap<u32, TableDef>,
    partial: PartialTables,
    tables: HashMap<u32, Streamed>,
    open: Option<Transaction>,
    /// Position of the open transaction's commit.
    commit: Lsn,
    marker: Option<String>,
    /// Transactions that end up to this position are early.
    horizon: Lsn,
    /// True if we replayed the open transaction from the other side: it carries one of our stamps.
    ours: bool,
    /// True if the open transaction wrote to a table that is copied later. Even without other writes it keeps its place: the
    /// snapshot of the copy may not see it, and then it must not count as applied.
    is_postponed: bool,
}

impl Assembler {
    /// Makes an assembler; transactions that commit up to the `horizon` are early.
    pub(crate) fn new(inventory: &Inventory, partial: PartialTables, horizon: Lsn) -> Assembler {
        let inventory = inventory.tables.iter().map(|table| (table.oid, table.clone())).collect();
        Assembler {
            inventory,
            partial,
            tables: HashMap::new(),
            open: None,
            commit: 0,
            marker: None,
            horizon,
            ours: false,
            is_postponed: false,
        }
    }

    /// Takes the next message; `size` is its size in the stream, in bytes.
    pub(crate) fn take(&mut self, message: Message, size: u64) -> Result<Option<Item>, Error> {
        match message {
            Message::Begin { xid, commit_lsn } => {
                self.commit = commit_lsn;
                let writes = Vec::new();
                self.open = Some(Transaction { stamp: 0, xid, writes, bytes: 0, told: None, early: false });
                (self.marker, self.ours, self.is_postponed) = (None, false, false);
            }
            Message::Commit { end_lsn, .. } => return self.commit(end_lsn).map(Some),
            Message::Relation(relation) => self.relation(relation)?,
            Message::Insert { relation, new } => {
                if let Some((table, [new])) = self.row(relation, [new])? {
                    self.write(Write::Insert { table, new }, size)?;
                } else if matches!(self.tables.get(&relation), Some(Streamed::Ours)) {
                    self.ours = true;
                }
            }
            Message::Update { relation, old: None, new } => {
                if let Some((table, [new])) = self.row(relation, [new])? {
                    self.write(Write::Update { table, old: None, new }, size)?;
                }
            }
            Message::Update { relation, old: Some(old), new } => {
                if let Some((table, [old, new])) = self.row(relation, [old, new])? {
                    self.write(Write::Update { table, old: Some(old), new }, size)?;
                }
            }
            Message::Delete { relation, old } => {
                if let Some((table, [old])) = self.row(relation, [old])? {
                    self.write(Write::Delete { table, old }, size)?;
                }
            }
            Message::Truncate { relations, restart_identity, .. } => {
                // With CASCADE, the list includes the tables that CASCADE reached.
                let found: Result<Vec<_>, _> = relations.into_iter().map(|relation| self.row(relation, [])).collect();
                let tables: Vec<_> = found?.into_iter().flatten().map(|(table, [])| table).collect();
                if !tables.is_empty() {
                    self.write(Write::Truncate { tables, restart_identity }, size)?;
                }
            }
            Message::Emitted { prefix, content } if prefix == MARKER_PREFIX => {
                self.marker = Some(String::from_utf8_lossy(&content).into_owned());
            }
            Message::Emitted { .. } | Message::Other => {}
        }
        Ok(None)
    }

    fn commit(&mut self, end: Lsn) -> Result<Item, Error> {
        let open = self.open.take().ok_or_else(|| Error::Pgoutput("a commit without its begin".into()))?;
        if let Some(text) = self.marker.take() {
            return Ok(Item::Marker { text, end });
        }
        if self.ours || open.writes.is_empty() && !self.is_postponed {
            return Ok(Item::Position(end));
        }
        let early = end <= self.horizon;
        let writes = if early { open.writes.into_iter().flat_map(Write::found_or_not).collect() } else { open.writes };
        Ok(Item::Transaction(Transaction { stamp: end, writes, early, ..open }))
    }

    fn write(&mut self, write: Write, size: u64) -> Result<(), Error> {
        let open = self.open.as_mut().ok_or_else(|| Error::Pgoutput("a change outside of a transaction".into()))?;
        open.bytes += size;
        open.writes.push(write);
        Ok(())
    }

    /// Returns the table of a change and its rows, with a value for each column of the table; `None` if the change is not to be
    /// repeated.
    fn row<const N: usize>(&mut self, oid: u32, mut rows: [Tuple; N]) -> Result<Option<RowsOf<N>>, Error> {
        let known = self.tables.get(&oid);
        let known =
            known.ok_or_else(|| Error::Pgoutput(format!("a change of relation {oid}, which was not described")))?;
        let Streamed::Table { table, places, copied } = known else {
            self.is_postponed |= matches!(known, Streamed::CopiedLater);
            return Ok(None);
        };
        let is_copied = |(copied, open): (&CopySnapshot, &Transaction)| copied.contains(open.xid, self.commit);
        if copied.as_ref().zip(self.open.as_ref()).is_some_and(is_copied) {
            return Ok(None);
        }
        for row in rows.iter_mut().filter(|_| places.is_some()) {
            let values = places.iter().flatten().map(|place| row.get(*place).cloned().unwrap_or(Value::Null));
            *row = values.collect();
        }
        Ok(Some((Arc::clone(table), rows)))
    }

    /// Takes the description of a table, which the stream sends before its first change, and again after a change of its
    /// definition.
    fn relation(&mut self, relation: Relation) -> Result<(), Error> {
        if relation.schema == OUR_SCHEMA {
            self.tables.insert(relation.oid, Streamed::Ours);
            return Ok(());
        }
        if self.partial.is_left_out(relation.oid) {
            let is_copied_later = self.partial.copying.contains(&relation.oid);
            let streamed = if is_copied_later { Streamed::CopiedLater } else { Streamed::Skipped };
            self.tables.insert(relation.oid, streamed);
            return Ok(());
        }
        let def = described(&self.inventory, relation.oid, &relation.schema, &relation.name)?;
        let names = || relation.columns.iter().map(|column| &column.name);
        let flagged = || relation.columns.iter().enumerate().filter(|(_, c)| c.key).map(|(at, _)| at).collect();
        let (def, places, version) = if def.columns.iter().map(|column| &column.name).eq(names()) {
            (def.clone(), None, 0)
        } else {
            // Columns that the inventory does not know are left out only if they are known to be dropped later.
            let is_new = |name: &String| !def.has_column(name) && !self.partial.is_dropped(def.oid, name);
            if names().any(is_new) {
                return Err(other_columns(def));
            }
            let known: Vec<&String> = names().filter(|name| def.has_column(name)).collect();
            let places = known.iter().filter_map(|name| names().position(|streamed| streamed == *name)).collect();
            (def.with_columns(&known), Some(places), hash(known.iter()))
        };
        let key = match relation.identity {
            b'i' if places.is_none() => Some(flagged()),
            b'f' | b'd' if places.is_none() => def.key.clone(),
            b'i' | b'd' => {
                let is_key = |name: &String| relation.columns.iter().any(|column| column.key && column.name == *name);
                let columns = def.columns.iter().enumerate().filter(|(_, column)| is_key(&column.name));
                Some(columns.map(|(at, _)| at).collect::<Vec<_>>()).filter(|key| !key.is_empty())
            }
            b'f' => def.key.clone(),
            _ => None,
        };
        let copied = self.partial.copied.get(&relation.oid).cloned();
        let table = Arc::new(Table { def, key, version });
        self.tables.insert(relation.oid, Streamed::Table { table, places, copied });
        Ok(())
    }
}

impl Transaction {
    /// Returns tokens of everything that it touches, as far as the order of transactions depends on it.
    ///
    /// Replay runs with `session_replication_role=replica`, which does not check foreign keys, so they imply no order. If a
    /// change does not contain the (old) values of a unique index, it takes a token for the whole index.
    pub(crate) fn tokens(&mut self) -> Vec<Token> {
        if let Some(told) = self.told.take() {
            return told;
        }
        let mut tokens = Vec::with_capacity(self.writes.len() * 2);
        for write in &self.writes {
            match write {
                Write::Insert { table, new } => {
                    row_token(table, new, &mut tokens);
                    for index in &table.def.uniques {
                        tokens.extend(unique_token(table, index, new));
                    }
                }
                Write::Upsert { table, new: row } | Write::Delete { table, old: row } => {
                    row_token(table, row, &mut tokens);
                    whole_indexes(table, &mut tokens);
                }
                Write::Update { table, old, new } => {
                    old.iter().chain([new]).for_each(|row| row_token(table, row, &mut tokens));
                    whole_indexes(table, &mut tokens);
                }
                Write::Truncate { tables, .. } => {
                    tokens.extend(tables.iter().map(|table| Token::Table(table.def.oid)));
                }
            }
        }
        tokens
    }
}

/// The inventory's definition of a table that a source of changes describes.
pub(super) fn described<'i>(
    inventory: &'i HashMap<u32, TableDef>,
    oid: u32,
    schema: &str,
    name: &str,
) -> Result<&'i TableDef, Error> {
    let changed = |what: &str| Error::SchemaChanged(format!("table {schema}.{name} {what}"));
    let def = inventory.get(&oid).ok_or_else(|| changed("is new"))?;
    if (def.schema.as_str(), def.name.as_str()) != (schema, name) {
        return Err(changed(&format!("was {}", def.display())));
    }
    Ok(def)
}

/// Makes the error for a table whose columns have changed.
pub(super) fn other_columns(def: &TableDef) -> Error {
    Error::SchemaChanged(format!("table {} has different columns", def.display()))
}

fn whole_indexes(table: &Table, tokens: &mut Vec<Token>) {
    let of = table.def.oid;
    tokens.extend(table.def.uniques.iter().map(|index| Token::Index(of, index.oid)));
}

fn row_token(table: &Table, row: &Tuple, tokens: &mut Vec<Token>) {
    let oid = table.def.oid;
    let token = match &table.key {
        // The rows of a table are its index 0. If equality is not visible, the token stands for all rows.
        Some(key) if !key.iter().all(|column| table.def.plain(*column)) => Token::Index(oid, 0),
        Some(key) => Token::Row(oid, hash(key.iter().map(|column| &row[*column]))),
        // Without a key, a row is identified by all its text; if an unchanged value was not sent, the token stands for all
        // rows.
        None if row.contains(&Value::Unchanged) => Token::Index(oid, 0),
        None => Token::Row(oid, hash(row.iter())),
    };
    tokens.push(token);
}

fn unique_token(table: &Table, index: &crate::inventory::UniqueIndex, row: &Tuple) -> Option<Token> {
    let (of, number) = (table.def.oid, index.oid);
    let Some(columns) = &index.columns else { return Some(Token::Index(of, number)) };
    let values = || columns.iter().map(|column| &row[*column]);
    if !index.nulls_equal && values().any(|value| *value == Value::Null) {
        return None;
    }
    Some(Token::Unique(of, number, hash(values())))
}

fn hash<T: Hash>(values: impl Iterator<Item = T>) -> u64 {
    let mut hasher = DefaultHasher::new();
    for value in values {
        value.hash(&mut hasher);
    }
    hasher.finish()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::intake::SourceSnapshot;
    use crate::inventory::{ColumnDef, UniqueIndex};
    use crate::pgoutput::Column;

    pub(crate) fn table_def(keyed: bool) -> TableDef {
        let column = |name: &str| ColumnDef::of(name, true);
        TableDef {
            oid: 5,
            schema: "public".into(),
            name: "t".into(),
            partitioned: false,
            pages: 1,
            bytes: 8192,
            columns: vec![column("id"), column("mail"), column("note")],
            key: keyed.then(|| vec![0]),
            identity: if keyed { 'd' } else { 'f' },
            uniques: vec![UniqueIndex { oid: 9, columns: Some(vec![1]), nulls_equal: false }],
            own_rows: None,
            rules: false,
        }
    }

    fn relation(def: &TableDef) -> Relation {
        let columns = def.columns.iter().enumerate();
        let columns = columns.map(|(at, c)| Column { name: c.name.clone(), key: at == 0, type_oid: 25 }).collect();
        let (schema, name) = (def.schema.clone(), def.name.clone());
        Relation { oid: def.oid, schema, name, identity: def.identity as u8, columns }
    }

    fn row(values: [&str; 3]) -> Tuple {
        let value = |text: &str| if text.is_empty() { Value::Null } else { Value::Text(text.to_owned().into()) };
        values.into_iter().map(value).collect()
    }

    fn transaction(assembler: &mut Assembler, changes: Vec<Message>) -> Item {
        assembler.take(Message::Begin { commit_lsn: 10, xid: 3 }, 0).unwrap();
        for change in changes {
            assert!(assembler.take(change, 1).unwrap().is_none());
        }
        assembler.take(Message::Commit { commit_lsn: 10, end_lsn: 12 }, 0).unwrap().unwrap()
    }

    fn assembler(def: &TableDef) -> Assembler {
        assembler_with(def, 0)
    }

    fn assembler_with(def: &TableDef, horizon: Lsn) -> Assembler {
        let inventory = Inventory { tables: vec![def.clone()], partitioned: Vec::new(), sequences: Vec::new() };
        let mut assembler = Assembler::new(&inventory, PartialTables::default(), horizon);
        assembler.take(Message::Relation(relation(def)), 0).unwrap();
        assembler
    }

    fn tokens(change: Message) -> Vec<Token> {
        let Item::Transaction(mut whole) = transaction(&mut assembler(&table_def(true)), vec![change]) else {
            panic!("it is a transaction")
        };
        assert_eq!((whole.stamp, whole.xid, whole.bytes), (12, 3, 1));
        whole.tokens()
    }

    #[test]
    fn an_insert_takes_its_row_and_its_values() {
        let new = row(["1", "a@b", "x"]);
        let taken = tokens(Message::Insert { relation: 5, new });
        assert!(matches!(taken[..], [Token::Row(5, _), Token::Unique(5, 9, _)]), "{taken:?}");
        let null = tokens(Message::Insert { relation: 5, new: row(["1", "", "x"]) });
        assert_eq!(null.len(), 1, "NULLs meet no NULL: {null:?}");
    }

    #[test]
    fn what_is_not_told_of_the_old_row_takes_the_whole_index() {
        let taken = tokens(Message::Update { relation: 5, old: None, new: row(["1", "a@b", "x"]) });
        assert!(matches!(taken[..], [Token::Row(..), Token::Index(5, 9)]), "{taken:?}");
        let old = Some(row(["2", "", ""]));
        let taken = tokens(Message::Update { relation: 5, old, new: row(["1", "a@b", "x"]) });
        let rows = taken.iter().filter(|token| matches!(token, Token::Row(..))).count();
        assert_eq!(rows, 2, "a change of key takes both keys: {taken:?}");
        let taken = tokens(Message::Delete { relation: 5, old: row(["2", "", ""]) });
        assert!(matches!(taken[..], [Token::Row(..), Token::Index(5, 9)]), "{taken:?}");
    }

    /// Returns the writes for an update that commits at 12, with this horizon.
    fn brought(def: &TableDef, horizon: Lsn, old: Option<Tuple>, new: Tuple) -> Vec<Write> {
        let update = Message::Update { relation: 5, old, new };
        match transaction(&mut assembler_with(def, horizon), vec![update]) {
            Item::Transaction(whole) if whole.early == (horizon >= 12) => whole.writes,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn before_the_horizon_a_row_is_brought_whether_it_is_there_or_not() {
        let def = table_def(true);
        let whole = || row(["1", "a", "b"]);
        assert!(matches!(brought(&def, 11, None, whole())[..], [Write::Update { .. }]), "beyond it");
        assert!(matches!(brought(&def, 12, None, whole())[..], [Write::Upsert { .. }]));
        let moved = brought(&def, 12, Some(row(["2", "", ""])), whole());
        let [Write::Delete { old, .. }, Write::Insert { new, .. }] = &moved[..] else { panic!("{moved:?}") };
        assert_eq!((&old[0], new), (&row(["2", "", ""])[0], &whole()));
        let full = brought(&def, 12, Some(row(["1", "before", "b"])), whole());
        assert!(matches!(full[..], [Write::Upsert { .. }]), "told, and the same: {full:?}");
        let mut part = whole();
        part[2] = Value::Unchanged;
        assert!(matches!(brought(&def, 12, None, part)[..], [Write::Update { .. }]), "it is there");
        let ruled = TableDef { rules: true, ..table_def(true) };
        assert!(matches!(brought(&ruled, 12, None, whole())[..], [Write::Update { .. }]));
        let keyless = brought(&table_def(false), 12, Some(whole()), whole());
        assert!(matches!(keyless[..], [Write::Update { .. }]), "{keyless:?}");
        let mut numbered = table_def(true);
        numbered.columns[1].identity_always = true;
        let replaced = brought(&numbered, 12, None, whole());
        assert!(
            matches!(replaced[..], [Write::Delete { .. }, Write::Insert { .. }]),
            "no update can set it: {replaced:?}"
        );
    }

    #[test]
    fn what_we_brought_ourselves_is_not_brought_back() {
        let mut assembler = assembler(&table_def(true));
        let mut ours = relation(&table_def(true));
        (ours.oid, ours.schema, ours.name) = (77, OUR_SCHEMA.into(), "applied".into());
        assembler.take(Message::Relation(ours), 0).unwrap();
        let new = || row(["1", "a", "b"]);
        let changes = vec![Message::Insert { relation: 5, new: new() }, Message::Insert { relation: 77, new: new() }];
        assert!(matches!(transaction(&mut assembler, changes), Item::Position(12)));
        let changes = vec![Message::Insert { relation: 5, new: new() }];
        assert!(matches!(transaction(&mut assembler, changes), Item::Transaction(_)));
    }

    #[test]
    fn changed_definitions_are_errors() {
        let mut assembler = assembler(&table_def(true));
        let mut other = relation(&table_def(true));
        other.columns.push(Column { name: "later".into(), key: false, type_oid: 25 });
        assert!(assembler.take(Message::Relation(other), 0).unwrap_err().to_string().contains("different columns"));
        let mut new = relation(&table_def(true));
        new.oid = 6;
        assert!(assembler.take(Message::Relation(new), 0).unwrap_err().to_string().contains("is new"));
    }

    /// Columns that are added later have no value yet, and those that are dropped later have one still.
    #[test]
    fn rows_of_other_columns_are_brought_into_the_order_of_the_table() {
        let def = table_def(true);
        let inventory = Inventory { tables: vec![def.clone()], partitioned: Vec::new(), sequences: Vec::new() };
        let mut partial = PartialTables::default();
        partial.dropped.insert((5, "gone".into()));
        let mut assembler = Assembler::new(&inventory, partial, 0);
        let mut other = relation(&def);
        other.columns =
            ["gone", "note", "id"].map(|name| Column { name: name.into(), key: name == "id", type_oid: 25 }).to_vec();
        assert!(assembler.take(Message::Relation(other), 0).unwrap().is_none());
        let changes = vec![Message::Insert { relation: 5, new: row(["g", "n", "7"]) }];
        let Item::Transaction(whole) = transaction(&mut assembler, changes) else { panic!("it is a transaction") };
        let Write::Insert { table, new } = &whole.writes[0] else { panic!("it is an insert") };
        assert_eq!(table.def.columns.iter().map(|column| column.name.as_str()).collect::<Vec<_>>(), ["note", "id"]);
        assert_eq!((&new[..], table.key.as_deref()), (&row(["n", "7", ""])[..2], Some(&[1][..])));
        assert_ne!(table.version, 0);
    }

    /// A change that the snapshot of a later copy sees is in the copied rows.
    #[test]
    fn changes_that_a_copy_holds_are_left_out() {
        let def = table_def(true);
        let inventory = Inventory { tables: vec![def.clone()], partitioned: Vec::new(), sequences: Vec::new() };
        // A transaction that commits later has a number that came again.
        for (snapshot, until, is_left_out) in
            [("4:4:", 11, true), ("3:3:", 11, false), ("3:9:3", 11, false), ("4:4:", 10, false)]
        {
            let mut partial = PartialTables::default();
            let snapshot = SourceSnapshot::parse(snapshot).unwrap();
            assert_eq!(SourceSnapshot::parse(&snapshot.to_string()).unwrap(), snapshot);
            partial.copied.insert(5, CopySnapshot { snapshot: snapshot.clone(), until });
            let mut assembler = Assembler::new(&inventory, partial, 0);
            assembler.take(Message::Relation(relation(&def)), 0).unwrap();
            let changes = vec![Message::Insert { relation: 5, new: row(["1", "a", "b"]) }];
            let item = transaction(&mut assembler, changes);
            assert_eq!(matches!(item, Item::Position(12)), is_left_out, "{snapshot}, {until}: {item:?}");
        }
        let mut partial = PartialTables::default();
        partial.copying.insert(5);
        let mut assembler = Assembler::new(&inventory, partial, 0);
        assembler.take(Message::Relation(relation(&def)), 0).unwrap();
        let changes = vec![Message::Delete { relation: 5, old: row(["1", "a", "b"]) }];
        let kept = transaction(&mut assembler, changes);
        assert!(matches!(&kept, Item::Transaction(empty) if empty.writes.is_empty() && empty.stamp == 12), "{kept:?}");
        let mut partial = PartialTables::default();
        partial.gone.insert(5);
        let mut assembler = Assembler::new(&inventory, partial, 0);
        assembler.take(Message::Relation(relation(&def)), 0).unwrap();
        let changes = vec![Message::Delete { relation: 5, old: row(["1", "a", "b"]) }];
        assert!(matches!(transaction(&mut assembler, changes), Item::Position(12)));
    }

    #[test]
    fn markers_come_through() {
        let changes = vec![Message::Emitted { prefix: MARKER_PREFIX.into(), content: "drain 1".into() }];
        let item = transaction(&mut assembler(&table_def(true)), changes);
        assert!(matches!(item, Item::Marker { text, end: 12 } if text == "drain 1"));
    }
}

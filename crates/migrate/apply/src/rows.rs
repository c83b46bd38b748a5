//! Converts the proxy's capture to items for the conductor: the other source of changes, beside [`super::stream`].
//!
//! Stamps are used as positions. Transactions that the copied snapshot has seen are left out.

use super::intake::SourceSnapshot;
use super::transaction::{Item, Table, Transaction, Write, described, other_columns};
use crate::Error;
use crate::inventory::{Inventory, TableDef};
use crate::pgoutput::{Lsn, Tuple, Value};
use crate::recording::Spool;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use stillpoint_migrate_capture::Action;
use stillpoint_migrate_control::Reply;
use stillpoint_migrate_control::rows::{Row, Syncset, TableShape};
use tokio::sync::{Notify, mpsc};

/// Maximum items that are passed on together.
const CHUNK_MAX: usize = 512;

/// Positions in the order of stamps that the follower waits for.
#[derive(Debug, Default)]
pub(crate) struct Markers {
    wanted: Mutex<Vec<(Lsn, String)>>,
    changed: Notify,
}

impl Markers {
    /// Puts a marker after this stamp.
    pub(crate) fn put(&self, behind: Lsn, text: String) {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner).push((behind, text));
        self.changed.notify_one();
    }

    fn take_reached<T>(&self, stamp: Lsn) -> Vec<Item<T>> {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        let reached = wanted.extract_if(.., |(behind, _)| *behind <= stamp);
        reached.map(|(end, text)| Item::Marker { text, end }).collect()
    }
}

/// Converts lines of a capture to items.
pub(super) trait Translate: Send {
    /// Type of the transactions.
    type Transaction: Send;

    /// Takes a line.
    fn take(&mut self, line: &[u8]) -> Result<Option<Item<Self::Transaction>>, Error>;

    /// The stamp of the last transaction taken.
    fn received(&self) -> Lsn;
}

/// Reads a capture.
pub(super) struct Reader<T> {
    spool: Arc<Spool>,
    translator: T,
    markers: Arc<Markers>,
}

/// Channel of items to the conductor.
pub(super) type Items<T> = mpsc::Sender<Result<Vec<Item<T>>, Error>>;

/// Makes transactions of captured rows.
pub(super) struct Translator {
    tables: Tables,
    seen: SourceSnapshot,
    received: Lsn,
}

/// Tables as the proxy describes them.
#[derive(Debug)]
pub(super) struct Tables {
    inventory: HashMap<u32, TableDef>,
    known: HashMap<u32, TableLayout>,
}

/// A table, and the position of each column's value.
#[derive(Debug)]
struct TableLayout {
    table: Arc<Table>,
    places: Vec<usize>,
}

impl<T: Translate> Reader<T> {
    pub(super) fn new(spool: Arc<Spool>, translator: T, markers: Arc<Markers>) -> Reader<T> {
        Reader { spool, translator, markers }
    }

    /// Reads until the receiver of items is gone; an error that ends it is sent on the same channel.
    pub(super) async fn run(mut self, items: Items<T::Transaction>) {
        if let Err(error) = self.pump(&items).await {
            // If the receiver is gone, the error is not needed.
            let _ = items.send(Err(error)).await;
        }
    }

    async fn pump(&mut self, items: &Items<T::Transaction>) -> Result<(), Error> {
        let mut bytes = Vec::new();
        loop {
            tokio::select! {
                taken = self.spool.take(&mut bytes) => taken?,
                () = self.markers.changed.notified() => {}
                () = items.closed() => return Ok(()),
            }
            let mut chunk = Vec::new();
            let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            for line in bytes[..whole].split_inclusive(|byte| *byte == b'\n') {
                chunk.extend(self.translator.take(line)?);
                if chunk.len() >= CHUNK_MAX && items.send(Ok(std::mem::take(&mut chunk))).await.is_err() {
                    return Ok(());
                }
            }
            bytes.drain(..whole);
            chunk.extend(self.markers.take_reached(self.translator.received()));
            if !chunk.is_empty() && items.send(Ok(chunk)).await.is_err() {
                return Ok(());
            }
        }
    }
}

impl Translator {
    /// Makes a translator; `seen` is the snapshot that was copied.
    pub(super) fn new(seen: SourceSnapshot, inventory: &Inventory) -> Translator {
        Translator { tables: Tables::new(inventory), seen, received: 0 }
    }

    fn transaction(&self, rows: Syncset) -> Result<Item, Error> {
        let Syncset { stamp, xid, rows, tokens, .. } = rows;
        if rows.is_empty() {
            return Ok(Item::Position(stamp));
        }
        // 32 bits, like the server's own numbers in its log.
        let xid = parse_xid(&xid)? as u32;
        if self.seen.sees(xid) {
            return Ok(Item::Position(stamp));
        }
        let bytes = rows.iter().map(row_bytes).sum();
        let writes = self.tables.writes(rows)?;
        let told = Some(tokens);
        Ok(Item::Transaction(Transaction { stamp, xid, writes, bytes, told, early: false }))
    }
}

impl Translate for Translator {
    type Transaction = Transaction;

    fn take(&mut self, line: &[u8]) -> Result<Option<Item>, Error> {
        match reply(line)? {
            Reply::Table(shape) => self.tables.register_table(&shape).map(|()| None),
            Reply::Syncset(rows) => {
                self.received = rows.stamp;
                self.transaction(rows).map(Some)
            }
            other => Err(unexpected(&other)),
        }
    }

    fn received(&self) -> Lsn {
        self.received
    }
}

impl Tables {
    pub(super) fn new(inventory: &Inventory) -> Tables {
        let tables = inventory.tables.iter().chain(&inventory.partitioned);
        Tables { inventory: tables.map(|table| (table.oid, table.clone())).collect(), known: HashMap::new() }
    }

    /// Takes the description of a table, which the proxy sends before its rows.
    pub(super) fn register_table(&mut self, shape: &TableShape) -> Result<(), Error> {
        let def = described(&self.inventory, shape.table, &shape.schema, &shape.name)?;
        let place = |name: &String| shape.columns.iter().position(|column| column == name);
        let places: Option<Vec<usize>> = def.columns.iter().map(|column| place(&column.name)).collect();
        let places = places.filter(|places| places.len() == shape.columns.len());
        let places = places.ok_or_else(|| other_columns(def))?;
        let key: Option<Vec<usize>> = shape.key.iter().map(|at| places.iter().position(|place| place == at)).collect();
        let key = key.filter(|key| !key.is_empty());
        self.known
            .insert(shape.table, TableLayout { table: Arc::new(Table { def: def.clone(), key, version: 0 }), places });
        Ok(())
    }

    pub(super) fn writes(&self, rows: Vec<Row>) -> Result<Vec<Write>, Error> {
        rows.into_iter().map(|row| self.write(row)).collect()
    }

    fn write(&self, row: Row) -> Result<Write, Error> {
        let unknown = || Error::Capture(format!("a row of relation {}, which was not described", row.table));
        let TableLayout { table, places } = self.known.get(&row.table).ok_or_else(unknown)?;
        let table = Arc::clone(table);
        let mut values = row.values;
        if values.len() != places.len() {
            return Err(Error::Capture(format!("{} values for a row of {}", values.len(), table.def.display())));
        }
        let mut value = |at: &usize| values[*at].take().map_or(Value::Null, |text| Value::Text(text.into()));
        let tuple: Tuple = places.iter().map(&mut value).collect();
        Ok(match row.did {
            Action::Insert => Write::Insert { table, new: tuple },
            Action::Upsert => Write::Upsert { table, new: tuple },
            Action::Update => Write::Update { table, old: None, new: tuple },
            Action::Delete => Write::Delete { table, old: tuple },
        })
    }
}

pub(super) fn reply(line: &[u8]) -> Result<Reply, Error> {
    Reply::of_line(line).map_err(|error| Error::Capture(error.to_string()))
}

pub(super) fn unexpected(reply: &Reply) -> Error {
    Error::Capture(format!("the proxy sent {reply:?} in the captured stream"))
}

/// Parses the number of a transaction as the proxy writes it.
pub(super) fn parse_xid(text: &str) -> Result<u64, Error> {
    text.parse().map_err(|_| Error::Capture(format!("`{text}` is not a transaction number")))
}

/// Size of a row in bytes.
pub(super) fn row_bytes(row: &Row) -> u64 {
    row.values.iter().map(|value| 8 + value.as_ref().map_or(0, String::len) as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transaction::tests::table_def;
    use stillpoint_migrate_replay::Token;

    fn translator() -> Translator {
        let seen = SourceSnapshot::parse("10:20:12").unwrap();
        let inventory = Inventory { tables: vec![table_def(true)], partitioned: Vec::new(), sequences: Vec::new() };
        Translator::new(seen, &inventory)
    }

    /// The proxy lists the columns in its own order.
    fn shape() -> TableShape {
        let columns = ["note", "id", "mail"].map(str::to_owned).to_vec();
        let (schema, name) = ("public".into(), "t".into());
        TableShape { table: 5, schema, name, columns, key: vec![1], insert_only: Vec::new() }
    }

    fn line(reply: &Reply) -> Vec<u8> {
        let mut line = serde_json::to_vec(reply).unwrap();
        line.push(b'\n');
        line
    }

    fn syncset(stamp: u64, xid: &str, did: Action) -> Reply {
        let values = vec![None, Some("7".to_owned()), Some("a@b".to_owned())];
        let rows = vec![Row { table: 5, did, values }];
        let tokens = vec![Token::Row(5, 77)];
        Reply::Syncset(Syncset { stamp, xid: xid.into(), rows, tokens, statements: None })
    }

    fn text(value: &str) -> Value {
        Value::Text(value.to_owned().into())
    }

    #[test]
    fn rows_come_in_the_order_of_the_tables_columns() {
        let mut translator = translator();
        assert!(translator.take(&line(&Reply::Table(shape()))).unwrap().is_none());
        for (did, sql) in [
            (
                Action::Insert,
                r#"INSERT INTO "public"."t" ("id", "mail", "note") OVERRIDING SYSTEM VALUE VALUES ($1, $2, $3)"#,
            ),
            (Action::Update, r#"UPDATE ONLY "public"."t" SET "id" = $1, "mail" = $2, "note" = $3 WHERE "id" = $4"#),
            (Action::Delete, r#"DELETE FROM ONLY "public"."t" WHERE "id" = $1"#),
            (
                Action::Upsert,
                "INSERT INTO \"public\".\"t\" (\"id\", \"mail\", \"note\") OVERRIDING SYSTEM VALUE VALUES ($1, $2, \
                 $3) \
                 ON CONFLICT (\"id\") DO UPDATE SET \"id\" = EXCLUDED.\"id\", \"mail\" = EXCLUDED.\"mail\", \
                 \"note\" = EXCLUDED.\"note\"",
            ),
        ] {
            let item = translator.take(&line(&syncset(3, "4294967330", did))).unwrap();
            let Some(Item::Transaction(mut whole)) = item else { panic!("{item:?}") };
            assert_eq!((whole.stamp, whole.xid, whole.writes[0].sql().as_str()), (3, 34, sql));
            assert_eq!(whole.tokens(), [Token::Row(5, 77)]);
            if did == Action::Insert {
                assert_eq!(whole.writes[0].parameters(), [&text("7"), &text("a@b"), &Value::Null]);
            }
        }
    }

    #[test]
    fn what_the_snapshot_saw_is_left_out() {
        let mut translator = translator();
        translator.take(&line(&Reply::Table(shape()))).unwrap();
        for (xid, left_out) in [("9", true), ("12", false), ("15", true), ("20", false)] {
            let item = translator.take(&line(&syncset(8, xid, Action::Insert))).unwrap();
            assert_eq!(matches!(item, Some(Item::Position(8))), left_out, "{xid}: {item:?}");
        }
    }

    #[test]
    fn tables_that_are_not_what_they_were_are_errors() {
        let mut other = shape();
        other.columns.push("more".into());
        let mut new = shape();
        new.table = 6;
        for (shape, what) in [(other, "different columns"), (new, "is new")] {
            let error = translator().take(&line(&Reply::Table(shape))).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        }
    }

    #[test]
    fn markers_come_behind_their_stamp() {
        let markers = Markers::default();
        markers.put(3, "drain".into());
        markers.put(0, "mark".into());
        assert!(
            matches!(&markers.take_reached::<Transaction>(2)[..], [Item::Marker { text, end: 0 }] if text == "mark")
        );
        assert!(
            matches!(&markers.take_reached::<Transaction>(3)[..], [Item::Marker { text, end: 3 }] if text == "drain")
        );
        assert!(markers.take_reached::<Transaction>(9).is_empty());
    }
}

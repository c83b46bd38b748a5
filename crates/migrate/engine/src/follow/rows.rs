//! From what the proxy has captured to what the conductor takes: the other source of changes, beside [`super::stream`].
//!
//! Stamps stand for positions. What the copied snapshot has seen is left out.

use super::conductor::SourceSnapshot;
use super::transaction::{Item, Table, Transaction, Write, described, other_columns};
use crate::Error;
use crate::inventory::{Inventory, TableDef};
use crate::pgoutput::{Lsn, Tuple, Value};
use crate::recording::Spool;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use stillpoint_migrate_proxy::control::Reply;
use stillpoint_migrate_proxy::control::rows::{Did, Row, Syncset, TableShape};
use stillpoint_migrate_replay::Token;
use tokio::sync::{Notify, mpsc};

/// Items that are handed on at once.
const CHUNK_MAX: usize = 512;

/// Places in the order of stamps that somebody waits for.
#[derive(Debug, Default)]
pub(crate) struct Markers {
    wanted: Mutex<Vec<(Lsn, String)>>,
    changed: Notify,
}

impl Markers {
    /// A marker comes behind this stamp.
    pub(crate) fn put(&self, behind: Lsn, text: String) {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner).push((behind, text));
        self.changed.notify_one();
    }

    fn reached(&self, stamp: Lsn) -> Vec<Item> {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        let reached = wanted.extract_if(.., |(behind, _)| *behind <= stamp);
        reached.map(|(end, text)| Item::Marker { text, end }).collect()
    }
}

/// Reads what was captured.
pub(crate) struct Reader {
    spool: Arc<Spool>,
    translator: Translator,
    markers: Arc<Markers>,
    received: Lsn,
}

/// Knows tables as the proxy tells of them.
struct Translator {
    inventory: HashMap<u32, TableDef>,
    seen: SourceSnapshot,
    tables: HashMap<u32, Known>,
}

/// A table, and where the value of each of its columns stands.
struct Known {
    table: Arc<Table>,
    places: Vec<usize>,
}

impl Reader {
    /// `seen` is the snapshot that was copied.
    pub(crate) fn new(spool: Arc<Spool>, seen: SourceSnapshot, inventory: &Inventory, markers: Arc<Markers>) -> Reader {
        let tables = inventory.tables.iter().chain(&inventory.partitioned);
        let inventory = tables.map(|table| (table.oid, table.clone())).collect();
        Reader { spool, translator: Translator { inventory, seen, tables: HashMap::new() }, markers, received: 0 }
    }

    /// Reads until the receiver of items is gone; the error that ends it goes the same way.
    pub(crate) async fn run(mut self, items: mpsc::Sender<Result<Vec<Item>, Error>>) {
        if let Err(error) = self.pump(&items).await {
            // Nobody listens any more: then nobody is interested.
            let _ = items.send(Err(error)).await;
        }
    }

    async fn pump(&mut self, items: &mpsc::Sender<Result<Vec<Item>, Error>>) -> Result<(), Error> {
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
                if let Some((stamp, item)) = self.translator.take(line)? {
                    self.received = stamp;
                    chunk.push(item);
                }
                if chunk.len() >= CHUNK_MAX && items.send(Ok(std::mem::take(&mut chunk))).await.is_err() {
                    return Ok(());
                }
            }
            bytes.drain(..whole);
            chunk.extend(self.markers.reached(self.received));
            if !chunk.is_empty() && items.send(Ok(chunk)).await.is_err() {
                return Ok(());
            }
        }
    }
}

impl Translator {
    /// Takes a line in; a transaction with its stamp.
    fn take(&mut self, line: &[u8]) -> Result<Option<(Lsn, Item)>, Error> {
        match Reply::of_line(line).map_err(|error| Error::Capture(error.to_string()))? {
            Reply::Table(shape) => {
                let known = self.table(&shape)?;
                self.tables.insert(shape.table, known);
                Ok(None)
            }
            Reply::Syncset(rows) => Ok(Some((rows.stamp, self.transaction(rows)?))),
            other => Err(Error::Capture(format!("the proxy said {other:?} among what it captured"))),
        }
    }

    fn table(&self, shape: &TableShape) -> Result<Known, Error> {
        let def = described(&self.inventory, shape.table, &shape.schema, &shape.name)?;
        let place = |name: &String| shape.columns.iter().position(|column| column == name);
        let places: Option<Vec<usize>> = def.columns.iter().map(|column| place(&column.name)).collect();
        let places = places.filter(|places| places.len() == shape.columns.len());
        let places = places.ok_or_else(|| other_columns(def))?;
        let key: Option<Vec<usize>> = shape.key.iter().map(|at| places.iter().position(|place| place == at)).collect();
        let key = key.filter(|key| !key.is_empty());
        Ok(Known { table: Arc::new(Table { def: def.clone(), key }), places })
    }

    fn transaction(&self, rows: Syncset) -> Result<Item, Error> {
        let Syncset { stamp, xid, rows, tokens, .. } = rows;
        if rows.is_empty() {
            return Ok(Item::Position(stamp));
        }
        let number: u64 = xid.parse().map_err(|_| Error::Capture(format!("`{xid}` is no number of a transaction")))?;
        // As the server's own numbers in its log are.
        let xid = number as u32;
        if self.seen.sees(xid) {
            return Ok(Item::Position(stamp));
        }
        let bytes = rows.iter().map(size).sum();
        let writes: Result<Vec<Write>, Error> = rows.into_iter().map(|row| self.write(row)).collect();
        let told = Some(tokens.into_iter().map(Token::from).collect());
        Ok(Item::Transaction(Transaction { stamp, xid, writes: writes?, bytes, told }))
    }

    fn write(&self, row: Row) -> Result<Write, Error> {
        let unknown = || Error::Capture(format!("a row of relation {}, of which nothing was said", row.table));
        let Known { table, places } = self.tables.get(&row.table).ok_or_else(unknown)?;
        let table = Arc::clone(table);
        let mut values = row.values;
        if values.len() != places.len() {
            return Err(Error::Capture(format!("{} values of {}", values.len(), table.def.display())));
        }
        let mut value = |at: &usize| values[*at].take().map_or(Value::Null, |text| Value::Text(text.into()));
        let tuple: Tuple = places.iter().map(&mut value).collect();
        Ok(match row.did {
            Did::Insert => Write::Insert { table, new: tuple },
            Did::Upsert => Write::Upsert { table, new: tuple },
            Did::Update => Write::Update { table, old: None, new: tuple },
            Did::Delete => Write::Delete { table, old: tuple },
        })
    }
}

/// What a row takes, in bytes.
fn size(row: &Row) -> u64 {
    row.values.iter().map(|value| 8 + value.as_ref().map_or(0, String::len) as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::super::transaction::tests::table_def;
    use super::*;
    use stillpoint_migrate_proxy::control::rows::Touched;

    fn translator() -> Translator {
        let seen = SourceSnapshot::parse("10:20:12").unwrap();
        Translator { inventory: HashMap::from([(5, table_def(true))]), seen, tables: HashMap::new() }
    }

    /// The proxy names the columns in an order of its own.
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

    fn syncset(stamp: u64, xid: &str, did: Did) -> Reply {
        let values = vec![None, Some("7".to_owned()), Some("a@b".to_owned())];
        let rows = vec![Row { table: 5, did, values }];
        let tokens = vec![Touched::Row(5, 77)];
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
                Did::Insert,
                r#"INSERT INTO "public"."t" ("id", "mail", "note") OVERRIDING SYSTEM VALUE VALUES ($1, $2, $3)"#,
            ),
            (Did::Update, r#"UPDATE ONLY "public"."t" SET "id" = $1, "mail" = $2, "note" = $3 WHERE "id" = $4"#),
            (Did::Delete, r#"DELETE FROM ONLY "public"."t" WHERE "id" = $1"#),
            (
                Did::Upsert,
                "INSERT INTO \"public\".\"t\" (\"id\", \"mail\", \"note\") OVERRIDING SYSTEM VALUE VALUES ($1, $2, $3) \
                 ON CONFLICT (\"id\") DO UPDATE SET \"id\" = EXCLUDED.\"id\", \"mail\" = EXCLUDED.\"mail\", \
                 \"note\" = EXCLUDED.\"note\"",
            ),
        ] {
            let item = translator.take(&line(&syncset(3, "4294967330", did))).unwrap();
            let Some((3, Item::Transaction(mut whole))) = item else { panic!("{item:?}") };
            assert_eq!((whole.stamp, whole.xid, whole.writes[0].sql().as_str()), (3, 34, sql));
            assert_eq!(whole.tokens(), [Token::Row { table: 5, key: 77 }]);
            if did == Did::Insert {
                assert_eq!(whole.writes[0].parameters(), [&text("7"), &text("a@b"), &Value::Null]);
            }
        }
    }

    #[test]
    fn what_the_snapshot_saw_is_left_out() {
        let mut translator = translator();
        translator.take(&line(&Reply::Table(shape()))).unwrap();
        for (xid, left_out) in [("9", true), ("12", false), ("15", true), ("20", false)] {
            let item = translator.take(&line(&syncset(8, xid, Did::Insert))).unwrap();
            assert_eq!(matches!(item, Some((8, Item::Position(8)))), left_out, "{xid}: {item:?}");
        }
    }

    #[test]
    fn tables_that_are_not_what_they_were_are_errors() {
        let mut other = shape();
        other.columns.push("more".into());
        let mut new = shape();
        new.table = 6;
        for (shape, what) in [(other, "other columns"), (new, "is new")] {
            let error = translator().take(&line(&Reply::Table(shape))).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        }
    }

    #[test]
    fn markers_come_behind_their_stamp() {
        let markers = Markers::default();
        markers.put(3, "drain".into());
        markers.put(0, "mark".into());
        assert!(matches!(&markers.reached(2)[..], [Item::Marker { text, end: 0 }] if text == "mark"));
        assert!(matches!(&markers.reached(3)[..], [Item::Marker { text, end: 3 }] if text == "drain"));
        assert!(markers.reached(9).is_empty());
    }
}

//! Row images from statements: statement and catalogue facts in, the statement with hidden columns behind RETURNING out.
//!
//! **The caller must** fill the [`Catalogue`] from the database as it is when the statement runs, split texts of several
//! statements, and take the hidden columns out of what the client gets: the last [`Rewritten::hidden`] fields of every
//! row, or all rows when [`Rewritten::client_sees_rows`] is false.
//!
//! **Guaranteed:** the statement's own text is untouched, only appended to, so what it does, its parameters and their
//! numbers stay the same. Every row that it writes comes back with its image and with the hashes of its tokens, computed
//! by the server, whose equality is not that of bytes. What cannot be shown so is refused by name, never guessed; a
//! statement that may write without being seen to is refused too.
//!
//! **It does not** parse what clients send while no migration runs, ask the database, or see what bypasses the statement
//! (triggers and cascades are facts of the catalogue).
//!
//! ```text
//! UPDATE item SET stock = 1 WHERE id = $1
//! UPDATE item SET stock = 1 WHERE id = $1
//! RETURNING "item"."id", "item"."stock", pg_catalog.hash_record_extended(ROW("item"."id"), 0)
//!           \__________ image __________/  \________________ token of the row _____________/
//! ```
//!
//! An example:
//!
//! ```
//! use stillpoint_migrate_capture::{Catalogue, Column, Seen, Table, rewrite};
//!
//! let columns = ["id", "stock"].map(|name| Column { name: name.into(), generated: false }).to_vec();
//! let mut catalogue = Catalogue::new(["public".to_owned()]);
//! let (schema, name) = ("public".into(), "item".into());
//! catalogue.add(Table { oid: 7, schema, name, columns, key: Some(vec![0]), ..Table::default() });
//! let Seen::Writes(rewritten) = rewrite("DELETE FROM item WHERE stock = 0", &catalogue)? else { unreachable!() };
//! assert!(rewritten.text.starts_with("DELETE FROM item WHERE stock = 0\nRETURNING \"item\".\"id\", \"item\".\"stock\""));
//! assert_eq!((rewritten.hidden, rewritten.client_sees_rows), (3, false));
//! # Ok::<(), stillpoint_migrate_capture::Refusal>(())
//! ```
//!
//! Follows "Row capture in the proxy" of the design; PostgreSQL's documentation of RETURNING.
#![forbid(unsafe_code)]

mod catalogue;
mod error;
mod rewrite;

pub use catalogue::{Catalogue, Column, Reference, Table, Unique, WritesMore};
pub use error::Refusal;
pub use rewrite::{Action, Hash, Rewritten, Seen, rewrite};

//! Row images from statements: takes a statement and facts of the catalogue, returns the statement with a hidden column after
//! RETURNING.
//!
//! **The caller must** fill the [`Catalogue`] from the database as it is when the statement runs, split texts of several
//! statements, and take the hidden column out of what the client gets: the first field of every row, or all rows when
//! [`RewrittenStatement::client_sees_rows`] is false.
//!
//! **Guaranteed:** the statement's own text is unchanged; text is only added after its RETURNING or its end. So its effect, its
//! parameters and their numbers stay the same. Every row that it writes comes back with its image and with the hashes of its
//! tokens. The server computes the hashes, because its equality is not equality of bytes. A statement whose rows cannot be
//! shown in this way is refused by name, never guessed; so is a statement that may write without showing it. A text that costs
//! too much to parse is refused too: one of more than a million tokens, or one whose tree may be more than 10,000 levels deep
//! (operators in a row, not lists). If the caller's stack is too small for a tree, the tree is walked on a stack of its own.
//!
//! **It does not** parse what clients send while no migration is active, query the database, or see writes that bypass the
//! statement (triggers and cascades are facts of the catalogue).
//!
//! ```text
//! UPDATE item SET stock = 1 WHERE id = $1
//! UPDATE item SET stock = 1 WHERE id = $1
//! RETURNING ROW("item"."id", "item"."stock", pg_catalog.hash_record_extended(ROW("item"."id"), 0))::pg_catalog.text
//!               \__________ image __________/  \________________ token of the row _____________/
//! ```
//!
//! The hidden column is one text. So it looks the same in every format that a client may request, and it depends only on how
//! the session writes dates, intervals and floating-point numbers. It is the first column, so that the proxy need not hold a
//! whole row before it forwards the row without it.
//!
//! | statement | becomes |
//! |---|---|
//! | INSERT; INSERT ... ON CONFLICT, UPDATE, DELETE of a table with a key; with or without RETURNING | row images |
//! | the same of a temporary table; COPY FROM into a temporary table | nothing |
//! | SELECT, SET, cursors, COPY TO, VACUUM, EXPLAIN without ANALYZE | nothing |
//! | BEGIN, COMMIT, ROLLBACK, SAVEPOINT, RELEASE, ROLLBACK TO | [`Effect::Control`] |
//! | TRUNCATE, DDL, SELECT INTO | a barrier |
//! | COPY FROM, MERGE, CALL, DO, EXECUTE, two-phase commit, writes inside WITH, EXPLAIN ANALYZE of a write | refused |
//! | UPDATE of a key; UPDATE and DELETE of a table without one; functions that may write | refused |
//! | tables with triggers, rules or cascades at that statement, views, row security, no SELECT right | refused |
//!
//! An example:
//!
//! ```
//! use stillpoint_migrate_capture::{Catalogue, Column, Effect, Table, rewrite};
//!
//! let columns = ["id", "stock"].map(|name| Column { name: name.into(), ..Column::default() }).to_vec();
//! let mut catalogue = Catalogue::new(["public".to_owned()]);
//! let (schema, name) = ("public".into(), "item".into());
//! catalogue.add(Table { oid: 7, schema, name, columns, key: Some(vec![0]), ..Table::default() });
//! let Effect::Writes(rewritten) = rewrite("DELETE FROM item WHERE stock = 0", &catalogue)? else { unreachable!() };
//! assert!(rewritten.text.starts_with("DELETE FROM item WHERE stock = 0\nRETURNING ROW(\"item\".\"id\", \"item\".\"stock\""));
//! let image = rewritten.read("(5,0,-77)")?;
//! assert_eq!(image.values, [Some("5".to_owned()), Some("0".to_owned())]);
//! # Ok::<(), stillpoint_migrate_capture::Refusal>(())
//! ```
//!
//! Follows "Row capture in the proxy" of the design; PostgreSQL's documentation of RETURNING.
#![forbid(unsafe_code)]

mod catalogue;
mod control;
mod determinism;
mod error;
pub mod facts;
mod image;
mod parse;
mod read_statement;
mod rewrite;
mod split;

pub use catalogue::{Catalogue, Column, Reference, Table, Unique, WritesMore};
pub use determinism::{check_repeatable, only_reads};
pub use error::Refusal;
pub use image::Image;
pub use read_statement::{ReadStatement, read_statement, without_literals};
pub use rewrite::{Action, Control, Effect, Hash, RewrittenStatement, rewrite};
pub use split::split;

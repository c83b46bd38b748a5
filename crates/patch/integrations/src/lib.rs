//! Places edits of our own in programs of other projects: each edit has an anchor, and contains none of their text.
//!
//! The obvious way is a diff. A diff contains lines of the text around each change, which we must not store, and it
//! applies wherever these lines are. An edit names its place instead: a file, a function, and a few words of the
//! statement. A moved or doubled anchor is an error that names both the file and the anchor.
//!
//! An integration is a directory: `*.edits` files state each text and its place, and all files below `files/` are added
//! unchanged.
//!
//! ```text
//! file sql/sql_connect.cc                  the file, from the root of the source tree
//! begin                                    after the file's first run of #include lines
//!   | #include "ours.h"                    text: what follows "| "
//! in Thread_cache::park                    scope: the body of this function, until the next `in` or `file`
//!   before do_command ( thd                before the statement that holds these words, once in the scope
//!     | ours();
//!   after pthread_cond_wait #2/3           the second of exactly three
//!   into while ( alive                     at the start of the block that this statement governs
//!   at end of while ( alive                at its end
//!   replace pthread_cond_wait              exactly these words
//!   begin                                  at the start of the body
//!   end                                    at its end
//! in struct thread_group                   (also `class`, `union`, `enum`): the body of this type
//! in line                                  every line by itself, for what is not C: words are split at white space
//! in file                                  the whole file again
//!   above worker_main                      before the definition of this function
//!   end                                    at the end of the file
//! ```
//!
//! **The caller must guarantee** that the tree is a copy of the pristine one; no other content of it is read.
//!
//! **It guarantees** that every anchor is found exactly as often as its edit states, before any file is written; that a
//! file of the tree is written only when its text changes (builds that compare times do no more than they must), and
//! that files edited by an earlier state of the integration are restored. After a failure the tree is unchanged, except
//! for files written before a write failed; the next run repairs those.
//!
//! **It does not** understand C: it knows words, brackets, statements and conditional directives. It refuses statements
//! that a condition governs without braces, because an insertion would change the governed code.
//!
//! ```
//! # use stillpoint_integrations::Edits;
//! let edits = Edits::parse("my.edits", "file a.c\nin main\n  before serve (\n    | point();\n")?;
//! let (file, edit) = edits.files().next().unwrap();
//! let text = edit.apply(file, "int main(void)\n{\n  for (;;) {\n    serve();\n  }\n}\n")?;
//! assert!(text.contains("{\n    point();\n    serve();"));
//! # Ok::<(), stillpoint_integrations::Error>(())
//! ```
#![forbid(unsafe_code)]

mod anchor;
mod edits;
mod error;
mod integration;
mod source;

pub use edits::{Edits, FileEdits};
pub use error::Error;
pub use integration::{Applied, Integration};

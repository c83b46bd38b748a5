//! Places edits of our own in other people's programs: each stands at an anchor, and nothing of their text is kept here.
//!
//! The obvious way is a diff. A diff carries lines of the text around each change, which is not ours to keep, and it
//! applies wherever those lines happen to be. We name what the edit belongs to instead: a file, a function, and a few
//! words of the statement. A moved or doubled anchor is an error that names both the file and the anchor.
//!
//! An integration is a directory: `*.edits` say what to insert where, and everything below `files/` is added as it is.
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
//! **The caller must guarantee** that the tree was made by copying the pristine one; nothing else is read from there.
//!
//! **It guarantees** that every anchor is found exactly as often as its edit says, before anything is written; that a
//! file of the tree is written only when its text changes (builds that look at times do no more than they must), and
//! that files edited by an earlier state of the integration are put back. On failure the tree is as it was, but for
//! files already written when a write failed; applying again mends those.
//!
//! **It does not** understand C: it knows words, brackets, statements and conditional directives. Statements that a
//! condition governs without braces are refused, because an insertion would change what is governed.
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

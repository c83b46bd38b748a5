//! Formats of criu: the page server's messages, images, the lazy-pages socket, RPC. Bytes in, messages out.
//!
//! **The caller must** do the input and output, and provide whole messages: headers of [`page_server::Form::bytes`]
//! bytes, one packet for each RPC message, whole image files.
//!
//! **Guaranteed:** no input causes a panic; a message that can be decoded has only possible values (ranges of whole
//! pages inside the address space, kinds of memory that exist). Criu 3.17 to 4.2 can read what is encoded here.
//!
//! **It does not** decode every image: only those that are needed to restore, inspect and check.
//!
//! An example:
//!
//! ```
//! use stillpoint_kernel_criu::page_server::{Command, Destination, Form};
//!
//! # fn main() -> Result<(), stillpoint_kernel_criu::Error> {
//! let opening = Command::Open { destination: Destination::Task(4121), wants_answer: true };
//! let mut bytes = Vec::new();
//! opening.encode(Form::Long, &mut bytes);
//! let mut first = [0; 24];
//! first.copy_from_slice(&bytes[..24]);
//! let form = Form::of_first(&first)?;
//! assert_eq!(Command::decode(form, &bytes)?, opening);
//! # Ok(())
//! # }
//! ```
//!
//! Follows criu's own headers and `.proto` files, versions 3.17 to 4.2.
#![forbid(unsafe_code)]

/// Messages of criu's protocol: `field: type = (wire type, label, tag = "number")`.
macro_rules! messages {
    ($($(#[$attribute:meta])* $scope:vis struct $name:ident {
        $($(#[$doc:meta])* $visible:vis $field:ident: $type:ty = ($($wire:tt)*),)*
    })*) => {$(
        $(#[$attribute])*
        #[derive(Clone, PartialEq, Eq, prost::Message)]
        $scope struct $name { $($(#[$doc])* #[prost($($wire)*)] $visible $field: $type,)* }
    )*};
}

mod error;
pub mod image;
pub mod lazy;
pub mod page_server;
pub mod pagemap;
pub mod rpc;
pub mod tcp;

pub use error::Error;

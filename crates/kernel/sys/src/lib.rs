//! Calls of the kernel that checkpoints and switches need and no library has, a module for each.
//!
//! **The caller must** meet what each module asks for: rights, and an order of calls.
//!
//! **Guaranteed:** each call returns the kernel's error, and a call that failed changes nothing but what its documentation names.
//!
//! **It does not** decide when a call is made: [`uffd`] serves memory, [`repair`] ends the repair of connections, [`handover`] keeps
//! memory for the next kernel.

pub mod handover;
pub mod repair;
pub mod uffd;

//! Locking of the state that threads share.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks; the state that a panicked thread left is as good as any other here.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

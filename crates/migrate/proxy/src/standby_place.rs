//! Place of the proxy that stands by.

use crate::mutex::lock;
use std::sync::Mutex;

/// Place of the standby, of which there is at most one.
#[derive(Debug, Default)]
pub(crate) struct Place(Mutex<Option<i32>>);

impl Place {
    /// Process number of the standby.
    pub(crate) fn taken_by(&self) -> Option<i32> {
        *lock(&self.0)
    }

    pub(crate) fn take(&self, process: i32) -> Result<TakenPlace<'_>, String> {
        let mut taken = lock(&self.0);
        if let Some(other) = *taken {
            return Err(format!("process {other} is already on standby"));
        }
        *taken = Some(process);
        Ok(TakenPlace(self))
    }
}

/// A place that is taken; dropping it frees it.
pub(crate) struct TakenPlace<'p>(&'p Place);

impl Drop for TakenPlace<'_> {
    fn drop(&mut self) {
        *lock(&self.0.0) = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_place() {
        let place = Place::default();
        let taken = place.take(7).unwrap();
        assert_eq!(place.take(8).err().unwrap(), "process 7 is already on standby");
        drop(taken);
        assert_eq!(place.taken_by(), None);
        let _taken = place.take(8).unwrap();
        assert_eq!(place.taken_by(), Some(8));
    }
}

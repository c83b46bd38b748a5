//! Place of each page in its file.

use crate::Error;
use serde::{Deserialize, Serialize};

/// Bytes that a dense file keeps together: 1 GiB of memory.
const WINDOW_BYTES: u64 = 1 << 30;
/// Largest number of windows: more than a memory could ever be spread over.
const WINDOWS_MAX: usize = 1 << 14;

/// The form of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// The place of a page is its address: the file is as long as the address space, and nearly all of it is a hole.
    Sparse,
    /// Form for file systems that limit a file to some terabytes: windows of addresses one after another, in order of
    /// arrival.
    Dense,
}

/// Map from addresses to places in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// Places of [`Form::Sparse`].
    Sparse,
    /// Places of [`Form::Dense`]: the numbers of the windows, in their order in the file.
    Dense(Vec<u64>),
}

impl Placement {
    /// Returns the placement of an empty file.
    pub fn new(form: Form) -> Self {
        match form {
            Form::Sparse => Placement::Sparse,
            Form::Dense => Placement::Dense(Vec::new()),
        }
    }

    /// Returns a placement with windows that an index names.
    ///
    /// # Errors
    /// The windows are not possible for this form.
    pub fn of(form: Form, windows: &[u64]) -> Result<Self, Error> {
        let mut sorted = windows.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != windows.len() || windows.len() > WINDOWS_MAX || sorted.last().is_some_and(|w| *w >= 1 << 26)
        {
            return Err(Error::Index("names impossible windows".into()));
        }
        match form {
            Form::Sparse if windows.is_empty() => Ok(Placement::Sparse),
            Form::Sparse => Err(Error::Index("names windows of a sparse file".into())),
            Form::Dense => Ok(Placement::Dense(windows.to_vec())),
        }
    }

    /// Returns the place of an address, and the address up to which the places are consecutive.
    pub fn locate(&self, address: u64) -> Option<(u64, u64)> {
        match self {
            Placement::Sparse => Some((address, u64::MAX)),
            Placement::Dense(windows) => {
                let window = address / WINDOW_BYTES;
                let at = windows.iter().position(|known| *known == window)?;
                Some((at as u64 * WINDOW_BYTES + address % WINDOW_BYTES, (window + 1) * WINDOW_BYTES))
            }
        }
    }

    /// Returns the place of an address as [`Placement::of_address`] does, and assigns one if it has none yet.
    pub fn assign(&mut self, address: u64) -> (u64, u64) {
        if let Some(known) = self.locate(address) {
            return known;
        }
        let Placement::Dense(windows) = self else { return (address, u64::MAX) };
        let window = address / WINDOW_BYTES;
        windows.push(window);
        ((windows.len() as u64 - 1) * WINDOW_BYTES + address % WINDOW_BYTES, (window + 1) * WINDOW_BYTES)
    }

    /// Returns the windows, for the index.
    pub fn windows(&self) -> &[u64] {
        match self {
            Placement::Sparse => &[],
            Placement::Dense(windows) => windows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_a_sparse_file_the_place_is_the_address() {
        let mut placement = Placement::new(Form::Sparse);
        assert_eq!(placement.assign(0x7fff_ffff_f000).0, 0x7fff_ffff_f000);
        assert_eq!(placement.locate(0x5555_5555_5000).unwrap().0, 0x5555_5555_5000);
    }

    #[test]
    fn in_a_dense_file_windows_follow_each_other_as_they_came() {
        let mut placement = Placement::new(Form::Dense);
        let (high, low) = (0x7f12_4000_3000, 0x5555_5555_5000);
        assert_eq!(placement.locate(high), None);
        assert_eq!(placement.assign(high), (0x3000, 0x7f12_8000_0000));
        assert_eq!(placement.assign(low).0, WINDOW_BYTES + low % WINDOW_BYTES);
        assert_eq!(placement.assign(high + 0x1000).0, 0x4000);
        let again = Placement::of(Form::Dense, placement.windows()).unwrap();
        assert_eq!(again.locate(low), placement.locate(low));
    }

    #[test]
    fn windows_that_cannot_be_are_refused() {
        assert!(Placement::of(Form::Dense, &[3, 3]).is_err());
        assert!(Placement::of(Form::Dense, &[u64::MAX / WINDOW_BYTES]).is_err());
        assert!(Placement::of(Form::Sparse, &[3]).is_err());
    }
}

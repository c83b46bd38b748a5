//! Parts of tables that a copy has brought to the target, as they are recorded there with their rows.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Facts about a copy that a later command needs, recorded before its first piece.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CopyState {
    /// The slot's snapshot, as PostgreSQL prints it.
    pub(crate) seen: String,
    /// Files of the tables that are copied without it, by their numbers on the source.
    pub(crate) files: BTreeMap<u32, u32>,
}

/// Part of a table in pages: the first, and the one after the last; `None` if it reaches to the end.
pub(crate) type Pages = (u64, Option<u64>);

/// Pages that are on the target, by tables.
pub(crate) type CopiedPages = BTreeMap<u32, Vec<Pages>>;

/// Statement that records a piece, in the transaction that writes its rows.
pub(crate) fn record_piece_sql(table: u32, (first, end): Pages) -> String {
    let end = end.map_or_else(|| "NULL".to_owned(), |end| end.to_string());
    format!("INSERT INTO stillpoint.pieces VALUES ({table}, {first}, {end})")
}

/// Parts of a table that are not among `copied`, in order; the last reaches to its end.
pub(crate) fn gaps(copied: &[Pages]) -> Vec<Pages> {
    let mut copied = copied.to_vec();
    copied.sort_unstable();
    let (mut gaps, mut at) = (Vec::new(), 0);
    for (first, end) in copied {
        if first > at {
            gaps.push((at, Some(first)));
        }
        match end {
            Some(end) => at = at.max(end),
            None => return gaps,
        }
    }
    gaps.push((at, None));
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_copied_is_left() {
        assert_eq!(gaps(&[]), [(0, None)]);
        assert_eq!(gaps(&[(0, None)]), []);
        assert_eq!(gaps(&[(8, Some(16)), (0, Some(8))]), [(16, None)]);
        assert_eq!(gaps(&[(16, None), (4, Some(8))]), [(0, Some(4)), (8, Some(16))]);
        assert_eq!(gaps(&[(0, Some(8)), (4, Some(6)), (9, Some(10))]), [(8, Some(9)), (10, None)]);
    }
}

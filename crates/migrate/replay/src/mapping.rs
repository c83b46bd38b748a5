//! Definition 2 of the paper: from a transaction of the source to its syncset.

/// Kind of a captured operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Reads only.
    Read,
    /// May write.
    Write,
}

/// End of a transaction on the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Its commit was acknowledged.
    Committed,
    /// It was rolled back, for any reason.
    Aborted,
}

/// The operations of a transaction that are replayed, in their order; empty if there is nothing to replay.
///
/// The *minimal* set is the first operation (it takes the snapshot, even if it is not a read) and all writes. If `minimal` is
/// false, every operation of every committed transaction counts (B-ALL). Operations that were rolled back are never replayed.
pub fn map<O>(operations: Vec<(Kind, O)>, end: End, minimal: bool) -> Vec<(Kind, O)> {
    let writes = operations.iter().any(|(kind, _)| *kind == Kind::Write);
    match end {
        End::Aborted => Vec::new(),
        End::Committed if !minimal => operations,
        End::Committed if !writes => Vec::new(),
        End::Committed => operations
            .into_iter()
            .enumerate()
            .filter(|(at, (kind, _))| *at == 0 || *kind == Kind::Write)
            .map(|(_, operation)| operation)
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Kind::{Read, Write};

    #[test]
    fn reads_alone_and_what_was_rolled_back_map_to_nothing() {
        assert_eq!(map(vec![(Read, "r1"), (Read, "r2")], End::Committed, true), []);
        assert_eq!(map(vec![(Read, "r1"), (Write, "w1")], End::Aborted, true), []);
        assert_eq!(map(vec![(Read, "r1"), (Write, "w1")], End::Aborted, false), []);
    }

    #[test]
    fn the_first_read_and_all_writes_are_kept_in_order() {
        let operations = vec![(Read, "r1"), (Read, "r2"), (Write, "w1"), (Read, "r3"), (Write, "w2")];
        assert_eq!(map(operations.clone(), End::Committed, true), [(Read, "r1"), (Write, "w1"), (Write, "w2")]);
        assert_eq!(map(operations.clone(), End::Committed, false), operations);
        assert_eq!(map(vec![(Write, "w1"), (Read, "r1")], End::Committed, true), [(Write, "w1")]);
    }
}

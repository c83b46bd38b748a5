//! Definition 2 of the paper: from a transaction of the source to its syncset.

/// Kind of a captured operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Reads only.
    Read,
    /// May write.
    Write,
}

/// The operations of a committed transaction that are replayed, in their order; empty if there is nothing to replay.
///
/// The *minimal* set is the first operation (it takes the snapshot, even if it is not a read) and all writes. If `minimal` is
/// false, every operation of every committed transaction counts (B-ALL). Operations that were rolled back are never replayed.
pub fn map<O>(mut operations: Vec<(Kind, O)>, minimal: bool) -> Vec<(Kind, O)> {
    let writes = operations.iter().any(|(kind, _)| *kind == Kind::Write);
    let mut at = 0..;
    operations.retain(|(kind, _)| !minimal || writes && (at.next() == Some(0) || *kind == Kind::Write));
    operations
}

#[cfg(test)]
mod tests {
    use super::*;
    use Kind::{Read, Write};

    #[test]
    fn reads_alone_map_to_nothing() {
        assert_eq!(map(vec![(Read, "r1"), (Read, "r2")], true), []);
    }

    #[test]
    fn the_first_read_and_all_writes_are_kept_in_order() {
        let operations = vec![(Read, "r1"), (Read, "r2"), (Write, "w1"), (Read, "r3"), (Write, "w2")];
        assert_eq!(map(operations.clone(), true), [(Read, "r1"), (Write, "w1"), (Write, "w2")]);
        assert_eq!(map(operations.clone(), false), operations);
        assert_eq!(map(vec![(Write, "w1"), (Read, "r1")], true), [(Write, "w1")]);
    }
}

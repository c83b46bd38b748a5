//! Tokens: the things that a transaction touches, as far as the order of transactions depends on them.

use crate::rules::Rules;
use serde::{Deserialize, Serialize};

/// One thing that a transaction touched. Two transactions conflict if they hold tokens for the same thing and at least one
/// token is not shared. Equality is by hash, so a collision costs concurrency and nothing else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Token {
    /// A row was inserted, updated or deleted; a change of key takes both keys. Object identifier of the table, and hash of the
    /// replica identity.
    Row(u32, u64),
    /// A value of a unique index was added or removed. For the primary key this token is needed only if foreign keys refer to
    /// it. Object identifiers of the index's table and of the index, and hash of the indexed values.
    Unique(u32, u32, u64),
    /// Shared: a row that refers to this value of a unique index was added or removed. Object identifiers of the *referenced*
    /// table and of the unique index that is referred to, and hash of the referenced values.
    Parent(u32, u32, u64),
    /// Any value of a unique index: the value that was added or removed is unknown, or its equality cannot be hashed. Object
    /// identifiers of the index's table and of the index.
    Index(u32, u32),
    /// The whole table with all its indexes (TRUNCATE, bulk changes), by its object identifier.
    Table(u32),
    /// The whole database (DDL, statements that could not be parsed).
    Everything,
}

/// Access with which a granule is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    Exclusive,
    Shared,
}

/// A node of the tree database / table / index / value. A syncset that holds a node also holds its ancestors shared. So a token
/// of a whole table conflicts with every token below it, and neither needs to know the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Granule {
    /// Table and index; the rows of a table are its index 0.
    place: u64,
    value: u64,
    level: u8,
}

impl Granule {
    const EVERYTHING: Granule = Granule { place: 0, value: 0, level: 0 };

    fn table(table: u32) -> Granule {
        Granule { place: u64::from(table) << 32, value: 0, level: 1 }
    }

    fn index(table: u32, index: u32) -> Granule {
        Granule { place: u64::from(table) << 32 | u64::from(index), value: 0, level: 2 }
    }

    fn value(table: u32, index: u32, value: u64) -> Granule {
        Granule { value, level: 3, ..Granule::index(table, index) }
    }
}

/// The granules of a set of tokens with their ancestors, each once, at its strongest access.
pub(crate) fn granules(tokens: &[Token], rules: &Rules) -> Box<[(Granule, Access)]> {
    use Access::{Exclusive, Shared};
    let mut held = Vec::with_capacity(4 + tokens.len() * 2);
    held.push((Granule::EVERYTHING, Shared));
    let mut below = |table: u32, index: u32, leaf: Option<(u64, Access)>| {
        held.push((Granule::table(table), Shared));
        match leaf {
            Some((value, access)) => {
                held.push((Granule::index(table, index), Shared));
                held.push((Granule::value(table, index, value), access));
            }
            None => held.push((Granule::index(table, index), Exclusive)),
        }
    };
    let mut whole = Vec::new();
    for token in tokens {
        match *token {
            Token::Row(table, key) if rules.rows => below(table, 0, Some((key, Exclusive))),
            Token::Unique(table, index, value) if rules.uniques => below(table, index, Some((value, Exclusive))),
            Token::Parent(table, index, value) if rules.parents => below(table, index, Some((value, Shared))),
            Token::Index(table, index) if rules.indexes => below(table, index, None),
            Token::Table(table) if rules.tables => whole.push((Granule::table(table), Exclusive)),
            Token::Everything if rules.everything => whole.push((Granule::EVERYTHING, Exclusive)),
            _ => {}
        }
    }
    held.extend(whole);
    // The exclusive access of a granule sorts before its shared one; the first of equal granules is kept.
    held.sort_unstable();
    held.dedup_by_key(|(granule, _)| *granule);
    held.into_boxed_slice()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn conflict(a: Token, b: Token) -> bool {
        let (a, b) = (granules(&[a], &Rules::ALL), granules(&[b], &Rules::ALL));
        a.iter().any(|(granule, access)| {
            let other = b.iter().find(|(other, _)| other == granule);
            other.is_some_and(|(_, other)| *access == Access::Exclusive || *other == Access::Exclusive)
        })
    }

    #[test]
    fn tokens_conflict_as_the_lemma_says() {
        let row = |table, key| Token::Row(table, key);
        let unique = |table, index, value| Token::Unique(table, index, value);
        let parent = |table, index, value| Token::Parent(table, index, value);
        assert!(conflict(row(1, 7), row(1, 7)));
        assert!(!conflict(row(1, 7), row(1, 8)) && !conflict(row(1, 7), row(2, 7)));
        assert!(conflict(unique(1, 5, 7), unique(1, 5, 7)));
        assert!(!conflict(unique(1, 5, 7), unique(1, 6, 7)) && !conflict(unique(1, 5, 7), row(1, 7)));
        assert!(!conflict(parent(1, 5, 7), parent(1, 5, 7)), "parents are shared");
        assert!(conflict(parent(1, 5, 7), unique(1, 5, 7)));
        assert!(!conflict(parent(1, 5, 7), row(1, 7)), "an update of other columns of the parent does not wait");
    }

    #[test]
    fn a_whole_meets_all_its_parts() {
        let index = Token::Index(1, 5);
        let unique = Token::Unique(1, 5, 9);
        let parent = Token::Parent(1, 5, 9);
        let row = Token::Row(1, 9);
        assert!(conflict(index, unique) && conflict(index, parent) && conflict(index, index));
        assert!(!conflict(index, row) && !conflict(index, Token::Index(1, 6)));
        for part in [index, unique, parent, row] {
            assert!(conflict(Token::Table(1), part) && !conflict(Token::Table(2), part));
            assert!(conflict(Token::Everything, part));
        }
        assert!(conflict(Token::Everything, Token::Table(3)) && conflict(Token::Everything, Token::Everything));
    }

    #[test]
    fn a_granule_is_held_once_at_its_strongest() {
        let tokens = [Token::Parent(1, 5, 9), Token::Unique(1, 5, 9), Token::Unique(1, 5, 9)];
        let held = granules(&tokens, &Rules::ALL);
        assert_eq!(held.len(), 4);
        assert_eq!(held[3], (Granule::value(1, 5, 9), Access::Exclusive));
    }
}

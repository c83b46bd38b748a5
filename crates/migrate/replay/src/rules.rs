//! The rules that every schedule keeps, as separate switches.
//!
//! They are a value only so that the simulation can leave one out and show that it detects this: code that is not compiled for
//! tests always takes [`Rules::ALL`].

/// One switch for each rule; true if the rule is active.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rules {
    /// Row tokens conflict.
    pub(crate) rows: bool,
    /// Unique-value tokens conflict.
    pub(crate) uniques: bool,
    /// Parent tokens conflict with inserts and deletes of the key they refer to.
    pub(crate) parents: bool,
    /// (index, any value) conflicts with every value.
    pub(crate) indexes: bool,
    /// A token of a table conflicts with every token in that table.
    pub(crate) tables: bool,
    /// DDL conflicts with everything.
    pub(crate) everything: bool,
    /// A conflicting syncset waits for the commit, not for the write.
    pub(crate) until_commit: bool,
    /// Conflicts are ordered by stamp, not by arrival.
    pub(crate) stamp_order: bool,
    /// A failed syncset is retried only after all lower stamps.
    pub(crate) retry_after_lower: bool,
    /// A syncset may follow unfinished ones only on the connection that runs them all.
    pub(crate) chain_on_one_player: bool,
    /// LSIR (1-a): a first read waits for the commits that it saw.
    pub(crate) reads_after_commits: bool,
    /// LSIR (1-b): a commit waits for the first reads that did not see it.
    pub(crate) commits_after_reads: bool,
    /// (1-b) also holds for transactions that still run on the source.
    pub(crate) running_counts: bool,
    /// Visibility decides where tokens contradict it.
    pub(crate) visibility_first: bool,
}

impl Rules {
    /// Every rule active.
    pub(crate) const ALL: Rules = Rules {
        rows: true,
        uniques: true,
        parents: true,
        indexes: true,
        tables: true,
        everything: true,
        until_commit: true,
        stamp_order: true,
        retry_after_lower: true,
        chain_on_one_player: true,
        reads_after_commits: true,
        commits_after_reads: true,
        running_counts: true,
        visibility_first: true,
    };
}

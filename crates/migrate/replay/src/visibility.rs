//! Visibility on the source: gives the order between commits and first reads without a critical region.

use std::fmt;

/// A top-level transaction number of the source (`xid8`), or a value of the paper's master clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Xid(pub u64);

/// A value of `pg_current_snapshot()`: transactions below `xmax` are seen unless they were in progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    xmax: Xid,
    /// Transactions below `xmax` that were in progress when the snapshot was taken, ascending.
    in_progress: Box<[Xid]>,
}

/// Order of the snapshots of one server: each sees everything that earlier ones saw. Of two with the same `xmax`, the later one
/// has fewer transactions in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank(Xid, std::cmp::Reverse<usize>);

impl Snapshot {
    /// Makes a snapshot from the first number not yet assigned and the transactions in progress, in any order.
    pub fn new(xmax: Xid, in_progress: impl IntoIterator<Item = Xid>) -> Snapshot {
        let mut in_progress: Vec<Xid> = in_progress.into_iter().filter(|xid| *xid < xmax).collect();
        in_progress.sort_unstable();
        in_progress.dedup();
        Snapshot { xmax, in_progress: in_progress.into() }
    }

    /// Makes a snapshot from a start stamp of the paper (STS): it sees every commit whose end stamp (ETS, used as its [`Xid`])
    /// is lower.
    pub fn at_clock(sts: u64) -> Snapshot {
        Snapshot { xmax: Xid(sts), in_progress: Box::default() }
    }

    /// Returns true if a commit of this transaction was visible.
    pub fn sees(&self, xid: Xid) -> bool {
        xid < self.xmax && self.in_progress.binary_search(&xid).is_err()
    }

    /// Returns true if it sees everything that another snapshot of the same server sees.
    pub fn includes(&self, other: &Snapshot) -> bool {
        self.rank() >= other.rank()
    }

    /// The first number that is not seen because it was not yet assigned.
    pub fn xmax(&self) -> Xid {
        self.xmax
    }

    pub(crate) fn rank(&self) -> Rank {
        Rank(self.xmax, std::cmp::Reverse(self.in_progress.len()))
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:", self.in_progress.first().unwrap_or(&self.xmax).0, self.xmax.0)?;
        for (at, xid) in self.in_progress.iter().enumerate() {
            write!(f, "{}{}", if at > 0 { "," } else { "" }, xid.0)?;
        }
        Ok(())
    }
}

impl std::str::FromStr for Snapshot {
    type Err = String;

    /// Reads what PostgreSQL prints: `xmin:xmax:xip,xip`.
    fn from_str(text: &str) -> Result<Snapshot, String> {
        let number = |part: &str| {
            part.parse().map(Xid).map_err(|_| format!("`{text}` is not a snapshot: `{part}` is not a number"))
        };
        let mut parts = text.splitn(3, ':');
        let (Some(xmin), Some(xmax), Some(list)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(format!("`{text}` is not a snapshot: it must have three parts"));
        };
        let (_, xmax) = (number(xmin)?, number(xmax)?);
        let in_progress: Result<Vec<Xid>, String> =
            list.split(',').filter(|part| !part.is_empty()).map(number).collect();
        Ok(Snapshot::new(xmax, in_progress?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sees_what_had_ended() {
        let snapshot: Snapshot = "10:15:10,12".parse().unwrap();
        let seen: Vec<u64> = (8..17).filter(|&xid| snapshot.sees(Xid(xid))).collect();
        assert_eq!(seen, [8, 9, 11, 13, 14]);
        assert_eq!(snapshot.to_string(), "10:15:10,12");
        assert_eq!(Snapshot::at_clock(5).to_string(), "5:5:");
    }

    #[test]
    fn a_later_snapshot_includes_an_earlier_one() {
        let snapshot = |text: &str| text.parse::<Snapshot>().unwrap();
        let (early, late) = (snapshot("5:7:5,6"), snapshot("5:7:5"));
        assert!(late.includes(&early) && late.includes(&late) && !early.includes(&late));
    }

    #[test]
    fn later_snapshots_rank_higher() {
        let ranks: Vec<Rank> = ["5:7:5,6", "5:7:5", "7:7:", "6:8:6", "8:8:"]
            .iter()
            .map(|text| text.parse::<Snapshot>().unwrap().rank())
            .collect();
        assert!(ranks.is_sorted_by(|a, b| a < b), "{ranks:?}");
    }

    #[test]
    fn nonsense_is_refused() {
        for bad in ["", "1", "1:2", "a:2:", "1:2:x", "1:-2:"] {
            assert!(bad.parse::<Snapshot>().is_err(), "{bad}");
        }
    }
}

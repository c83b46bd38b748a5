//! Privileges of a process, before and after an exec.

use crate::Pid;
use std::io;
use stillpoint_host::kernel_files;

const CAP_SETGID: u32 = 6;
const CAP_SETUID: u32 = 7;

/// Ids and capabilities of a process's main thread (credentials(7), capabilities(7)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Credentials {
    /// Real, effective, saved and file-system ids.
    uids: [u32; 4],
    gids: [u32; 4],
    groups: Vec<u32>,
    /// Permitted capabilities, one bit each.
    permitted: u64,
}

impl Credentials {
    pub(super) fn of(pid: Pid) -> io::Result<Credentials> {
        let status = kernel_files::text(format!("/proc/{pid}/status"))?;
        Credentials::parse(&status).ok_or_else(|| io::Error::other("its status names no credentials"))
    }

    pub(super) fn parse(status: &str) -> Option<Credentials> {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let ids = |name: &str| -> Option<Vec<u32>> {
            field(name)?.split_ascii_whitespace().map(|id| id.parse().ok()).collect()
        };
        Some(Credentials {
            uids: ids("Uid")?.try_into().ok()?,
            gids: ids("Gid")?.try_into().ok()?,
            groups: ids("Groups")?,
            permitted: u64::from_str_radix(field("CapPrm")?.trim(), 16).ok()?,
        })
    }

    fn may(&self, capability: u32) -> bool {
        self.permitted & 1 << capability != 0
    }

    /// Returns true if `after` has privileges that a process with these credentials could not have obtained without an exec.
    pub(super) fn are_exceeded_by(&self, after: &Credentials) -> bool {
        let uids = self.may(CAP_SETUID) || after.uids.iter().all(|id| self.uids.contains(id));
        let known = |id: &u32| self.gids.contains(id) || self.groups.contains(id);
        let gids = self.may(CAP_SETGID) || after.gids.iter().chain(&after.groups).all(known);
        !uids || !gids || after.permitted & !self.permitted != 0
    }
}

/// Returns true if a program's auxiliary vector states that it runs with more privileges than its caller (`AT_SECURE`).
pub(super) fn is_secure(auxiliary_vector: &[u8]) -> bool {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
    let pairs = auxiliary_vector.as_chunks::<16>().0;
    let found = pairs.iter().find(|pair| word(&pair[..8]) == libc::AT_SECURE);
    // a vector without this entry is not the vector of a program
    found.is_none_or(|pair| word(&pair[8..]) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(uids: &str, gids: &str, groups: &str, permitted: &str) -> Credentials {
        let status = format!(
            "Name:\tx\nUid:\t{uids}\nGid:\t{gids}\nFDSize:\t64\nGroups:\t{groups} \nCapInh:\t0\nCapPrm:\t{permitted}\n"
        );
        Credentials::parse(&status).unwrap()
    }

    #[test]
    fn privileges_that_an_exec_adds_are_seen() {
        let user = of("1000 1000 1000 1000", "1000 1000 1000 1000", "4 27", "0000000000000000");
        let root = of("0 0 0 0", "0 0 0 0", "", "000001ffffffffff");
        assert!(!user.are_exceeded_by(&user) && !root.are_exceeded_by(&user) && user.are_exceeded_by(&root));
        for more in [
            of("1000 0 0 0", "1000 1000 1000 1000", "4 27", "0"),
            of("1000 1000 0 1000", "1000 1000 1000 1000", "4 27", "0"),
            of("1000 1000 1000 1000", "1000 42 42 42", "4 27", "0"),
            of("1000 1000 1000 1000", "1000 1000 1000 1000", "4 27 42", "0"),
            of("1000 1000 1000 1000", "1000 1000 1000 1000", "4 27", "400"),
        ] {
            assert!(user.are_exceeded_by(&more), "{more:?}");
        }
        // a process that dropped its capabilities and gets them again as root
        let bare = of("0 0 0 0", "0 0 0 0", "", "0");
        assert!(bare.are_exceeded_by(&root) && !root.are_exceeded_by(&bare));
        let fewer = of("1000 1000 1000 1000", "1000 1000 1000 1000", "4", "0");
        assert!(!user.are_exceeded_by(&fewer));
        let real = of("1000 33 33 33", "33 33 33 33", "", "0");
        assert!(!real.are_exceeded_by(&of("1000 1000 1000 1000", "33 33 33 33", "", "0")));
    }

    #[test]
    fn a_status_that_lacks_a_field_is_none() {
        let whole = "Uid:\t1 1 1 1\nGid:\t1 1 1 1\nGroups:\t\nCapPrm:\t0\n";
        assert!(Credentials::parse(whole).is_some());
        for line in whole.lines() {
            assert_eq!(Credentials::parse(&whole.replace(line, "")), None, "without {line:?}");
        }
        assert_eq!(Credentials::parse(&whole.replace("1 1 1 1", "1 1 1")), None);
        assert_eq!(Credentials::parse(&whole.replace("CapPrm:\t0", "CapPrm:\tx")), None);
    }

    #[test]
    fn a_vector_tells_whether_it_is_secure() {
        let vector = |pairs: &[(u64, u64)]| -> Vec<u8> {
            pairs.iter().flat_map(|(kind, value)| [kind.to_le_bytes(), value.to_le_bytes()].concat()).collect()
        };
        assert!(!is_secure(&vector(&[(6, 4096), (libc::AT_SECURE, 0), (0, 0)])));
        assert!(is_secure(&vector(&[(6, 4096), (libc::AT_SECURE, 1), (0, 0)])));
        assert!(is_secure(&vector(&[(6, 4096), (0, 0)])) && is_secure(&[]));
        let own = Credentials::of(Pid(std::process::id() as i32)).unwrap();
        assert!(!own.are_exceeded_by(&own));
        assert!(!is_secure(&std::fs::read("/proc/self/auxv").unwrap()));
    }
}

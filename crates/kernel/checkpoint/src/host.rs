//! The machine, as an image records it.

use sha2::{Digest, Sha256};
use std::path::Path;
use stillpoint_host::clock::since_1970;
use stillpoint_host::file::read_regular;
use stillpoint_host::kernel_files;
use stillpoint_kernel_criu::rpc::Version;
use stillpoint_kernel_foam::Origin;

/// Limit in bytes for a machine's id.
const MACHINE_ID_MAX: u64 = 4096;

/// Returns the origin to be recorded in an image made now, of this process, by this criu.
pub(crate) fn origin(pid: i32, criu: Version) -> Origin {
    Origin {
        machine: machine(),
        kernel: kernel(),
        processor: processor(),
        criu: format!("{}.{}.{}", criu.major, criu.minor, criu.sublevel()),
        made_s: since_1970().as_secs(),
        pid,
        name: crate::process_tree::process_name(pid),
    }
}

/// Returns the id of this machine; its name where it has no id.
pub(crate) fn machine() -> String {
    let id = read_regular(Path::new("/etc/machine-id"), MACHINE_ID_MAX).ok().and_then(|id| String::from_utf8(id).ok());
    let found = |text: Option<String>| text.map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    found(id).or_else(|| found(kernel_files::text("/proc/sys/kernel/hostname").ok())).unwrap_or_default()
}

/// Returns the release of the running kernel.
pub fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Returns the id of this boot: a new one whenever a kernel starts.
pub fn boot() -> String {
    kernel_files::text("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Returns model and features of the processor: programs have chosen their code by them.
pub(crate) fn processor() -> String {
    let text = kernel_files::text("/proc/cpuinfo").unwrap_or_default();
    let of = |key: &str| {
        let line = text.lines().find(|line| line.split(':').next().is_some_and(|name| name.trim() == key));
        line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let mut features: Vec<String> = of("flags").split(' ').map(ToOwned::to_owned).collect();
    features.sort();
    let digest = hex::encode(&Sha256::digest(features.join(" "))[..6]);
    format!("{}, features {digest}", of("model name"))
}

/// Returns the numbers at the front of a release, to compare: `6.18.44-x` is 6, 18, 44.
pub fn numbers(release: &str) -> Vec<u64> {
    let digits = release.split(|c: char| !c.is_ascii_digit());
    digits.take(3).map_while(|part| part.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_their_numbers() {
        assert!(numbers("6.18.44-fc") > numbers("6.12.9+deb13-amd64"));
        assert!(numbers("7.2-rc1") > numbers("6.18.44"));
    }
}

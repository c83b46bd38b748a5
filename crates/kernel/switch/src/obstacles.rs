//! Obstacles to loading a kernel, or to a boot without an operator.

use crate::region::mounted_source;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use stillpoint_host::file::{open_regular, read_regular_text};
use stillpoint_host::kernel_files::{self, Files};

/// Limit in bytes for `/etc/crypttab`.
const CRYPTTAB_MAX: u64 = 1 << 20;

/// Refusals, and warnings of things that were not checked.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Obstacles {
    pub(crate) refused: Vec<String>,
    pub(crate) cautions: Vec<String>,
}

/// Checks whether the running kernel allows loading another one. `image` is the kernel to go to.
pub(crate) fn check_loading(image: &Path) -> Obstacles {
    let read = |path: &str| kernel_files::text(path).unwrap_or_default();
    let signed = is_signed(image);
    check_loading_with(
        &read("/proc/sys/kernel/kexec_load_disabled"),
        &read("/proc/sys/kernel/kexec_load_limit_reboot"),
        &read("/sys/kernel/security/lockdown"),
        (image, signed),
    )
}

fn check_loading_with(
    disabled: &str,
    limit: &str,
    lockdown: &str,
    (image, signed): (&Path, Option<bool>),
) -> Obstacles {
    let mut found = Obstacles::default();
    if disabled.trim() == "1" {
        let text = "this kernel cannot load another one until the next boot (kernel.kexec_load_disabled=1)";
        found.refused.push(text.into());
    }
    if limit.trim() == "0" {
        let text = "this kernel has reached its limit of loaded kernels (kernel.kexec_load_limit_reboot=0)";
        found.refused.push(text.into());
    }
    let mode = lockdown.split_whitespace().find_map(|word| word.strip_prefix('[')?.strip_suffix(']'));
    if let Some(mode) = mode.filter(|mode| *mode != "none") {
        let image = image.display();
        match signed {
            Some(true) => found.cautions.push(format!(
                "this kernel is locked down ({mode}) and loads only kernels whose signature it trusts: {image} has \
                 one, and this check cannot determine whether the kernel trusts it; the first phase of a switch loads \
                 it, before any unit is stopped"
            )),
            _ => found.refused.push(format!(
                "this kernel is locked down ({mode}) and loads only signed kernels: {image} has no signature"
            )),
        }
    }
    found
}

/// Returns true if a kernel has a signature (a table of certificates, as UEFI's Secure Boot checks it); `None` if the
/// file cannot be read.
fn is_signed(image: &Path) -> Option<bool> {
    let file = open_regular(image).ok()?;
    let mut head = vec![0; 1 << 12];
    let read = file.read_at(&mut head, 0).ok()?;
    head.truncate(read);
    Some(certificate_bytes(&head).is_some_and(|bytes| bytes > 0))
}

/// Returns the bytes of the table of certificates, by the headers of a PE32+ image.
fn certificate_bytes(head: &[u8]) -> Option<u32> {
    let word = |at: usize| head.get(at..at + 4).and_then(|word| word.try_into().ok()).map(u32::from_le_bytes);
    let pe = word(0x3c)? as usize;
    // a 64-bit optional header follows 24 bytes of signature and file header
    let optional = pe.checked_add(24)?;
    let is_pe = head.get(pe..pe + 4)? == b"PE\0\0" && head.get(optional..optional + 2)? == [0x0b, 0x02];
    // its fifth directory: address, then size
    if is_pe { word(optional + 112 + 4 * 8 + 4) } else { None }
}

/// Finds file systems below these paths for which the initramfs asks a passphrase: the machine would wait for an operator.
pub(crate) fn find_passphrases(paths: &[&Path]) -> Obstacles {
    let mounts = kernel_files::text("/proc/self/mountinfo").unwrap_or_default();
    let crypttab = read_regular_text(Path::new("/etc/crypttab"), CRYPTTAB_MAX).unwrap_or_default();
    let mut found = Obstacles::default();
    for path in paths {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        let Some(source) = mounted_source(&mounts, &path) else { continue };
        let Ok(device) = Path::new(&source).metadata().map(|device| device.rdev()) else { continue };
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        for name in encrypted_devices(&Files::of_kernel(), &device) {
            check_unlocking(&path, &name, &crypttab, &mut found);
        }
    }
    found.refused.dedup();
    found.cautions.dedup();
    found
}

/// Returns the names of the encrypted devices below a block device, by its directory in /sys.
fn encrypted_devices(files: &Files, device: &Path) -> Vec<String> {
    let slaves = device.join("slaves");
    let below = files.names(&slaves);
    let mut names: Vec<String> = below.iter().flat_map(|slave| encrypted_devices(files, &slaves.join(slave))).collect();
    if files.value(device.join("dm/uuid")).starts_with("CRYPT-") {
        names.push(files.value(device.join("dm/name")));
    }
    names
}

/// Judges how a device is unlocked, by the line of crypttab(5) with its name.
fn check_unlocking(path: &Path, name: &str, crypttab: &str, found: &mut Obstacles) {
    let path = path.display();
    let mut lines = crypttab.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let Some(fields) = lines.find(|fields| fields.first() == Some(&name)) else {
        found.cautions.push(format!(
            "{path} is located on the encrypted device {name}, which is not in /etc/crypttab: this check cannot \
             determine whether the machine unlocks it at boot without an operator"
        ));
        return;
    };
    let (key, options) = (fields.get(2).copied().unwrap_or("none"), fields.get(3).copied().unwrap_or_default());
    let by_device = ["tpm2-device=", "fido2-device=", "pkcs11-uri="];
    let has = |names: &[&str]| options.split(',').any(|option| names.iter().any(|name| option.starts_with(name)));
    if has(&["keyscript="]) {
        found.cautions.push(format!(
            "{path} is located on the encrypted device {name}, which a script unlocks: this check cannot determine \
             whether the script asks an operator"
        ));
    } else if ["none", "-"].contains(&key) && !has(&by_device) {
        found.refused.push(format!(
            "{path} is located on the encrypted device {name}, and /etc/crypttab requests its passphrase: a kernel \
             that starts would wait for an operator; use a key file or a TPM"
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_kernel_that_loads_no_other_one_is_found() {
        let image = Path::new("/boot/vmlinuz");
        let of = |disabled, limit, lockdown, signed| check_loading_with(disabled, limit, lockdown, (image, signed));
        assert_eq!(of("0\n", "-1\n", "[none] integrity confidentiality\n", Some(false)), Obstacles::default());
        assert_eq!(of("", "", "", None), Obstacles::default());
        assert!(of("1\n", "-1", "", None).refused[0].contains("kexec_load_disabled=1"));
        assert!(of("0", "0\n", "", None).refused[0].contains("kexec_load_limit_reboot=0"));
        let locked = "none [integrity] confidentiality\n";
        assert!(of("0", "-1", locked, Some(false)).refused[0].contains("/boot/vmlinuz has no signature"));
        let signed = of("0", "-1", locked, Some(true));
        assert!(signed.refused.is_empty() && signed.cautions[0].contains("cannot determine"), "{signed:?}");
    }

    #[test]
    fn a_signature_is_found_by_the_headers() {
        let mut head = vec![0; 0x200];
        assert_eq!(certificate_bytes(&head), None);
        head[0x3c] = 0x40;
        head[0x40..0x44].copy_from_slice(b"PE\0\0");
        head[0x58..0x5a].copy_from_slice(&[0x0b, 0x02]);
        assert_eq!(certificate_bytes(&head), Some(0));
        head[0x58 + 112 + 36] = 8;
        assert_eq!(certificate_bytes(&head), Some(8));
        // a header that points elsewhere
        head[0x3c..0x40].copy_from_slice(&[0xff; 4]);
        assert_eq!(certificate_bytes(&head), None);
        assert_eq!(certificate_bytes(&[]), None);
    }

    #[test]
    fn encrypted_devices_are_found_below_others() {
        let dir = tempfile::tempdir().unwrap();
        let device = |path: &str, uuid: &str, name: &str| {
            let dm = dir.path().join("sys").join(path).join("dm");
            fs::create_dir_all(&dm).unwrap();
            fs::write(dm.join("uuid"), uuid).unwrap();
            fs::write(dm.join("name"), format!("{name}\n")).unwrap();
        };
        device("root", "LVM-abc", "vg-root");
        device("root/slaves/dm-0", "CRYPT-LUKS2-abc", "disk_crypt");
        fs::create_dir_all(dir.path().join("sys/root/slaves/dm-0/slaves/vda3")).unwrap();
        let files = Files::below(dir.path());
        assert_eq!(encrypted_devices(&files, Path::new("/sys/root")), ["disk_crypt"]);
        assert!(encrypted_devices(&files, Path::new("/sys/none")).is_empty());
    }

    #[test]
    fn a_passphrase_is_told_from_a_key() {
        let judge = |line: &str| {
            let mut found = Obstacles::default();
            check_unlocking(Path::new("/"), "disk_crypt", line, &mut found);
            (found.refused.len(), found.cautions.len())
        };
        assert_eq!(judge("disk_crypt UUID=1 none luks,discard"), (1, 0));
        assert_eq!(judge("disk_crypt UUID=1"), (1, 0));
        assert_eq!(judge("disk_crypt UUID=1 /etc/keys/disk luks"), (0, 0));
        assert_eq!(judge("disk_crypt UUID=1 none luks,tpm2-device=auto"), (0, 0));
        assert_eq!(judge("disk_crypt UUID=1 none luks,keyscript=/bin/ask"), (0, 1));
        assert_eq!(judge("# disk_crypt UUID=1 none"), (0, 1));
    }
}

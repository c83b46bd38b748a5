//! Default kernel of the boot loader: after a panic, a hang or a loss of power the boot loader chooses, and it must
//! choose the running kernel. The choice is read from GRUB's configuration, as Debian makes it.

use std::path::Path;
use stillpoint_host::file::read_regular_text;

/// Limit in bytes for a file of GRUB.
const CONFIGURATION_MAX: u64 = 16 << 20;

/// Returns the warning for the operator that the boot loader may not start the running kernel by default.
pub(crate) fn warning(boot: &Path, from: &str) -> Option<String> {
    let must = format!("after a panic, a hang or a loss of power {from} must start by default");
    match default_kernel(boot) {
        Ok(kernel) if kernel == from => None,
        Ok(kernel) => Some(format!(
            "{must}, but GRUB starts {kernel}: put the entry of {from} into GRUB_DEFAULT of /etc/default/grub, and run \
             update-grub"
        )),
        Err(why) => Some(format!("{must}, and stillpoint cannot determine whether it does: {why}")),
    }
}

/// Returns the version of the kernel that GRUB starts by default.
fn default_kernel(boot: &Path) -> Result<String, String> {
    for dir in ["grub", "grub2"] {
        let path = boot.join(dir).join("grub.cfg");
        if let Ok(config) = read_regular_text(&path, CONFIGURATION_MAX) {
            let environment = boot.join(dir).join("grubenv");
            let environment = read_regular_text(&environment, CONFIGURATION_MAX).unwrap_or_default();
            return default_entry_kernel(&config, &environment).map_err(|why| format!("{}: {why}", path.display()));
        }
    }
    Err(format!("there is no GRUB in {}", boot.display()))
}

/// One line of a menu, with all names of an entry.
#[derive(Debug, Clone)]
struct EntryName {
    number: usize,
    title: String,
    id: String,
}

impl EntryName {
    fn is(&self, name: &str) -> bool {
        name == self.number.to_string() || name == self.title || (!self.id.is_empty() && name == self.id)
    }
}

fn default_entry_kernel(config: &str, environment: &str) -> Result<String, String> {
    let saved = |key: &str| {
        let lines = environment.lines().filter_map(|line| line.split_once('='));
        lines.filter(|(name, value)| *name == key && !value.is_empty()).map(|(_, value)| value.to_owned()).next_back()
    };
    let mut set =
        config.lines().filter_map(|line| line.trim().strip_prefix("set default=")).map(|text| text.trim_matches('"'));
    let default = match set.rfind(|text| !text.contains("next_entry")) {
        Some("${saved_entry}") => saved("saved_entry").unwrap_or_else(|| "0".into()),
        Some(text) if text.contains('$') => return Err(format!("its default is {text}")),
        Some(text) => text.to_owned(),
        None => "0".into(),
    };
    // an entry that was requested for one boot, which has not happened yet
    let entry = saved("next_entry").unwrap_or(default);
    let selected: Vec<&str> = entry.split('>').collect();
    let is_selected = |path: &[EntryName]| {
        path.len() == selected.len() && path.iter().zip(&selected).all(|(name, selected)| name.is(selected))
    };
    let found = entries(config).into_iter().find(|(path, _)| is_selected(path));
    found.map(|(_, kernel)| kernel).ok_or_else(|| format!("its default, {entry}, is not an entry with a Linux kernel"))
}

/// Returns the entries with a kernel: the place of each in the menus, and the kernel's version.
fn entries(config: &str) -> Vec<(Vec<EntryName>, String)> {
    let mut found = Vec::new();
    // blocks that are open; those that are not menus have no name
    let mut open: Vec<Option<EntryName>> = Vec::new();
    // number of entries of each open menu, the outermost first
    let mut counts = vec![0];
    for line in config.lines().map(str::trim) {
        if line.starts_with("menuentry ") || line.starts_with("submenu ") {
            let number = counts.last().copied().unwrap_or(0);
            if let Some(count) = counts.last_mut() {
                *count += 1;
            }
            counts.push(0);
            let id = line.split_once("menuentry_id_option").and_then(|(_, rest)| quoted(rest)).unwrap_or_default();
            open.push(Some(EntryName { number, title: quoted(line).unwrap_or_default(), id }));
        } else if line.ends_with('{') && !line.ends_with("${") {
            open.push(None);
        } else if line == "}" {
            if let Some(Some(_)) = open.pop() {
                counts.pop();
            }
        } else if ["linux", "linux16", "linuxefi"].contains(&line.split_whitespace().next().unwrap_or_default()) {
            let file = line.split_whitespace().nth(1).and_then(|path| path.rsplit('/').next());
            if let Some(version) = file.and_then(|file| file.strip_prefix("vmlinuz-")) {
                found.push((open.iter().flatten().cloned().collect(), version.to_owned()));
            }
        }
    }
    found
}

/// Returns the text in the first quotes.
fn quoted(text: &str) -> Option<String> {
    let begin = text.find(['\'', '"'])?;
    let mark = text[begin..].chars().next()?;
    text[begin + 1..].split(mark).next().map(ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn config(default: &str) -> String {
        format!(
            "if [ -s $prefix/grubenv ]; then\n  load_env\nfi\nif [ \"${{next_entry}}\" ] ; then\n   set default=\"${{next_entry}}\"\n\
             else\n   set default=\"{default}\"\nfi\nfunction savedefault {{\n  if [ -z x ]; then\n    save_env saved_entry\n  fi\n}}\n\
             menuentry 'Debian GNU/Linux' --class os $menuentry_id_option 'gnulinux-simple-1' {{\n\tlinux\t/boot/vmlinuz-6.12 root=/dev/vda ro\n\
             \tinitrd\t/boot/initrd.img-6.12\n}}\n\
             submenu 'Advanced options' $menuentry_id_option 'gnulinux-advanced-1' {{\n\
             \tmenuentry 'Debian, with Linux 6.12' --class os $menuentry_id_option 'gnulinux-6.12-1' {{\n\t\tlinux\t/vmlinuz-6.12\n\t}}\n\
             \tmenuentry 'Debian, with Linux 6.1' --class os $menuentry_id_option 'gnulinux-6.1-1' {{\n\t\tlinux\t/vmlinuz-6.1 quiet\n\t}}\n\
             }}\nmenuentry 'Memory test' {{\n\tlinux16\t/boot/memtest86.bin\n}}\n"
        )
    }

    #[test]
    fn the_entry_that_starts_by_itself_is_found_as_grub_finds_it() {
        let kernel = |default: &str, environment: &str| default_entry_kernel(&config(default), environment);
        for default in ["0", "Debian GNU/Linux", "gnulinux-simple-1", "1>0", "gnulinux-advanced-1>gnulinux-6.12-1"] {
            assert_eq!(kernel(default, "").as_deref(), Ok("6.12"), "{default}");
        }
        for default in ["1>1", "Advanced options>Debian, with Linux 6.1", "gnulinux-advanced-1>gnulinux-6.1-1"] {
            assert_eq!(kernel(default, "").as_deref(), Ok("6.1"), "{default}");
        }
        let saved = "# GRUB Environment Block\nsaved_entry=1>1\n#####";
        assert_eq!(kernel("${saved_entry}", saved).as_deref(), Ok("6.1"));
        assert_eq!(kernel("${saved_entry}", "").as_deref(), Ok("6.12"));
        assert_eq!(kernel("0", "next_entry=1>1\n").as_deref(), Ok("6.1"));
        assert!(kernel("2", "").unwrap_err().contains("its default, 2, is not an entry"));
        assert!(kernel("${chosen}", "").unwrap_err().contains("its default is ${chosen}"));
    }

    #[test]
    fn a_boot_loader_that_starts_another_kernel_is_warned_of() {
        let dir = tempfile::tempdir().unwrap();
        assert!(warning(dir.path(), "6.1").unwrap().contains("cannot determine whether it does: there is no GRUB in"));
        fs::create_dir(dir.path().join("grub")).unwrap();
        fs::write(dir.path().join("grub/grub.cfg"), config("0")).unwrap();
        assert_eq!(warning(dir.path(), "6.12"), None);
        let text = warning(dir.path(), "6.1").unwrap();
        assert!(
            text.contains("6.1 must start by default")
                && text.contains("GRUB starts 6.12")
                && text.contains("GRUB_DEFAULT")
        );
    }
}

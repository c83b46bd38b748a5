//! Configuration of a switch: one file.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use stillpoint_host::trusted::Directory;
use stillpoint_kernel_checkpoint::{ADDRESS_TIMEOUT, Error, RestoreMode};

/// Default path of the file.
pub const CONFIG: &str = "/etc/stillpoint/kernel.toml";

/// Limit in bytes for the file.
const CONFIG_MAX: u64 = 1 << 20;
/// Value of `images` for memory that this kernel hands over to the next one.
const HANDOVER: &str = "handover";

/// One unit that is taken along.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct UnitConfig {
    /// A command that succeeds when the unit serves, run beside it after the switch.
    #[serde(default)]
    pub health: Vec<String>,
}

/// All settings of a switch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Config {
    /// The criu that dumps and restores.
    pub criu: PathBuf,
    /// Directory of the journal and of the images: it must exist when a kernel has mounted its root file system.
    pub state: PathBuf,
    /// Other directory of the images: on another disk, or in memory that outlives kernels (`stillpoint kernel memory`);
    /// with `handover` this kernel hands over memory with the images to the next one.
    pub images: Option<PathBuf>,
    /// Directory of kernels and their initramfs, named as Debian names them.
    pub boot: PathBuf,
    /// Time at which memory is restored.
    pub memory: RestoreMode,
    /// Compare pages with their checksums when they are fetched, not all of them before anything runs: a damaged one
    /// then ends its unit, which starts from its files.
    pub verify_on_demand: bool,
    /// Rate of the background fetch in MiB a second; 0 is unlimited.
    pub fill_rate: u64,
    /// Text that is appended to the command line of the new kernel.
    pub append: String,
    /// Seconds without progress of the units' restores until all are restored and stopped; after that the old kernel is
    /// started again.
    pub restore_limit_s: u64,
    /// Seconds for which a unit's restore may wait for the addresses that its sockets are bound to.
    pub address_limit_s: u64,
    /// Seconds after memory is resident in which health commands may fail; after that the old kernel starts the units
    /// from files.
    pub health_limit_s: u64,
    /// Seconds for all units that stay to stop; after that the switch is aborted, and they start again.
    pub stop_limit_s: u64,
    /// The device file of the watchdog that resets the machine when a kernel hangs.
    pub watchdog: PathBuf,
    /// Seconds after the kexec within which a kernel must reach the restore of units.
    pub watchdog_limit_s: u32,
    /// The new kernel gets a crash kernel, which returns to the old one when the new one panics. Off by default:
    /// devices that the new kernel used may still write to memory when the old one has it back.
    pub crash_kernel: bool,
    /// MiB of the new kernel's RAM for the crash kernel; computed by default.
    pub crash_kernel_mib: Option<u64>,
    /// The crash kernel stays loaded when the units serve.
    pub crash_kernel_stays: bool,
    /// The units, by name.
    pub units: BTreeMap<String, UnitConfig>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            criu: "criu".into(),
            state: "/var/lib/stillpoint/switch".into(),
            images: None,
            boot: "/boot".into(),
            memory: RestoreMode::OnDemand,
            verify_on_demand: false,
            fill_rate: 512,
            append: String::new(),
            restore_limit_s: 300,
            address_limit_s: ADDRESS_TIMEOUT.as_secs(),
            health_limit_s: 120,
            stop_limit_s: 120,
            watchdog: "/dev/watchdog0".into(),
            watchdog_limit_s: 300,
            crash_kernel: false,
            crash_kernel_mib: None,
            crash_kernel_stays: false,
            units: BTreeMap::new(),
        }
    }
}

impl Config {
    /// Reads a file; a file that does not exist gives the defaults.
    ///
    /// # Errors
    /// Another user can change it: it names programs that root runs. Or it cannot be parsed.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bytes = match Directory::of_file(path).and_then(|(directory, name)| directory.read(name, CONFIG_MAX)) {
            Err(error) if error.is_not_found() => return Ok(Config::default()),
            bytes => bytes?,
        };
        let refused = |why: &str| Error::refused(format_args!("{}: {}", path.display(), why.trim_end()));
        let text = std::str::from_utf8(&bytes).map_err(|error| refused(&error.to_string()))?;
        Config::parse(text).map_err(|why| refused(&why))
    }

    /// Returns the directory that holds the images of units, and nothing else.
    pub fn images(&self) -> PathBuf {
        let dir = self.handover().or_else(|| self.images.clone());
        dir.as_ref().unwrap_or(&self.state).join("images")
    }

    /// Returns the mount point of memory that is handed over, if it holds the images.
    pub(crate) fn handover(&self) -> Option<PathBuf> {
        let is_it = self.images.as_deref() == Some(Path::new(HANDOVER));
        is_it.then(|| self.state.join(HANDOVER))
    }

    fn parse(text: &str) -> Result<Self, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }

    /// Selects only these units of all that the file names.
    pub fn select(&mut self, names: &[String]) {
        if !names.is_empty() {
            let known = std::mem::take(&mut self.units);
            let take = |name: &String| (name.clone(), known.get(name).cloned().unwrap_or_default());
            self.units = names.iter().map(take).collect();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Settings of the installed file whose values there are examples: by default they have none, or are computed.
    const EXAMPLES: [&str; 3] = ["images", "crash-kernel-mib", "health"];

    #[test]
    fn the_installed_file_names_every_setting_and_its_default() {
        let text = include_str!("../../../../packaging/etc/stillpoint/kernel.toml");
        assert_eq!(Config::parse(text).unwrap(), Config::default());
        // a setting is commented out without a blank, an explanation with one
        let settings = || text.lines().filter_map(|line| line.strip_prefix('#')).filter(|line| !line.starts_with(' '));
        let all: Vec<&str> = settings().collect();
        let config = Config::parse(&all.join("\n")).unwrap();
        assert_eq!(config.units["redis-server"].health, ["redis-cli", "ping"]);
        let name = |line: &&str| line.split(" = ").next().is_some_and(|name| EXAMPLES.contains(&name));
        let defaults: Vec<&str> = settings().filter(|line| !name(line) && !line.starts_with('[')).collect();
        assert_eq!(Config::parse(&defaults.join("\n")).unwrap(), Config::default());
        let known = serde_json::to_value(&config).unwrap();
        for setting in known.as_object().unwrap().keys().filter(|setting| *setting != "units") {
            assert!(all.iter().any(|line| line.starts_with(&format!("{setting} = "))), "{setting} is not in the file");
        }
    }

    #[test]
    fn a_file_that_another_user_can_change_names_no_program() {
        use std::fs::{self, Permissions};
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("kernel.toml");
        assert_eq!(Config::read(&path).unwrap(), Config::default());
        fs::write(&path, "fill-rate = 7\n").unwrap();
        assert_eq!(Config::read(&path).unwrap().fill_rate, 7);
        fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
        let error = Config::read(&path).unwrap_err();
        assert!(error.is_refusal() && error.to_string().contains("others can write to it"), "{error}");
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        fs::write(&path, [0xff]).unwrap();
        assert!(Config::read(&path).unwrap_err().is_refusal());
    }

    #[test]
    fn a_file_says_what_differs_and_nothing_unknown() {
        let text = "criu = \"/usr/local/bin/criu\"\nmemory = \"eager\"\n[units.redis-server]\nhealth = [\"redis-cli\", \"ping\"]\n";
        let mut config = Config::parse(text).unwrap();
        assert_eq!((config.memory, config.fill_rate), (RestoreMode::Eager, 512));
        config.select(&["memcached".into()]);
        assert_eq!(config.units.keys().collect::<Vec<_>>(), ["memcached"]);
        assert_eq!((config.images(), config.handover()), ("/var/lib/stillpoint/switch/images".into(), None));
        let config = Config::parse("images = \"handover\"").unwrap();
        assert_eq!(config.images(), Path::new("/var/lib/stillpoint/switch/handover/images"));
        assert!(Config::parse("unit = 1").unwrap_err().contains("unknown field `unit`"));
    }
}

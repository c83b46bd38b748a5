//! Files of the emulated machine, made by `setup/guest`.

use super::qemu::EMULATOR_BROKE;
use crate::{Unavailable, recipes, skipped, workspace_root};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// Maximum of starts of a test whose emulator breaks.
const ATTEMPTS: usize = 3;

/// Lock of the test that has a machine: two machines of two processors each would wait for each other on a host with as
/// few.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Runs a test with the guest; the test is skipped if there is none. If the emulator ends by an assertion of its own,
/// which is unrelated to the test, that is printed, and the test is repeated.
#[track_caller]
pub fn emulated(test: impl Fn(&Guest)) {
    let Some(guest) = Guest::for_test() else { return };
    // a test that failed has ended its machine
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for attempt in 1.. {
        let Err(panic) = catch_unwind(AssertUnwindSafe(|| test(&guest))) else { return };
        let broke = panic.downcast_ref::<String>().is_some_and(|text| text.contains(EMULATOR_BROKE));
        if !broke || attempt == ATTEMPTS {
            resume_unwind(panic);
        }
        println!("COUNT emulators that broke 1");
    }
}

/// A built guest: an emulator, two kernels, a disk.
#[derive(Debug, Clone)]
pub struct Guest {
    pub(crate) dir: PathBuf,
    /// Directory of kernels that its disk does not have.
    pub(crate) own: Option<PathBuf>,
    /// Versions of its kernels, the older one first.
    pub kernels: Vec<String>,
}

impl Guest {
    /// Returns `$STILLPOINT_GUEST`, or builds it, or finds it built. The error is the reason why it cannot be built, or
    /// why no machine could run it.
    ///
    /// # Errors
    /// The guest cannot be built, or no machine could run it.
    pub fn build() -> Result<Guest, Unavailable> {
        if !rustix::process::geteuid().is_root() {
            return Err("a machine's network needs root".into());
        }
        if !Path::new("/dev/net/tun").exists() {
            return Err("no /dev/net/tun: a machine has no network".into());
        }
        if let Some(dir) = std::env::var_os("STILLPOINT_GUEST") {
            return Ok(Guest::at(dir.into())?);
        }
        Ok(Guest::at(recipes::guest(&[])?)?)
    }

    /// Returns a guest with the newest of Debian's kernels of each of these series too (`$STILLPOINT_GUEST_EVERY`), as
    /// [`Guest::build`] does.
    ///
    /// # Errors
    /// As for [`Guest::build`].
    pub fn every(series: &[&str]) -> Result<Guest, Unavailable> {
        if let Some(dir) = std::env::var_os("STILLPOINT_GUEST_EVERY") {
            return Ok(Guest::at(dir.into())?);
        }
        Ok(Guest::at(recipes::guest(series)?)?)
    }

    /// Returns a guest that is built.
    fn at(dir: PathBuf) -> Result<Guest, String> {
        let kernels = kernels(&dir)?;
        Ok(Guest { dir, own: None, kernels })
    }

    /// Replaces its kernels by those of `setup/handover` (`$STILLPOINT_HANDOVER`).
    ///
    /// # Errors
    /// The kernels cannot be built.
    pub fn with_handover(self) -> Result<Guest, Unavailable> {
        let own = match std::env::var_os("STILLPOINT_HANDOVER") {
            Some(dir) => dir.into(),
            None => recipes::handover()?,
        };
        let kernels = kernels(&own)?;
        Ok(Guest { own: Some(own), kernels, ..self })
    }

    /// Returns the path of a kernel.
    pub(crate) fn image(&self, kernel: &str) -> PathBuf {
        self.own.as_ref().unwrap_or(&self.dir).join(format!("vmlinuz-{kernel}"))
    }

    /// Returns the path of its initramfs, which is made in `dir` if it must be made.
    pub(crate) fn initrd(&self, kernel: &str, dir: &Path) -> Result<PathBuf, String> {
        let Some(own) = &self.own else { return Ok(self.dir.join(format!("initrd-{kernel}"))) };
        let read = |path: PathBuf| std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()));
        let of_guest = self::kernels(&self.dir)?.pop().unwrap_or_default();
        let mut bytes = read(self.dir.join(format!("initrd-{of_guest}")))?;
        // alignment at which the kernel looks for a second archive that is not compressed
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes.extend(read(own.join("no-modules"))?);
        let path = dir.join(format!("initrd-{kernel}"));
        std::fs::write(&path, bytes).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(path)
    }

    /// Returns the guest for a test, which must leave if there is none; with `REQUIRE_ALL=1` it fails.
    #[track_caller]
    pub fn for_test() -> Option<Guest> {
        Guest::build().map_err(|why| skipped(&why)).ok()
    }
}

/// Returns the versions that a directory of kernels names.
fn kernels(dir: &Path) -> Result<Vec<String>, String> {
    let path = dir.join("kernels");
    let kernels = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let kernels: Vec<String> = kernels.lines().map(ToOwned::to_owned).collect();
    if kernels.len() < 2 {
        return Err(format!("{} names {} kernels", path.display(), kernels.len()));
    }
    Ok(kernels)
}

/// Returns the directory of the files that are installed with the tool.
pub(crate) fn packaging() -> PathBuf {
    workspace_root().join("packaging")
}

//! The builder's settings, and its reports.

use crate::{Cache, Error, Event};
use std::path::{Path, PathBuf};
use stillpoint_host::EntryName;

/// Builder of patches and of the packages they need, with one cache.
pub struct Builder<'a> {
    pub(crate) cache: Cache,
    pub(crate) release: Option<String>,
    pub(crate) root_of: Option<String>,
    pub(crate) jobs: usize,
    /// Directories with `.dsc` and `.deb` files of the caller.
    pub(crate) local: Vec<PathBuf>,
    on_event: &'a (dyn Fn(Event) + Sync),
}

impl<'a> Builder<'a> {
    /// Makes a builder that runs `jobs` compilers at a time; `on_event` gets every event.
    pub fn new(cache: Cache, jobs: usize, on_event: &'a (dyn Fn(Event) + Sync)) -> Self {
        Builder { cache, release: None, root_of: None, jobs: jobs.max(1), local: Vec::new(), on_event }
    }

    /// Selects sources, compilers and binaries of another release of the distribution (`bullseye`), from the archives
    /// of this system.
    pub fn of_release(self, codename: Option<String>) -> Self {
        Builder { release: codename, ..self }
    }

    /// Selects a clean root of this release, for a source of any release. Build dependencies that the release lacks are
    /// left out.
    pub fn in_root_of(self, codename: Option<String>) -> Self {
        Builder { root_of: codename, ..self }
    }

    /// Returns an entry of the cache, as [`Cache::entry`] does; says so if another process makes it.
    pub(crate) fn entry(
        &self,
        entry: &EntryName,
        make: impl FnOnce(&Path) -> Result<(), Error>,
    ) -> Result<PathBuf, Error> {
        if self.cache.is_being_made(entry) {
            self.report(Event::Waiting { entry: entry.to_string() });
        }
        self.cache.entry(entry, make)
    }

    /// Adds directories with `.dsc` and `.deb` files to the places of packages.
    pub fn with_sources(self, directories: Vec<PathBuf>) -> Self {
        Builder { local: directories, ..self }
    }

    pub(crate) fn progress(&self, text: &str) {
        tracing::debug!("{text}");
        (self.on_event)(Event::Progress { text: text.to_owned() });
    }

    pub(crate) fn report(&self, event: Event) {
        tracing::info!("{event}");
        (self.on_event)(event);
    }
}

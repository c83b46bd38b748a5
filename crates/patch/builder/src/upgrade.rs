//! CVEs that another version of a source package fixes.

use crate::{Builder, Error, Parts};
use stillpoint_host::untrusted::Tree;
use stillpoint_patch_provenance::Changelog;

impl Builder<'_> {
    /// Returns the CVEs that the changelog of a source package's version names for the versions above `from`; `None` if it does not reach
    /// back to `from`.
    ///
    /// # Errors
    /// The source cannot be fetched, or its changelog cannot be read.
    pub fn cves_since(&self, package: &str, version: &str, from: &str) -> Result<Option<Vec<String>>, Error> {
        let source = self.fetch_source(package, Some(version), Parts::Source)?;
        let text = Tree::open(source.tree())?.read("debian/changelog")?;
        Ok(Changelog::parse(&String::from_utf8_lossy(&text)).cves_between(from, version))
    }
}

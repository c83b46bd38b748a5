//! Packages whose rules run with most compilations put off ([`crate::recorder`]): a build takes half an hour, one unit
//! two seconds.
//!
//! The package's own rules run in a clean root as for a build: they configure, and make generated sources. The target as
//! a whole is not compared with a build; the byte check of every unit that a patch touches replaces this comparison.

use crate::commands::Recording;
use crate::debian::Diff;
use crate::includes::Includes;
use crate::package::{BuiltPackage, Rules, Shipped, SourcePackage};
use crate::{Builder, Error, recorder};
use std::path::Path;
use stillpoint_host::EntryName;
use stillpoint_host::untrusted::Tree;

/// Name, in the entry of a package, of the file that says why its rules do not run with compilations put off.
const WHY_NOT: &str = "why-not";

/// Version of the steps by which rules are followed; increase it with every change of these.
const OUTLINE_VERSION: &[u8] = b"3";

impl Builder<'_> {
    /// Runs a package's rules, and compiles only what they need themselves. A package whose rules do not work so is
    /// built. Runs once for each version.
    ///
    /// # Errors
    /// The clean root cannot be made, a diff of the series does not apply, or the build fails as well.
    pub fn outline_package(&self, source: &SourcePackage) -> Result<BuiltPackage, Error> {
        match self.outline(source, &Shipped::Full.diffs(&source.series)?)? {
            Ok(outlined) if crate::lto::is_used(&outlined.recording) => {
                self.progress(&format!("{} needs a whole build: its links optimise", source.name()));
                self.build_package(source, &Shipped::Full, None)
            }
            Ok(outlined) => Ok(outlined),
            Err(why) => {
                tracing::info!(%why, "the rules do not run with compilations put off");
                self.progress(&format!("{} needs a whole build: its rules read what they compile", source.name()));
                self.build_package(source, &Shipped::Full, None)
            }
        }
    }

    /// Runs a package's rules with these diffs. The inner error is the reason why they do not run with compilations put
    /// off.
    pub(crate) fn outline(
        &self,
        source: &SourcePackage,
        diffs: &[Diff],
    ) -> Result<Result<BuiltPackage, String>, Error> {
        let recorder = stillpoint_host::cache::key([OUTLINE_VERSION, recorder::PROGRAM.as_bytes()]);
        let identity = format!("{}-outlined-{}", self.identity(source, diffs), &recorder[..8]);
        let root = self.root_for(source)?;
        let build_path = source.build_path();
        let entry = self.entry(&EntryName::new("built", &identity), |into| {
            let tree = self.shipped_tree(source, diffs, into)?;
            self.progress(&format!("following the rules of {} {}", source.name(), source.version()));
            match self.run_to_links(&root, &build_path, into, &Rules { deferring: true, integration: None }) {
                Ok(()) => Includes::of_tree(&Tree::open(&tree)?)?.write(&Tree::open(into)?),
                Err(error @ Error::Command { .. }) => {
                    let own = Tree::open(into)?;
                    own.write(WHY_NOT, error.to_string().as_bytes())?;
                    ["tree", "records"].iter().try_for_each(|name| Ok(own.remove_all(name)?))
                }
                Err(other) => Err(other),
            }
        })?;
        let own = Tree::open(&entry)?;
        if let Some(why) = own.read_existing(WHY_NOT)? {
            return Ok(Err(String::from_utf8_lossy(&why).into_owned()));
        }
        Ok(Ok(BuiltPackage {
            shipped: diffs.to_vec(),
            root: Tree::open(&root)?.known_as(Path::new("/")),
            source: build_path.clone(),
            tree: Tree::open(&entry.join("tree"))?.known_as(&build_path),
            identity,
            recording: Recording::read(&entry.join("records"))?,
            includes: Some(Includes::read(&own)?),
        }))
    }
}

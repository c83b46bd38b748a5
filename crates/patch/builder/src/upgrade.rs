//! Upgrade of a program to another version of its source package: the CVEs that this fixes, and the part of it that can be a live patch.

use crate::request::missing;
use crate::{Builder, Built, DebianRequest, Error, Parts, Shipped, ShippedAs, Statement};
use stillpoint_host::untrusted::Tree;
use stillpoint_patch_provenance::Changelog;

/// Limit of diffs between two versions that are tried one by one.
const DIFFS_MAX: usize = 40;

/// Diff of a series that is no part of a patch.
#[derive(Debug)]
pub struct RefusedDiff {
    /// Its name in the series.
    pub name: String,
    /// CVEs that it names.
    pub cves: Vec<String>,
    /// Reason for the refusal.
    pub error: Error,
}

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

    /// Builds the patch of as many diffs between two versions as can be live: each is tried on top of those before it. Returns what was
    /// built, if any diff can be live, and the diffs that cannot.
    ///
    /// # Errors
    /// The request is not for the difference of two versions, or that is no list of diffs; or a step fails that is no refusal.
    pub fn build_parts(
        &self,
        request: &DebianRequest,
        statement: &Statement,
    ) -> Result<(Option<Built>, Vec<RefusedDiff>), Error> {
        let not_diffs = |why: String| Error::Malformed { what: format!("the difference of {}", request.package), why };
        let ShippedAs::Version(old) = &request.shipped else {
            return Err(not_diffs("it is not that of two versions".into()));
        };
        let new = self.fetch_source(&request.package, request.version.as_deref(), Parts::Source)?;
        let old = self.fetch_source(&request.package, Some(old), Parts::Source)?;
        let diffs = missing(&new.series, &Shipped::Full.diffs(&old.series)?, &[]);
        if diffs.is_empty() || diffs.len() > DIFFS_MAX {
            return Err(not_diffs(format!("it has {} diffs", diffs.len())));
        }
        let (mut taken, mut last, mut refused) = (Vec::new(), None, Vec::new());
        for diff in diffs {
            let quilt = [&taken[..], std::slice::from_ref(&diff.name)].concat();
            match self.build_debian(&DebianRequest { quilt: quilt.clone(), ..request.clone() }, statement) {
                Ok(built) => (taken, last) = (quilt, Some(built)),
                // a diff that does not apply changes what a refused one has added
                Err(error) if error.is_refusal() || matches!(error, Error::DoesNotApply { .. }) => {
                    refused.push(RefusedDiff { name: diff.name, cves: diff.cves, error });
                }
                Err(error) => return Err(error),
            }
        }
        Ok((last, refused))
    }
}

//! Selection of patches to enable for a unit.

use crate::bases::Stack;
use crate::enabled::Enabled;
use crate::error::{Error, Of};
use crate::patch_file::PatchFile;
use crate::policy::Policy;
use crate::root::Root;
use crate::unit_file::Service;
use std::path::Path;
use stillpoint_host::file::read_regular;
use stillpoint_patch_format::Patch;

/// Size limit of a program whose build-id is read: the service's own user may have made the file.
const PROGRAM_LEN_MAX: u64 = 2 << 30;

/// Patches to add to those of a unit, each checked with the ones below it.
pub struct Addition<'a> {
    root: &'a Root,
    service: &'a Service,
    policy: &'a Policy,
    enabled: Vec<PatchFile>,
    stack: Stack,
}

/// Accepted patch, by its name.
#[derive(Debug)]
pub enum Candidate {
    /// A patch to be enabled.
    New(String),
    /// The same file is enabled.
    Enabled(String),
}

impl<'a> Addition<'a> {
    /// Starts with the patches that are enabled for a unit.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn to(
        enabled: &Enabled,
        root: &'a Root,
        service: &'a Service,
        policy: &'a Policy,
    ) -> Result<Addition<'a>, Error> {
        let enabled = enabled.patches()?;
        let stack = Stack::of(enabled.iter().filter_map(|stored| Some(policy.check(stored).ok()?.0.patch)));
        Ok(Addition { root, service, policy, enabled, stack })
    }

    /// Adds a patch on top.
    ///
    /// # Errors
    /// The policy does not accept it, it is for another build of the unit's program, another patch has its name, its
    /// base would not be active at a start, or it would undo the change of a patch below it.
    pub fn add(&mut self, file: &PatchFile) -> Result<Candidate, Error> {
        let patch = self.policy.check(file)?.0.patch;
        check_program(self.root, self.service, &patch)?;
        if self.enabled.iter().any(|stored| stored.bytes == file.bytes) {
            return Ok(Candidate::Enabled(patch.name));
        }
        let name = patch.name.clone();
        if let Some(taken) = self.enabled.iter().find(|stored| stored.patch().is_ok_and(|other| other.name == name)) {
            return Err(Error::NameTaken { name, path: taken.path.clone() });
        }
        if let Some((below, object)) = self.stack.undone_by(&patch) {
            return Err(Error::Undoes { patch: name, object: object.to_owned(), below: below.name.clone() });
        }
        self.stack.push(patch)?;
        Ok(Candidate::New(name))
    }
}

/// Refuses a patch for another build of the program that the unit starts.
fn check_program(root: &Root, service: &Service, patch: &Patch) -> Result<(), Error> {
    let target = &patch.target;
    for program in service.programs().filter(|p| p.file_name().is_some_and(|name| name == target.file_name.as_str())) {
        let path = root.at(&program.display().to_string());
        let found = build_id(&path).of(|| path.display().to_string())?;
        if !target.build_id.0.is_empty() && found.is_some_and(|id| id != target.build_id.0) {
            let (name, path, build_id) = (&patch.name, path.display(), &target.build_id);
            return Err(Error::Refused(format!("patch {name} is for another build of {path} (build-id {build_id})")));
        }
    }
    Ok(())
}

fn build_id(path: &Path) -> Result<Option<Vec<u8>>, stillpoint_host::Error> {
    use object::Object;
    let bytes = match read_regular(path, PROGRAM_LEN_MAX) {
        // The service reports this itself when it starts.
        Err(error) if error.is_not_found() => return Ok(None),
        bytes => bytes?,
    };
    // A script starts another program: nothing is known about that.
    Ok(object::File::parse(&*bytes).ok().and_then(|file| file.build_id().ok().flatten().map(<[u8]>::to_vec)))
}

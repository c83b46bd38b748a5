//! Added members of structures as shadow variables: units are rewritten after they were preprocessed.

use crate::Error;
use crate::commands::{CompileCommand, Job};
use crate::compile::Compiler;
use crate::preprocess::Text;
use crate::sandbox::first_error;
use crate::statement::exports;
use crate::verdict::Bounded;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;
use stillpoint_host::cache::key;
use stillpoint_patch_differ::{HookNames, Refusal as DifferRefusal};
use stillpoint_patch_format::Patch;
use stillpoint_patch_shadow::{Checked, Kind, Origin, Refusal, Request, Rewritten, ShadowMember, Stop, rewrite};

/// Members that become shadow variables, as the author states them.
#[derive(Debug, Clone, Default)]
pub struct ShadowMembers {
    /// The members.
    pub members: Vec<ShadowMember>,
    /// Functions of the program that return new memory of the size that they get.
    pub allocators: Vec<String>,
}

/// Function of the table that finds a member.
const LOOK_UP: &str = "__stillpoint_member";
/// Hook of the table that empties it.
const FORGET: &str = "__stillpoint_members_forget";

/// Options that could make a refused patch possible, if their author knows the program to allow them.
#[derive(Debug, Clone)]
pub enum Proposal {
    /// Members that structures gain are kept beside the objects.
    ShadowMembers(ShadowMembers),
    /// Initial values that changed are written.
    WriteData,
}

impl Error {
    /// Returns the options that could make the refused patch possible.
    pub fn proposal(&self) -> Option<Proposal> {
        if let Some(members) = ShadowMembers::default().proposed(self) {
            return Some(Proposal::ShadowMembers(members));
        }
        let Error::Refused(refusals) = self else { return None };
        (!refusals.is_empty() && refusals.iter().all(DifferRefusal::is_writable)).then_some(Proposal::WriteData)
    }
}

impl ShadowMembers {
    /// Returns the request that could make a refused patch possible, if nothing but members that structures gain refuses it, or functions
    /// that may be allocators. Each member begins with zero.
    pub fn proposed(&self, error: &Error) -> Option<ShadowMembers> {
        let mut proposed = self.clone();
        match error {
            Error::Refused(refusals) => proposed.members.extend(gained(refusals)?),
            Error::ShadowMembers(refusals) => {
                proposed.allocators.extend(refusals.iter().filter_map(|refusal| refusal.allocator.clone()));
            }
            _ => return None,
        }
        proposed.members.sort();
        proposed.members.dedup();
        proposed.allocators.sort();
        proposed.allocators.dedup();
        let is_more = proposed.members.len() > self.members.len() || proposed.allocators.len() > self.allocators.len();
        is_more.then_some(proposed)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Returns true if the patch has to bring the table itself.
    pub(crate) fn needs_table(&self, earlier: &[Patch]) -> bool {
        !self.is_empty() && !earlier.iter().any(|patch| exports(patch).any(|name| name == LOOK_UP))
    }

    pub(crate) fn hooks(&self, stated: &HookNames, earlier: &[Patch]) -> HookNames {
        let mut hooks = stated.clone();
        if self.needs_table(earlier) {
            // old code has made and ended objects since an earlier time of the patch
            hooks.pre_apply.insert(0, FORGET.into());
            hooks.post_revert.push(FORGET.into());
        }
        hooks
    }
}

/// Returns the members that structures gained; `None` if something else was refused.
fn gained(refusals: &[DifferRefusal]) -> Option<Vec<ShadowMember>> {
    let mut members = Vec::new();
    for refusal in refusals {
        match refusal {
            DifferRefusal::TypeLayoutChanged { type_name, added: Some(added), .. } => {
                let type_name = type_name.strip_prefix("struct ").unwrap_or(type_name);
                members.extend(added.iter().map(|member| ShadowMember {
                    type_name: type_name.to_owned(),
                    member: member.clone(),
                    value: String::new(),
                }));
            }
            // a variable of such a type has another size, too
            DifferRefusal::VariableChanged { .. } => {}
            _ => return None,
        }
    }
    Some(members)
}

/// Compiler of units without the members.
pub(crate) struct Rewriter<'a> {
    pub(crate) compiler: &'a Compiler<'a>,
    request: &'a ShadowMembers,
    /// True if other diffs may gain some of the members.
    is_part: bool,
    /// Begins of objects, of each member that a unit defines.
    found: Mutex<Vec<Option<BTreeSet<Origin>>>>,
}

impl<'a> Rewriter<'a> {
    pub(crate) fn new(compiler: &'a Compiler<'a>, request: &'a ShadowMembers, is_part: bool) -> Self {
        Rewriter { compiler, request, is_part, found: Mutex::new(vec![None; request.members.len()]) }
    }

    /// Returns the object of a unit in a tree, without the members; `text` is its preprocessed text there.
    pub(crate) fn object(
        &self,
        tree: &Path,
        unit: &str,
        command: &CompileCommand,
        text: &Text,
        side: &'static str,
    ) -> Result<Vec<u8>, Error> {
        let whole = || self.compiler.object(tree, unit, command, Job::Sections, text, side);
        if self.request.is_empty() {
            return whole();
        }
        let failed = |output| Error::Compile { unit: unit.to_owned(), side, output };
        let preprocessed = self.compiler.preprocessed(tree, command)?.map_err(failed)?;
        if !command.is_plain_c() {
            return match self.named(&preprocessed) {
                Some(member) => Err(self.refused(Kind::Unseen, member, format!("{unit}, which is no C, may use it"))),
                None => whole(),
            };
        }
        let name = self.name(unit, command, text)?;
        let (of_origins, of_object) = (format!("{name}.members"), format!("{name}.o"));
        let cache = self.compiler.cache;
        let stored = cache.load("text", &of_origins).and_then(|bytes| serde_json::from_slice(&bytes).ok());
        if let (Some(origins), Some(object)) = (stored, cache.load("object", &of_object)) {
            self.remember(origins);
            return Ok(object);
        }
        let Rewritten { text, origins } = self.rewrite(tree, command, preprocessed)?;
        if origins.iter().all(Option::is_none) {
            return whole();
        }
        let (object, result) = self.compiler.on_text(tree, command, &text, Job::Sections)?;
        let object = object.ok_or_else(|| failed(first_error(&result)))?;
        let bytes = serde_json::to_vec(&origins).map_err(|e| Error::Malformed { what: name, why: e.to_string() })?;
        cache.store("text", &of_origins, &bytes)?;
        cache.store("object", &of_object, &object)?;
        self.remember(origins);
        Ok(object)
    }

    /// Returns a name for the result: the same for the same text, command and request.
    fn name(&self, unit: &str, command: &CompileCommand, text: &Text) -> Result<String, Error> {
        let project = self.compiler.project;
        let root = project.root.as_deref().unwrap_or(Path::new("")).as_os_str().as_encoded_bytes();
        let source = project.source.as_os_str().as_encoded_bytes();
        let (version, request) = (self.compiler.version(command)?, format!("{:?}", self.request));
        let (identity, rules) = (command.identity(), stillpoint_patch_shadow::VERSION.to_le_bytes());
        let parts =
            [&b"members"[..], root, source, unit.as_bytes(), version.as_bytes(), &identity, text.full.as_bytes()];
        Ok(key(parts.into_iter().chain([request.as_bytes(), &rules])))
    }

    fn rewrite(&self, tree: &Path, command: &CompileCommand, text: Vec<u8>) -> Result<Rewritten, Error> {
        let request = Request { members: &self.request.members, allocators: &self.request.allocators };
        let mut check = |text: &[u8]| {
            let (_, result) = self.compiler.on_text(tree, command, text, Job::Check)?;
            let printed = String::from_utf8_lossy(&result.stderr).into_owned();
            Ok::<_, Error>(Checked { is_clean: result.status.success(), printed })
        };
        match rewrite(text, request, &mut check) {
            Ok(rewritten) => Ok(rewritten),
            Err(Stop::Refused(refusals)) => Err(Error::ShadowMembers(refusals)),
            Err(Stop::Compiler(error)) => Err(error),
        }
    }

    /// Returns a member whose name, and that of its structure, is in a text.
    fn named(&self, text: &[u8]) -> Option<&'a ShadowMember> {
        let text = String::from_utf8_lossy(text);
        self.request.members.iter().find(|one| text.contains(&one.member) && text.contains(&one.type_name))
    }

    fn remember(&self, origins: Vec<Option<Vec<Origin>>>) {
        let mut found = self.found.lock().expect("no panic holds it");
        for (known, more) in found.iter_mut().zip(origins) {
            if let Some(more) = more {
                known.get_or_insert_default().extend(more);
            }
        }
    }

    fn refused(&self, kind: Kind, member: &ShadowMember, why: String) -> Error {
        Error::ShadowMembers(vec![Refusal {
            kind,
            member: member.to_string(),
            place: String::new(),
            why,
            allocator: None,
        }])
    }

    /// Returns what the author must know, after all units were compiled.
    pub(crate) fn finish(&self) -> Result<Vec<String>, Error> {
        let mut warnings = Vec::new();
        let mut numbers = BTreeSet::new();
        for (member, origins) in self.request.members.iter().zip(&*self.found.lock().expect("no panic holds it")) {
            if !numbers.insert(member.id()) {
                let why = "another member has the same number in the table: give one of them in another patch";
                return Err(self.refused(Kind::Type, member, why.into()));
            }
            let Some(origins) = origins else {
                if self.is_part {
                    continue;
                }
                let why = "no unit that changes defines a structure of this name with this member".into();
                return Err(self.refused(Kind::Type, member, why));
            };
            if origins.is_empty() {
                let why = "no variable of the type, and no call that allocates or clears one, was found".into();
                return Err(self.refused(Kind::Origin, member, why));
            }
            let places: Vec<String> = origins.iter().map(|one| format!("{} ({})", one.place, one.what)).collect();
            let value = if member.value.is_empty() { "0" } else { &member.value };
            warnings.push(format!(
                "shadow member {member}: {value} in every object that exists; objects begin at {}; objects that other \
                 programs, plug-ins or libraries make are not seen; apply it with --quiescence stop or global",
                Bounded(&places)
            ));
        }
        Ok(warnings)
    }
}

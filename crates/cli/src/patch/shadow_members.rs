//! Options of `stillpoint patch build` for members that structures gain, and their proposal.

use stillpoint_patch_builder::{Refusal, ShadowMember, ShadowMembers, ShadowRefusal};

/// Members that become shadow variables.
#[derive(clap::Args)]
pub(super) struct ShadowOptions {
    /// Members that structures gain, to be kept beside the objects that live, which keep their layout. VALUE is what a
    /// member has in each object that exists [default: 0]. The patch has the scope `process`.
    #[arg(long, value_name = "TYPE.MEMBER[=VALUE]", num_args = 1.., conflicts_with = "may_stay")]
    shadow_member: Vec<String>,
    /// Functions of the program that return new memory of the size that they get, as `malloc` does.
    #[arg(long, value_name = "FUNCTION", num_args = 1.., requires = "shadow_member")]
    shadow_allocator: Vec<String>,
}

impl ShadowOptions {
    pub(super) fn statement(&self) -> anyhow::Result<ShadowMembers> {
        let members =
            self.shadow_member.iter().map(|text| ShadowMember::parse(text)).collect::<Result<Vec<_>, String>>();
        let members = members.map_err(|why| anyhow::anyhow!("--shadow-member {why}"))?;
        Ok(ShadowMembers { members, allocators: self.shadow_allocator.clone() })
    }
}

/// Returns the options that could make a refused patch possible: nothing but added members is refused.
pub(super) fn options(refusals: &[Refusal]) -> Option<String> {
    let mut members = Vec::new();
    for refusal in refusals {
        match refusal {
            Refusal::TypeLayoutChanged { type_name, added: Some(added), .. } => {
                let name = type_name.strip_prefix("struct ").unwrap_or(type_name);
                members.extend(added.iter().map(|member| format!("{name}.{member}")));
            }
            // a variable of such a type has another size, too
            Refusal::VariableChanged { .. } => {}
            _ => return None,
        }
    }
    members.sort();
    members.dedup();
    let list = members.join(" ");
    let text = "if 0, or the =VALUE that is added to a member, is right for the objects that exist; apply it with --quiescence stop";
    (!members.is_empty()).then(|| format!("--shadow-member {list}, {text}"))
}

/// Returns advice for members that cannot be shadow variables.
pub(super) fn hint(refusals: &[ShadowRefusal]) -> String {
    let mut functions: Vec<&str> = refusals.iter().filter_map(|refusal| refusal.allocator.as_deref()).collect();
    functions.sort_unstable();
    functions.dedup();
    if functions.is_empty() {
        "change the diff so that it does without, or upgrade the package; docs/limits.md explains each kind".to_owned()
    } else {
        format!("--shadow-allocator {}, if they return new memory of this size", functions.join(" "))
    }
}

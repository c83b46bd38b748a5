//! Options of `stillpoint patch build` for members that structures gain, and their proposal.

use stillpoint_patch_builder::{Error, Proposal, ShadowMember, ShadowMembers};

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

/// Returns the options that could make a refused patch possible, with what their author has to know.
pub(super) fn hint(error: &Error) -> Option<String> {
    match (error, error.proposal()) {
        (Error::ShadowMembers(_), None) => Some(
            "change the diff so that it does without, or upgrade the package; docs/limits.md explains each kind".into(),
        ),
        (_, proposal) => proposal.as_ref().map(described),
    }
}

/// Returns the options as they are written, with what their author has to know.
pub(super) fn described(proposal: &Proposal) -> String {
    match proposal {
        Proposal::ShadowMembers(ShadowMembers { members, allocators }) if members.is_empty() => {
            format!("--shadow-allocator {}, if they return new memory of this size", allocators.join(" "))
        }
        Proposal::ShadowMembers(ShadowMembers { members, .. }) => {
            let list: Vec<String> = members.iter().map(|one| format!("{}.{}", one.type_name, one.member)).collect();
            let text = "if 0, or the =VALUE that is added to a member, is right for the objects that exist; apply it with --quiescence stop";
            format!("--shadow-member {}, {text}", list.join(" "))
        }
        Proposal::WriteData => "--write-data, if the program makes no copies of this data that the change has to reach; it is written while \
                                all threads are stopped"
            .to_owned(),
    }
}

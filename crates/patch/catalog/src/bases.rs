//! Bases of enabled patches. A start applies the patches in order, and drops each one whose base is not active by then.

use crate::patch_file::PatchFile;
use stillpoint_patch_format::{DiffFact, Patch, SymbolValue};

/// Patches of one unit that a start activates, in their order.
#[derive(Default)]
pub(crate) struct Stack(Vec<Patch>);

/// Base that is not active below a patch.
#[derive(Debug, thiserror::Error)]
#[error(
    "patch {} is based on {}, which no patch enabled below it adds to {} (build-id {})",
    patch.name, self.base(), patch.target.file_name, patch.target.build_id
)]
pub struct MissingBase {
    /// Patch that needs it.
    pub patch: Patch,
    base: Base,
}

/// Prerequisite that an earlier patch must provide.
#[derive(Debug)]
enum Base {
    /// A diff, by its name and SHA-256.
    Diff(String, [u8; 32]),
    /// A function or variable that an earlier patch added.
    Symbol(String),
}

impl Stack {
    /// Returns the patches that are active after a start with these.
    pub(crate) fn of(patches: impl IntoIterator<Item = Patch>) -> Stack {
        let mut stack = Stack::default();
        for patch in patches {
            // an error means that the start drops it as well
            let _ = stack.push(patch);
        }
        stack
    }

    /// Adds a patch on top, and removes those that it replaces.
    ///
    /// # Errors
    /// The first base that no patch of the same file below it provides; the stack is unchanged.
    pub(crate) fn push(&mut self, patch: Patch) -> Result<(), Box<MissingBase>> {
        let is_replaced = |below: &Patch| is_same_file(below, &patch) && patch.replaces.contains(&below.name);
        let stays = |below: &&Patch| !is_replaced(below);
        let brings = |base: &Base| self.0.iter().filter(stays).any(|below| base.is_added_by(below, &patch));
        let missing = bases(&patch).find(|base| !brings(base));
        if let Some(base) = missing {
            return Err(Box::new(MissingBase { patch, base }));
        }
        self.0.retain(|below| !is_replaced(below));
        self.0.push(patch);
        Ok(())
    }

    /// Returns a patch whose change to a function or constant a patch on top would undo, with the name of that object.
    pub(crate) fn undone_by<'p>(&self, patch: &'p Patch) -> Option<(&Patch, &'p str)> {
        let below = self.0.iter().filter(|below| is_same_file(below, patch) && !patch.replaces.contains(&below.name));
        let objects = |patch: &'p Patch| {
            let functions = patch.functions.iter().map(|f| (f.old.start, f.name.as_str()));
            functions
                .chain(patch.constants.iter().map(|c| (c.old.start, c.name.as_str())))
                .chain(patch.data.iter().map(|c| (c.old.start, c.name.as_str())))
        };
        let changes = |below: &Patch, at| {
            below.functions.iter().any(|f| f.old.start == at)
                || below.constants.iter().any(|c| c.old.start == at)
                || below.data.iter().any(|c| c.old.start == at)
        };
        below
            .filter(|below| !patch.contains(&below.source.diffs))
            .find_map(|below| objects(patch).find(|(at, _)| changes(below, *at)).map(|(_, name)| (below, name)))
    }

    /// Returns true if a patch of this name is active.
    pub(crate) fn holds(&self, name: &str) -> bool {
        self.0.iter().any(|patch| patch.name == name)
    }
}

fn bases(patch: &Patch) -> impl Iterator<Item = Base> {
    let diff = |diff: &DiffFact| Base::Diff(diff.name.clone(), diff.sha256);
    let others = patch.symbols.iter().filter(|symbol| symbol.value == SymbolValue::OtherPatch);
    patch.based_on.iter().map(diff).chain(others.map(|symbol| Base::Symbol(symbol.name.clone())))
}

/// Returns true if both patches are for the same file: by the build-id, or by the text without one.
fn is_same_file(a: &Patch, b: &Patch) -> bool {
    let (a, b) = (&a.target, &b.target);
    a.build_id == b.build_id && (!a.build_id.0.is_empty() || a.text_sha256 == b.text_sha256)
}

impl Base {
    fn is_added_by(&self, below: &Patch, above: &Patch) -> bool {
        let mut exports = below.exports.iter().filter_map(|index| below.symbols.get(*index as usize));
        is_same_file(below, above)
            && match self {
                Base::Diff(_, sha256) => below.source.diffs.iter().any(|diff| diff.sha256 == *sha256),
                Base::Symbol(name) => exports.any(|symbol| symbol.name == *name),
            }
    }
}

impl MissingBase {
    /// Returns true if `below` provides the base to the file that the patch is for.
    pub fn is_added_by(&self, below: &Patch) -> bool {
        self.base.is_added_by(below, &self.patch)
    }

    /// Base in words, for the `try:` line.
    pub fn base(&self) -> String {
        match &self.base {
            Base::Diff(name, _) => name.clone(),
            Base::Symbol(name) => format!("`{name}`"),
        }
    }
}

/// Returns the first base that a remaining patch loses with the removed ones.
pub fn lost_base(removed: &[PatchFile], remaining: &[PatchFile]) -> Option<Box<MissingBase>> {
    let mut all: Vec<&PatchFile> = removed.iter().chain(remaining).collect();
    all.sort();
    let before = Stack::of(all.into_iter().filter_map(|stored| stored.patch().ok()));
    let mut after = Stack::default();
    let mut missing = remaining.iter().filter_map(|stored| after.push(stored.patch().ok()?).err());
    missing.find(|missing| before.holds(&missing.patch.name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use stillpoint_patch_format as format;

    /// Makes a patch of its diff `name` for a build.
    fn patch(name: &str, build: u8, based_on: &[&str]) -> Patch {
        let diff = |name: &&str| DiffFact { name: (*name).to_owned(), sha256: [name.len() as u8; 32] };
        Patch {
            name: name.to_owned(),
            description: String::new(),
            cves: Vec::new(),
            replaces: Vec::new(),
            source: format::Source { diffs: vec![diff(&name)], ..format::Source::default() },
            based_on: based_on.iter().map(diff).collect(),
            toolchain: format::Toolchain::default(),
            target: format::Target {
                build_id: format::BuildId(vec![build]),
                text_sha256: [build; 32],
                file_name: "server".into(),
                kind: format::TargetKind::PieExecutable,
            },
            scope: format::Scope::ThreadLocal,
            scope_stated: false,
            sections: Vec::new(),
            symbols: Vec::new(),
            exports: Vec::new(),
            functions: Vec::new(),
            constants: Vec::new(),
            data: Vec::new(),
            off_stack: Vec::new(),
            staying: Vec::new(),
            hooks: format::Hooks::default(),
            types: Vec::new(),
            escaping: Vec::new(),
            warnings: Vec::new(),
        }
    }

    #[test]
    fn a_base_is_below_and_for_the_same_file() {
        let (base, above) = (|build| patch("a", build, &[]), patch("bb", 1, &["a"]));
        assert_eq!(Stack::default().push(above.clone()).unwrap_err().base(), "a");
        assert!(Stack::of([base(2)]).push(above.clone()).is_err(), "it is for another build");
        assert!(Stack::of([base(1)]).push(above.clone()).is_ok());
        // a dropped patch is not a base, nor is a replaced one
        let upon_nothing = patch("dddd", 1, &["ccc"]);
        assert!(Stack::of([upon_nothing]).push(patch("eeeee", 1, &["dddd"])).is_err());
        let replacing = Patch { replaces: vec!["a".into()], ..patch("ccc", 1, &[]) };
        let mut stack = Stack::of([base(1), replacing]);
        assert!(!stack.holds("a") && stack.holds("ccc"));
        let missing = stack.push(above).unwrap_err();
        assert!(missing.to_string().contains("patch bb is based on a,"), "{missing}");
    }

    #[test]
    fn a_patch_on_top_contains_the_diffs_of_the_functions_that_it_changes_again() {
        let changing = |name: &str, start, based_on: &[&str]| {
            let function = format::Function {
                name: "parse".into(),
                unit: "parse.c".into(),
                old: format::Range { start: format::Svma(start), len: 64 },
                old_parts: Vec::new(),
                old_bytes: Vec::new(),
                new: 0,
                reasons: Vec::new(),
            };
            Patch { functions: vec![function], ..patch(name, 1, based_on) }
        };
        let stack = Stack::of([changing("a", 64, &[])]);
        let undone =
            |patch: &Patch| stack.undone_by(patch).map(|(below, object)| (below.name.clone(), object.to_owned()));
        assert_eq!(undone(&changing("bb", 64, &[])), Some(("a".into(), "parse".into())));
        assert_eq!(undone(&changing("bb", 128, &[])), None);
        assert_eq!(undone(&changing("bb", 64, &["a"])), None);
        assert_eq!(undone(&Patch { replaces: vec!["a".into()], ..changing("bb", 64, &[]) }), None);
    }

    #[test]
    fn what_an_earlier_patch_adds_is_a_base() {
        let symbol = |value| format::Symbol { name: "added".into(), value, resolved_by: format::ResolvedBy::Patch };
        let above = Patch { symbols: vec![symbol(SymbolValue::OtherPatch)], ..patch("bb", 1, &[]) };
        assert_eq!(Stack::of([patch("a", 1, &[])]).push(above.clone()).unwrap_err().base(), "`added`");
        let inside = symbol(SymbolValue::Patch { section: 0, offset: 0 });
        let base = Patch { symbols: vec![inside], exports: vec![0], ..patch("a", 1, &[]) };
        assert!(Stack::of([base]).push(above).is_ok());
    }
}

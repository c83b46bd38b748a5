//! Allowed dependencies between packages: `cli -> engines -> skeleton -> edge -> pure`, and none between pillars.

use super::{Finding, Package, Tree};

/// Distance of a package from the outside world. A package uses only those of lower layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Layer {
    /// Decides from data alone.
    Pure,
    /// Unsafe code, ptrace, raw system calls.
    Edge,
    /// The skeleton on which engines run.
    Skeleton,
    /// Performs the operations.
    Engine,
    /// Performs operations that consist of those of an engine.
    Composite,
    /// The binary.
    Cli,
    /// Tests, fuzzers and checks: they may use all.
    Tool,
}

/// Subject of a package.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pillar {
    /// Shared by all pillars.
    Shared,
    /// `stillpoint patch`.
    Patch,
    /// `stillpoint migrate`.
    Migrate,
    /// `stillpoint kernel`.
    Kernel,
    /// `stillpoint measure`: uses of the engines' packages only `events`.
    Measure,
}

/// Layer and pillar of every package: the only such list, and the architecture.
const PACKAGES: &[(&str, Layer, Pillar)] = &[
    ("stillpoint-base", Layer::Pure, Pillar::Shared),
    ("stillpoint-events", Layer::Pure, Pillar::Shared),
    ("stillpoint-patch-format", Layer::Pure, Pillar::Patch),
    ("stillpoint-patch-insn", Layer::Pure, Pillar::Patch),
    ("stillpoint-patch-unwind", Layer::Pure, Pillar::Patch),
    ("stillpoint-patch-differ", Layer::Pure, Pillar::Patch),
    ("stillpoint-patch-shadow", Layer::Pure, Pillar::Patch),
    ("stillpoint-migrate-wire", Layer::Pure, Pillar::Migrate),
    ("stillpoint-migrate-replay", Layer::Pure, Pillar::Migrate),
    ("stillpoint-migrate-capture", Layer::Pure, Pillar::Migrate),
    ("stillpoint-kernel-foam", Layer::Pure, Pillar::Kernel),
    ("stillpoint-kernel-criu", Layer::Pure, Pillar::Kernel),
    ("stillpoint-host", Layer::Edge, Pillar::Shared),
    ("stillpoint-operation", Layer::Skeleton, Pillar::Shared),
    ("stillpoint-integrations", Layer::Edge, Pillar::Patch),
    ("stillpoint-patch-tracee", Layer::Edge, Pillar::Patch),
    ("stillpoint-patch-provenance", Layer::Edge, Pillar::Patch),
    ("stillpoint-patch-builder", Layer::Engine, Pillar::Patch),
    ("stillpoint-patch-catalog", Layer::Engine, Pillar::Patch),
    ("stillpoint-patch-engine", Layer::Engine, Pillar::Patch),
    ("stillpoint-migrate-control", Layer::Edge, Pillar::Migrate),
    ("stillpoint-migrate-postgres", Layer::Edge, Pillar::Migrate),
    ("stillpoint-migrate-proxy", Layer::Edge, Pillar::Migrate),
    ("stillpoint-migrate-apply", Layer::Engine, Pillar::Migrate),
    ("stillpoint-migrate-attach", Layer::Engine, Pillar::Migrate),
    ("stillpoint-migrate-engine", Layer::Composite, Pillar::Migrate),
    ("stillpoint-kernel-crash", Layer::Edge, Pillar::Kernel),
    ("stillpoint-kernel-sys", Layer::Edge, Pillar::Kernel),
    ("stillpoint-kernel-checkpoint", Layer::Engine, Pillar::Kernel),
    ("stillpoint-kernel-switch", Layer::Composite, Pillar::Kernel),
    ("stillpoint-kernel-bench", Layer::Tool, Pillar::Shared),
    ("stillpoint-kernel-tests", Layer::Tool, Pillar::Kernel),
    ("stillpoint-migrate-bench", Layer::Tool, Pillar::Shared),
    ("stillpoint-migrate-tests", Layer::Tool, Pillar::Shared),
    ("stillpoint-measure", Layer::Engine, Pillar::Measure),
    ("stillpoint", Layer::Cli, Pillar::Shared),
    ("stillpoint-patch-bench", Layer::Tool, Pillar::Shared),
    ("stillpoint-patch-tests", Layer::Tool, Pillar::Shared),
    ("stillpoint-testing", Layer::Tool, Pillar::Shared),
    ("xtask", Layer::Tool, Pillar::Shared),
];

/// Layer and pillar of a package, if it is listed.
pub(super) fn place(name: &str) -> Option<(Layer, Pillar)> {
    PACKAGES.iter().find(|(known, ..)| *known == name).map(|&(_, layer, pillar)| (layer, pillar))
}

/// Checks that every dependency leads to a lower layer, and stays in its pillar or goes to a shared package.
pub(super) fn directions(tree: &Tree) -> Vec<Finding> {
    tree.packages.iter().flat_map(directions_of).collect()
}

fn directions_of(package: &Package) -> Vec<Finding> {
    let manifest = format!("{}/Cargo.toml", package.dir);
    let Some((layer, pillar)) = place(&package.name) else {
        return vec![Finding::new(
            &manifest,
            0,
            format!("package `{}` has no place in xtask's layers.rs", package.name),
        )];
    };
    let mut findings = Vec::new();
    for used in &package.dependencies {
        let Some((used_layer, used_pillar)) = place(used) else { continue };
        // Pure packages may use each other: cargo forbids cycles, and no other order is needed. Likewise, edge packages of a pillar may use
        // each other, and shared packages of the edge.
        let goes_down = used_layer < layer
            || (used_layer, layer) == (Layer::Pure, Layer::Pure)
            || ((used_layer, layer) == (Layer::Edge, Layer::Edge) && pillar != Pillar::Shared)
            || layer == Layer::Tool;
        if !goes_down {
            let message = format!("`{}` ({layer:?}) uses `{used}` ({used_layer:?}): arrows point down", package.name);
            findings.push(Finding::new(&manifest, 0, message));
        }
        if pillar != Pillar::Shared && used_pillar != Pillar::Shared && pillar != used_pillar {
            let message = format!(
                "`{}` ({pillar:?}) uses `{used}` ({used_pillar:?}): pillars meet in `events` only",
                package.name
            );
            findings.push(Finding::new(&manifest, 0, message));
        }
    }
    findings
}

/// Checks that every package uses the workspace's lints.
pub(super) fn manifests(tree: &Tree) -> Vec<Finding> {
    let manifest = |package: &Package| format!("{}/Cargo.toml", package.dir);
    tree.packages
        .iter()
        .filter_map(|package| tree.file(&manifest(package)))
        .filter(|file| !file.text.contains("[lints]\nworkspace = true"))
        .map(|file| Finding::new(&file.path, 0, "lacks `[lints] workspace = true`"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(name: &str, dependencies: &[&str]) -> Tree {
        let package = Package {
            name: name.into(),
            dir: "crates/x".into(),
            dependencies: dependencies.iter().map(ToString::to_string).collect(),
            ..Package::default()
        };
        Tree { packages: vec![package], ..Tree::default() }
    }

    fn messages(name: &str, dependencies: &[&str]) -> Vec<String> {
        directions(&tree(name, dependencies)).into_iter().map(|finding| finding.message).collect()
    }

    #[test]
    fn arrows_that_point_down_are_fine() {
        assert!(messages("stillpoint", &["stillpoint-patch-engine", "stillpoint-measure", "clap"]).is_empty());
        assert!(messages("stillpoint-patch-engine", &["stillpoint-patch-tracee", "stillpoint-events"]).is_empty());
        assert!(messages("stillpoint-patch-differ", &["stillpoint-patch-insn", "object"]).is_empty());
        assert!(messages("stillpoint-migrate-proxy", &["stillpoint-migrate-postgres", "stillpoint-host"]).is_empty());
        assert!(messages("stillpoint-patch-tests", &["stillpoint-patch-builder"]).is_empty());
    }

    #[test]
    fn arrows_that_point_up_or_sideways_are_found() {
        for (name, used) in [
            ("stillpoint-patch-format", "stillpoint-patch-tracee"),
            ("stillpoint-patch-tracee", "stillpoint-patch-engine"),
            ("stillpoint-patch-engine", "stillpoint-patch-builder"),
            ("stillpoint-host", "stillpoint-migrate-postgres"),
            ("stillpoint-patch-engine", "stillpoint"),
        ] {
            assert!(messages(name, &[used])[0].contains("arrows point down"), "{name} -> {used}");
        }
    }

    #[test]
    fn pillars_do_not_meet() {
        let found = messages("stillpoint-measure", &["stillpoint-patch-format"]);
        assert!(found[0].contains("pillars meet in `events` only"), "{found:?}");
    }

    #[test]
    fn a_package_without_a_place_is_found() {
        assert!(messages("stillpoint-new", &[])[0].contains("has no place"));
    }

    #[test]
    fn a_package_without_the_lints_is_found() {
        let mut tree = tree("stillpoint", &[]);
        tree.files = Tree::of_files([("crates/x/Cargo.toml", "[package]\n")]).files;
        assert_eq!(manifests(&tree).len(), 1);
        tree.files[0].text = "[lints]\nworkspace = true\n".into();
        assert!(manifests(&tree).is_empty());
    }
}

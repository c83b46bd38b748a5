//! Names as the compiler decorates them.

/// Returns true if `name` is a cold part (`f.cold`, `f.part.0.cold.1`).
pub(crate) fn is_cold(name: &str) -> bool {
    cold_parent(name).is_some()
}

/// Returns the function that a cold part belongs to.
pub(crate) fn cold_parent(name: &str) -> Option<&str> {
    let undecorated = strip_number(name).filter(|rest| rest.ends_with(".cold")).unwrap_or(name);
    undecorated.strip_suffix(".cold")
}

fn strip_number(name: &str) -> Option<&str> {
    let (stem, digits) = name.rsplit_once('.')?;
    (!digits.is_empty() && !stem.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())).then_some(stem)
}

/// Returns `name` without all suffixes of the compiler: `.part.0`, `.isra.1`, `.constprop.0`, `.cold`, `.7`.
pub(crate) fn stem(name: &str) -> &str {
    const CLONES: [&str; 6] = [".part", ".isra", ".constprop", ".lto_priv", ".localalias", ".cold"];
    let mut name = name;
    loop {
        if let Some(rest) = CLONES.iter().find_map(|c| name.strip_suffix(c)).filter(|rest| !rest.is_empty()) {
            name = rest;
        } else if let Some(rest) = strip_number(name) {
            name = rest;
        } else {
            return name;
        }
    }
}

/// Returns the stem, and the kinds of clone in the order made, without numbers: `f.part.0.isra.1` gives `.part.isra`.
pub(crate) fn clone_key(name: &str) -> (&str, String) {
    let stem = stem(name);
    let kinds =
        name[stem.len()..].split('.').filter(|part| !part.is_empty() && !part.bytes().all(|b| b.is_ascii_digit()));
    (stem, kinds.flat_map(|kind| [".", kind]).collect())
}

/// Returns true if `name` is a static with a number of the compiler (`counter.3`), which has no meaning outside its
/// object.
pub(crate) fn is_numbered(name: &str) -> bool {
    strip_number(name).is_some()
}

/// Returns true if the compiler made the object for its own use, so that only its content identifies it.
pub(crate) fn is_anonymous(name: &str) -> bool {
    const COMPILER_PREFIXES: [&str; 4] = ["CSWTCH", "__func__", "__FUNCTION__", "__PRETTY_FUNCTION__"];
    name.is_empty() || name.starts_with(".L") || (is_numbered(name) && COMPILER_PREFIXES.contains(&stem(name)))
}

/// Returns true if a function initialises or destroys a unit's static objects.
pub(crate) fn is_static_initialiser(name: &str) -> bool {
    const COMPILER_PREFIXES: [&str; 4] = ["_GLOBAL__sub_I_", "_GLOBAL__sub_D_", "_GLOBAL__I_", "__cxx_global_"];
    COMPILER_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        || name.contains("__static_initialization_and_destruction_")
}

/// Returns `name` without the part that a compiler takes from the unit's first global or its file.
pub(crate) fn initialiser_kind(name: &str) -> &str {
    let kinds = ["_GLOBAL__sub_I_", "_GLOBAL__sub_D_"];
    kinds.into_iter().find(|kind| name.starts_with(kind)).unwrap_or(name)
}

/// Returns true if the object is a class's table of virtual functions or of virtual bases, or its type information.
pub(crate) fn is_class_data(name: &str) -> bool {
    ["_ZTV", "_ZTT", "_ZTC", "_ZTI", "_ZTS"].iter().any(|prefix| name.starts_with(prefix))
}

/// Returns the class that such an object belongs to, as in the source.
pub(crate) fn class_of(name: &str) -> String {
    let text = stillpoint_patch_format::readable(name);
    let inner = text.split_once('(').and_then(|(_, rest)| rest.rsplit_once(')')).map(|(inner, _)| inner);
    let inner = inner.filter(|_| text.starts_with('{')).unwrap_or(&text);
    let prefixes = ["typeinfo for ", "typeinfo name for ", "construction vtable for "];
    prefixes.iter().find_map(|prefix| inner.strip_prefix(prefix)).unwrap_or(inner).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decorations_are_taken_apart() {
        assert_eq!(stem("f.part.0.isra.1.cold"), "f");
        assert_eq!(stem("counter.3"), "counter");
        assert_eq!(stem("plain"), "plain");
        assert_eq!(clone_key("f.part.0.isra.1"), ("f", ".part.isra".to_owned()));
        assert_eq!(cold_parent("f.part.0.cold"), Some("f.part.0"));
        assert_eq!(cold_parent("f.cold.3"), Some("f"));
        assert_eq!(cold_parent("f.3"), None);
        assert!(is_anonymous("CSWTCH.12") && is_anonymous("__func__.0") && is_anonymous(".LC4"));
        assert!(is_static_initialiser("_GLOBAL__sub_I_main") && !is_static_initialiser("main"));
        assert_eq!(class_of("_ZTV5Shape"), "Shape");
        assert_eq!(class_of("_ZTI5Shape"), "Shape");
        assert!(!is_anonymous("count.0") && !is_anonymous("CSWTCH_like"));
    }
}

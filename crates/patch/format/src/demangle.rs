//! Symbol names in readable form.

use cpp_demangle::{DemangleOptions, Symbol};
use std::borrow::Cow;
use std::fmt;

/// Longest name that is demangled, in bytes; a longer one is unreadable and stays as it is. Template names have no upper limit.
const NAME_MAX: usize = 4096;

/// Longest demangled name, in bytes: each of a few substitutions in a row doubles the length.
const TEXT_MAX: usize = 32 << 10;

/// A text of at most [`TEXT_MAX`] bytes.
#[derive(Default)]
struct Bounded(String);

impl fmt::Write for Bounded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len() + text.len() > TEXT_MAX {
            return Err(fmt::Error);
        }
        self.0.push_str(text);
        Ok(())
    }
}

/// Returns a symbol's name as it is written in the source: `_ZN4Pool4growEm` becomes `Pool::grow(unsigned long)`. A C name, or a name that
/// is not understood, stays as it is. A suffix of the compiler (`.cold`, `.part.0`) stays at the end, and the unit of a static
/// (`pool.cc:_ZL5count`) stays at the start.
///
/// ```
/// use stillpoint_patch_format::readable;
/// assert_eq!(readable("_ZN4Pool4growEm.cold"), "Pool::grow(unsigned long).cold");
/// assert_eq!(readable("lookupKey"), "lookupKey");
/// ```
pub fn readable(name: &str) -> Cow<'_, str> {
    demangle(name, &DemangleOptions::new()).map_or(Cow::Borrowed(name), Cow::Owned)
}

/// Returns the same name without parameters and result: `Pool::grow`.
///
/// ```
/// assert_eq!(stillpoint_patch_format::readable_short("_ZN4Pool4growEm"), "Pool::grow");
/// ```
pub fn readable_short(name: &str) -> Cow<'_, str> {
    demangle(name, &DemangleOptions::new().no_params().no_return_type()).map_or(Cow::Borrowed(name), Cow::Owned)
}

fn demangle(name: &str, options: &DemangleOptions) -> Option<String> {
    if let Some(at) = name.find(":_Z") {
        let (unit, name) = name.split_at(at + 1);
        return Some(unit.to_owned() + &demangle(name, options)?);
    }
    let mangled = name.strip_prefix("DW.ref.").unwrap_or(name);
    if !mangled.starts_with("_Z") || name.len() > NAME_MAX {
        return None;
    }
    let (mangled, decoration) = mangled.split_at(mangled.find('.').unwrap_or(mangled.len()));
    let mut text = Bounded::default();
    Symbol::new(mangled).ok()?.structured_demangle(&mut text, options).ok()?;
    Some(text.0 + decoration)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_not_mangled_stay() {
        for name in ["", "_Z", "_Zgarbage", "main", "_ZN", ".LC0", "_ZN4Pool4grow"] {
            assert_eq!(readable(name), name);
        }
        let long = format!("_Z{}", "P".repeat(1 << 20));
        assert_eq!(readable(&long), long);
        let deep = format!("_Z1f{}i", "P".repeat(2000));
        assert!(!readable(&deep).is_empty(), "nesting is bounded");
    }

    #[test]
    fn a_name_that_doubles_itself_is_left_alone() {
        // each parameter is a pointer to a function that takes the previous parameter's type twice; that type's number is in base 36
        let digits = |n: usize| char::from_digit(n as u32, 36).expect("one digit").to_ascii_uppercase();
        let name = |levels: usize| {
            let parameters = (0..levels).map(|n| format!("PFS{0}_S{0}_E", digits(2 * n))).collect::<String>();
            format!("_Z1fPFiiiE{parameters}")
        };
        assert!(readable(&name(1)).starts_with("f("), "{}", readable(&name(1)));
        assert_eq!(readable(&name(17)), name(17));
    }

    #[test]
    fn tables_and_guards_say_of_what() {
        assert_eq!(readable("pool.cc:_ZL5count"), "pool.cc:count");
        assert_eq!(readable("_ZTV5Shape"), "{vtable(Shape)}");
        assert_eq!(readable("_ZGVZ4nextvE5count"), "guard variable for next()::count");
    }
}

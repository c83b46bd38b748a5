//! Lambdas and other unnamed classes: compilers number them, and a number has no meaning in another build.
//!
//! A function of such a class, and every template made for it, has the number in its name. If a patch adds or removes a
//! lambda, pairing by name would give a lambda in live data the code of another one. So the classes are paired by the
//! code of all their functions, and the names follow.

use crate::object_file::{Home, Nature, Object, Site};
use crate::symbol_names;
use std::collections::{BTreeMap, HashMap};
use stillpoint_patch_format::readable;

/// The name of a symbol that mentions unnamed classes: its readable form, and the places of those classes in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Name {
    text: String,
    /// Start and end of each class, the outermost first.
    classes: Vec<(usize, usize)>,
    /// Form of a constructor or destructor, which the readable name omits; and suffixes of the compiler.
    form: String,
}

impl Name {
    /// Parses a mangled name that mentions such a class; `None` for all other names.
    pub(crate) fn parse(symbol: &str) -> Option<Name> {
        let (mangled, decoration) = symbol.split_at(symbol.find('.').unwrap_or(symbol.len()));
        let hint = ["Ul", "Ut", "$_"].iter().any(|hint| mangled.contains(hint));
        if !hint || !mangled.starts_with("_Z") {
            return None;
        }
        let text = readable(mangled).into_owned();
        let classes = classes(&text);
        let kinds = decoration.split('.').filter(|part| !part.bytes().all(|b| b.is_ascii_digit()));
        let form = forms(mangled).into_iter().chain(kinds.map(str::to_owned)).collect::<Vec<_>>().join(".");
        (!classes.is_empty()).then_some(Name { text, classes, form })
    }

    /// Returns the name without the numbers.
    pub(crate) fn without_numbers(&self) -> String {
        format!("{} {}", erase(&self.text), self.form)
    }

    /// Returns the name with every class replaced by its pair in `to_old`; `None` when one of them has no counterpart.
    fn translate(&self, to_old: &HashMap<String, String>) -> Option<String> {
        let (mut out, mut at) = (String::new(), 0);
        for &(start, end) in &self.classes {
            // A class nested in another, or named in its parameters, has been replaced along with it.
            if start < at {
                continue;
            }
            out.push_str(&self.text[at..start]);
            out.push_str(to_old.get(&self.text[start..end])?);
            at = end;
        }
        Some(format!("{out}{} {}", &self.text[at..], self.form))
    }

    fn whole(&self) -> String {
        format!("{} {}", self.text, self.form)
    }
}

/// Members of the closures of each function, in the order of the source; by the function's readable name.
pub(crate) type Closures = BTreeMap<String, Vec<String>>;

/// Pairs of the unnamed classes of two objects: the newer one's names to the older one's.
#[derive(Debug)]
pub(crate) struct Classes {
    to_old: HashMap<String, String>,
    /// Classes of the older object that the newer one replaced by others.
    pub(crate) left: Vec<String>,
    old: HashMap<usize, Name>,
    new: HashMap<usize, Name>,
}

impl Classes {
    pub(crate) fn between(old: (&Object<'_>, &Closures), new: (&Object<'_>, &Closures)) -> Self {
        let (old_names, new_names) = (names_of(old.0), names_of(new.0));
        let same_closures = |class: &str| old.1.get(enclosing(class)) == new.1.get(enclosing(class));
        let (to_old, left) = pair(&traits(old.0, &old_names), &traits(new.0, &new_names), same_closures);
        Classes { to_old, left, old: old_names, new: new_names }
    }

    /// Returns true if the name of a symbol of the older object has the number of such a class.
    pub(crate) fn is_old(&self, symbol: usize) -> bool {
        self.old.contains_key(&symbol)
    }

    /// Returns true if the name of a symbol of the newer object has the number of such a class.
    pub(crate) fn is_new(&self, symbol: usize) -> bool {
        self.new.contains_key(&symbol)
    }

    /// Returns every symbol of the newer object whose name has a class's number, with its candidates in the older one.
    pub(crate) fn candidates(&self) -> Vec<(usize, Vec<usize>)> {
        let mut by_name: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (symbol, name) in &self.old {
            by_name.entry(name.whole()).or_default().push(*symbol);
        }
        let mut found: Vec<(usize, Vec<usize>)> = Vec::new();
        for (symbol, name) in &self.new {
            let olds = name.translate(&self.to_old).and_then(|name| by_name.get(&name));
            found.extend(olds.map(|olds| (*symbol, olds.clone())));
        }
        found.sort_unstable();
        found
    }
}

/// Returns true if the object has any such class.
pub(crate) fn has_any(object: &Object<'_>) -> bool {
    object.symbols.iter().any(|s| matches!(s.home, Home::Section(_)) && Name::parse(s.name).is_some())
}

fn names_of(object: &Object<'_>) -> HashMap<usize, Name> {
    let defined = object.symbols.iter().enumerate().filter(|(_, s)| matches!(s.home, Home::Section(_)));
    defined.filter_map(|(index, symbol)| Some((index, Name::parse(symbol.name)?))).collect()
}

/// Code of each class's functions: that of all functions that mention the class, independent of numbers.
type ClassCode = BTreeMap<String, Vec<String>>;

fn traits(object: &Object<'_>, all: &HashMap<usize, Name>) -> ClassCode {
    let mut out = ClassCode::new();
    for (index, name) in all {
        let contents = contents(object, *index).map(|contents| format!("{} {contents}", name.without_numbers()));
        for &(start, end) in &name.classes {
            out.entry(name.text[start..end].to_owned()).or_default().extend(contents.clone());
        }
    }
    out.values_mut().for_each(|all| all.sort_unstable());
    out
}

/// Returns a function's bytes without relocated places, and the destinations of the relocations; `None` for other
/// symbols.
fn contents(object: &Object<'_>, symbol: usize) -> Option<String> {
    let symbol = &object.symbols[symbol];
    let Home::Section(home) = symbol.home else { return None };
    let section = object.sections.get(home).filter(|s| s.nature == Nature::Text)?;
    let (start, end) = (symbol.value, symbol.value.checked_add(symbol.size)?);
    let mut bytes = section.bytes.get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)?.to_vec();
    let mut references = Vec::new();
    for reloc in section.relocations.iter().filter(|r| (start..end).contains(&r.offset)) {
        let at = (reloc.offset - start) as usize;
        let field = at..(at + 4).min(bytes.len());
        bytes[field].fill(0);
        references.push(reference_text(object, object.site(reloc)));
    }
    Some(format!("{bytes:?} {references:?}"))
}

fn reference_text(object: &Object<'_>, site: Site<'_>) -> String {
    let plain = |name: &str| {
        Name::parse(name).map_or_else(|| symbol_names::stem(name).to_owned(), |name| name.without_numbers())
    };
    match site {
        Site::Extern(name, offset) => format!("{} {offset}", plain(name)),
        Site::Value(value) => value.to_string(),
        Site::Inside { section, offset, anchor } => {
            match (object.literal(section, anchor), object.owner(section, anchor)) {
                (Some(literal), _) => format!("{literal:?} {}", offset.wrapping_sub(anchor)),
                (None, Some(owner)) => {
                    format!(
                        "{} {}",
                        plain(object.symbols[owner].name),
                        offset.wrapping_sub(object.symbols[owner].value as i64)
                    )
                }
                (None, None) => format!("{:?}", object.sections[section].nature),
            }
        }
    }
}

/// Returns the function of the source that contains a class, also where the class is in a lambda of that function.
fn enclosing(class: &str) -> &str {
    let marks = ["::{lambda(", "::{unnamed type#", "::$_"];
    marks.iter().filter_map(|mark| class.find(mark)).min().map_or(class, |at| &class[..at])
}

/// Pairs classes of one place in the source by their code. If the same number is left on both sides, and no closure has
/// other members than before, pairs the rest by order. Also returns those of the older side that the newer one replaced
/// by others.
fn pair(
    old: &ClassCode,
    new: &ClassCode,
    same_closures: impl Fn(&str) -> bool,
) -> (HashMap<String, String>, Vec<String>) {
    let mut groups: BTreeMap<String, (Vec<&String>, Vec<&String>)> = BTreeMap::new();
    old.keys().for_each(|class| groups.entry(erase(class)).or_default().0.push(class));
    new.keys().for_each(|class| groups.entry(erase(class)).or_default().1.push(class));
    let (mut out, mut left) = (HashMap::new(), Vec::new());
    for (mut olds, mut news) in groups.into_values() {
        olds.sort_unstable_by_key(|class| numbers(class));
        news.sort_unstable_by_key(|class| numbers(class));
        let equal = |one: &&String, other: &&String| old[*one] == new[*other];
        news.retain(|class| {
            let same = olds.iter().position(|one| one == class && equal(one, class));
            same.map(|at| out.insert((*class).clone(), olds.remove(at).clone())).is_none()
        });
        news.retain(|class| {
            let same = olds.iter().position(|one| equal(one, class));
            same.map(|at| out.insert((*class).clone(), olds.remove(at).clone())).is_none()
        });
        if olds.len() == news.len() && news.iter().all(|class| same_closures(class)) {
            out.extend(news.into_iter().cloned().zip(olds.into_iter().cloned()));
        } else if !news.is_empty() {
            left.extend(olds.into_iter().cloned());
        }
    }
    (out, left)
}

/// Returns start and end of every unnamed class, each with the scopes that contain it.
fn classes(text: &str) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    for mark in ["{lambda(", "{unnamed type#", "$_"] {
        for (at, _) in text.match_indices(mark) {
            let end = if mark == "$_" { digits_end(text, at + mark.len()) } else { closing_bracket(text, at) };
            found.extend(end.map(|end| (scope_start(text, at), end)));
        }
    }
    // Of those with one start, the longest first: it contains the others.
    found.sort_unstable_by_key(|(start, end)| (*start, std::cmp::Reverse(*end)));
    found
}

fn digits_end(text: &str, at: usize) -> Option<usize> {
    let digits = text[at..].bytes().take_while(u8::is_ascii_digit).count();
    (digits > 0).then_some(at + digits)
}

/// Returns the position one past the bracket that closes the one at `at`.
fn closing_bracket(text: &str, at: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (offset, byte) in text.bytes().enumerate().skip(at) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return Some(offset + 1);
        }
    }
    None
}

/// Returns the start of the scopes before `at`: `f(int) const::` of `g<f(int) const::{lambda()#1}>`.
fn scope_start(text: &str, at: usize) -> usize {
    let (bytes, mut depth, mut start) = (text.as_bytes(), 0usize, at);
    while start > 0 {
        match bytes[start - 1] {
            b')' | b'>' | b'}' | b']' => depth += 1,
            b'(' | b'<' | b'{' | b'[' | b',' if depth == 0 => break,
            b'(' | b'<' | b'{' | b'[' => depth -= 1,
            b' ' if depth == 0 && !["const", "volatile", "&"].iter().any(|q| text[start..].starts_with(q)) => break,
            _ => {}
        }
        start -= 1;
    }
    start
}

/// Returns `text` without the numbers of classes.
fn erase(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['#', '$']) {
        let mark = if rest[at..].starts_with("$_") { at + 2 } else { at + 1 };
        out.push_str(&rest[..mark]);
        rest = rest[mark..].trim_start_matches(|c: char| c.is_ascii_digit());
    }
    out + rest
}

/// Returns the numbers of classes in `text`, for their order.
fn numbers(text: &str) -> Vec<u64> {
    let marked = text.split(['#', '$']).skip(1).map(|part| part.trim_start_matches('_'));
    marked.map(|part| part[..digits_end(part, 0).unwrap_or(0)].parse().unwrap_or(0)).collect()
}

/// Returns the forms of constructors and destructors in a mangled name; their readable names are the same.
fn forms(mangled: &str) -> Vec<String> {
    let pairs = mangled.as_bytes().windows(2);
    let forms = pairs.filter(|pair| matches!(pair, [b'C', b'1'..=b'5'] | [b'D', b'0'..=b'5']));
    forms.map(|pair| String::from_utf8_lossy(pair).into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_found_with_their_scopes() {
        let found = |text: &'static str| classes(text).into_iter().map(|(a, b)| &text[a..b]).collect::<Vec<_>>();
        assert_eq!(found("h<int (int), set(int)::{lambda(int)#2}>::run()"), ["set(int)::{lambda(int)#2}"]);
        assert_eq!(found("A::f() const::{lambda()#1}::operator()() const"), ["A::f() const::{lambda()#1}"]);
        assert_eq!(found("set(int)::$_12::operator()(int) const"), ["set(int)::$_12"]);
        assert_eq!(found("plain(int)"), [""; 0]);
    }

    #[test]
    fn names_without_numbers_are_equal() {
        let parse = |name: &str| Name::parse(name).expect("a lambda's function");
        let (one, other) = (parse("_ZZ3seteENKUliE_clEi"), parse("_ZZ3seteENKUliE0_clEi"));
        assert_ne!(one, other);
        assert_eq!(one.without_numbers(), other.without_numbers());
        assert_eq!(numbers("f()::{lambda()#12}::g()::$_3"), [12, 3]);
        assert_eq!(Name::parse("_Z3Ulai"), None);
        assert_eq!(enclosing("A::f() const::{lambda()#1}::operator()() const::{lambda()#2}"), "A::f() const");
    }
}

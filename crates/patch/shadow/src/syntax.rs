//! The tree of a unit, and its types: which structures contain the one that has the new member.

use crate::mask::{self, Masked};
use std::collections::{HashMap, HashSet};
use tree_sitter::{Node, Parser, Tree};

/// A parsed unit.
pub(crate) struct Unit {
    pub(crate) text: Vec<u8>,
    pub(crate) masked: Masked,
    tree: Tree,
    /// Starts of files and lines: place in the text, file, line.
    markers: Vec<(usize, String, usize)>,
}

/// Identifier of a type: a tag, or the place of a structure without one.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Tag(String),
    Unnamed(usize),
}

/// A structure or union with its members.
pub(crate) struct Record<'t> {
    pub(crate) key: Key,
    pub(crate) node: Node<'t>,
    pub(crate) is_union: bool,
    /// Types of members that it holds by value.
    holds: Vec<Key>,
    /// True if it is declared by a type alone: an unnamed part of the structure around it.
    pub(crate) is_part: bool,
}

/// Types of a unit.
pub(crate) struct Types<'t> {
    typedefs: HashMap<String, Key>,
    pub(crate) records: Vec<Record<'t>>,
}

impl Unit {
    /// Parses a preprocessed text; `None` if the parser gives up.
    pub(crate) fn parse(text: Vec<u8>) -> Option<Unit> {
        let masked = mask::mask(&text);
        let mut parser = Parser::new();
        parser.set_language(&tree_sitter_c::LANGUAGE.into()).ok()?;
        let tree = parser.parse(&masked.text, None)?;
        let markers = markers(&text);
        Some(Unit { text, masked, tree, markers })
    }

    pub(crate) fn root(&self) -> Node<'_> {
        self.tree.root_node()
    }

    pub(crate) fn slice(&self, node: Node<'_>) -> &str {
        std::str::from_utf8(&self.masked.text[node.byte_range()]).unwrap_or("")
    }

    /// Returns the nodes of the tree, outer ones first, in the order of the text.
    pub(crate) fn nodes(&self) -> Nodes<'_> {
        Nodes { open: vec![self.root()] }
    }

    /// Returns file and line of a place.
    pub(crate) fn file_line(&self, at: usize) -> (&str, usize) {
        let index = self.markers.partition_point(|(start, ..)| *start <= at);
        let Some((start, file, line)) = index.checked_sub(1).and_then(|index| self.markers.get(index)) else {
            return ("", 1);
        };
        (file, line + self.text[*start..at].iter().filter(|b| **b == b'\n').count())
    }

    /// Returns `FILE:LINE` for messages.
    pub(crate) fn place(&self, at: usize) -> String {
        let (file, line) = self.file_line(at);
        format!("{file}:{line}")
    }

    /// Returns a line marker that continues the text at a place.
    pub(crate) fn marker(&self, at: usize) -> String {
        let (file, line) = self.file_line(at);
        format!("\n# {line} \"{file}\"\n")
    }

    pub(crate) fn is_type_of(&self, node: Node<'_>) -> bool {
        self.masked.types_of.contains(&node.start_byte())
    }
}

/// Iterator over a tree; recursion would let a deep text overflow the stack.
pub(crate) struct Nodes<'t> {
    open: Vec<Node<'t>>,
}

impl<'t> Iterator for Nodes<'t> {
    type Item = Node<'t>;

    fn next(&mut self) -> Option<Node<'t>> {
        let node = self.open.pop()?;
        let at = self.open.len();
        let mut cursor = node.walk();
        self.open.extend(node.children(&mut cursor));
        self.open[at..].reverse();
        Some(node)
    }
}

fn markers(text: &[u8]) -> Vec<(usize, String, usize)> {
    let (mut found, mut at) = (Vec::new(), 0);
    for line in text.split_inclusive(|b| *b == b'\n') {
        at += line.len();
        let Some(rest) = line.strip_prefix(b"# ") else { continue };
        let rest = String::from_utf8_lossy(rest);
        let Some((number, name)) = rest.split_once(" \"") else { continue };
        let (Ok(number), Some((name, _))) = (number.trim().parse(), name.rsplit_once('"')) else { continue };
        found.push((at, name.to_owned(), number));
    }
    found
}

impl<'t> Types<'t> {
    pub(crate) fn of(unit: &'t Unit) -> Self {
        let mut types = Types { typedefs: HashMap::new(), records: Vec::new() };
        for node in unit.nodes() {
            match node.kind() {
                "struct_specifier" | "union_specifier" => {
                    if let Some(body) = node.child_by_field_name("body") {
                        let holds = Vec::new();
                        let is_union = node.kind() == "union_specifier";
                        let is_part = node.parent().is_some_and(|parent| {
                            parent.kind() == "field_declaration" && parent.child_by_field_name("declarator").is_none()
                        });
                        let key = types.key(unit, node).unwrap_or(Key::Unnamed(node.start_byte()));
                        types.records.push(Record { key, node: body, is_union, holds, is_part });
                    }
                }
                "type_definition" => types.define(unit, node),
                _ => {}
            }
        }
        for index in 0..types.records.len() {
            types.records[index].holds = types.held(unit, types.records[index].node);
        }
        types
    }

    fn define(&mut self, unit: &Unit, node: Node<'_>) {
        let Some(key) = node.child_by_field_name("type").and_then(|node| self.key(unit, node)) else { return };
        let mut cursor = node.walk();
        for declarator in node.children_by_field_name("declarator", &mut cursor) {
            if let Some(name) = by_value(declarator).filter(|name| name.kind() == "type_identifier") {
                self.typedefs.insert(unit.slice(name).to_owned(), key.clone());
            }
        }
    }

    fn held(&self, unit: &Unit, body: Node<'_>) -> Vec<Key> {
        let mut cursor = body.walk();
        let fields = body.named_children(&mut cursor).filter(|child| child.kind() == "field_declaration");
        let is_held = |field: &Node<'_>| {
            let mut cursor = field.walk();
            let mut declarators = field.children_by_field_name("declarator", &mut cursor).peekable();
            declarators.peek().is_none() || declarators.any(|declarator| by_value(declarator).is_some())
        };
        let keys = fields.filter(is_held).filter_map(|field| self.key(unit, field.child_by_field_name("type")?));
        keys.collect()
    }

    /// Returns the structure that a type names.
    pub(crate) fn key(&self, unit: &Unit, node: Node<'_>) -> Option<Key> {
        match node.kind() {
            "struct_specifier" | "union_specifier" => Some(match node.child_by_field_name("name") {
                Some(name) => Key::Tag(unit.slice(name).to_owned()),
                None => Key::Unnamed(node.start_byte()),
            }),
            "type_identifier" => self.typedefs.get(unit.slice(node)).cloned(),
            _ => None,
        }
    }

    /// Returns the structure with a tag or typedef.
    pub(crate) fn named(&self, name: &str) -> Vec<Key> {
        let tag = Key::Tag(name.to_owned());
        self.typedefs.get(name).cloned().into_iter().chain([tag]).collect()
    }

    /// Returns the structures that contain one by value, itself included.
    pub(crate) fn containers(&self, of: &Key) -> HashSet<Key> {
        let mut found = HashSet::from([of.clone()]);
        loop {
            let more =
                self.records.iter().filter(|r| !found.contains(&r.key) && r.holds.iter().any(|k| found.contains(k)));
            let more: Vec<Key> = more.map(|record| record.key.clone()).collect();
            if more.is_empty() {
                return found;
            }
            found.extend(more);
        }
    }

    /// Returns the text that names a type in C, and the end of its definition.
    pub(crate) fn spelling(&self, key: &Key) -> Option<String> {
        match key {
            Key::Tag(name) => Some(format!("struct {name}")),
            Key::Unnamed(_) => {
                let names = self.typedefs.iter().filter(|(_, of)| *of == key).map(|(name, _)| name);
                names.min().cloned()
            }
        }
    }
}

/// Returns the name of a declarator that declares an object or an array of them, not a pointer or a function.
pub(crate) fn by_value(mut declarator: Node<'_>) -> Option<Node<'_>> {
    loop {
        declarator = match declarator.kind() {
            "identifier" | "field_identifier" | "type_identifier" => return Some(declarator),
            "array_declarator" | "init_declarator" => declarator.child_by_field_name("declarator")?,
            "parenthesized_declarator" | "attributed_declarator" => declarator.named_child(0)?,
            _ => return None,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_are_found_through_typedefs() {
        let text = "typedef struct { int a; } inner;\nstruct mid { inner i[3]; };\ntypedef struct mid mid_t;\n\
                    struct out { struct { mid_t m; }; };\nstruct other { mid_t *m; inner (*f)(void); };\n";
        let unit = Unit::parse(text.into()).unwrap();
        let types = Types::of(&unit);
        let inner = types.named("inner").remove(0);
        assert_eq!(types.spelling(&inner).unwrap(), "inner");
        let found = types.containers(&inner);
        for (name, is_in) in [("mid", true), ("out", true), ("other", false)] {
            assert_eq!(found.contains(&Key::Tag(name.into())), is_in, "{name}");
        }
        assert_eq!(found.len(), 4, "with the part of `out`");
    }
}

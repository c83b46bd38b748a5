//! Declarations of objects of the structure: how long they live, and their initial values.

use crate::definition::refusal;
use crate::error::{Kind, Refusal};
use crate::member::ShadowMember;
use crate::rewrite::Origin;
use crate::syntax::{Key, Types, Unit, by_value};
use std::collections::HashSet;
use tree_sitter::Node;

/// Declarations of a unit that concern the structure.
#[derive(Default)]
pub(crate) struct Objects<'t> {
    pub(crate) origins: Vec<Origin>,
    pub(crate) refusals: Vec<Refusal>,
    /// Local objects whose type the compiler derives.
    pub(crate) derived: Vec<Derived<'t>>,
}

/// Declaration of a local object whose type the compiler derives, and its name.
pub(crate) struct Derived<'t> {
    pub(crate) declaration: Node<'t>,
    pub(crate) name: Node<'t>,
}

/// Search for declarations of objects.
pub(crate) struct Search<'u, 's> {
    pub(crate) unit: &'u Unit,
    pub(crate) types: &'s Types<'u>,
    pub(crate) member: &'s ShadowMember,
    /// The structure, and those that contain it.
    pub(crate) containers: &'s HashSet<Key>,
}

impl<'u> Search<'u, '_> {
    pub(crate) fn run(&self) -> Objects<'u> {
        let mut objects = Objects::default();
        for node in self.unit.nodes() {
            match node.kind() {
                "declaration" => self.declaration(node, &mut objects),
                "function_definition" if self.is_ours(node) && is_function(node) => {
                    self.refuse(&mut objects, Kind::ByValue, node, "a function returns the structure by value");
                }
                "parameter_declaration" if self.is_ours(node) => self.parameter(node, &mut objects),
                "compound_literal_expression" => {
                    let ty = node.child_by_field_name("type").filter(|ty| self.is_ours(*ty));
                    if ty.is_some_and(|ty| {
                        ty.child_by_field_name("declarator").is_none_or(|d| d.kind().contains("array"))
                    }) {
                        self.refuse(&mut objects, Kind::Stack, node, "an unnamed local object");
                    }
                }
                _ => {}
            }
        }
        objects
    }

    /// Returns true if the type of a declaration is the structure or contains it.
    fn is_ours(&self, node: Node<'_>) -> bool {
        let key = node.child_by_field_name("type").and_then(|ty| self.types.key(self.unit, ty));
        key.is_some_and(|key| self.containers.contains(&key))
    }

    fn refuse(&self, objects: &mut Objects<'_>, kind: Kind, node: Node<'_>, why: &str) {
        objects.refusals.push(refusal(kind, self.unit, node.start_byte(), self.member, why));
    }

    fn parameter(&self, node: Node<'_>, objects: &mut Objects<'_>) {
        let declarator = node.child_by_field_name("declarator");
        if declarator.is_none_or(|declarator| declarator.kind() == "identifier") {
            self.refuse(objects, Kind::ByValue, node, "a function takes the structure by value");
        }
    }

    fn declaration(&self, node: Node<'u>, objects: &mut Objects<'u>) {
        let is_local = is_local(node);
        let is_derived = node.child_by_field_name("type").is_some_and(|ty| self.unit.is_type_of(ty));
        let is_ours = self.is_ours(node);
        if !(is_ours || is_derived && is_local) {
            return;
        }
        if is_ours && is_function(node) {
            return self.refuse(objects, Kind::ByValue, node, "a function returns the structure by value");
        }
        let storage = self.storage(node);
        let mut cursor = node.walk();
        for declarator in node.children_by_field_name("declarator", &mut cursor) {
            let Some(name) = by_value(declarator) else { continue };
            if !is_ours {
                objects.derived.push(Derived { declaration: node, name });
            } else if storage.contains(&"__thread") || storage.contains(&"_Thread_local") {
                self.refuse(objects, Kind::Stack, node, "an object of each thread");
            } else if is_local && !storage.contains(&"static") && !storage.contains(&"extern") {
                let why = format!("the local object `{}`", self.unit.slice(name));
                self.refuse(objects, Kind::Stack, node, &why);
            } else {
                if let Some(value) = declarator.child_by_field_name("value").filter(|value| !is_safe(self.unit, *value))
                {
                    self.refuse(objects, Kind::Initialiser, value, "a list of values initialises the structure");
                }
                if !storage.contains(&"extern") {
                    let what = format!("`{}`, for the time of the process", self.unit.slice(name));
                    objects.origins.push(Origin { place: self.unit.place(node.start_byte()), what });
                }
            }
        }
    }

    fn storage(&self, node: Node<'_>) -> Vec<&str> {
        let mut cursor = node.walk();
        let words = node.children(&mut cursor).filter(|child| child.kind() == "storage_class_specifier");
        words.map(|word| self.unit.slice(word)).collect()
    }
}

fn is_local(node: Node<'_>) -> bool {
    let mut around = node.parent();
    while let Some(parent) = around {
        if parent.kind() == "compound_statement" || parent.kind() == "function_definition" {
            return true;
        }
        around = parent.parent();
    }
    false
}

/// Returns true if a declaration declares a function, not a pointer to one, with this type as its result.
fn is_function(node: Node<'_>) -> bool {
    let mut cursor = node.walk();
    node.children_by_field_name("declarator", &mut cursor).any(|declarator| {
        declarator.kind() == "function_declarator"
            && declarator.child_by_field_name("declarator").is_some_and(|inner| inner.kind() == "identifier")
    })
}

/// Returns true if a list says nothing about members by their places: it is empty, zero, or names each member.
fn is_safe(unit: &Unit, value: Node<'_>) -> bool {
    if value.kind() != "initializer_list" {
        return true;
    }
    let mut cursor = value.walk();
    let elements: Vec<Node<'_>> = value.named_children(&mut cursor).filter(|node| node.kind() != "comment").collect();
    let is_zero = elements.len() == 1 && unit.slice(elements[0]) == "0";
    let is_named = |node: &Node<'_>| match node.kind() {
        "initializer_pair" => node.child_by_field_name("value").is_none_or(|value| is_safe(unit, value)),
        "initializer_list" => is_safe(unit, *node),
        _ => false,
    };
    is_zero || elements.iter().all(is_named)
}

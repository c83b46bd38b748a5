//! Uses that may concern the member or the memory of its structure. The parser finds all that have the form; the
//! compiler says which of them have the type.

use crate::definition::refusal;
use crate::error::{Kind, Refusal};
use crate::member::ShadowMember;
use crate::syntax::Unit;
use std::collections::BTreeSet;
use tree_sitter::Node;

/// Expression `object.member` or `object->member`.
pub(crate) struct Access<'t> {
    pub(crate) node: Node<'t>,
    pub(crate) object: Node<'t>,
    pub(crate) operator: Node<'t>,
}

/// Memory that a call makes, or clears.
#[derive(Clone, Copy)]
pub(crate) struct Call<'t> {
    pub(crate) node: Node<'t>,
    /// Arguments whose product is the size.
    pub(crate) size: (Node<'t>, Option<Node<'t>>),
}

/// Task of a `sizeof`.
pub(crate) enum Task<'t> {
    /// A call makes or clears objects.
    Makes(Call<'t>),
    /// It divides another size.
    Counts,
    /// A call of a function that is not known gets it.
    Calls(String),
    /// None of these.
    Unknown(Kind, String),
}

/// Expression `sizeof`, or `offsetof`, with which memory of structures with an open end is allocated.
pub(crate) struct Size<'t> {
    pub(crate) node: Node<'t>,
    /// Type or expression whose size it is.
    pub(crate) operand: String,
    pub(crate) task: Task<'t>,
    /// True if the size is exactly that of one object.
    pub(crate) is_one: bool,
}

/// Call of a function that writes or reads memory.
pub(crate) struct Memory<'t> {
    /// Argument that points to it.
    pub(crate) pointer: Node<'t>,
    pub(crate) call: Node<'t>,
    /// The call, if it clears the memory.
    pub(crate) clears: Option<Call<'t>>,
    /// Rule that it breaks otherwise.
    pub(crate) kind: Kind,
}

/// Uses in a unit.
#[derive(Default)]
pub(crate) struct Uses<'t> {
    pub(crate) accesses: Vec<Access<'t>>,
    pub(crate) sizes: Vec<Size<'t>>,
    pub(crate) memories: Vec<Memory<'t>>,
    /// Designators of the member in lists of initial values.
    pub(crate) designators: Vec<Node<'t>>,
    /// Accesses that were replaced: calls with the object.
    pub(crate) replaced: Vec<Node<'t>>,
}

/// Functions of C's library that copy or compare memory.
const COPIES: [&str; 9] = [
    "memcpy",
    "memmove",
    "mempcpy",
    "bcopy",
    "memccpy",
    "__builtin_memcpy",
    "__builtin_memmove",
    "bzero",
    "explicit_bzero",
];
const CLEARS: [&str; 2] = ["memset", "__builtin_memset"];
const RESIZES: [&str; 2] = ["realloc", "reallocarray"];
/// Functions that return new memory of one size, or of a number of objects and their size.
const ALLOCATES: [&str; 2] = ["malloc", "__builtin_malloc"];
const ALLOCATES_MANY: [&str; 2] = ["calloc", "__builtin_calloc"];

/// Finds the uses after a place, from which on the structure is complete.
pub(crate) fn find<'t>(unit: &'t Unit, member: &ShadowMember, allocators: &BTreeSet<String>, from: usize) -> Uses<'t> {
    let mut uses = Uses::default();
    let replaced = format!("{}_of", crate::definition::own_type(member));
    for node in unit.nodes().filter(|node| node.start_byte() >= from) {
        match node.kind() {
            "field_expression" => uses.accesses.extend(access(unit, member, node)),
            "field_designator" if unit.slice(node).trim_start_matches('.').trim() == member.member => {
                uses.designators.push(node);
            }
            "sizeof_expression" => {
                let operand = node.child_by_field_name("value").or_else(|| node.child_by_field_name("type"));
                if let Some(operand) = operand.map(|operand| bare(unit, operand)) {
                    let (task, is_one) = task(unit, allocators, node);
                    uses.sizes.push(Size { node, operand, task, is_one });
                }
            }
            "call_expression" if callee(unit, node) == "__builtin_offsetof" => {
                let (task, _) = task(unit, allocators, node);
                let is_memory = !matches!(task, Task::Counts | Task::Unknown(Kind::Size, _));
                if let Some(operand) = offset_type(unit, node).filter(|_| is_memory) {
                    uses.sizes.push(Size { node, operand, task, is_one: false });
                }
            }
            "call_expression" if callee(unit, node) == replaced => uses.replaced.push(node),
            "call_expression" => memories(unit, node, &mut uses.memories),
            _ => {}
        }
    }
    uses
}

fn access<'t>(unit: &Unit, member: &ShadowMember, node: Node<'t>) -> Option<Access<'t>> {
    let field = node.child_by_field_name("field")?;
    let (object, operator) = (node.child_by_field_name("argument")?, node.child_by_field_name("operator")?);
    (unit.slice(field) == member.member && !node.has_error()).then_some(Access { node, object, operator })
}

/// Returns the text of an operand without its parentheses: a type in parentheses is no expression.
fn bare(unit: &Unit, mut node: Node<'_>) -> String {
    while let Some(inner) = node.named_child(0).filter(|_| node.kind() == "parenthesized_expression") {
        node = inner;
    }
    String::from_utf8_lossy(&unit.text[node.byte_range()]).into_owned()
}

/// Returns the type of `offsetof`.
fn offset_type(unit: &Unit, call: Node<'_>) -> Option<String> {
    let list = call.child_by_field_name("arguments")?;
    let text = String::from_utf8_lossy(&unit.text[list.byte_range()]).into_owned();
    let (ty, _) = text.strip_prefix('(')?.split_once(',')?;
    Some(ty.trim().to_owned())
}

/// Returns the name of the function that a call calls, or of the variable that holds it.
fn callee<'u>(unit: &'u Unit, call: Node<'_>) -> &'u str {
    let function = call.child_by_field_name("function").map_or("", |function| unit.slice(function));
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    function.trim_end_matches([')', ' ']).rsplit(|c| !is_name(c)).next().unwrap_or("")
}

fn arguments(call: Node<'_>) -> Vec<Node<'_>> {
    let Some(list) = call.child_by_field_name("arguments") else { return Vec::new() };
    let mut cursor = list.walk();
    list.named_children(&mut cursor).filter(|child| child.kind() != "comment").collect()
}

fn memories<'t>(unit: &Unit, call: Node<'t>, found: &mut Vec<Memory<'t>>) {
    let (name, arguments) = (callee(unit, call), arguments(call));
    let is_clear = CLEARS.contains(&name);
    if !(is_clear || COPIES.contains(&name) || RESIZES.contains(&name)) {
        return;
    }
    let clears = clearing(unit, call).filter(|_| is_clear);
    let kind = if RESIZES.contains(&name) { Kind::Resize } else { Kind::Copy };
    let pointers = arguments.iter().take(if is_clear || RESIZES.contains(&name) { 1 } else { 2 });
    let is_pointer = |node: &&Node<'t>| node.kind() != "number_literal" && node.kind() != "string_literal";
    found.extend(pointers.filter(is_pointer).map(|&pointer| Memory { pointer, call, clears, kind }));
}

/// Returns the call of `memset` if it clears memory.
fn clearing<'t>(unit: &Unit, call: Node<'t>) -> Option<Call<'t>> {
    match arguments(call)[..] {
        [_, value, len] if matches!(unit.slice(value), "0" | "'\\0'" | "0x0" | "0x00") => {
            Some(Call { node: call, size: (len, None) })
        }
        _ => None,
    }
}

/// Finds the task of a `sizeof`, and whether the size is that of one object.
fn task<'t>(unit: &Unit, allocators: &BTreeSet<String>, node: Node<'t>) -> (Task<'t>, bool) {
    let (mut at, mut is_one) = (node, true);
    while let Some(parent) = at.parent() {
        match parent.kind() {
            "parenthesized_expression" | "cast_expression" => {}
            "binary_expression" => match parent.child_by_field_name("operator").map(|op| unit.slice(op)) {
                Some("*" | "+") => is_one = false,
                Some("/") if is_division(parent) => return (Task::Counts, false),
                _ => break,
            },
            // what an earlier rewriting put there
            "assignment_expression" if unit.slice(parent).starts_with("__stillpoint_") => {}
            "argument_list" => {
                let call = parent.parent().filter(|call| call.kind() == "call_expression");
                return call.map_or((unknown(), false), |call| of_call(unit, allocators, call, at, is_one));
            }
            _ => break,
        }
        at = parent;
    }
    (unknown(), false)
}

fn unknown<'t>() -> Task<'t> {
    Task::Unknown(Kind::Size, "the size of the structure is used, and not by a call that allocates or clears it".into())
}

/// Returns true if both sides are sizes: the number of elements of an array.
fn is_division(node: Node<'_>) -> bool {
    ["left", "right"].iter().all(|side| {
        let mut operand = node.child_by_field_name(side);
        while let Some(inner) = operand.filter(|inner| inner.kind() == "parenthesized_expression") {
            operand = inner.named_child(0);
        }
        operand.is_some_and(|operand| operand.kind() == "sizeof_expression")
    })
}

fn of_call<'t>(
    unit: &Unit,
    allocators: &BTreeSet<String>,
    call: Node<'t>,
    size: Node<'t>,
    is_one: bool,
) -> (Task<'t>, bool) {
    let (name, all) = (callee(unit, call), arguments(call));
    let refused = |kind, why: String| (Task::Unknown(kind, why), false);
    let others: Vec<Node<'t>> = all.iter().copied().filter(|argument| *argument != size).collect();
    if CLEARS.contains(&name) {
        return match clearing(unit, call) {
            Some(clears) if clears.size.0 == size => (Task::Makes(clears), is_one),
            _ => refused(Kind::Copy, format!("`{name}` writes over the structure")),
        };
    }
    if COPIES.contains(&name) {
        return refused(Kind::Copy, format!("`{name}` copies or clears the structure"));
    }
    if RESIZES.contains(&name) {
        return refused(Kind::Resize, format!("`{name}` moves the structure"));
    }
    let many = others.first().copied().filter(|_| ALLOCATES_MANY.contains(&name) && others.len() == 1);
    if many.is_some() {
        let is_one = is_one && many.is_some_and(|number| unit.slice(number) == "1");
        return (Task::Makes(Call { node: call, size: (size, many) }), is_one);
    }
    if !(ALLOCATES.contains(&name) || allocators.contains(name)) {
        return (Task::Calls(name.to_owned()), false);
    }
    match others.iter().find(|other| other.kind() == "number_literal" && unit.slice(**other) != "1") {
        Some(number) => refused(Kind::Size, format!("`{name}` gets a size and the number {}", unit.slice(*number))),
        None => (Task::Makes(Call { node: call, size: (size, None) }), is_one),
    }
}

/// Refuses an access that is no read or write of the member.
pub(crate) fn check(unit: &Unit, member: &ShadowMember, access: &Access<'_>, is_array: bool) -> Result<(), Refusal> {
    let (mut at, mut is_element, mut is_part) = (access.node, false, false);
    let refused = |why: &str| Err(refusal(Kind::Address, unit, access.node.start_byte(), member, why));
    while let Some(parent) = at.parent() {
        match parent.kind() {
            "parenthesized_expression" => {}
            "subscript_expression" if is_array && !is_element && is_first(parent, at) => is_element = true,
            "field_expression" if is_first(parent, at) && operator(unit, parent) == "." => is_part = true,
            _ => break,
        }
        at = parent;
    }
    let parent = at.parent();
    let is_addressed = parent.is_some_and(|p| p.kind() == "pointer_expression" && operator(unit, p) == "&");
    if is_addressed {
        let call =
            parent.and_then(|address| address.parent()?.parent()).filter(|call| call.kind() == "call_expression");
        let name = call.map_or("", |call| callee(unit, call));
        // operations of the compiler, which use the address at once
        return match name.starts_with("__atomic_") || name.starts_with("__sync_") {
            true => Ok(()),
            false => refused("its address is taken"),
        };
    }
    let is_measured = parent.is_some_and(|p| p.kind() == "sizeof_expression");
    if is_array && !is_element && !is_measured {
        return refused("it is an array whose address is taken");
    }
    if is_part && !is_measured {
        return refused("a part of it is used, whose address may be taken");
    }
    Ok(())
}

fn is_first(parent: Node<'_>, child: Node<'_>) -> bool {
    parent.child_by_field_name("argument") == Some(child)
}

fn operator<'u>(unit: &'u Unit, node: Node<'_>) -> &'u str {
    node.child_by_field_name("operator").map_or("", |operator| unit.slice(operator))
}

/// Finds functions that the unit declares as allocators.
pub(crate) fn declared_allocators(unit: &Unit) -> BTreeSet<String> {
    let tokens = crate::mask::tokens(&unit.text);
    let mut found = BTreeSet::new();
    for (at, token) in tokens.iter().enumerate() {
        if !matches!(token.text, b"__alloc_size__" | b"alloc_size") || tokens.get(at + 2).is_none() {
            continue;
        }
        // with a number and a size, the range is not known
        if tokens.get(at + 3).is_none_or(|after| after.text != b")") {
            continue;
        }
        let root = unit.root().descendant_for_byte_range(token.start, token.start);
        let declaration = root.and_then(|node| {
            let mut node = node;
            while !matches!(node.kind(), "declaration" | "function_definition") {
                node = node.parent()?;
            }
            Some(node)
        });
        let mut declarator = declaration.and_then(|declaration| declaration.child_by_field_name("declarator"));
        while let Some(inner) = declarator.filter(|inner| inner.kind() != "identifier") {
            declarator = inner.child_by_field_name("declarator");
        }
        found.extend(declarator.map(|name| unit.slice(name).to_owned()));
    }
    found
}

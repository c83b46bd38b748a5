//! The structure that gains the member: removal of the member, and the type and function that replace it.

use crate::error::{Kind, Refusal};
use crate::member::ShadowMember;
use crate::syntax::{Key, Types, Unit};
use tree_sitter::Node;

/// The structure in a unit.
pub(crate) struct Definition<'t> {
    pub(crate) key: Key,
    /// Text that names it in C.
    pub(crate) spelling: String,
    pub(crate) body: Node<'t>,
}

/// The member in its structure.
struct Field {
    /// Bytes to remove.
    removed: (usize, usize),
    /// Text that declares the member in another structure.
    declaration: String,
    is_array: bool,
}

/// Unit without the member.
pub(crate) struct Moved {
    pub(crate) text: Vec<u8>,
    pub(crate) is_array: bool,
}

/// Finds the structure.
pub(crate) fn find<'t>(types: &Types<'t>, member: &ShadowMember) -> Option<Definition<'t>> {
    let keys = types.named(&member.type_name);
    let record = types.records.iter().find(|record| keys.contains(&record.key))?;
    let spelling = match types.spelling(&record.key) {
        Some(spelling) if !record.is_union => spelling,
        _ => format!("union {}", member.type_name),
    };
    Some(Definition { key: record.key.clone(), spelling, body: record.node })
}

/// Returns the end of the item of the file that contains a node; `None` inside of a function.
pub(crate) fn item_end(node: Node<'_>) -> Option<usize> {
    let mut item = node;
    while let Some(parent) = item.parent() {
        match parent.kind() {
            "translation_unit" => {
                let last = item.next_sibling().filter(|next| next.kind() == ";").unwrap_or(item);
                return Some(last.end_byte());
            }
            "compound_statement" => return None,
            _ => item = parent,
        }
    }
    None
}

/// Takes the member out of its structure; `None` if the structure does not have it.
pub(crate) fn take_out(
    unit: &Unit,
    definition: &Definition<'_>,
    member: &ShadowMember,
) -> Result<Option<Moved>, Refusal> {
    let Some(field) = field(unit, definition.body, member)? else { return Ok(None) };
    let at = definition.body.start_byte();
    if definition.spelling.starts_with("union ") {
        return Err(refusal(Kind::Union, unit, at, member, "the type is a union"));
    }
    let Some(item_end) = item_end(definition.body) else {
        return Err(refusal(Kind::Type, unit, at, member, "the structure is defined inside of a function"));
    };
    let (start, end) = field.removed;
    let mut text = unit.text[..start].to_vec();
    text.extend(unit.text[start..end].iter().map(|b| if *b == b'\n' { b'\n' } else { b' ' }));
    text.extend_from_slice(&unit.text[end..item_end]);
    text.extend_from_slice(accessor(member, &definition.spelling, &field).as_bytes());
    text.extend_from_slice(unit.marker(item_end).as_bytes());
    text.extend_from_slice(&unit.text[item_end..]);
    Ok(Some(Moved { text, is_array: field.is_array }))
}

fn field(unit: &Unit, body: Node<'_>, member: &ShadowMember) -> Result<Option<Field>, Refusal> {
    let mut cursor = body.walk();
    for field in body.named_children(&mut cursor).filter(|child| child.kind() == "field_declaration") {
        let mut cursor = field.walk();
        let declarators: Vec<Node<'_>> = field.children_by_field_name("declarator", &mut cursor).collect();
        let Some(own) = declarators.iter().find(|d| name_of(unit, **d) == Some(&member.member)) else { continue };
        if declarators.len() > 1 {
            let why = "its declaration declares other members too: declare it alone";
            return Err(refusal(Kind::Type, unit, field.start_byte(), member, why));
        }
        if field.has_error() {
            return Err(refusal(Kind::Unseen, unit, field.start_byte(), member, "its declaration was not understood"));
        }
        let is_array = own.kind() == "array_declarator";
        if is_array && own.child_by_field_name("declarator").is_some_and(|inner| inner.kind() == "array_declarator") {
            return Err(refusal(Kind::Type, unit, field.start_byte(), member, "it is an array of arrays"));
        }
        let removed = (field.start_byte(), field.end_byte());
        let declaration = String::from_utf8_lossy(&unit.text[removed.0..removed.1]).into_owned();
        return Ok(Some(Field { removed, declaration, is_array }));
    }
    Ok(None)
}

/// Returns the name that a declarator declares.
fn name_of<'u>(unit: &'u Unit, mut declarator: Node<'_>) -> Option<&'u str> {
    loop {
        if declarator.kind() == "field_identifier" {
            return Some(unit.slice(declarator));
        }
        declarator = declarator
            .child_by_field_name("declarator")
            .or_else(|| declarator.named_child(0).filter(|_| declarator.kind() == "parenthesized_declarator"))?;
    }
}

/// Returns a name for the member's own type.
pub(crate) fn own_type(member: &ShadowMember) -> String {
    format!("__stillpoint_shadow_{}", member.id())
}

/// Returns the expression of an initial value.
pub(crate) fn initial(member: &ShadowMember) -> String {
    let own = own_type(member);
    match member.value.as_str() {
        "" => format!("&(struct {own}){{ 0 }}"),
        value => format!("&(struct {own}){{ .{} = ({value}) }}", member.member),
    }
}

fn accessor(member: &ShadowMember, of: &str, field: &Field) -> String {
    let (own, id, declaration, name) = (own_type(member), member.id(), &field.declaration, &member.member);
    // arrays, also those behind a typedef, cannot be assigned
    let assigned = if field.is_array { String::new() } else { format!("value->{name} = value->{name};") };
    format!(
        "\n# 1 \"{DEFINITION}\"\n\
         struct {own} {{ {declaration} }};\n\
         extern void *__stillpoint_member(unsigned long, unsigned long, unsigned long, void *);\n\
         extern void __stillpoint_member_clear(unsigned long, unsigned long, unsigned long);\n\
         _Static_assert(sizeof(struct {own}) <= 48, \"the member has more than 48 bytes\");\n\
         _Static_assert(_Alignof(struct {own}) <= 16, \"the member is aligned to more than 16 bytes\");\n\
         _Static_assert(_Alignof({of}) >= 8, \"the structure is aligned to less than 8 bytes\");\n\
         static __inline__ __attribute__((__unused__)) void {own}_is_value(struct {own} *value)\
         {{ (void)value; {assigned} }}\n\
         static __inline__ __attribute__((__always_inline__, __unused__)) struct {own} *\
         {own}_of(const volatile {of} *object, struct {own} *value)\n\
         {{ return (struct {own} *)__stillpoint_member((unsigned long)object, {id}ul, sizeof(struct {own}), value); }}\n"
    )
}

/// Name of the file for messages of the compiler about what is inserted.
pub(crate) const DEFINITION: &str = "stillpoint/definition";

pub(crate) fn refusal(kind: Kind, unit: &Unit, at: usize, member: &ShadowMember, why: &str) -> Refusal {
    Refusal { kind, member: member.to_string(), place: unit.place(at), why: why.to_owned(), allocator: None }
}

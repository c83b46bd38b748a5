//! Reasons why a member cannot be moved into shadow variables.

/// Reason why a member stays refused, and its place. [`Refusal::code`] names the rule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}{}: {why}", .member, at(.place))]
pub struct Refusal {
    /// The rule.
    pub kind: Kind,
    /// `TYPE.MEMBER`.
    pub member: String,
    /// `FILE:LINE`, or empty.
    pub place: String,
    /// The fault.
    pub why: String,
    /// Function that would have to return new memory.
    pub allocator: Option<String>,
}

fn at(place: &str) -> String {
    if place.is_empty() { String::new() } else { format!(" at {place}") }
}

/// Rule that a use of the structure or of the member breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The type has no such member, or it is no structure of the file's scope.
    Type,
    /// The type is part of a union.
    Union,
    /// An object of the type lives on a stack, or in a thread-local.
    Stack,
    /// The structure is passed or returned by value.
    ByValue,
    /// The whole structure is assigned.
    Assignment,
    /// The memory of the structure is copied.
    Copy,
    /// The memory of the structure is resized.
    Resize,
    /// The size of the structure is used where it is not known for what.
    Size,
    /// A list initialises the structure.
    Initialiser,
    /// The address of the member is taken.
    Address,
    /// The initial value cannot be given.
    Value,
    /// The compiler or the parser sees the member where it cannot be replaced.
    Unseen,
    /// Nothing makes objects of the type.
    Origin,
}

impl Refusal {
    /// Returns the name of the rule, stable and in kebab-case.
    pub fn code(&self) -> &'static str {
        match self.kind {
            Kind::Type => "shadow-type",
            Kind::Union => "shadow-union",
            Kind::Stack => "shadow-stack-object",
            Kind::ByValue => "shadow-by-value",
            Kind::Assignment => "shadow-assignment",
            Kind::Copy => "shadow-copy",
            Kind::Resize => "shadow-resize",
            Kind::Size => "shadow-size",
            Kind::Initialiser => "shadow-initialiser",
            Kind::Address => "shadow-address",
            Kind::Value => "shadow-value",
            Kind::Unseen => "shadow-unseen",
            Kind::Origin => "shadow-origin",
        }
    }
}

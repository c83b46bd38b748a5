//! The structure of a type without its qualifiers and typedefs, and its notation.

use super::dwarf::{DebugInfoError, Die, NESTING_MAX, Side, is_aggregate};
use gimli::{AttributeValue, constants as dw};

/// A type without qualifiers and typedefs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Shape {
    Void,
    Base {
        encoding: u8,
        size: u64,
    },
    Pointer {
        tag: u16,
        to: Option<Die>,
    },
    /// A pointer to a member of a class.
    Member {
        class: Option<Die>,
        to: Option<Die>,
    },
    Aggregate {
        union: bool,
        die: Die,
        name: Option<String>,
    },
    Enumeration {
        die: Die,
        name: Option<String>,
    },
    Array {
        element: Option<Die>,
        counts: Vec<Count>,
    },
    Function {
        die: Die,
    },
    Other {
        tag: u16,
        name: String,
        size: u64,
    },
}

/// Elements of one dimension of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Count {
    Fixed(u64),
    /// A flexible or incomplete array.
    Open,
    /// Known at run time only.
    Variable,
}

/// A member of a structure or union; members of anonymous members count as members of the outer one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Member {
    pub(super) name: String,
    pub(super) place: Place,
    pub(super) bits: Option<u64>,
    pub(super) ty: Option<Die>,
}

/// Place of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Place {
    /// Bits from the start.
    Bit(u64),
    /// Result of a DWARF expression (virtual bases).
    Computed(Vec<u8>),
}

impl Place {
    fn shifted(self, by: &Place) -> Place {
        match (self, by) {
            (Place::Bit(at), Place::Bit(by)) => Place::Bit(at + by),
            (Place::Computed(bytes), _) => Place::Computed(bytes),
            (Place::Bit(_), Place::Computed(bytes)) => Place::Computed(bytes.clone()),
        }
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Place::Bit(at) if at % 8 == 0 => write!(f, "{:#x}", at / 8),
            Place::Bit(at) => write!(f, "{:#x} bit {}", at / 8, at % 8),
            Place::Computed(_) => f.write_str("(computed)"),
        }
    }
}

impl Side<'_> {
    /// Returns the type without typedefs and qualifiers. An anonymous structure gets the name of its innermost typedef.
    pub(super) fn shape(&self, ty: Option<Die>) -> Result<Shape, DebugInfoError> {
        let (mut at, mut alias) = (ty, None);
        for _ in 0..NESTING_MAX {
            let Some(die) = at else { return Ok(Shape::Void) };
            let entry = self.entry(die)?;
            match entry.tag() {
                dw::DW_TAG_typedef => alias = self.full_name(die)?,
                dw::DW_TAG_const_type
                | dw::DW_TAG_volatile_type
                | dw::DW_TAG_restrict_type
                | dw::DW_TAG_atomic_type
                | dw::DW_TAG_immutable_type
                | dw::DW_TAG_packed_type => {}
                _ => return self.shape_of(die, alias),
            }
            at = self.reference(&entry, dw::DW_AT_type, die.unit())?;
        }
        Err(DebugInfoError::Nesting)
    }

    fn shape_of(&self, die: Die, alias: Option<String>) -> Result<Shape, DebugInfoError> {
        let entry = self.entry(die)?;
        let size = number(entry.attr_value(dw::DW_AT_byte_size)).unwrap_or(0);
        let name = if entry.has_attr(dw::DW_AT_name) { self.full_name(die)? } else { None };
        let element = || self.reference(&entry, dw::DW_AT_type, die.unit());
        let tag = entry.tag();
        Ok(match tag {
            dw::DW_TAG_base_type => {
                let encoding = match entry.attr_value(dw::DW_AT_encoding) {
                    Some(AttributeValue::Encoding(encoding)) => encoding.0,
                    _ => 0,
                };
                Shape::Base { encoding, size }
            }
            dw::DW_TAG_pointer_type | dw::DW_TAG_reference_type | dw::DW_TAG_rvalue_reference_type => {
                Shape::Pointer { tag: tag.0, to: element()? }
            }
            tag if is_aggregate(tag) => {
                let name = name.or(alias);
                Shape::Aggregate { union: tag == dw::DW_TAG_union_type, die, name }
            }
            dw::DW_TAG_enumeration_type => Shape::Enumeration { die, name: name.or(alias) },
            dw::DW_TAG_array_type => Shape::Array { element: element()?, counts: self.counts(die)? },
            dw::DW_TAG_subroutine_type | dw::DW_TAG_subprogram => Shape::Function { die },
            dw::DW_TAG_ptr_to_member_type => {
                let class = self.reference(&entry, dw::DW_AT_containing_type, die.unit())?;
                Shape::Member { class, to: element()? }
            }
            tag => Shape::Other { tag: tag.0, name: name.unwrap_or_default(), size },
        })
    }

    fn counts(&self, array: Die) -> Result<Vec<Count>, DebugInfoError> {
        let mut counts = Vec::new();
        self.below(array, false, |_, entry| {
            if entry.tag() != dw::DW_TAG_subrange_type {
                return Ok(());
            }
            let (count, last) = (entry.attr_value(dw::DW_AT_count), entry.attr_value(dw::DW_AT_upper_bound));
            let known = count.is_some() || last.is_some();
            counts.push(match (number(count), number(last)) {
                (Some(count), _) => Count::Fixed(count),
                (None, Some(last)) => Count::Fixed(last.wrapping_add(1)),
                (None, None) if known => Count::Variable,
                (None, None) => Count::Open,
            });
            Ok(())
        })?;
        Ok(counts)
    }

    /// Returns the size, the alignment if stated, and true if the type is complete.
    pub(super) fn extent(&self, die: Die) -> Result<(u64, Option<u64>, bool), DebugInfoError> {
        let entry = self.entry(die)?;
        let size = number(entry.attr_value(dw::DW_AT_byte_size)).unwrap_or(0);
        Ok((size, number(entry.attr_value(dw::DW_AT_alignment)), !entry.has_attr(dw::DW_AT_declaration)))
    }

    /// Returns the members in the order of the source, those of anonymous structures and unions inlined.
    pub(super) fn members(&self, aggregate: Die) -> Result<Vec<Member>, DebugInfoError> {
        let mut members = Vec::new();
        self.gather(aggregate, "", &Place::Bit(0), 0, &mut members)?;
        Ok(members)
    }

    fn gather(
        &self,
        aggregate: Die,
        prefix: &str,
        base: &Place,
        depth: usize,
        members: &mut Vec<Member>,
    ) -> Result<(), DebugInfoError> {
        if depth > NESTING_MAX {
            return Err(DebugInfoError::Nesting);
        }
        self.below(aggregate, false, |die, entry| {
            let inherits = entry.tag() == dw::DW_TAG_inheritance;
            let is_static = entry.has_attr(dw::DW_AT_external) || entry.has_attr(dw::DW_AT_declaration);
            if !(inherits || entry.tag() == dw::DW_TAG_member) || is_static {
                return Ok(());
            }
            let ty = self.type_of(die)?;
            let bits = number(entry.attr_value(dw::DW_AT_bit_size));
            let place = self.place(entry, bits, ty)?.shifted(base);
            let name = match self.string(entry, dw::DW_AT_name, die.unit())? {
                Some(name) => format!("{prefix}{name}"),
                None if inherits => format!("{prefix}(base {})", self.describe(ty)?),
                None => prefix.to_owned(),
            };
            match self.shape(ty)? {
                Shape::Aggregate { die: inner, name: None, .. } => {
                    let inner_prefix = if name == prefix { name } else { name + "." };
                    self.gather(inner, &inner_prefix, &place, depth + 1, members)
                }
                _ => {
                    members.push(Member { name, place, bits, ty });
                    Ok(())
                }
            }
        })
    }

    fn place(
        &self,
        entry: &super::dwarf::Entry<'_>,
        bits: Option<u64>,
        ty: Option<Die>,
    ) -> Result<Place, DebugInfoError> {
        if let Some(at) = number(entry.attr_value(dw::DW_AT_data_bit_offset)) {
            return Ok(Place::Bit(at));
        }
        let byte = match entry.attr_value(dw::DW_AT_data_member_location) {
            Some(AttributeValue::Exprloc(expression)) => match plus_constant(expression.0.slice()) {
                Some(at) => at,
                None => return Ok(Place::Computed(expression.0.slice().to_vec())),
            },
            value => number(value).unwrap_or(0),
        };
        // Before DWARF 4 bits count from the most significant one of the storage unit.
        let from_top = number(entry.attr_value(dw::DW_AT_bit_offset));
        let at = match (from_top, bits) {
            (Some(from_top), Some(bits)) => {
                let storage = match number(entry.attr_value(dw::DW_AT_byte_size)) {
                    Some(size) => size,
                    None => self.size(ty)?,
                };
                (byte * 8 + storage * 8).wrapping_sub(from_top).wrapping_sub(bits)
            }
            _ => byte * 8,
        };
        Ok(Place::Bit(at))
    }

    /// Returns the size of a type without arrays.
    fn size(&self, ty: Option<Die>) -> Result<u64, DebugInfoError> {
        Ok(match self.shape(ty)? {
            Shape::Base { size, .. } | Shape::Other { size, .. } => size,
            Shape::Aggregate { die, .. } | Shape::Enumeration { die, .. } => self.extent(die)?.0,
            Shape::Pointer { .. } => 8,
            Shape::Member { .. } => 16,
            _ => 0,
        })
    }

    /// Returns names and values of an enumeration.
    pub(super) fn enumerators(&self, enumeration: Die) -> Result<Vec<(String, i128)>, DebugInfoError> {
        let mut all = Vec::new();
        self.below(enumeration, false, |die, entry| {
            if entry.tag() != dw::DW_TAG_enumerator {
                return Ok(());
            }
            let value = entry.attr_value(dw::DW_AT_const_value);
            let value = value.and_then(|v| v.udata_value().map(i128::from).or_else(|| v.sdata_value().map(i128::from)));
            let name = self.string(entry, dw::DW_AT_name, die.unit())?.unwrap_or_default();
            all.push((name.to_owned(), value.unwrap_or(0)));
            Ok(())
        })?;
        Ok(all)
    }

    /// Returns the slots of a class's table of virtual functions that the class itself fills.
    pub(super) fn virtual_functions(&self, class: Die) -> Result<Vec<(String, Vec<u8>)>, DebugInfoError> {
        let mut all = Vec::new();
        self.below(class, false, |die, entry| {
            if let Some(AttributeValue::Exprloc(slot)) = entry.attr_value(dw::DW_AT_vtable_elem_location) {
                let name = match self.string(entry, dw::DW_AT_linkage_name, die.unit())? {
                    Some(name) => Some(name),
                    None => self.name_of(entry, die.unit())?,
                };
                all.push((name.unwrap_or_default().to_owned(), slot.0.slice().to_vec()));
            }
            Ok(())
        })?;
        Ok(all)
    }

    /// Returns the type of each parameter of a function, and true if more may follow.
    pub(super) fn parameters(&self, function: Die) -> Result<(Vec<Option<Die>>, bool), DebugInfoError> {
        let (mut types, mut open) = (Vec::new(), false);
        self.below(function, false, |die, entry| {
            match entry.tag() {
                dw::DW_TAG_formal_parameter => types.push(self.type_of(die)?),
                dw::DW_TAG_unspecified_parameters => open = true,
                _ => {}
            }
            Ok(())
        })?;
        Ok((types, open))
    }

    /// Returns true for a function that is declared without its parameters, as C allows: `int f()`.
    pub(super) fn has_no_prototype(&self, function: Die) -> Result<bool, DebugInfoError> {
        let is_stated = self.entry(function)?.has_attr(dw::DW_AT_prototyped);
        let (types, open) = self.parameters(function)?;
        Ok(types.is_empty() && open && !is_stated && !self.is_cxx(function.unit()))
    }

    /// Returns true if callers that know a function without its parameters call it as others do: C promotes each small argument.
    pub(super) fn is_called_without_prototype(&self, function: Die) -> Result<bool, DebugInfoError> {
        /// Encodings of numbers that become `double`, if they are smaller.
        const FLOATS: [u8; 2] = [dw::DW_ATE_float.0, dw::DW_ATE_complex_float.0];
        let (types, open) = self.parameters(function)?;
        let mut is_small = false;
        for ty in types {
            is_small |= match self.shape(ty)? {
                Shape::Base { encoding, size } if FLOATS.contains(&encoding) => size < 8,
                Shape::Base { size, .. } => size < 4,
                Shape::Enumeration { die, .. } => self.extent(die)?.0 < 4,
                _ => false,
            };
        }
        Ok(!open && !is_small && !self.is_cxx(function.unit()))
    }

    /// Returns true if no code writes to a variable of this type.
    pub(super) fn is_constant(&self, ty: Option<Die>) -> Result<bool, DebugInfoError> {
        let mut at = ty;
        for _ in 0..NESTING_MAX {
            let Some(die) = at else { return Ok(false) };
            let entry = self.entry(die)?;
            match entry.tag() {
                dw::DW_TAG_const_type => return Ok(true),
                dw::DW_TAG_typedef | dw::DW_TAG_volatile_type | dw::DW_TAG_array_type => {}
                _ => return Ok(false),
            }
            at = self.reference(&entry, dw::DW_AT_type, die.unit())?;
        }
        Err(DebugInfoError::Nesting)
    }

    /// Returns a type as a C programmer writes it, typedefs by their names.
    pub(super) fn describe(&self, ty: Option<Die>) -> Result<String, DebugInfoError> {
        self.declare(ty, String::new(), 0)
    }

    /// Returns the declaration of `declarator`: C writes a type from the inside out.
    fn declare(&self, ty: Option<Die>, declarator: String, depth: usize) -> Result<String, DebugInfoError> {
        let leaf = |name: &str| match declarator.is_empty() {
            true => name.to_owned(),
            false => format!("{name} {declarator}"),
        };
        let Some(die) = ty else { return Ok(leaf("void")) };
        if depth > 8 {
            return Ok(leaf("..."));
        }
        let entry = self.entry(die)?;
        let tag = entry.tag();
        let target = || self.reference(&entry, dw::DW_AT_type, die.unit());
        let name = self.string(&entry, dw::DW_AT_name, die.unit())?;
        let name = name.map_or(Ok(None), |_| self.full_name(die))?.unwrap_or_else(|| "(anonymous)".to_owned());
        match tag {
            dw::DW_TAG_const_type | dw::DW_TAG_volatile_type | dw::DW_TAG_atomic_type | dw::DW_TAG_restrict_type => {
                let qualifier = match tag {
                    dw::DW_TAG_const_type => "const ",
                    dw::DW_TAG_volatile_type => "volatile ",
                    dw::DW_TAG_atomic_type => "_Atomic ",
                    _ => "",
                };
                Ok(qualifier.to_owned() + &self.declare(target()?, declarator, depth + 1)?)
            }
            dw::DW_TAG_pointer_type | dw::DW_TAG_reference_type | dw::DW_TAG_rvalue_reference_type => {
                let sign = match tag {
                    dw::DW_TAG_pointer_type => "*",
                    dw::DW_TAG_reference_type => "&",
                    _ => "&&",
                };
                let to = target()?;
                let binds_tighter = matches!(self.shape(to)?, Shape::Function { .. } | Shape::Array { .. });
                let inner = match binds_tighter {
                    true => format!("({sign}{declarator})"),
                    false => format!("{sign}{declarator}"),
                };
                self.declare(to, inner, depth + 1)
            }
            dw::DW_TAG_ptr_to_member_type => {
                let class = self.reference(&entry, dw::DW_AT_containing_type, die.unit())?;
                let class = class.map_or(Ok(None), |class| self.full_name(class))?.unwrap_or_default();
                let to = target()?;
                let inner = match self.shape(to)? {
                    Shape::Function { .. } => format!("({class}::*{declarator})"),
                    _ => format!("{class}::*{declarator}"),
                };
                self.declare(to, inner, depth + 1)
            }
            dw::DW_TAG_array_type => {
                let dimensions = self.counts(die)?.into_iter().map(|count| match count {
                    Count::Fixed(n) => format!("[{n}]"),
                    Count::Open => "[]".to_owned(),
                    Count::Variable => "[*]".to_owned(),
                });
                self.declare(target()?, dimensions.fold(declarator, |text, dimension| text + &dimension), depth + 1)
            }
            dw::DW_TAG_subroutine_type | dw::DW_TAG_subprogram => {
                let (parameters, open) = self.parameters(die)?;
                let texts = parameters.into_iter().map(|ty| self.declare(ty, String::new(), depth + 1));
                let mut texts: Vec<String> = texts.collect::<Result<_, _>>()?;
                texts.extend(open.then(|| "...".to_owned()));
                if texts.is_empty() {
                    texts.push("void".to_owned());
                }
                self.declare(self.type_of(die)?, format!("{declarator}({})", texts.join(", ")), depth + 1)
            }
            dw::DW_TAG_structure_type => Ok(leaf(&format!("struct {name}"))),
            dw::DW_TAG_class_type => Ok(leaf(&format!("class {name}"))),
            dw::DW_TAG_union_type => Ok(leaf(&format!("union {name}"))),
            dw::DW_TAG_enumeration_type => Ok(leaf(&format!("enum {name}"))),
            _ => Ok(leaf(&name)),
        }
    }
}

fn number(value: Option<AttributeValue<super::dwarf::Reader<'_>>>) -> Option<u64> {
    value.and_then(|value| value.udata_value())
}

/// Returns the operand of a lone `DW_OP_plus_uconst`.
fn plus_constant(expression: &[u8]) -> Option<u64> {
    let (&dw_plus_uconst, mut rest) = expression.split_first()?;
    if dw_plus_uconst != dw::DW_OP_plus_uconst.0 {
        return None;
    }
    let mut value = 0u64;
    for shift in (0..63).step_by(7) {
        let (&byte, tail) = rest.split_first()?;
        rest = tail;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return rest.is_empty().then_some(value);
        }
    }
    None
}

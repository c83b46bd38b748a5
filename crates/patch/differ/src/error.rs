//! Refusals: the reasons why no patch can be made, each with the name of its rule.

use stillpoint_patch_format::{Svma, readable};

/// Reason why no patch can be made. [`Refusal::code`] is the rule's name, stable and in kebab-case.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The target is not an ELF file that can be patched.
    #[error("target: {0}")]
    BadTarget(String),
    /// An object is not a relocatable x86-64 ELF file as a C compiler writes it.
    #[error("object of {unit} ({side}): {why}")]
    BadObject {
        /// Translation unit.
        unit: String,
        /// `shipped`, `before` or `after`.
        side: &'static str,
        /// The fault.
        why: String,
    },
    /// An object holds intermediate code instead of machine code.
    #[error("object of {unit} ({side}) was compiled with -flto: section `{section}`; {why}")]
    Lto {
        /// Translation unit.
        unit: String,
        /// `shipped`, `before` or `after`.
        side: &'static str,
        /// The section that shows it, or the format.
        section: String,
        /// Reason why the link's own partitions do not replace it.
        why: String,
    },
    /// A function that is needed is not in the shipped text, byte for byte.
    #[error("function `{function}` of {unit} is not in the shipped text: {why}", function = readable(.function))]
    UnplacedFunction {
        /// Translation unit.
        unit: String,
        /// The function.
        function: String,
        /// `no match`, or the possible places.
        why: String,
    },
    /// One name was read back with two values.
    #[error("`{name}` of {unit} is at {one} and at {other}", name = readable(.name))]
    SymbolConflict {
        /// Translation unit.
        unit: String,
        /// The name.
        name: String,
        /// Value read first.
        one: String,
        /// Value that contradicts it.
        other: String,
    },
    /// A name that the new code refers to has no address in the target.
    #[error("`{name}`, used by `{user}` of {unit}, has no known address in the target: {why}", name = readable(.name), user = readable(.user))]
    UnresolvedSymbol {
        /// Translation unit.
        unit: String,
        /// The name.
        name: String,
        /// Function or object that refers to it.
        user: String,
        /// The sources that were searched.
        why: String,
    },
    /// Initialised data changed that the running program already holds.
    #[error("initialised data `{object}` of {unit} changed: {why}", object = readable(.object))]
    DataChanged {
        /// Translation unit.
        unit: String,
        /// The object.
        object: String,
        /// The difference, and the users of the object.
        why: String,
        /// True if [`Options::write_data`](crate::Options::write_data) may permit it.
        writable: bool,
    },
    /// A variable has another size or nature than in the target.
    #[error("variable `{object}` of {unit} changed from {before} to {after}", object = readable(.object))]
    VariableChanged {
        /// Translation unit.
        unit: String,
        /// The variable.
        object: String,
        /// Size or nature before.
        before: String,
        /// Size or nature after.
        after: String,
        /// True if new code may have a copy of it, with [`Options::write_data`](crate::Options::write_data).
        copyable: bool,
    },
    /// A static local or file static could not be distinguished from others of its name.
    #[error("static variable `{object}` of {unit} cannot be identified: {why}", object = readable(.object))]
    AmbiguousStatic {
        /// Translation unit.
        unit: String,
        /// The variable.
        object: String,
        /// The candidates.
        why: String,
    },
    /// The linker or compiler gave two functions one address, and only one of them changed.
    #[error("functions `{one}` and `{other}` of {unit} share the code at {at} and differ after the change", one = readable(.one), other = readable(.other))]
    IdenticalCodeFolded {
        /// Translation unit.
        unit: String,
        /// The changed function.
        one: String,
        /// The unchanged function.
        other: String,
        /// Common address of the two.
        at: Svma,
    },
    /// An entry has no room for a jump.
    #[error("function `{function}` of {unit} has {len} bytes, too few for a jump of 5 bytes, and {why}", function = readable(.function))]
    EntryTooShort {
        /// Translation unit.
        unit: String,
        /// The function.
        function: String,
        /// Length in bytes.
        len: u64,
        /// Reason why its callers cannot be patched instead.
        why: String,
    },
    /// Code jumps into the bytes that a jump would overwrite.
    #[error("the branch at {from} goes into the entry of `{function}` of {unit}, at {to}, and {why}", function = readable(.function))]
    BranchIntoEntry {
        /// Translation unit.
        unit: String,
        /// The function.
        function: String,
        /// The branch.
        from: Svma,
        /// Destination of the branch.
        to: Svma,
        /// Reason why its callers cannot be patched instead.
        why: String,
    },
    /// The first instructions cannot be moved.
    #[error("entry of `{function}` of {unit} cannot be redirected: {why}", function = readable(.function))]
    EntryUnsuitable {
        /// Translation unit.
        unit: String,
        /// The function.
        function: String,
        /// The obstacle.
        why: String,
    },
    /// New code that would have to run at start-up.
    #[error("{unit} has a new or changed `{section}`: code that runs at start-up cannot be patched")]
    InitArray {
        /// Translation unit.
        unit: String,
        /// `.init_array`, `.ctors`, `.preinit_array`, `.fini_array`, ...
        section: String,
    },
    /// Code that makes a unit's static objects changed.
    #[error("the initialisation of static objects of {unit} changed (`{function}`: {why}): that code has already run")]
    StaticInitialiser {
        /// Translation unit.
        unit: String,
        /// The compiler's name of that code.
        function: String,
        /// The difference.
        why: String,
    },
    /// The table of virtual functions or the run-time type information of a class changed.
    #[error("class `{class}` of {unit} changed {what}: live objects still have the old one")]
    ClassChanged {
        /// Translation unit.
        unit: String,
        /// The class.
        class: String,
        /// The changed part of the class.
        what: String,
    },
    /// The new code has a thread-local that the target does not have.
    #[error("new thread-local variable `{object}` in {unit}: running threads have no room for it", object = readable(.object))]
    NewThreadLocal {
        /// Translation unit.
        unit: String,
        /// The variable.
        object: String,
    },
    /// An indirect function (`STT_GNU_IFUNC`) changed or is new.
    #[error("indirect function `{function}` of {unit} changed: its resolver has already run", function = readable(.function))]
    IndirectFunction {
        /// Translation unit.
        unit: String,
        /// The function.
        function: String,
    },
    /// A relocation that the patch file has no kind for.
    #[error("relocation {kind} at {section}+{offset:#x} in {unit} is not supported")]
    Relocation {
        /// Translation unit.
        unit: String,
        /// Name as in the psABI, for instance `R_X86_64_TLSGD`.
        kind: String,
        /// Section of the object.
        section: String,
        /// Place, bytes from the section's start.
        offset: u64,
    },
    /// Unwind data that cannot be carried over.
    #[error("unwind data of `{function}` in {unit}: {why}", function = readable(.function))]
    UnwindData {
        /// Translation unit.
        unit: String,
        /// The function.
        function: String,
        /// The fault.
        why: String,
    },
    /// A section that the differ does not know how to carry over.
    #[error("section `{section}` of {unit} changed and has an unknown kind")]
    UnknownSection {
        /// Translation unit.
        unit: String,
        /// The section.
        section: String,
    },
    /// A name that the caller stated does not exist.
    #[error("{what} `{name}` is in no unit of the patch and in no symbol table of the target", name = readable(.name))]
    UnknownName {
        /// `hook`, `off-stack function` or `changed function`.
        what: &'static str,
        /// Name that the caller stated.
        name: String,
    },
    /// A type that live data may have has another layout.
    #[error("type `{type_name}` changed: {what}")]
    TypeLayoutChanged {
        /// Name of the type, for instance `struct redisServer`.
        type_name: String,
        /// The member and its change: "member `clients` moved from byte 24 to 32".
        what: String,
        /// Members that a structure gained, if no other changed than by its offset; `None` if more changed.
        added: Option<Vec<String>>,
    },
    /// The parameters or the result of a function changed, and code or data that stays has its address.
    #[error("function `{function}` changed from `{before}` to `{after}`, but {user}", function = readable(.function))]
    SignatureChanged {
        /// The function.
        function: String,
        /// Type of the function as shipped.
        before: String,
        /// Type after the change.
        after: String,
        /// Code or data that stays and has its address.
        user: String,
    },
    /// DWARF is missing or damaged, so that types cannot be compared.
    #[error("debug information of {unit}: {why}")]
    DebugInfo {
        /// Translation unit or object.
        unit: String,
        /// The fault.
        why: String,
    },
    /// The finished patch breaks a rule of the file format, usually a limit.
    #[error("patch file: {0}")]
    Format(String),
}

impl Refusal {
    /// Returns true for a change of data that a patch may write, or of which new code may have a copy, if its author allows it.
    pub fn is_writable(&self) -> bool {
        matches!(self, Refusal::DataChanged { writable: true, .. } | Refusal::VariableChanged { copyable: true, .. })
    }

    /// Returns the name of the rule, stable, for tests and for machines: that of the variant in kebab-case.
    pub fn code(&self) -> String {
        let debug = format!("{self:?}");
        let variant = debug.chars().take_while(char::is_ascii_alphabetic).enumerate();
        variant.fold(String::new(), |mut code, (at, letter)| {
            if at > 0 && letter.is_ascii_uppercase() {
                code.push('-');
            }
            code + &letter.to_ascii_lowercase().to_string()
        })
    }
}

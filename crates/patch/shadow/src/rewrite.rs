//! Rewriting of one unit, in passes of the compiler.

use crate::definition::{self, DEFINITION, Definition, initial, own_type, refusal};
use crate::edits::Edits;
use crate::error::{Kind, Refusal};
use crate::member::ShadowMember;
use crate::objects::{Objects, Search};
use crate::syntax::{Key, Types, Unit};
use crate::uses::{self, Access, Call, Task, Uses};
use std::collections::{BTreeSet, HashSet};

/// Place where objects of the type begin.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct Origin {
    /// `FILE:LINE`.
    pub place: String,
    /// The variable, or the function that returns the memory.
    pub what: String,
}

/// A unit without the members.
#[derive(Debug)]
pub struct Rewritten {
    /// Preprocessed text.
    pub text: Vec<u8>,
    /// For each member of the request: the places where its objects begin; `None` if the unit does not define it.
    pub origins: Vec<Option<Vec<Origin>>>,
}

/// Request to rewrite units.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// Members to move.
    pub members: &'a [ShadowMember],
    /// Functions of the program that return new memory of the size that they get.
    pub allocators: &'a [String],
}

/// Reason why a unit was not rewritten.
#[derive(Debug)]
pub enum Stop<E> {
    /// The members cannot be moved.
    Refused(Vec<Refusal>),
    /// The compiler could not be called.
    Compiler(E),
}

/// Answer of the compiler to a text.
#[derive(Debug)]
pub struct Checked {
    /// True if it found no error.
    pub is_clean: bool,
    /// Everything that it printed.
    pub printed: String,
}

/// Call of the compiler: checks a preprocessed text, without a limit of errors.
pub type Check<'c, E> = dyn FnMut(&[u8]) -> Result<Checked, E> + 'c;

/// Limit of passes: nested accesses are found one in the other.
const PASSES_MAX: usize = 8;

/// Rewrites a preprocessed unit so that each member is a shadow variable.
///
/// # Errors
/// Every use that cannot be rewritten, or a failed call of the compiler.
pub fn rewrite<E>(text: Vec<u8>, request: Request<'_>, check: &mut Check<'_, E>) -> Result<Rewritten, Stop<E>> {
    let mut rewritten = Rewritten { text, origins: Vec::new() };
    for member in request.members {
        let origins = one(&mut rewritten.text, member, request.allocators, check)?;
        rewritten.origins.push(origins);
    }
    Ok(rewritten)
}

fn one<E>(
    text: &mut Vec<u8>,
    member: &ShadowMember,
    allocators: &[String],
    check: &mut Check<'_, E>,
) -> Result<Option<Vec<Origin>>, Stop<E>> {
    let Some((moved, is_array)) = without(text, member).map_err(|refusal| Stop::Refused(vec![refusal]))? else {
        return Ok(None);
    };
    let mut current = moved;
    let mut question = Question::Accesses;
    for _ in 0..PASSES_MAX {
        let unit = parsed(std::mem::take(&mut current), member).map_err(|refusal| Stop::Refused(vec![refusal]))?;
        let pass = Pass::new(&unit, member, allocators, is_array);
        let pass = pass.map_err(|refusal| Stop::Refused(vec![refusal]))?;
        if question == Question::Accesses && pass.uses.accesses.is_empty() {
            question = Question::Objects;
        }
        let checked = check(&pass.question(question)).map_err(Stop::Compiler)?;
        let answers = pass.answers(&checked, question).map_err(Stop::Refused)?;
        current = pass.edited(&answers);
        match (question, answers.accesses.is_empty()) {
            (Question::Objects, true) => {
                *text = current;
                let mut origins = pass.objects.origins;
                origins.extend(answers.origins);
                return Ok(Some(origins));
            }
            // those inside of others are seen when the others are gone
            (_, false) => question = Question::Accesses,
            (Question::Accesses, true) => question = Question::Objects,
        }
        if question == Question::Accesses && !pass.has_nested(&answers) {
            question = Question::Objects;
        }
    }
    let why = "accesses are nested too deeply".to_owned();
    Err(Stop::Refused(vec![Refusal {
        kind: Kind::Unseen,
        member: member.to_string(),
        place: String::new(),
        why,
        allocator: None,
    }]))
}

fn parsed(text: Vec<u8>, member: &ShadowMember) -> Result<Unit, Refusal> {
    Unit::parse(text).ok_or_else(|| Refusal {
        kind: Kind::Unseen,
        member: member.to_string(),
        place: String::new(),
        why: "the parser gave up".into(),
        allocator: None,
    })
}

/// Returns the text without the member; `None` if its structure is not there, or does not have it.
fn without(text: &[u8], member: &ShadowMember) -> Result<Option<(Vec<u8>, bool)>, Refusal> {
    let contains = |word: &str| text.windows(word.len()).any(|window| window == word.as_bytes());
    if !contains(&member.member) || !contains(&member.type_name) {
        return Ok(None);
    }
    let unit = parsed(text.to_vec(), member)?;
    let types = Types::of(&unit);
    let Some(definition) = definition::find(&types, member) else { return Ok(None) };
    let moved = definition::take_out(&unit, &definition, member)?;
    Ok(moved.map(|moved| (moved.text, moved.is_array)))
}

/// Question to the compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Question {
    /// Expressions that access the member.
    Accesses,
    /// Places where objects begin, and other uses of their memory.
    Objects,
}

/// Part of a text that is under a file name of its own, and texts around it.
struct Mark {
    start: usize,
    end: usize,
    label: String,
    before: String,
    after: String,
}

/// One question to the compiler about a unit.
struct Pass<'u> {
    unit: &'u Unit,
    member: &'u ShadowMember,
    uses: Uses<'u>,
    objects: Objects<'u>,
    /// Text that names a container, and the end of its definition; the structure itself is the first.
    names: Vec<(String, usize)>,
    /// Begin of the structure's body.
    body: usize,
    is_array: bool,
}

/// Answers of the compiler.
#[derive(Default)]
struct Answers<'u> {
    /// Numbers of accesses.
    accesses: BTreeSet<usize>,
    /// Calls that make or clear objects, by their place.
    makes: Vec<(Call<'u>, bool)>,
    origins: Vec<Origin>,
}

impl<'u> Pass<'u> {
    fn new(unit: &'u Unit, member: &'u ShadowMember, stated: &[String], is_array: bool) -> Result<Self, Refusal> {
        let types = Types::of(unit);
        let found = definition::find(&types, member).ok_or_else(|| Refusal {
            kind: Kind::Unseen,
            member: member.to_string(),
            place: String::new(),
            why: "the structure was not found again".into(),
            allocator: None,
        })?;
        let containers = types.containers(&found.key);
        let names = names(unit, &types, member, &found, &containers)?;
        let from = found.body.end_byte();
        unparsed(unit, member, from, &names)?;
        let objects = Search { unit, types: &types, member, containers: &containers }.run();
        let mut allocators = uses::declared_allocators(unit);
        allocators.extend(stated.iter().cloned());
        let uses = uses::find(unit, member, &allocators, from);
        Ok(Pass { unit, member, uses, objects, names, body: found.body.start_byte(), is_array })
    }

    /// Makes a text in which each use that concerns the structure is an error in a file of its own name.
    fn question(&self, question: Question) -> Vec<u8> {
        let mut marks = Vec::new();
        let mut mark = |(start, end), kind: &str, number, before: &str, after: String| {
            let label = format!("\n# 1 \"stillpoint/{kind}/{number}\"\n");
            marks.push(Mark { start, end, label, before: before.to_owned(), after });
        };
        for (number, access) in self.uses.accesses.iter().enumerate() {
            mark((access.operator.start_byte(), access.node.end_byte()), "access", number, "", String::new());
        }
        for (number, node) in self.uses.designators.iter().enumerate() {
            mark((node.start_byte(), node.end_byte()), "designator", number, "", String::new());
        }
        for (number, node) in self.uses.replaced.iter().enumerate() {
            mark((node.start_byte(), node.end_byte()), "replaced", number, "", String::new());
        }
        let mut edits = Edits::default();
        if question == Question::Objects {
            self.mark_memory(&mut mark);
            // makes each assignment of the whole structure an error
            edits.replace((self.body + 1, self.body + 1), " const char __stillpoint_mark; ".into());
        }
        for mark in &marks {
            let inside =
                |other: &&Mark| (other.start, mark.end) <= (mark.start, other.end) && !std::ptr::eq(*other, mark);
            let around = marks.iter().filter(inside).filter(|other| other.start <= mark.start && other.end >= mark.end);
            let label = around.min_by_key(|other| other.end - other.start).map(|other| other.label.clone());
            let label = label.unwrap_or_else(|| self.unit.marker(mark.end));
            edits.around(
                (mark.start, mark.end),
                format!("{}{}", mark.label, mark.before),
                format!("{}{}{label}", mark.label, mark.after),
            );
        }
        edits.apply(&self.unit.text)
    }

    /// Marks the sizes, memory and derived types; `mark` takes range, label, number, and the texts before and after.
    fn mark_memory(&self, mark: &mut impl FnMut((usize, usize), &str, usize, &str, String)) {
        for (number, size) in self.uses.sizes.iter().enumerate() {
            let range = (size.node.start_byte(), size.node.end_byte());
            let operand = format!("__typeof__({})", size.operand);
            let (any, own) = (self.is_ours(&operand, range.0, self.names.len()), self.is_ours(&operand, range.0, 1));
            let own = format!("\n# 1 \"stillpoint/own/{number}\"\n + 0 * sizeof(char[1 - 2 * ({own})]))");
            mark(range, "size", number, "(", format!(" + 0 * sizeof(char[1 - 2 * ({any})]){own}"));
        }
        for (number, memory) in self.uses.memories.iter().enumerate() {
            let (start, end) = (memory.pointer.start_byte(), memory.pointer.end_byte());
            let pointer = String::from_utf8_lossy(&self.unit.text[start..end]);
            let ours = self.is_ours(&format!("__typeof__(*({pointer}))"), start, self.names.len());
            mark((start, end), "memory", number, "(", format!(") + 0 * sizeof(char[1 - 2 * ({ours})])"));
        }
        for (number, derived) in self.objects.derived.iter().enumerate() {
            let end = derived.declaration.end_byte();
            let ours = self.is_ours(&format!("__typeof__({})", self.unit.slice(derived.name)), end, self.names.len());
            mark((end, end), "derived", number, &format!("_Static_assert(!({ours}), \"\");"), String::new());
        }
    }

    /// Returns true if an access that the compiler found contains another possible one.
    fn has_nested(&self, answers: &Answers<'u>) -> bool {
        let found = answers.accesses.iter().filter_map(|number| self.uses.accesses.get(*number));
        let open = |node: &tree_sitter::Node<'_>| {
            self.uses.accesses.iter().any(|other| {
                other.node.id() != node.id()
                    && other.node.start_byte() <= node.start_byte()
                    && other.node.end_byte() >= node.end_byte()
            })
        };
        found.map(|access| access.node).any(|node| open(&node))
    }

    /// Returns an expression that is true if a type is one of the first `count` containers, or an array of them.
    fn is_ours(&self, of: &str, at: usize, count: usize) -> String {
        let known = self.names.iter().take(count).filter(|(_, end)| *end <= at);
        let tests: Vec<String> = known
            .map(|(name, _)| {
                format!("__builtin_types_compatible_p({of}, {name}) | __builtin_types_compatible_p({of}, {name} [])")
            })
            .collect();
        if tests.is_empty() { "0".into() } else { tests.join(" | ") }
    }

    fn refused(&self, kind: Kind, at: usize, why: &str) -> Refusal {
        refusal(kind, self.unit, at, self.member, why)
    }

    fn answers(&self, checked: &Checked, question: Question) -> Result<Answers<'u>, Vec<Refusal>> {
        let mut refusals = match question {
            Question::Objects => self.objects.refusals.clone(),
            Question::Accesses => Vec::new(),
        };
        let mut answers = Answers::default();
        let (mut sizes, mut own, mut memories) = (BTreeSet::new(), BTreeSet::new(), BTreeSet::new());
        refusals.extend(self.unanswered(checked));
        for ((file, line), message) in checked.printed.lines().filter_map(error_line) {
            let question = file.strip_prefix("stillpoint/").and_then(|rest| rest.split_once('/'));
            let number = question.and_then(|(_, number)| number.parse::<usize>().ok());
            match (question.map_or("", |(kind, _)| kind), number) {
                ("access", Some(number)) => _ = answers.accesses.insert(number),
                ("size", Some(number)) => _ = sizes.insert(number),
                ("own", Some(number)) => _ = own.insert(number),
                ("memory", Some(number)) => _ = memories.insert(number),
                ("designator", Some(number)) => {
                    let at = self.uses.designators.get(number).map_or(0, |node| node.start_byte());
                    refusals.push(self.refused(Kind::Initialiser, at, "a list of values initialises it"));
                }
                ("derived", Some(number)) => {
                    let at = self.objects.derived.get(number).map_or(0, |derived| derived.declaration.start_byte());
                    refusals.push(self.refused(Kind::Stack, at, "a local object"));
                }
                ("replaced", Some(number)) => {
                    let at = self.uses.replaced.get(number).map_or(0, |node| node.start_byte());
                    let why = format!("the object of an access was misread: {message}");
                    refusals.push(self.refused(Kind::Unseen, at, &why));
                }
                // a fault that the program has already, and that is none without the checks of this pass
                _ if message.ends_with("-pointer-types]") || message.ends_with("=int-conversion]") => {}
                _ => {
                    let kind = match message {
                        _ if file == DEFINITION => Kind::Type,
                        _ if message.contains("read-only") || message.contains("const-qualified") => Kind::Assignment,
                        _ => Kind::Unseen,
                    };
                    let why = format!("the compiler: {message}");
                    let place = if file == DEFINITION { String::new() } else { format!("{file}:{line}") };
                    refusals.push(Refusal { kind, member: self.member.to_string(), place, why, allocator: None });
                }
            }
        }
        for access in answers.accesses.iter().filter_map(|number| self.uses.accesses.get(*number)) {
            refusals.extend(uses::check(self.unit, self.member, access, self.is_array).err());
        }
        self.memory(&sizes, &own, &memories, &mut answers, &mut refusals);
        if refusals.is_empty() { Ok(answers) } else { Err(refusals) }
    }

    /// Refuses if the compiler did not look at the whole text: what it did not say is no answer then.
    fn unanswered(&self, checked: &Checked) -> Option<Refusal> {
        let is_error = |line: &&str| line.contains(" error: ") && error_line(line).is_none();
        let stops = |line: &&str| is_error(line) || line.contains("compilation terminated");
        let lines = &checked.printed;
        let silent = !checked.is_clean && !lines.lines().any(|line| error_line(line).is_some());
        let line =
            lines.lines().find(stops).or_else(|| silent.then(|| lines.lines().next().unwrap_or("no message")))?;
        Some(self.refused(Kind::Unseen, self.body, &format!("the compiler stopped: {line}")))
    }

    /// Sorts the uses of sizes and memory that concern the structure.
    fn memory(
        &self,
        sizes: &BTreeSet<usize>,
        own: &BTreeSet<usize>,
        memories: &BTreeSet<usize>,
        answers: &mut Answers<'u>,
        refusals: &mut Vec<Refusal>,
    ) {
        for (number, size) in sizes.union(own).filter_map(|number| Some((number, self.uses.sizes.get(*number)?))) {
            let at = size.node.start_byte();
            match &size.task {
                Task::Makes(call) => {
                    let is_one = size.is_one && own.contains(number);
                    answers.makes.push((*call, is_one));
                    let function = call.node.child_by_field_name("function").map_or("", |f| self.unit.slice(f));
                    answers.origins.push(Origin { place: self.unit.place(at), what: format!("`{function}`") });
                }
                Task::Counts => {}
                Task::Unknown(kind, why) => refusals.push(self.refused(*kind, at, why)),
                Task::Calls(name) => {
                    let why =
                        format!("`{name}` gets the size of the structure, and is not known to return new memory of it");
                    refusals.push(Refusal { allocator: Some(name.clone()), ..self.refused(Kind::Size, at, &why) });
                }
            }
        }
        for memory in memories.iter().filter_map(|number| self.uses.memories.get(*number)) {
            let at = memory.call.start_byte();
            match memory.clears {
                Some(_) if answers.makes.iter().any(|(call, _)| call.node == memory.call) => {}
                Some(call) => answers.makes.push((call, false)),
                None => {
                    let refusal = self.refused(memory.kind, at, "a function of memory gets a pointer to the structure");
                    let is_known =
                        refusals.iter().any(|known| (known.kind, &known.place) == (refusal.kind, &refusal.place));
                    refusals.extend((!is_known).then_some(refusal));
                }
            }
        }
        if !self.member.value.is_empty()
            && let Some((call, _)) = answers.makes.iter().find(|(_, is_one)| !is_one)
        {
            let why = "several objects, or a structure around it, are made at once, which must begin with zero";
            refusals.push(self.refused(Kind::Value, call.node.start_byte(), why));
        }
    }

    /// Returns the text with all that the compiler found replaced.
    fn edited(&self, answers: &Answers<'u>) -> Vec<u8> {
        let mut edits = Edits::default();
        for access in answers.accesses.iter().filter_map(|number| self.uses.accesses.get(*number)) {
            self.replace(access, &mut edits);
        }
        let mut done = HashSet::new();
        for (call, _) in answers.makes.iter().filter(|(call, _)| done.insert(call.node.id())) {
            self.clear(call, &mut edits);
        }
        edits.apply(&self.unit.text)
    }

    fn replace(&self, access: &Access<'_>, edits: &mut Edits) {
        let own = own_type(self.member);
        let object = if self.unit.slice(access.operator) == "." { "&(" } else { "(" };
        let range = (access.object.start_byte(), access.object.end_byte());
        edits.around(range, format!("{own}_of({object}"), format!("), {})", initial(self.member)));
        edits.replace((access.operator.start_byte(), access.operator.end_byte()), "->".into());
    }

    fn clear(&self, call: &Call<'_>, edits: &mut Edits) {
        let (id, number) = (self.member.id(), call.node.start_byte());
        let (size, start) = (format!("__stillpoint_n{number}"), format!("__stillpoint_p{number}"));
        let mut keep = |node: tree_sitter::Node<'_>, name: &str| {
            edits.around((node.start_byte(), node.end_byte()), format!("({name} = ("), "))".into());
        };
        keep(call.size.0, &size);
        let mut product = size.clone();
        if let Some(number) = call.size.1 {
            let name = format!("{size}m");
            keep(number, &name);
            product = format!("{size} * {name}");
        }
        let own = own_type(self.member);
        let first = match self.member.value.as_str() {
            "" => String::new(),
            _ => format!(
                " if ({start}) __stillpoint_member((unsigned long){start}, {id}ul, sizeof(struct {own}), &(struct {own}){{ 0 }});"
            ),
        };
        let before =
            format!("(__extension__ ({{ unsigned long {size} = 0, {size}m = 0; (void){size}m; void *{start} = ");
        let after =
            format!(";{first} __stillpoint_member_clear((unsigned long){start}, {product}, {id}ul); {start}; }}))");
        edits.around((call.node.start_byte(), call.node.end_byte()), before, after);
    }
}

/// Returns the texts that name the structures around the member; the structure itself is the first.
fn names(
    unit: &Unit,
    types: &Types<'_>,
    member: &ShadowMember,
    found: &Definition<'_>,
    containers: &HashSet<Key>,
) -> Result<Vec<(String, usize)>, Refusal> {
    let mut names = vec![(found.spelling.clone(), found.body.end_byte())];
    for record in types.records.iter().filter(|record| containers.contains(&record.key)) {
        let (at, end) = (record.node.start_byte(), record.node.end_byte());
        if record.is_union {
            return Err(refusal(Kind::Union, unit, at, member, "a union contains the structure"));
        }
        match types.spelling(&record.key) {
            _ if record.is_part || record.key == found.key => {}
            Some(name) => names.push((name, definition::item_end(record.node).unwrap_or(end))),
            None => return Err(refusal(Kind::Type, unit, at, member, "a structure without a name contains it")),
        }
    }
    Ok(names)
}

/// Refuses text that the parser did not understand and that may concern the structure.
fn unparsed(unit: &Unit, member: &ShadowMember, from: usize, names: &[(String, usize)]) -> Result<(), Refusal> {
    let mut words: Vec<&str> = names.iter().map(|(name, _)| name.rsplit(' ').next().unwrap_or(name)).collect();
    words.extend(["sizeof", &member.type_name]);
    for node in unit.nodes().filter(|node| node.is_error() && node.end_byte() > from) {
        let tokens = crate::mask::tokens(&unit.masked.text[node.byte_range()]);
        if let Some(token) = tokens.iter().find(|token| words.iter().any(|word| word.as_bytes() == token.text)) {
            let why = format!("`{}` is in text that was not understood", String::from_utf8_lossy(token.text));
            return Err(refusal(Kind::Unseen, unit, node.start_byte() + token.start, member, &why));
        }
    }
    Ok(())
}

/// Splits `FILE:LINE:COLUMN: error: MESSAGE`.
fn error_line(line: &str) -> Option<((&str, usize), &str)> {
    let (place, message) = line.split_once(": error: ").or_else(|| line.split_once(": fatal error: "))?;
    let mut parts = place.rsplitn(3, ':');
    let (_, line, file) = (parts.next()?, parts.next()?, parts.next()?);
    Some(((file, line.parse().ok()?), message))
}

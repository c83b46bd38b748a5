//! Rules that every record keeps, so that a reader of a ledger can rely on it: a target may have forged all of it.
//!
//! A hostile target can still state false facts about its own memory. It cannot state values that harm the reader: lengths without limit,
//! sums that overflow, names that are paths, lines or escape sequences.

use super::{
    ConstantRecord, Contents, DataTransition, FunctionRecord, LedgerError, LookupRedirectRecord, PlacedPatch, Record,
    Site, Span, Transition, View,
};
use crate::lookup_redirect::TABLE_LEN;
use stillpoint_base::PAGE;
use stillpoint_patch_format::{Avma, DATA_MAX, is_patch_name};
use stillpoint_patch_insn::{DISPLACED_MAX, JUMP_LEN};

/// First address outside user space.
const ADDRESS_END: u64 = 1 << 47;
/// Largest memory of a patch in bytes; every patch file needs less.
const ARENA_MAX: u64 = 1 << 30;
/// Largest memory of all patches in bytes: they are within 2 GiB of their modules.
const ARENAS_MAX: u64 = 4 << 30;
/// Largest number of patches ever placed in one target.
const PLACED_MAX: usize = 16 << 10;
/// Largest number of functions and constants of all those patches, and of one transition: readers compare each with others.
const CHANGED_MAX: usize = 64 << 10;
/// Largest name or other text in bytes.
const TEXT_MAX: usize = 64 << 10;
/// Valid operations of a transition.
const OPERATIONS: [&str; 3] = ["apply", "revert", "replace"];

type Valid = Result<(), LedgerError>;

/// Checks one more record after those in `view`; the error names the first broken rule.
pub(super) fn check(view: &View, record: &Record) -> Valid {
    match record {
        Record::Placed(patch) => placed(view, patch),
        Record::Begin(begun) | Record::Rest(begun) => transition(view, begun),
        Record::Phase { .. } => Ok(()),
        Record::LookupRedirect(redirect) => self::lookup_redirect(redirect),
        Record::PlacedData(data) => placed_data(view, data),
        Record::BeginWithData(begun, data) => transition(view, begun).and_then(|()| data_transition(begun, data)),
    }
}

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Valid {
    if holds { Ok(()) } else { Err(LedgerError::Inconsistent(why())) }
}

/// Checks a text for people; it is shown with its control characters escaped.
fn prose(what: &str, text: &str) -> Valid {
    ensure(text.len() <= TEXT_MAX, || format!("{what} has {} bytes", text.len()))
}

/// Checks a name, or a text of one line: it is used in scripts and tables.
fn text(what: &str, text: &str) -> Valid {
    prose(what, text)?;
    ensure(!text.chars().any(char::is_control), || format!("{what} {text:?} has control characters"))
}

fn texts<'t>(what: &str, all: impl IntoIterator<Item = &'t String>) -> Valid {
    all.into_iter().try_for_each(|one| text(what, one))
}

fn address(what: &str, at: Avma) -> Valid {
    ensure(at.0 < ADDRESS_END, || format!("{what} is at {at}"))
}

fn span(what: &str, span: Span) -> Valid {
    let fits = span.start.0 < ADDRESS_END && span.len <= ADDRESS_END - span.start.0;
    ensure(fits, || format!("{what} has {:#x} bytes from {}", span.len, span.start))
}

fn inside(what: &str, inner: Span, outer: Span) -> Valid {
    span(what, inner)?;
    ensure(inner.start >= outer.start && inner.end() <= outer.end(), || format!("{what} is outside of {outer}"))
}

/// Checks offsets inside an entry's five bytes.
fn boundaries(what: &str, all: &[u8]) -> Valid {
    let fits = all.len() < JUMP_LEN && all.iter().all(|offset| usize::from(*offset) < JUMP_LEN);
    ensure(fits, || format!("{what} has instructions at {all:?}"))
}

fn placed(view: &View, patch: &PlacedPatch) -> Valid {
    ensure(is_patch_name(&patch.name), || format!("{:?} is not the name of a patch", patch.name))?;
    ensure(patch.build_id.0.len() <= 64, || format!("a build-id of {} bytes", patch.build_id.0.len()))?;
    prose("a description", &patch.description)?;
    texts("the name of a module", [&patch.module])?;
    texts("a CVE", &patch.cves)?;
    texts("the name of a diff", patch.diffs.iter().chain(&patch.based_on).map(|diff| &diff.name))?;
    texts("the name of a key", &patch.signer)?;
    texts("the name of code", patch.staying.iter().chain(&patch.escaping))?;
    ensure(view.placed.len() < PLACED_MAX, || format!("more than {PLACED_MAX} patches"))?;
    let changed = |patch: &PlacedPatch| patch.functions.len() + patch.constants.len();
    bounded(view.placed.iter().map(|patch| changed(patch)).sum::<usize>() + changed(patch))?;
    memory(view, patch)?;
    patch.functions.iter().try_for_each(|one| function(patch, one))?;
    patch.constants.iter().try_for_each(constant)?;
    for code in &patch.off_stack {
        texts("the name of code", [&code.name, &code.reason])?;
        span("code that must be off the stack", code.span)?;
    }
    for export in &patch.exports {
        text("the name of an export", &export.name)?;
        address("an export", export.address)?;
    }
    for symbol in &patch.symbols {
        text("the name of a symbol", &symbol.name)?;
        span("a symbol", symbol.span)?;
    }
    let hooks = &patch.hooks;
    let mut all = hooks.pre_apply.iter().chain(&hooks.post_apply).chain(&hooks.pre_revert).chain(&hooks.post_revert);
    all.try_for_each(|hook| inside("a hook", Span::new(*hook, 0), patch.arena))
}

fn bounded(changed: usize) -> Valid {
    ensure(changed <= CHANGED_MAX, || format!("{changed} functions and constants change, more than {CHANGED_MAX}"))
}

fn placed_data(view: &View, data: &[ConstantRecord]) -> Valid {
    let last = view.placed.last();
    ensure(last.is_some_and(|patch| patch.data.is_empty()), || "data of a patch that was not placed".to_owned())?;
    let earlier = view.placed.iter().map(|patch| patch.data.len()).sum::<usize>();
    bounded(earlier + data.len())?;
    bounded_data(data.iter().map(|one| one.original.len()))?;
    data.iter().try_for_each(constant)
}

/// Checks the number of bytes of data that change together.
fn bounded_data(lens: impl Iterator<Item = usize>) -> Valid {
    let len: usize = lens.sum();
    ensure(len as u64 <= DATA_MAX, || format!("{len} bytes of data change, more than {DATA_MAX}"))
}

fn data_transition(begun: &Transition, data: &DataTransition) -> Valid {
    bounded(begun.sites.len() + begun.constants.len() + data.changes.len())?;
    bounded_data(data.changes.iter().map(|one| one.from.len()))?;
    data.changes.iter().try_for_each(|Contents { name, at, from, to }| contents(name, *at, from, to))?;
    ensure(data.opened.len() <= data.changes.len(), || format!("{} ranges were opened", data.opened.len()))?;
    data.opened.iter().try_for_each(|pages| {
        span("opened pages", *pages)?;
        let whole = pages.start.0 % PAGE == 0 && pages.len % PAGE == 0 && pages.len <= DATA_MAX + 2 * PAGE;
        ensure(whole, || format!("pages {pages} were opened"))
    })?;
    address("the code that completes a change", data.completer)
}

/// Checks that all memory mapped for a patch is inside its arena.
fn memory(view: &View, patch: &PlacedPatch) -> Valid {
    let arena = patch.arena;
    span("the memory of a patch", arena)?;
    ensure(arena.len <= ARENA_MAX, || format!("a patch has {} bytes of memory", arena.len))?;
    let all = view.bytes_kept() + arena.len;
    ensure(all <= ARENAS_MAX, || format!("patches have {all} bytes of memory"))?;
    inside("state bytes", patch.states, arena)?;
    inside("unwind data", patch.eh_frame, arena)?;
    inside("the table of unwind data", patch.search_table, arena)?;
    patch.trampolines.iter().try_for_each(|one| inside("a dispatcher", *one, arena))?;
    patch.text.iter().try_for_each(|code| {
        text("the name of code", &code.name)?;
        inside("new code", code.span, arena)
    })
}

fn function(patch: &PlacedPatch, function: &FunctionRecord) -> Valid {
    let FunctionRecord { name, unit, old, old_parts, .. } = function;
    texts("the name of a function", [name, unit])?;
    span(name, *old)?;
    old_parts.iter().try_for_each(|part| span(name, *part))?;
    let len = usize::from(function.displaced_len);
    ensure(len <= DISPLACED_MAX, || format!("{len} bytes of {name} are displaced"))?;
    boundaries(name, &function.inner_boundaries)?;
    inside("displaced code", Span::new(function.displaced, 0), patch.arena)?;
    inside("new code", Span::new(function.new, 0), patch.arena)?;
    inside("new code", function.new_span, patch.arena)?;
    inside("a dispatcher", function.dispatchers, patch.arena)
}

fn constant(constant: &ConstantRecord) -> Valid {
    let ConstantRecord { name, at, original, new } = constant;
    contents(name, *at, original, new)
}

fn contents(name: &str, at: Avma, from: &[u8], to: &[u8]) -> Valid {
    text("the name of a constant", name)?;
    span(name, Span::new(at, from.len() as u64))?;
    ensure(from.len() == to.len(), || format!("{name} has {} bytes and then {}", from.len(), to.len()))
}

fn transition(view: &View, transition: &Transition) -> Valid {
    let operation = &transition.operation;
    ensure(OPERATIONS.contains(&operation.as_str()), || format!("{operation:?} is not an operation"))?;
    address("a state byte", transition.state)?;
    bounded(transition.sites.len() + transition.constants.len())?;
    for Contents { name, at, from, to } in &transition.constants {
        contents(name, *at, from, to)?;
    }
    transition.sites.iter().try_for_each(|one| site(view, one))?;
    transition.trampolines.iter().try_for_each(|one| span("a dispatcher", *one))?;
    transition.loop_entries.iter().try_for_each(|one| address("an entry", *one))?;
    let mut code = transition.leave.iter().chain(&transition.enter).chain(&transition.staying);
    code.try_for_each(|code| {
        text("the name of code", &code.name)?;
        span(&code.name, code.span)
    })
}

fn site(view: &View, site: &Site) -> Valid {
    text("the name of a function", &site.name)?;
    address(&site.name, site.entry)?;
    address("a dispatcher", site.dispatcher)?;
    boundaries(&site.name, &site.inner_boundaries)?;
    [site.from, site.to].into_iter().try_for_each(|side| {
        address(&site.name, side.target)?;
        ensure(side.patch.is_none_or(|number| view.patch(number).is_some()), || {
            format!("{} has code of a patch that does not exist", site.name)
        })
    })
}

fn lookup_redirect(redirect: &LookupRedirectRecord) -> Valid {
    span("the lookup redirect's table", redirect.table)?;
    ensure(redirect.table.len == TABLE_LEN, || {
        format!("the lookup redirect's table has {} bytes", redirect.table.len)
    })?;
    boundaries("the lookup redirect's entry", &redirect.inner_boundaries)?;
    [redirect.entry, redirect.code, redirect.displaced]
        .into_iter()
        .try_for_each(|at| address("the lookup redirect", at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::{HookRecord, NamedSpan};
    use stillpoint_patch_format::{BuildId, DiffFact, Scope};

    const ARENA: Span = Span { start: Avma(0x10_0000), len: 0x3000 };

    fn patch() -> PlacedPatch {
        let at = |offset: u64, len| Span::new(Avma(ARENA.start.0 + offset), len);
        let function = FunctionRecord {
            name: "f".into(),
            unit: "a.c".into(),
            old: Span::new(Avma(0x4000), 64),
            old_parts: vec![],
            original: [0x90; 5],
            displaced_len: 5,
            inner_boundaries: vec![1, 2, 3, 4],
            loops_to_entry: false,
            displaced: at(0, 0).start,
            new: at(0x200, 0).start,
            new_span: at(0x200, 32),
            dispatchers: at(0x180, 128),
            dispatcher_len: 64,
        };
        PlacedPatch {
            name: "CVE-2026-1".into(),
            digest: [0; 32],
            description: "two\nlines".into(),
            cves: vec!["CVE-2026-1".into()],
            diffs: vec![DiffFact { name: "a.patch".into(), sha256: [0; 32] }],
            based_on: vec![],
            build_id: BuildId(vec![1; 20]),
            module: "redis-server".into(),
            bias: 0,
            signer: None,
            scope: Scope::ThreadLocal,
            placed_at_s: 0,
            arena: ARENA,
            states: at(0x1000, 64),
            trampolines: vec![at(0, 0x200)],
            text: vec![NamedSpan { name: "f".into(), span: at(0x200, 32) }],
            eh_frame: at(0x1100, 64),
            search_table: at(0x1200, 16),
            functions: vec![function],
            constants: vec![ConstantRecord {
                name: "c".into(),
                at: Avma(0x8000),
                original: vec![1, 2],
                new: vec![3, 4],
            }],
            data: vec![],
            off_stack: vec![],
            staying: vec![],
            exports: vec![],
            escaping: vec![],
            hooks: HookRecord::default(),
            symbols: vec![],
        }
    }

    /// Returns the error for a patch that a forger has changed.
    fn said(forge: impl FnOnce(&mut PlacedPatch)) -> String {
        let mut forged = patch();
        forge(&mut forged);
        let record = Record::Placed(Box::new(forged));
        let told = check(&View::default(), &record).map_err(|error| error.to_string());
        assert!(View::default().add(record).is_err() == told.is_err(), "every record comes through the same door");
        told.err().unwrap_or_default()
    }

    #[test]
    fn names_that_lead_elsewhere_or_break_lines_are_refused() {
        assert_eq!(said(|_| ()), "");
        for name in ["../../etc/cron.d/x", "a/b", "", "a\nshell touch /tmp/x", "a b", &"x".repeat(129), "\u{1b}[2J"] {
            assert!(said(|patch| patch.name = name.into()).contains("not the name of a patch"), "{name:?}");
        }
        for name in ["f\nshell id", "f\u{1b}]0;x\u{7}", "f\0"] {
            assert!(said(|patch| patch.functions[0].name = name.into()).contains("control characters"), "{name:?}");
            assert!(said(|patch| patch.text[0].name = name.into()).contains("control characters"), "{name:?}");
            assert!(said(|patch| patch.diffs[0].name = name.into()).contains("control characters"), "{name:?}");
            assert!(said(|patch| patch.module = name.into()).contains("control characters"), "{name:?}");
        }
        assert!(said(|patch| patch.module = "x".repeat(TEXT_MAX + 1)).contains("bytes"));
    }

    #[test]
    fn lengths_without_limit_are_refused() {
        for len in [ARENA_MAX + 1, u64::MAX, 1 << 40] {
            assert_ne!(said(|patch| patch.arena.len = len), "", "{len:#x}");
            assert_ne!(said(|patch| patch.eh_frame.len = len), "", "{len:#x}");
            assert_ne!(said(|patch| patch.text[0].span.len = len), "", "{len:#x}");
            assert_ne!(said(|patch| patch.functions[0].dispatchers.len = len), "", "{len:#x}");
        }
        assert_ne!(said(|patch| patch.states.start = Avma(0)), "", "state bytes before the text");
        assert_ne!(said(|patch| patch.functions[0].old = Span::new(Avma(u64::MAX - 4), 64)), "");
        assert_ne!(said(|patch| patch.functions[0].inner_boundaries = vec![9]), "");
        assert_ne!(said(|patch| patch.constants[0].new = vec![1; 3]), "");
        let mut view = View::default();
        let big = |start: u64| {
            let mut big = patch();
            big.arena = Span::new(Avma(start), ARENA_MAX);
            Record::Placed(Box::new(big))
        };
        (0..4).try_for_each(|_| view.add(big(ARENA.start.0))).expect("4 GiB");
        view.add(big(ARENA.start.0)).expect_err("more than that");
    }

    #[test]
    fn more_functions_than_readers_compare_are_refused() {
        let many = |patch: &mut PlacedPatch, count| patch.functions = vec![patch.functions[0].clone(); count];
        assert_eq!(said(|patch| many(patch, CHANGED_MAX - 1)), "");
        assert!(said(|patch| many(patch, CHANGED_MAX)).contains("65537 functions and constants"));
        let mut half = patch();
        many(&mut half, CHANGED_MAX / 2);
        let half = Record::Placed(Box::new(half));
        let mut view = View::default();
        view.add(half.clone()).expect("half of what is allowed");
        view.add(half).expect_err("more than all of it, with its constant");
    }

    #[test]
    fn data_without_limit_or_without_a_patch_are_refused() {
        let one = |len: usize| ConstantRecord {
            name: "limits".into(),
            at: Avma(0x8000),
            original: vec![1; len],
            new: vec![2; len],
        };
        let mut view = View::default();
        view.add(Record::PlacedData(vec![one(4)])).expect_err("no patch is placed");
        view.add(Record::Placed(Box::new(patch()))).expect("a patch");
        let torn = ConstantRecord { new: vec![2; 3], ..one(4) };
        for wrong in [
            vec![torn],
            vec![one(DATA_MAX as usize + 1)],
            vec![one(DATA_MAX as usize); 2],
            vec![one(0); CHANGED_MAX + 1],
        ] {
            view.clone().add(Record::PlacedData(wrong)).expect_err("not what the tool writes");
        }
        view.add(Record::PlacedData(vec![one(4)])).expect("its data");
        let at = |active: &[u32]| view.data(active).into_iter().map(|(at, bytes)| (at, bytes[0])).collect::<Vec<_>>();
        assert_eq!((at(&[0]), at(&[])), (vec![(Avma(0x8000), 2)], vec![(Avma(0x8000), 1)]));
        view.add(Record::PlacedData(vec![one(4)])).expect_err("it has data already");
    }

    #[test]
    fn pages_that_were_opened_are_those_of_data() {
        let begin = |opened: Vec<Span>| {
            let changes = vec![Contents { name: "limits".into(), at: Avma(0x8000), from: vec![1], to: vec![2] }];
            let transition = crate::ledger::first_transition();
            let data = DataTransition { changes, opened, completer: Avma(0x2000) };
            check(&View::default(), &Record::BeginWithData(Box::new(transition), Box::new(data)))
        };
        let pages = |start, len| Span::new(Avma(start), len);
        begin(vec![pages(0x8000, 0x1000)]).expect("one page");
        for wrong in [pages(0x8001, 0x1000), pages(0x8000, 0x1001), pages(0x8000, 1 << 30), pages(1 << 47, 0x1000)] {
            begin(vec![wrong]).expect_err("no pages of data");
        }
        begin(vec![pages(0x8000, 0x1000); 2]).expect_err("more ranges than variables");
    }

    #[test]
    fn a_guide_has_the_table_that_is_read() {
        let redirect = |table: Span| {
            let record = LookupRedirectRecord {
                entry: Avma(0x1000),
                original: [0; 5],
                jump: [0; 5],
                inner_boundaries: vec![],
                code: Avma(0x2000),
                displaced: Avma(0x2080),
                table,
            };
            check(&View::default(), &Record::LookupRedirect(Box::new(record)))
        };
        redirect(Span::new(Avma(0x3000), TABLE_LEN)).expect("ours");
        for len in [0, 8, 63, TABLE_LEN - 1, TABLE_LEN + 64, u64::MAX] {
            redirect(Span::new(Avma(0x3000), len)).expect_err("no table of ours");
        }
    }
}

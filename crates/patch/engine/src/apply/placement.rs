//! Ledger record of a patch in memory.

use super::preflight::Preflight;
use crate::Error;
use crate::ledger::{
    ConstantRecord, ExportRecord, FunctionRecord, HookRecord, NamedSpan, OffStackRecord, PlacedPatch, Span,
    SymbolRecord,
};
use crate::link::{DISPATCHER_LEN, DISPATCHERS, Image, Layout, STATES_LEN, contents};
use std::time::{SystemTime, UNIX_EPOCH};
use stillpoint_patch_format::{Avma, Patch, Range, SectionKind, Signed, SymbolValue};
use stillpoint_patch_insn::{self as insn, JUMP_LEN};
use stillpoint_patch_tracee::Module;

/// Returns the record of `signed`, linked as `image`, in the arena at `arena`; puts the displaced prologues into the image.
pub(crate) fn place(
    signed: &Signed,
    signer: Option<String>,
    module: &Module,
    prepared: &Preflight,
    layout: &Layout,
    arena: Avma,
    image: &mut Image,
) -> Result<PlacedPatch, Error> {
    let patch = &signed.patch;
    let at = |offset: u64| Avma(arena.0 + offset);
    let span = |range: Range| Span::new(module.avma(range.start), range.len);
    let mut functions = Vec::with_capacity(patch.functions.len());
    for (index, function) in patch.functions.iter().enumerate() {
        let (plan, code, laid) = (&prepared.entries[index], &prepared.codes[index], layout.functions[index]);
        let entry = module.avma(function.old.start);
        let displaced = insn::displace(code, function.old.start, plan, entry, at(laid.displaced));
        let displaced = displaced.map_err(|source| Error::Entry { function: function.name.clone(), source })?;
        let start = laid.displaced as usize;
        image.segments[0][start..start + displaced.len()].copy_from_slice(&displaced);
        let new = Avma(image.addresses[function.new as usize].unwrap_or_default());
        functions.push(FunctionRecord {
            name: function.name.clone(),
            unit: function.unit.clone(),
            old: span(function.old),
            old_parts: function.old_parts.iter().map(|p| span(*p)).collect(),
            original: std::array::from_fn(|i| code.get(i).copied().unwrap_or(0xcc)),
            displaced_len: plan.displaced_len as u8,
            inner_boundaries: plan.inner_boundaries.iter().copied().filter(|b| usize::from(*b) < JUMP_LEN).collect(),
            loops_to_entry: plan.loops_to_entry,
            displaced: at(laid.displaced),
            new,
            new_span: section_span(patch, layout, arena, function.new),
            dispatchers: Span::new(at(laid.dispatchers), DISPATCHERS * DISPATCHER_LEN),
            dispatcher_len: DISPATCHER_LEN as u32,
        });
    }
    let constants = patch.constants.iter().zip(&prepared.constants).map(|(constant, original)| ConstantRecord {
        name: constant.name.clone(),
        at: module.avma(constant.old.start),
        original: original.clone(),
        new: contents(image, layout, arena, constant.new, constant.old.len),
    });
    let constants = constants.collect();
    let data = patch.data.iter().map(|change| ConstantRecord {
        name: change.name.clone(),
        at: module.avma(change.old.start),
        original: contents(image, layout, arena, change.shipped, change.old.len),
        new: contents(image, layout, arena, change.new, change.old.len),
    });
    let data = data.collect();
    let address = |symbol: &u32| Avma(image.addresses[*symbol as usize].unwrap_or_default());
    let hooks = |list: &[u32]| list.iter().map(address).collect();
    let placed_at_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    Ok(PlacedPatch {
        name: patch.name.clone(),
        digest: signed.digest,
        description: patch.description.clone(),
        cves: patch.cves.clone(),
        diffs: patch.source.diffs.clone(),
        based_on: patch.based_on.clone(),
        build_id: patch.target.build_id.clone(),
        module: patch.target.file_name.clone(),
        bias: module.bias,
        signer,
        scope: patch.scope,
        placed_at_s,
        arena: Span::new(arena, layout.len()),
        states: Span::new(at(layout.states), STATES_LEN),
        trampolines: layout.trampolines(arena),
        text: text(patch, layout, arena),
        eh_frame: Span::new(at(layout.eh_frame.0), layout.eh_frame.1),
        search_table: Span::new(at(layout.search_table.0), layout.search_table.1),
        functions,
        constants,
        data,
        off_stack: off_stack(patch, module),
        staying: patch.staying.clone(),
        exports: patch.exports.iter().map(|e| export(patch, *e, address(e))).collect(),
        escaping: patch.escaping.clone(),
        hooks: HookRecord {
            pre_apply: hooks(&patch.hooks.pre_apply),
            post_apply: hooks(&patch.hooks.post_apply),
            pre_revert: hooks(&patch.hooks.pre_revert),
            post_revert: hooks(&patch.hooks.post_revert),
        },
        symbols: symbols(patch, image),
    })
}

fn export(patch: &Patch, symbol: u32, address: Avma) -> ExportRecord {
    ExportRecord { name: patch.symbols[symbol as usize].name.clone(), address }
}

fn off_stack(patch: &Patch, module: &Module) -> Vec<OffStackRecord> {
    let record = |o: &stillpoint_patch_format::OffStack| OffStackRecord {
        name: o.name.clone(),
        span: Span::new(module.avma(o.range.start), o.range.len),
        reason: o.reason.clone(),
    };
    patch.off_stack.iter().map(record).collect()
}

fn section_span(patch: &Patch, layout: &Layout, arena: Avma, symbol: u32) -> Span {
    match patch.symbols[symbol as usize].value {
        SymbolValue::Patch { section, .. } => {
            let section = section as usize;
            Span::new(Avma(arena.0 + layout.sections[section]), patch.sections[section].size)
        }
        _ => Span::new(Avma(0), 0),
    }
}

fn text(patch: &Patch, layout: &Layout, arena: Avma) -> Vec<NamedSpan> {
    let sections = patch.sections.iter().zip(&layout.sections);
    let text = sections.filter(|(s, _)| s.kind == SectionKind::Text && s.size > 0);
    let named = |(s, at): (&stillpoint_patch_format::Section, &u64)| {
        let name = s.name.strip_prefix(".text.").unwrap_or(&s.name).trim_start_matches("unlikely.");
        NamedSpan { name: name.to_owned(), span: Span::new(Avma(arena.0 + at), s.size) }
    };
    text.map(named).collect()
}

fn symbols(patch: &Patch, image: &Image) -> Vec<SymbolRecord> {
    let own = patch.symbols.iter().zip(&image.addresses).filter_map(|(symbol, address)| {
        let SymbolValue::Patch { section, offset } = symbol.value else { return None };
        let of = &patch.sections[section as usize];
        let wanted = matches!(of.kind, SectionKind::Text | SectionKind::Data | SectionKind::Bss | SectionKind::RoData);
        let named = !symbol.name.is_empty() && !symbol.name.starts_with(".L") && wanted;
        let span = Span::new(Avma((*address)?), of.size - offset);
        named.then(|| SymbolRecord { name: symbol.name.clone(), span, code: of.kind == SectionKind::Text })
    });
    own.collect()
}

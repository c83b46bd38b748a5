//! Values of a patch's symbols in one process.

use crate::Error;
use crate::image::{Dynamic, Found, executable_tls_offset, search_order, static_tls_offset, tls_segment};
use crate::ledger::View;
use crate::link::SymbolAddress;
use std::collections::BTreeSet;
use stillpoint_patch_format::{Avma, Patch, RelocationKind, Svma, Symbol, SymbolValue, TargetKind};
use stillpoint_patch_tracee::{Memory, Module, Process};

/// Looks up every external symbol of `patch`; the patch's own symbols stay `None`.
pub(crate) fn resolve(
    process: &Process,
    modules: &[Module],
    module: &Module,
    view: &View,
    patch: &Patch,
) -> Result<Vec<Option<SymbolAddress>>, Error> {
    let used = |kinds: &[RelocationKind]| {
        let relocations = patch.sections.iter().flat_map(|s| &s.relocations);
        relocations.filter(|r| kinds.contains(&r.kind)).map(|r| r.symbol).collect()
    };
    let thread_locals = used(&[RelocationKind::TpOff32, RelocationKind::GotTpOff32]);
    let narrow = used(&[RelocationKind::Abs32, RelocationKind::Abs32Signed]);
    let mut resolver = Resolver { process, modules, module, view, patch, order: None, thread_locals, narrow };
    patch.symbols.iter().zip(0..).map(|(symbol, index)| resolver.symbol(symbol, index)).collect()
}

struct Resolver<'a> {
    process: &'a Process,
    modules: &'a [Module],
    module: &'a Module,
    view: &'a View,
    patch: &'a Patch,
    order: Option<Vec<usize>>,
    /// Symbols that the patch uses as thread-locals.
    thread_locals: BTreeSet<u32>,
    /// Symbols whose address must fit 32 bits.
    narrow: BTreeSet<u32>,
}

impl<'a> Resolver<'a> {
    fn refuse<T>(&self, symbol: &Symbol, why: impl Into<String>) -> Result<T, Error> {
        Err(Error::Symbol { patch: self.patch.name.clone(), symbol: symbol.name.clone(), why: why.into() })
    }

    fn memory(&self) -> &'a Memory {
        self.process.memory()
    }

    fn thread_local_slot(&self, symbol: &Symbol, slot: Svma) -> Result<u64, Error> {
        let value = self.memory().read_u64(self.module.avma(slot))?;
        if value == 0 {
            return self.refuse(symbol, format!("the target's slot at {slot}, which holds its offset, is empty"));
        }
        Ok(value)
    }

    fn symbol(&mut self, symbol: &Symbol, index: u32) -> Result<Option<SymbolAddress>, Error> {
        let value = match &symbol.value {
            SymbolValue::Patch { .. } => return Ok(None),
            SymbolValue::Target(at) => self.module.avma(*at).0,
            // a weak symbol without a definition is correctly zero
            SymbolValue::TargetSlot(at) => self.memory().read_u64(self.module.avma(*at))?,
            SymbolValue::TargetTlsSlot(at) => self.thread_local_slot(symbol, *at)?,
            SymbolValue::TargetTls(offset) => self.thread_local(symbol, *offset)?,
            SymbolValue::Import { version } => self.import(symbol, index, version.as_deref())?,
            SymbolValue::OtherPatch => self.other_patch(symbol)?.0,
        };
        Ok(Some(value))
    }

    fn thread_local(&self, symbol: &Symbol, offset: u64) -> Result<u64, Error> {
        if self.patch.target.kind == TargetKind::SharedLibrary {
            let base = self.library_thread_locals(symbol, self.module)?;
            return Ok(base.wrapping_add_unsigned(offset) as u64);
        }
        match tls_segment(self.memory(), self.module)? {
            Some(tls) if offset < tls.len => Ok(executable_tls_offset(tls).wrapping_add_unsigned(offset) as u64),
            Some(tls) => self.refuse(
                symbol,
                format!("its offset {offset:#x} is outside of the {:#x} bytes of thread-local variables", tls.len),
            ),
            None => self.refuse(symbol, "the target has no thread-local variables"),
        }
    }

    fn library_thread_locals(&self, symbol: &Symbol, module: &Module) -> Result<i64, Error> {
        match static_tls_offset(self.process, self.modules, module)? {
            Some(offset) => Ok(offset),
            None => self.refuse(
                symbol,
                format!("the thread-local variables of {} have a different offset in each thread", module.path),
            ),
        }
    }

    /// Returns the value of a definition in another library, as the patch uses it.
    fn defined(&self, symbol: &Symbol, index: u32, module: &Module, found: Found) -> Result<u64, Error> {
        let meant = self.thread_locals.contains(&index);
        if meant != found.thread_local {
            let is = if found.thread_local { "a thread-local variable" } else { "not a thread-local variable" };
            return self.refuse(symbol, format!("it is {is} in {}, but the patch uses it differently", module.path));
        }
        if found.thread_local {
            let offset = found.address.0.wrapping_sub(module.bias);
            return Ok(self.library_thread_locals(symbol, module)?.wrapping_add_unsigned(offset) as u64);
        }
        // code can be reached through a stub
        if !found.function && self.narrow.contains(&index) && u32::try_from(found.address.0).is_err() {
            return self.refuse(symbol, format!("it is located in {}, out of reach of a 32-bit address", module.path));
        }
        Ok(found.address.0)
    }

    /// Returns the address from the newest active patch of the same module that exports the name.
    fn other_patch(&self, symbol: &Symbol) -> Result<Avma, Error> {
        let active = self.view.active.iter().rev().filter_map(|n| self.view.patch(*n));
        let mut exports = active.filter(|p| p.build_id == self.patch.target.build_id).flat_map(|p| &p.exports);
        match exports.find(|e| e.name == symbol.name) {
            Some(export) => Ok(export.address),
            None => self.refuse(symbol, "no active patch exports it"),
        }
    }

    fn import(&mut self, symbol: &Symbol, index: u32, version: Option<&str>) -> Result<u64, Error> {
        let modules = self.modules;
        let order = self.order.get_or_insert_with(|| search_order(self.process, modules)).clone();
        for module in order.into_iter().map(|place| &modules[place]) {
            let Some(dynamic) = Dynamic::of(self.memory(), module)? else { continue };
            let Some(found) = dynamic.find(&symbol.name, version) else { continue };
            return match found.ifunc {
                true => Ok(self.bound(symbol, module, found.address)?.0),
                false => self.defined(symbol, index, module, found),
            };
        }
        // a fix may add a symbol to an executable that its plug-ins then use
        let mut active = self.view.active.iter().rev().filter_map(|n| self.view.patch(*n));
        let added = active.find_map(|p| p.exports.iter().find(|e| e.name == symbol.name));
        if let (Some(export), None) = (added, version) {
            return Ok(export.address.0);
        }
        let version = version.map(|v| format!("@{v}")).unwrap_or_default();
        self.refuse(symbol, format!("no mapped library defines {}{version}", symbol.name))
    }

    /// Returns the address of an indirect function: its resolver must not be called from outside, but some module has bound it already.
    fn bound(&self, symbol: &Symbol, defined_in: &Module, resolver: Avma) -> Result<Avma, Error> {
        let text = |value: Avma| defined_in.mappings.iter().any(|m| m.execute && m.contains(value));
        let within = Dynamic::of(self.memory(), defined_in)?.and_then(|d| d.bound_within(resolver));
        if let Some(value) = within.filter(|v| *v != resolver && text(*v)) {
            return Ok(value);
        }
        for module in self.modules {
            let Some(dynamic) = Dynamic::of(self.memory(), module)? else { continue };
            for (slot, _) in dynamic.bound_slots(|name| name == symbol.name.as_bytes()) {
                let value = Avma(self.memory().read_u64(slot)?);
                if text(value) {
                    return Ok(value);
                }
            }
        }
        self.refuse(symbol, format!("it is an indirect function of {} that no module has bound yet", defined_in.path))
    }
}

//! What the symbols of a patch stand for in one process.

use crate::Error;
use crate::image::{Dynamic, executable_tls_offset, search_order, tls_segment};
use crate::ledger::View;
use crate::link::SymbolAddress;
use stillpoint_patch_format::{Avma, Patch, Svma, Symbol, SymbolValue, TargetKind};
use stillpoint_patch_tracee::{Memory, Module, Process};

/// Looks up every symbol of `patch` that lies outside of it; the patch's own stay `None`.
pub(crate) fn resolve(
    process: &Process,
    modules: &[Module],
    module: &Module,
    view: &View,
    patch: &Patch,
) -> Result<Vec<Option<SymbolAddress>>, Error> {
    let mut resolver = Resolver { process, modules, module, view, patch, order: None };
    patch.symbols.iter().map(|symbol| resolver.symbol(symbol)).collect()
}

struct Resolver<'a> {
    process: &'a Process,
    modules: &'a [Module],
    module: &'a Module,
    view: &'a View,
    patch: &'a Patch,
    order: Option<Vec<usize>>,
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
            return self.refuse(symbol, format!("the target's slot at {slot} for its offset is empty"));
        }
        Ok(value)
    }

    fn symbol(&mut self, symbol: &Symbol) -> Result<Option<SymbolAddress>, Error> {
        let value = match &symbol.value {
            SymbolValue::Patch { .. } => return Ok(None),
            SymbolValue::Target(at) => self.module.avma(*at).0,
            // a weak symbol that nobody defines rightly is zero
            SymbolValue::TargetSlot(at) => self.memory().read_u64(self.module.avma(*at))?,
            SymbolValue::TargetTlsSlot(at) => self.thread_local_slot(symbol, *at)?,
            SymbolValue::TargetTls(offset) => self.thread_local(symbol, *offset)?,
            SymbolValue::Import { version } => self.import(symbol, version.as_deref())?.0,
            SymbolValue::OtherPatch => self.other_patch(symbol)?.0,
        };
        Ok(Some(value))
    }

    fn thread_local(&self, symbol: &Symbol, offset: u64) -> Result<u64, Error> {
        if self.patch.target.kind == TargetKind::SharedLibrary {
            return self
                .refuse(symbol, "the thread-locals of a shared library have no offset that is known from outside");
        }
        match tls_segment(self.memory(), self.module)? {
            Some(tls) if offset < tls.len => Ok(executable_tls_offset(tls).wrapping_add_unsigned(offset) as u64),
            Some(tls) => self.refuse(symbol, format!("offset {offset:#x} in {:#x} bytes of thread-locals", tls.len)),
            None => self.refuse(symbol, "the target has no thread-locals"),
        }
    }

    /// The newest active patch of the same module that exports the name.
    fn other_patch(&self, symbol: &Symbol) -> Result<Avma, Error> {
        let active = self.view.active.iter().rev().filter_map(|n| self.view.patch(*n));
        let mut exports = active.filter(|p| p.build_id == self.patch.target.build_id).flat_map(|p| &p.exports);
        match exports.find(|e| e.name == symbol.name) {
            Some(export) => Ok(export.address),
            None => self.refuse(symbol, "no active patch exports it"),
        }
    }

    fn import(&mut self, symbol: &Symbol, version: Option<&str>) -> Result<Avma, Error> {
        let modules = self.modules;
        let order = self.order.get_or_insert_with(|| search_order(self.process, modules)).clone();
        for index in order {
            let module = &modules[index];
            let Some(dynamic) = Dynamic::of(self.memory(), module)? else { continue };
            let Some(found) = dynamic.find(&symbol.name, version) else { continue };
            if !found.ifunc {
                return Ok(found.address);
            }
            return self.bound(symbol, module, found.address);
        }
        let version = version.map(|v| format!("@{v}")).unwrap_or_default();
        self.refuse(symbol, format!("no mapped library defines {}{version}", symbol.name))
    }

    /// An indirect function: its resolver must not be called from outside, but some module has bound it already.
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

//! A process as an operation finds it.

use crate::event_pump::ended_or;
use crate::generation_word::check_libc;
use crate::image::Dynamic;
use crate::ledger::store::{self, Store};
use crate::ledger::{Record, Transition, View};
use crate::{Error, data_change};
use stillpoint_patch_format::Avma;
use stillpoint_patch_insn::JUMP_LEN;
use stillpoint_patch_tracee::{Mapping, Module, Pid, Process, Stat, Status, frozen_group};

/// A process in its state before an operation changes it.
pub(crate) struct Target {
    pub(crate) process: Process,
    pub(crate) modules: Vec<Module>,
    pub(crate) mappings: Vec<Mapping>,
    pub(crate) store: Option<Store>,
    pub(crate) view: View,
}

impl Target {
    pub(crate) fn open(pid: Pid) -> Result<Self, Error> {
        refuse_own_tracer(pid)?;
        let process = Process::open(pid)?;
        if let Some(group) = frozen_group(pid) {
            return Err(Error::Frozen { pid, group });
        }
        Target::inspect(process.clone()).map_err(|error| ended_or(&process, error))
    }

    fn inspect(process: Process) -> Result<Self, Error> {
        let mappings = process.mappings()?;
        // a process that ends gives up its memory before it is a zombie
        if mappings.is_empty() {
            return Err(Error::Ended(process.pid()));
        }
        let modules = process.modules_among(&mappings);
        check_process(&process, &mappings, &modules)?;
        let store = store::find_in(&process, &mappings)?;
        let view = store.as_ref().map(|s| s.view().clone()).unwrap_or_default();
        // it takes long: not while a thread is stopped
        process.signal_returns()?;
        Ok(Target { process, modules, mappings, store, view })
    }

    pub(crate) fn reload(&mut self) -> Result<(), Error> {
        self.mappings = self.process.mappings()?;
        self.store = store::refresh(&self.process, &self.mappings, self.store.take())?;
        self.view = self.store.as_ref().map(|s| s.view().clone()).unwrap_or_default();
        Ok(())
    }

    /// Returns the used bytes of the ledger: while their number is unchanged, no tool has changed anything.
    pub(crate) fn ledger_len(&self) -> usize {
        self.store.as_ref().map_or(0, |s| s.ledger.end)
    }

    /// Returns the address of the ledger, if there is one.
    pub(crate) fn ledger_at(&self) -> Option<Avma> {
        self.store.as_ref().map(Store::at)
    }

    /// Returns the offset of the generation word from the thread pointer, 0 without a ledger.
    pub(crate) fn word_offset(&self) -> i32 {
        self.store.as_ref().map_or(0, |store| store.ledger.word_offset)
    }

    /// Appends a record to the ledger. When this returns, the record is in the target, even if the tool is killed afterwards.
    ///
    /// # Errors
    /// There is no ledger, the record breaks a rule, or the ledger cannot be written.
    pub(crate) fn append(&mut self, record: Record) -> Result<(), Error> {
        let store = self.store.as_mut().ok_or(Error::NoWord(self.process.pid()))?;
        store.append(self.process.memory(), record)
    }

    /// Checks that every entry, constant and variable holds the bytes that the transition replaces.
    pub(crate) fn expect_old_side(&self, transition: &Transition) -> Result<(), Error> {
        let memory = self.process.memory();
        for site in &transition.sites {
            let now: [u8; JUMP_LEN] = memory.read_array(site.entry)?;
            if let Some(offset) = (0..JUMP_LEN).find(|i| now[*i] != site.from.bytes[*i]) {
                return Err(Error::BytesDiffer { function: site.name.clone(), at: site.entry, offset });
            }
        }
        for constant in &transition.constants {
            let now = memory.read_vec(constant.at, constant.from.len())?;
            if let Some(offset) = now.iter().zip(&constant.from).position(|(a, b)| a != b) {
                return Err(Error::BytesDiffer { function: constant.name.clone(), at: constant.at, offset });
            }
        }
        let data = transition.data.iter().flat_map(|data| &data.changes);
        data_change::expect_all(memory, &self.view, data)
    }
}

/// Limit of the processes that are walked from this one to the first.
const ANCESTORS_MAX: usize = 256;

/// Refuses the tracer of this process or of one of its ancestors: this process would wait for the tracer, and the tracer for this process.
fn refuse_own_tracer(pid: Pid) -> Result<(), Error> {
    let mut at = Pid(std::process::id() as i32);
    for _ in 0..ANCESTORS_MAX {
        if Status::of(at).is_some_and(|status| status.tracer == pid) {
            return Err(Error::OwnTracer(pid));
        }
        match Stat::of(at) {
            Some(stat) if stat.parent.0 > 0 => at = stat.parent,
            _ => break,
        }
    }
    Ok(())
}

/// Refuses a process that is unsuitable for every patch.
fn check_process(process: &Process, mappings: &[Mapping], modules: &[Module]) -> Result<(), Error> {
    check_libc(process, mappings)?;
    let unsuitable = |what: String| Err(Error::Unsuitable { pid: process.pid(), what });
    if process.shadow_stack()? {
        return unsuitable("has an active shadow stack".into());
    }
    let Some(executable) = modules.iter().find(|m| m.executable) else {
        return unsuitable("does not map its executable".into());
    };
    if Dynamic::of(process.memory(), executable)?.is_none() {
        return unsuitable("runs a statically linked executable".into());
    }
    Ok(())
}

//! libstillpoint in a process: finding its control block, sending requests, reading its state.

use super::abi::{
    ANSWER_AT, CONTROL_LEN, Control, GatherOutcome, MAGIC, Mode, Name, OUTCOME_AT, REQUEST_AT, Request, SLOT_LEN, Slot,
    VERSION, VERSION_AT, decode_slots, encode_answer,
};
use crate::Error;
use crate::image::Dynamic;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, OwnedFd};
use stillpoint_host::kernel_files;
use stillpoint_patch_format::Avma;
use stillpoint_patch_tracee::{Memory, Module, Process, Tid};

/// Largest data mapping, in bytes, that is searched for a control block without a symbol.
const SEARCHED_DATA_MAX: u64 = 64 << 20;

/// Location of the control block of a process.
#[derive(Debug)]
pub(crate) struct Library {
    at: Avma,
    /// True if the process has a PID namespace of its own: its slots hold other numbers than ours.
    nested: bool,
    /// Threads by their number in the slots.
    tids: BTreeMap<i32, Tid>,
    wake_fd: Option<OwnedFd>,
}

fn control_at(memory: &Memory, at: Avma) -> Option<Control> {
    Control::decode(&memory.read_array::<CONTROL_LEN>(at).ok()?)
}

/// Finds a control block that is linked into an executable without exported symbols.
fn search_data(memory: &Memory, module: &Module) -> Option<Avma> {
    let data = module.mappings.iter().filter(|m| m.write && m.len() <= SEARCHED_DATA_MAX);
    data.into_iter().find_map(|mapping| {
        let mut found = None;
        memory.look_through(mapping.start, mapping.len(), MAGIC.len() - 1, |at, bytes| {
            let mut hits = memchr::memmem::find_iter(bytes, MAGIC).map(|offset| Avma(at.0 + offset as u64));
            found = hits.find(|at| at.0 % 8 == 0 && control_at(memory, *at).is_some());
            if found.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        found
    })
}

fn may_contain_library(module: &&Module) -> bool {
    module.executable || module.path.rsplit('/').next().is_some_and(|name| name.starts_with("libstillpoint."))
}

/// Returns the address of a module's control block by its symbol.
fn find_by_symbol(memory: &Memory, module: &Module) -> Result<Option<Avma>, Error> {
    let symbol = Dynamic::of(memory, module)?.and_then(|dynamic| dynamic.find("sp_control", None));
    Ok(symbol.map(|found| found.address))
}

impl Library {
    /// Finds the library: linked into the executable, or by the name of its file. If there are several, returns the initialised one.
    pub(crate) fn find(process: &Process, modules: &[Module]) -> Result<Option<Library>, Error> {
        let memory = process.memory();
        let mut places = Vec::new();
        for module in modules.iter().filter(may_contain_library) {
            let found = find_by_symbol(memory, module)?.filter(|at| control_at(memory, *at).is_some());
            let found = found.or_else(|| module.executable.then(|| search_data(memory, module)).flatten());
            places.extend(found);
        }
        let initialised = |at: &&Avma| control_at(memory, **at).is_some_and(|control| control.priorities > 0);
        let Some(at) = places.iter().find(initialised).or(places.first()) else { return Ok(None) };
        let nested = process.status()?.ns_pids.len() > 1;
        Ok(Some(Library { at: *at, nested, tids: BTreeMap::new(), wake_fd: None }))
    }

    /// Returns the version of a library that is unknown to this program, for people.
    pub(crate) fn other_version(process: &Process, modules: &[Module]) -> Result<Option<u32>, Error> {
        let memory = process.memory();
        for module in modules.iter().filter(may_contain_library) {
            let Some(at) = find_by_symbol(memory, module)? else { continue };
            let (mut magic, mut version) = ([0; MAGIC.len()], [0; 4]);
            let readable =
                memory.read(at, &mut magic).and_then(|()| memory.read(Avma(at.0 + VERSION_AT), &mut version));
            let version = u32::from_le_bytes(version);
            if readable.is_ok() && magic == *MAGIC && version != VERSION {
                return Ok(Some(version));
            }
        }
        Ok(None)
    }

    /// Reads the present contents of the control block.
    pub(crate) fn control(&self, memory: &Memory) -> Result<Control, Error> {
        Control::decode(&memory.read_array::<CONTROL_LEN>(self.at)?).ok_or(Error::Control(self.at))
    }

    /// Returns the registered threads.
    pub(crate) fn slots(&self, memory: &Memory) -> Result<Vec<Slot>, Error> {
        let control = self.control(memory)?;
        let bytes = memory.read_vec(Avma(control.slots), control.slots_used as usize * SLOT_LEN)?;
        Ok(decode_slots(&bytes))
    }

    /// Records which thread has which number in the slots.
    pub(crate) fn update_tids(&mut self, process: &Process, threads: &[Tid]) {
        if !self.nested {
            self.tids = threads.iter().map(|tid| (tid.0, *tid)).collect();
            return;
        }
        let present: BTreeSet<Tid> = threads.iter().copied().collect();
        self.tids.retain(|_, tid| present.contains(tid));
        let known: BTreeSet<Tid> = self.tids.values().copied().collect();
        for tid in present.difference(&known) {
            let inner = process.thread_status(*tid).ok().and_then(|status| status.ns_pids.last().copied());
            self.tids.extend(inner.map(|inner| (inner, *tid)));
        }
    }

    /// Returns the thread of a slot, if it is recorded.
    pub(crate) fn thread(&self, slot: &Slot) -> Option<Tid> {
        self.tids.get(&slot.tid).copied()
    }

    /// Makes a request to change the word or, if `generation` is not 0, to migrate to that generation. The bell is written last: threads do
    /// not read an incomplete request.
    pub(crate) fn send_request(
        &mut self,
        process: &Process,
        mode: Mode,
        group: Name,
        word: (i32, u32),
        generation: u32,
        deadline_ns: u64,
    ) -> Result<Request, Error> {
        let memory = process.memory();
        let control = self.control(memory)?;
        let bell = memory.read_array(Avma(control.bell)).map(u32::from_le_bytes)?;
        let last = control.last_number.max(bell);
        let request = Request {
            // 0 means that there never was a request
            number: last.checked_add(1).unwrap_or(1),
            word: word.1,
            mode,
            patcher_pid: std::process::id() as i32,
            deadline_ns,
            word_offset: i64::from(word.0),
            group,
            generation,
        };
        memory.write(Avma(self.at.0 + ANSWER_AT), &encode_answer(request.number))?;
        memory.write(Avma(self.at.0 + REQUEST_AT), &request.encode())?;
        memory.write(Avma(control.bell), &request.number.to_le_bytes())?;
        self.wake(process);
        Ok(request)
    }

    /// Writes the outcome of the last request. No thread may hold the library's lock, unless that does not matter.
    pub(crate) fn write_outcome(&self, memory: &Memory, outcome: GatherOutcome) -> Result<(), Error> {
        Ok(memory.write(Avma(self.at.0 + OUTCOME_AT), &(outcome as u32).to_le_bytes())?)
    }

    /// Makes the library check at once. Otherwise a thread checks at its next point, and a blocked thread a few times a second.
    pub(crate) fn wake(&mut self, process: &Process) {
        if self.wake_fd.is_none() {
            self.wake_fd =
                self.control(process.memory()).ok().and_then(|control| duplicate_eventfd(process, control.wake_fd));
        }
        let Some(fd) = &self.wake_fd else { return };
        // a hostile target may have filled the counter: then the write would never return
        let mut writable = [PollFd::new(fd, PollFlags::OUT)];
        if poll(&mut writable, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) == Ok(1) {
            let rung = rustix::io::write(fd, &1u64.to_ne_bytes());
            tracing::debug!(?rung, "rung");
        }
    }
}

/// Duplicates a descriptor of the process, if it is an eventfd.
fn duplicate_eventfd(process: &Process, fd: i32) -> Option<OwnedFd> {
    let pid = rustix::process::Pid::from_raw(process.pid().0)?;
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).ok()?;
    if fd < 0 || !process.is_alive() {
        return None;
    }
    let copy = pidfd_getfd(pidfd, fd, PidfdGetfdFlags::empty()).ok()?;
    let kind = kernel_files::link(format!("/proc/self/fd/{}", copy.as_raw_fd())).ok()?;
    (kind.as_os_str() == "anon_inode:[eventfd]").then_some(copy)
}

/// Returns the offset of the library's own word: no other word has to be searched for in all threads.
pub(crate) fn own_word(process: &Process, modules: &[Module]) -> Result<Option<i32>, Error> {
    let Some(library) = Library::find(process, modules)? else { return Ok(None) };
    Ok(Some(library.control(process.memory())?.word_offset))
}

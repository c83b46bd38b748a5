//! All threads standing.

use crate::{Error, Held, Tid};
use std::marker::PhantomData;
use stillpoint_patch_format::Avma;

/// All threads of a process standing. Dropping it thaws them, those that ran before first.
#[derive(Debug)]
pub struct Frozen<'s, 'p> {
    session: PhantomData<(&'s mut (), &'p ())>,
}

impl Frozen<'_, '_> {
    /// The threads, all of them standing (kernel workers not among them), in the order stopped.
    pub fn threads(&self) -> &[Tid] {
        &[]
    }

    /// One of them.
    pub fn thread(&mut self, _tid: Tid) -> Result<Held<'_>, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// A thread suited to carry remote calls.
    pub fn carrier(&mut self) -> Result<Held<'_>, Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Writes pieces of text, each with one write that a kill cannot split (so a piece must not cross a page: all are
    /// checked before the first is written). The caller has proved that no thread stands inside of any of them.
    pub fn write_text(&mut self, _pieces: &[(Avma, &[u8])]) -> Result<(), Error> {
        Err(Error::Unsupported("this yet"))
    }

    /// Thaws and says for how long each thread stood, in nanoseconds, in the order thawed.
    pub fn thaw(self) -> Result<Vec<(Tid, u64)>, Error> {
        Err(Error::Unsupported("this yet"))
    }
}

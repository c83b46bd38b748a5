//! Owners of the memory in an image.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The process or shared memory whose memory an image holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Object {
    /// The private memory of a process.
    Task(u32),
    /// A shared memory, by its number in criu.
    Shmem(u64),
}

impl Object {
    /// Returns the name of its file.
    pub fn file_name(&self) -> String {
        match self {
            Object::Task(pid) => format!("foam-task-{pid}.img"),
            Object::Shmem(id) => format!("foam-shmem-{id}.img"),
        }
    }
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Object::Task(pid) => write!(f, "process {pid}"),
            Object::Shmem(id) => write!(f, "shared memory {id}"),
        }
    }
}

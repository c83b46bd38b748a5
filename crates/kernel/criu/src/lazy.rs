//! Messages of `criu restore --lazy-pages` on its socket: for each process its id, then one byte with its userfaultfd;
//! at the end that everything runs. Ids of zombies are negated, with nothing after them.

use crate::Error;

/// Name of the socket in the working directory of criu.
pub const SOCKET: &str = "lazy-pages.socket";

/// One message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message {
    /// The memory of this process: a byte with a descriptor follows.
    Process(u32),
    /// A zombie, which has no memory.
    Zombie(u32),
    /// All processes have been restored.
    Finished,
}

const FINISHED: u32 = 0x5253_5446;
/// Largest number of a process in any kernel.
const PID_MAX: i32 = 1 << 22;

impl Message {
    /// Decodes the four bytes of a message.
    ///
    /// # Errors
    /// The number is neither a process id nor the end.
    pub fn decode(bytes: [u8; 4]) -> Result<Self, Error> {
        if u32::from_le_bytes(bytes) == FINISHED {
            return Ok(Message::Finished);
        }
        match i32::from_le_bytes(bytes) {
            0 => Err(Error::Pid(0)),
            pid if !(-PID_MAX..=PID_MAX).contains(&pid) => Err(Error::Pid(pid)),
            pid if pid > 0 => Ok(Message::Process(pid.unsigned_abs())),
            pid => Ok(Message::Zombie(pid.unsigned_abs())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_told_apart() {
        assert_eq!(Message::decode(4121i32.to_le_bytes()), Ok(Message::Process(4121)));
        assert_eq!(Message::decode((-4121i32).to_le_bytes()), Ok(Message::Zombie(4121)));
        assert_eq!(Message::decode(*b"FTSR"), Ok(Message::Finished));
        for pid in [0, i32::MIN, i32::MAX] {
            assert_eq!(Message::decode(pid.to_le_bytes()), Err(Error::Pid(pid)));
        }
    }
}

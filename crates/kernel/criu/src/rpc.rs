//! criu's RPC: requests to `criu swrk`, its answers, and its notifications in between, each one message on a
//! `SOCK_SEQPACKET` socket.

use crate::Error;
use crate::image::message;
use prost::Message;

/// Operation of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum RequestType {
    /// No operation.
    Empty = 0,
    /// Freezes and dumps.
    Dump = 1,
    /// Restores.
    Restore = 2,
    /// Checks that this kernel has all that criu needs.
    Check = 3,
    /// Dumps the memory alone, in one pass.
    PreDump = 4,
    /// Notification, or the answer to one.
    Notify = 6,
    /// Returns the optional features.
    FeatureCheck = 9,
    /// Returns the version of criu.
    Version = 10,
}

/// Method by which criu blocks the network of sockets that it dumps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum NetworkLock {
    /// Rules of iptables.
    Iptables = 1,
    /// Rules of nftables.
    Nftables = 2,
    /// No method: the caller blocks it.
    Skip = 3,
}

messages! {
    /// Destination of pages.
    pub struct PageServer {
        /// Number of a socket that criu has inherited.
        pub fd: Option<i32> = (int32, optional, tag = "4"),
    }

    /// Options of a request that this product uses.
    pub struct Options {
        /// Directory of the images: descriptor in the requesting process.
        pub images_dir_fd: i32 = (int32, required, tag = "1"),
        /// Number of the process at the root of the tree to dump.
        pub pid: Option<i32> = (int32, optional, tag = "2"),
        /// Let the processes run after the dump.
        pub leave_running: Option<bool> = (bool, optional, tag = "3"),
        /// Dump established TCP connections.
        pub tcp_established: Option<bool> = (bool, optional, tag = "5"),
        /// Dump a tree whose session leader is outside.
        pub shell_job: Option<bool> = (bool, optional, tag = "7"),
        /// Dump file locks.
        pub file_locks: Option<bool> = (bool, optional, tag = "8"),
        /// Level of the log, from 0 to 4.
        pub log_level: Option<i32> = (int32, optional, tag = "9"),
        /// Name of the log in the working directory.
        pub log_file: Option<String> = (string, optional, tag = "10"),
        /// Destination of pages.
        pub ps: Option<PageServer> = (message, optional, tag = "11"),
        /// Send a notification at every step.
        pub notify_scripts: Option<bool> = (bool, optional, tag = "12"),
        /// Images of the previous pass, below the directory of images.
        pub parent_img: Option<String> = (string, optional, tag = "14"),
        /// Track changes of memory.
        pub track_mem: Option<bool> = (bool, optional, tag = "15"),
        /// Keep open files that were deleted, by links to them.
        pub link_remap: Option<bool> = (bool, optional, tag = "18"),
        /// Mode for control groups: 0 leaves them as they are.
        pub manage_cgroups_mode: Option<i32> = (int32, optional, tag = "34"),
        /// Limit in bytes up to which deleted files are kept in the images.
        pub ghost_limit: Option<u32> = (uint32, optional, tag = "35"),
        /// Restore memory on demand.
        pub lazy_pages: Option<bool> = (bool, optional, tag = "48"),
        /// Method by which the network is blocked.
        pub network_lock: Option<i32> = (enumeration = "NetworkLock", optional, tag = "64"),
    }

    /// Optional features of criu on this kernel.
    #[derive(Copy)]
    pub struct Features {
        /// Changes of memory can be tracked.
        pub mem_track: Option<bool> = (bool, optional, tag = "1"),
        /// Memory can be restored on demand.
        pub lazy_pages: Option<bool> = (bool, optional, tag = "2"),
    }

    /// A request.
    pub struct Request {
        /// The operation, a [`RequestType`].
        pub kind: i32 = (enumeration = "RequestType", required, tag = "1"),
        /// Options of the operation.
        pub opts: Option<Options> = (message, optional, tag = "2"),
        /// Permission to continue, as the answer to a notification.
        pub notify_success: Option<bool> = (bool, optional, tag = "3"),
        /// More requests follow.
        pub keep_open: Option<bool> = (bool, optional, tag = "4"),
        /// Features that are queried.
        pub features: Option<Features> = (message, optional, tag = "5"),
    }

    struct Restored {
        pid: i32 = (int32, required, tag = "1"),
    }

    struct Notification {
        script: Option<String> = (string, optional, tag = "1"),
        pid: Option<i32> = (int32, optional, tag = "2"),
    }

    struct Response {
        kind: i32 = (enumeration = "RequestType", required, tag = "1"),
        success: bool = (bool, required, tag = "2"),
        restore: Option<Restored> = (message, optional, tag = "4"),
        notify: Option<Notification> = (message, optional, tag = "5"),
        errno: Option<i32> = (int32, optional, tag = "7"),
        features: Option<Features> = (message, optional, tag = "8"),
        message: Option<String> = (string, optional, tag = "9"),
        version: Option<Version> = (message, optional, tag = "10"),
    }

    /// A version of criu.
    #[derive(Copy)]
    pub struct Version {
        /// First number.
        pub major: i32 = (int32, required, tag = "1"),
        /// Second number.
        pub minor: i32 = (int32, required, tag = "2"),
        /// Third number, if there is one.
        pub sublevel: Option<i32> = (int32, optional, tag = "4"),
    }
}

/// Answer of criu.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// criu is at a step, and waits for permission to continue.
    Notify {
        /// Name of the step: `post-dump`, `post-restore`, ...
        step: String,
        /// Number of the process concerned.
        pid: Option<i32>,
    },
    /// criu has completed the request.
    Done {
        /// Number of the process at the root of the restored tree.
        restored: Option<i32>,
        /// The features, if they were queried.
        features: Option<Features>,
        /// The version, if it was queried.
        version: Option<Version>,
    },
    /// The request failed.
    Failed {
        /// An error number.
        errno: Option<i32>,
        /// criu's error message.
        message: Option<String>,
    },
}

impl Request {
    /// Makes a request of a kind, with options.
    pub fn new(kind: RequestType, opts: Option<Options>) -> Self {
        Request { kind: kind as i32, opts, notify_success: None, keep_open: None, features: None }
    }

    /// Makes a request for the optional features.
    pub fn features() -> Self {
        let features = Some(Features { mem_track: Some(true), lazy_pages: Some(true) });
        Request { features, ..Request::new(RequestType::FeatureCheck, None) }
    }

    /// Makes the answer to a notification.
    pub fn notified(go_on: bool) -> Self {
        Request { notify_success: Some(go_on), ..Request::new(RequestType::Notify, None) }
    }

    /// Encodes the request.
    pub fn encode(&self) -> Vec<u8> {
        self.encode_to_vec()
    }
}

impl Answer {
    /// Decodes one message of criu.
    ///
    /// # Errors
    /// The bytes are not an answer of criu.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let response: Response = message("an answer of criu", bytes)?;
        if let (RequestType::Notify, Some(notify)) = (response.kind(), response.notify.clone()) {
            return Ok(Answer::Notify { step: notify.script.unwrap_or_default(), pid: notify.pid });
        }
        if !response.success {
            return Ok(Answer::Failed { errno: response.errno, message: response.message });
        }
        Ok(Answer::Done {
            restored: response.restore.map(|restored| restored.pid),
            features: response.features,
            version: response.version,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn requests_have_the_bytes_that_criu_reads() {
        assert_eq!(Request::notified(true).encode(), [0x08, 6, 0x18, 1]);
        let options = Options { images_dir_fd: 5, pid: Some(4121), network_lock: Some(3), ..Options::default() };
        let bytes = Request::new(RequestType::Dump, Some(options)).encode();
        assert_eq!(bytes, [0x08, 1, 0x12, 8, 0x08, 5, 0x10, 0x99, 0x20, 0x80, 0x04, 3]);
    }

    #[test]
    fn answers_are_told_apart() {
        let step = [0x08, 6, 0x10, 1, 0x2a, 11, 0x0a, 9, b'p', b'o', b's', b't', b'-', b'd', b'u', b'm', b'p'];
        assert_eq!(Answer::decode(&step), Ok(Answer::Notify { step: "post-dump".into(), pid: None }));
        let restored = Answer::decode(&[0x08, 2, 0x10, 1, 0x22, 2, 0x08, 7]).unwrap();
        assert_eq!(restored, Answer::Done { restored: Some(7), features: None, version: None });
        let failed = Answer::decode(&[0x08, 2, 0x10, 0, 0x38, 17]).unwrap();
        assert_eq!(failed, Answer::Failed { errno: Some(17), message: None });
        assert!(Answer::decode(&[0x08]).is_err());
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_an_answer(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            let _ = Answer::decode(&bytes);
        }
    }
}

//! Services in which the C library looks up names of machines.

use std::ffi::{CStr, c_char, c_int};

/// Services for names of machines, in the syntax of nsswitch.conf(5). The C library holds both itself.
const SERVICES: &CStr = c"files dns";

unsafe extern "C" {
    /// Replaces a line of nsswitch.conf for this process; 0 on success. Declared in glibc's `nss.h`.
    fn __nss_configure_lookup(database: *const c_char, services: *const c_char) -> c_int;
}

/// Makes this process look up names of machines in `/etc/hosts` and by DNS only; to be called before the first look-up.
///
/// The obvious way is the machine's nsswitch.conf. Its other services are shared libraries for the machine's glibc, and the installed program has
/// one of its own: loading them would bring a second C library of another version into the process.
pub fn use_files_and_dns() {
    // SAFETY: two strings that end in a zero byte. glibc copies what it needs of them, and takes a lock of its own.
    let result = unsafe { __nss_configure_lookup(c"hosts".as_ptr(), SERVICES.as_ptr()) };
    debug_assert_eq!(result, 0, "glibc knows the database of hosts");
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::ToSocketAddrs;

    #[test]
    fn a_name_of_the_hosts_file_is_found() {
        use_files_and_dns();
        let found: Vec<_> = ("localhost", 1).to_socket_addrs().unwrap().collect();
        assert!(found.iter().all(|address| address.ip().is_loopback()), "{found:?}");
    }
}

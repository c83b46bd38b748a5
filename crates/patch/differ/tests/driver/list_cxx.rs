//! The names of all C++ programs, so that each is a test of its own.

/// Makes a test of every C++ program that must be accepted: it calls `$check` with the program's name.
macro_rules! accepted_cxx_programs {
    ($check:path) => {
        accepted_programs! { $check =>
            method_body
        }
    };
}

/// The same for every C++ program that must be refused, or that leaves nothing to patch.
macro_rules! other_cxx_programs {
    ($check:path) => {
        other_programs! { $check =>
        }
    };
}

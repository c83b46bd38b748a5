//! Reasons for which a test lacks something.

use std::fmt;

/// Missing item, by its cause: `make test` counts the kinds separately.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unavailable {
    /// The archive lists it, and answers 404 for every suitable version.
    Withheld(String),
    /// This machine, its network or its setup lacks it.
    Missing(String),
}

/// Exit code of the scripts in `setup/` for packages that the archive withholds.
pub const WITHHELD_CODE: i32 = 75;

impl Unavailable {
    /// Makes the reason from a failed script in `setup/`: its exit code gives the kind.
    pub fn of_code(code: Option<i32>, why: String) -> Unavailable {
        match code {
            Some(WITHHELD_CODE) => Unavailable::Withheld(why),
            _ => Unavailable::Missing(why),
        }
    }

    /// Returns the text of either kind.
    pub fn text(&self) -> &str {
        match self {
            Unavailable::Withheld(why) | Unavailable::Missing(why) => why,
        }
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl std::error::Error for Unavailable {}

impl From<String> for Unavailable {
    fn from(why: String) -> Unavailable {
        Unavailable::Missing(why)
    }
}

impl From<&String> for Unavailable {
    fn from(why: &String) -> Unavailable {
        Unavailable::Missing(why.clone())
    }
}

impl From<&str> for Unavailable {
    fn from(why: &str) -> Unavailable {
        Unavailable::Missing(why.to_owned())
    }
}

impl From<&Unavailable> for Unavailable {
    fn from(why: &Unavailable) -> Unavailable {
        why.clone()
    }
}

/// For programs that report every reason in the same way.
impl From<Unavailable> for String {
    fn from(why: Unavailable) -> String {
        match why {
            Unavailable::Withheld(why) | Unavailable::Missing(why) => why,
        }
    }
}

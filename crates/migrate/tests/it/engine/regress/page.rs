//! The page with the result of each file.

use super::file_migration::{FileResult, Outcome};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use stillpoint_migrate_engine::Capture;
use stillpoint_testing::workspace_root;

const ABOUT: &str = "Each of PostgreSQL 15's files, in a database\n\
    of its own: what it defines is there before the migration, what it writes and reads runs through the proxy while the\n\
    target follows, errors included; what `check` would refuse is taken away before. Behind the switch-over both sides are dumped.\n\n";
const TABLE: &str =
    "| file | statements | wrote | failed | both sides | taken away before |\n|---|---|---|---|---|---|\n";

/// Writes these files into the page of this capture, beside the ones that it has; all in this order.
pub(crate) fn write(file_result: &[FileResult], order: &[String], capture: Capture) {
    let (name, title, test) = match capture {
        Capture::Log => ("migrate-regress.md", "while a target follows", "what_the_log"),
        _ => ("migrate-regress-rows.md", "while a target follows by images of rows", "what_images"),
    };
    let path = workspace_root().join("experiments").join(name);
    let mut rows = BTreeMap::new();
    for line in fs::read_to_string(&path).unwrap_or_default().lines() {
        if let Some(at) = order.iter().position(|name| line.starts_with(&format!("| {name} |"))) {
            rows.insert(at, line.to_owned());
        }
    }
    for one in file_result {
        let FileResult { name, statements, wrote, failed, taken_away, outcome } = one;
        let at = order.iter().position(|other| other == name).expect("it stands in the schedule");
        let cell = |text: String| text.replace('|', "\\|");
        let (outcome, taken) = (cell(outcome.to_string()), cell(taken_away.join(", ")));
        rows.insert(at, format!("| {name} | {statements} | {wrote} | {failed} | {outcome} | {taken} |"));
    }
    let equal = rows.values().filter(|row| row.contains("| equal (")).count();
    let mut page = format!(
        "# PostgreSQL's own regression tests {title}\n\n\
         Written by `STILLPOINT_SOAK=1 cargo test -p stillpoint-migrate-tests --test it {test}`. {ABOUT}"
    );
    writeln!(page, "**{equal} of {} files leave both sides equal.**\n", rows.len()).expect("memory");
    page.push_str(TABLE);
    rows.values().for_each(|row| page.extend([row, "\n"]));
    fs::write(&path, page).expect("write the page");
}

impl FileResult {
    /// Fault of a file where images cannot carry everything: a migration may end by name, but after a success both
    /// sides must be equal.
    pub(crate) fn silent(&self) -> Option<String> {
        match &self.outcome {
            Outcome::Ended(why) if !why.contains("did not end within") => None,
            equal if equal.is_equal() => None,
            other => Some(format!("{}: {other}", self.name)),
        }
    }

    /// Fault of a file; `exception` is the known part of its outcome.
    pub(crate) fn fault(&self, exception: Option<&str>) -> Option<String> {
        let name = &self.name;
        match (&self.outcome, exception) {
            (equal, None) if equal.is_equal() => None,
            (equal, Some(known)) if equal.is_equal() => Some(format!("{name} is carried now, in spite of `{known}`")),
            (other, Some(known)) if other.to_string().contains(known) => None,
            (other, _) => Some(format!("{name}: {other}")),
        }
    }
}

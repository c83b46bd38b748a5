//! The page of what became of each file.

use super::carried::Carried;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use stillpoint_testing::workspace_root;

const HEAD: &str = "# PostgreSQL's own regression tests while a target follows\n\n\
    Written by `STILLPOINT_SOAK=1 cargo test -p stillpoint-migrate-engine --test regress`. Each of PostgreSQL 15's files, in a \
    database\nof its own: what it defines is there before the migration, what it writes and reads runs through the proxy while \
    the\ntarget follows, errors included; what `check` would refuse is taken away before. Behind the switch-over both sides are \
    dumped.\n\n";
const TABLE: &str =
    "| file | statements | wrote | failed | both sides | taken away before |\n|---|---|---|---|---|---|\n";

/// Puts these files into the page, beside those that stand there; all in this order.
pub(crate) fn write(carried: &[Carried], order: &[String]) {
    let path = workspace_root().join("experiments/migrate-regress.md");
    let mut rows = BTreeMap::new();
    for line in fs::read_to_string(&path).unwrap_or_default().lines() {
        if let Some(at) = order.iter().position(|name| line.starts_with(&format!("| {name} |"))) {
            rows.insert(at, line.to_owned());
        }
    }
    for one in carried {
        let Carried { name, statements, wrote, failed, taken_away, outcome } = one;
        let at = order.iter().position(|other| other == name).expect("it stands in the schedule");
        let cell = |text: String| text.replace('|', "\\|");
        let (outcome, taken) = (cell(outcome.to_string()), cell(taken_away.join(", ")));
        rows.insert(at, format!("| {name} | {statements} | {wrote} | {failed} | {outcome} | {taken} |"));
    }
    let equal = rows.values().filter(|row| row.contains("| equal (")).count();
    let mut page = HEAD.to_owned();
    writeln!(page, "**{equal} of {} files leave both sides equal.**\n", rows.len()).expect("memory");
    page.push_str(TABLE);
    rows.values().for_each(|row| page.extend([row, "\n"]));
    fs::write(&path, page).expect("write the page");
}

impl Carried {
    /// What is wrong with it, where this much of its outcome is known for an exception.
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

//! Comparison of migrations with other ways to move a PostgreSQL database: `migrate-rivals` measures them; it is
//! located beside this program and knows the servers.

use crate::results::Section;
use std::fs;
use std::process::Command;
use tempfile::TempDir;

/// Names of the sections, and the name that `migrate-rivals` uses for each.
pub(crate) const SECTIONS: [&str; 3] = ["migrate-copy", "migrate-rate", "migrate-gap"];

/// Runs one of [`SECTIONS`]; `small` only checks that it works.
pub(crate) fn section(key: &'static str, rounds: usize, small: bool) -> Result<Section, String> {
    let told = |what: &str, error: &dyn std::fmt::Display| format!("{what}: {error}");
    let rivals = std::env::current_exe().map_err(|e| told("find this program", &e))?.with_file_name("migrate-rivals");
    let dir = TempDir::with_prefix("stillpoint-bench-").map_err(|e| told("make a directory", &e))?;
    let values = dir.path().join("values");
    let mut command = Command::new(&rivals);
    command.args(small.then_some("--small")).arg(key.trim_start_matches("migrate-")).arg(rounds.to_string());
    let output = command.arg(&values).output().map_err(|e| told(&rivals.display().to_string(), &e))?;
    if !output.status.success() {
        return Err(format!("{}: {}", rivals.display(), String::from_utf8_lossy(&output.stderr)));
    }
    let page = String::from_utf8_lossy(&output.stdout);
    // Missing inputs are reported before the heading.
    let (told_first, rest) = page.split_once("## ").unwrap_or(("", &*page));
    let (title, rest) = rest.split_once('\n').unwrap_or((rest, ""));
    let mut section = Section::new(key, title, &[]);
    let notes = [told_first, rest].map(str::trim);
    section.notes.extend(notes.into_iter().filter(|note| !note.is_empty()).map(str::to_owned));
    let text = fs::read_to_string(&values).map_err(|e| told("read the values", &e))?;
    section.raw = serde_json::from_str(&text).map_err(|e| told("read the values", &e))?;
    Ok(section)
}

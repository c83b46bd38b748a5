//! Diffs of source trees, made from edits when they are needed: this tree stores none of their text.

use std::path::Path;
use std::process::Command;
use stillpoint_integrations::Edits;

/// Returns what the edits change in the source tree, as a diff.
///
/// # Errors
/// The edits are malformed, or the source does not have their places or cannot be read.
pub fn diff(name: &str, edits: &str, source: &Path) -> Result<String, String> {
    let edits = Edits::parse(name, edits).map_err(|e| e.to_string())?;
    let mut all = String::new();
    for (file, edit) in edits.files() {
        let path = source.join(file);
        let before = std::fs::read(&path).map_err(|e| format!("read {}: {e}", path.display()))?;
        // old sources have comments in other encodings
        let text: String = before.iter().map(|byte| char::from(*byte)).collect();
        let after: Vec<u8> = edit.apply(file, &text).map_err(|e| e.to_string())?.chars().map(|c| c as u8).collect();
        let changed = tempfile::NamedTempFile::new().map_err(|e| format!("make a file: {e}"))?;
        std::fs::write(changed.path(), after).map_err(|e| format!("write a file: {e}"))?;
        let labels = [format!("--label=a/{file}"), format!("--label=b/{file}")];
        let mut diff = Command::new("diff");
        diff.args(["-U1", "--text"]).args(labels).arg(&path).arg(changed.path());
        let output = diff.output().map_err(|e| format!("run diff: {e}"))?;
        all += &String::from_utf8_lossy(&output.stdout);
    }
    Ok(all)
}

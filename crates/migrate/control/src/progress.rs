//! Progress of a migration, as the command that runs it reports to the proxy.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Most characters of a text.
const TEXT_CHARS_MAX: usize = 300;
/// Most phases of a report.
const PHASES_MAX: usize = 64;

/// A short text without control characters, for display.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct ShortText(String);

impl ShortText {
    /// Makes a text of the beginning of another one; control characters become spaces.
    pub fn shorten(text: &str) -> ShortText {
        let shown = |c: char| if c.is_control() { ' ' } else { c };
        ShortText(text.chars().take(TEXT_CHARS_MAX).map(shown).collect())
    }
}

impl TryFrom<String> for ShortText {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        // Four bytes a character at most: a long text is not counted to its end.
        let is_short = text.len() <= 4 * TEXT_CHARS_MAX && text.chars().count() <= TEXT_CHARS_MAX;
        match is_short && !text.chars().any(char::is_control) {
            true => Ok(ShortText(text)),
            false => Err(format!("a text has control characters, or more than {TEXT_CHARS_MAX} characters")),
        }
    }
}

impl std::ops::Deref for ShortText {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ShortText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Progress of a command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Progress {
    /// The command: `migrate` or `fallback`.
    pub operation: ShortText,
    /// Server that clients leave.
    pub source: ShortText,
    /// Server that clients go to.
    pub target: ShortText,
    /// Phases so far, in the order of their beginnings.
    #[serde(default)]
    pub phases: Phases,
    /// The copy of the rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copying: Option<CopyReport>,
    /// The distance of the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub following: Option<FollowReport>,
    /// The last comparison: all rows were equal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared: Option<CompareReport>,
    /// Share of their usual throughput that clients keep, in percent, while the command slows itself down for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept_percent: Option<u64>,
    /// The pause of clients at the switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub switched: Option<SwitchReport>,
    /// Reason why clients stay, if the command holds and takes orders to switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub holding: Option<ShortText>,
    /// The last warning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<ShortText>,
    /// Result of the command, once it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended: Option<ShortText>,
}

/// Phases of a command; their number is limited.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<PhaseReport>")]
pub struct Phases(Vec<PhaseReport>);

impl TryFrom<Vec<PhaseReport>> for Phases {
    type Error = String;

    fn try_from(phases: Vec<PhaseReport>) -> Result<Self, String> {
        if phases.len() <= PHASES_MAX { Ok(Phases(phases)) } else { Err(format!("more than {PHASES_MAX} phases")) }
    }
}

impl Phases {
    /// Adds a phase that begins. One of the same name that has not ended has failed, and is forgotten; at the limit the
    /// oldest one is.
    pub fn begin(&mut self, name: ShortText) {
        self.0.retain(|phase| phase.name != name || phase.duration_ms.is_some());
        if self.0.len() == PHASES_MAX {
            self.0.remove(0);
        }
        self.0.push(PhaseReport { name, duration_ms: None });
    }

    /// Records the end of the last phase of this name.
    pub fn end(&mut self, name: &ShortText, duration_ms: u64) {
        let begun = |phase: &&mut PhaseReport| phase.name == *name && phase.duration_ms.is_none();
        if let Some(phase) = self.0.iter_mut().rev().find(begun) {
            phase.duration_ms = Some(duration_ms);
        }
    }

    /// All phases, in the order of their beginnings.
    pub fn all(&self) -> &[PhaseReport] {
        &self.0
    }

    /// Phases that have not ended.
    pub fn present(&self) -> impl Iterator<Item = &PhaseReport> {
        self.0.iter().filter(|phase| phase.duration_ms.is_none())
    }
}

/// A phase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PhaseReport {
    /// Name of the phase.
    pub name: ShortText,
    /// Duration in milliseconds, once it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
}

/// Progress of the copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyReport {
    /// Bytes copied so far.
    pub bytes: u64,
    /// Size of the tables in bytes.
    pub bytes_total: u64,
    /// Rate in bytes a second.
    pub bytes_per_s: u64,
}

/// Distance of a target that follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FollowReport {
    /// Milliseconds from a commit on the source to its repetition.
    pub lag_ms: u64,
    /// Bytes of the source's log that are not repeated yet.
    pub lag_bytes: u64,
    /// Transactions that the apply workers repeat per second.
    pub tps: u64,
}

/// Result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompareReport {
    /// Number of tables.
    pub tables: u64,
    /// Number of rows.
    pub rows: u64,
}

/// The pause of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SwitchReport {
    /// Microseconds for which clients were paused.
    pub paused_us: u64,
    /// Part of them until the last transaction had ended.
    pub drained_us: u64,
    /// Number of moved sessions.
    pub sessions: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_short_and_can_be_displayed() {
        let long = "\u{1F600}".repeat(TEXT_CHARS_MAX + 1);
        for wrong in ["a\nb", "\u{1b}[2J", "\u{7f}", "\u{85}", &long] {
            assert!(ShortText::try_from(wrong.to_owned()).is_err(), "{wrong:?}");
            let shown = ShortText::shorten(wrong);
            assert_eq!(ShortText::try_from(shown.to_string()).as_ref(), Ok(&shown), "{wrong:?}");
        }
        assert_eq!(&*ShortText::shorten("a\nb"), "a b");
        assert!(serde_json::from_str::<ShortText>(r#""<b>\u0000""#).is_err());
        assert_eq!(&*serde_json::from_str::<ShortText>(r#""<b>""#).unwrap(), "<b>");
    }

    #[test]
    fn phases_end_in_any_order_and_do_not_become_many() {
        let mut phases = Phases::default();
        let name = |text: &str| ShortText::shorten(text);
        for text in ["copy", "copy, target 2", "catch-up"] {
            phases.begin(name(text));
        }
        phases.end(&name("copy"), 7);
        phases.end(&name("other"), 7);
        let present: Vec<_> = phases.present().map(|phase| phase.name.to_string()).collect();
        assert_eq!(present, ["copy, target 2", "catch-up"]);
        phases.begin(name("catch-up"));
        assert_eq!(phases.present().count(), 2);
        (0..200).for_each(|at| phases.begin(name(&at.to_string())));
        assert_eq!(phases.all().len(), PHASES_MAX);
        let text = serde_json::to_string(&phases).unwrap();
        assert_eq!(serde_json::from_str::<Phases>(&text).unwrap(), phases);
        let many = format!("[{}]", vec![r#"{"name":"x"}"#; PHASES_MAX + 1].join(","));
        assert!(serde_json::from_str::<Phases>(&many).is_err());
    }

    #[test]
    fn unknown_fields_are_refused() {
        let text = r#"{"operation":"migrate","source":"a","target":"b"}"#;
        assert!(serde_json::from_str::<Progress>(text).is_ok());
        assert!(serde_json::from_str::<Progress>(&text.replace("source", "sauce")).is_err());
    }
}

//! Orders of an operator to a command that holds: when clients are to change sides.

use jiff::civil::{DateTime, Time};
use jiff::{Timestamp, ToSpan, ZonedDateTime};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// An order to move clients. Each part that is given must hold.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct SwitchOrder {
    /// Moment before which clients stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
    /// Part of each day in which they may move, by this machine's clock and time zone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<DailyWindow>,
    /// Conditions on the load.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub when: Vec<Condition>,
}

/// Load of the source and distance of the side that follows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct FollowLoad {
    /// Time until a commit of now is on the side that follows, in seconds.
    pub lag_s: f64,
    /// Log that is not replayed yet, in bytes.
    pub lag_bytes: u64,
    /// Transactions a second that are replayed.
    pub tps: f64,
}

impl SwitchOrder {
    /// Returns true if nothing has to be waited for.
    pub fn is_immediate(&self) -> bool {
        *self == SwitchOrder::default()
    }

    /// Returns the reason why clients may not move now.
    pub(crate) fn why_not(&self, now: &ZonedDateTime, load: &FollowLoad) -> Option<String> {
        if let Some(at) = self.at.filter(|at| now.timestamp() < *at) {
            return Some(format!("it is ordered for {at}"));
        }
        if let Some(window) = self.window.filter(|window| !window.has(now.time())) {
            return Some(format!("it is ordered for {window} of a day"));
        }
        self.when.iter().find(|condition| !condition.holds(load)).map(|condition| format!("{condition} does not hold"))
    }
}

/// Reads a moment: with an offset, as local date and time, or as the next such local time.
///
/// # Errors
///
/// A description of what is wrong with the text.
pub fn moment(text: &str, now: &ZonedDateTime) -> Result<Timestamp, String> {
    let wrong = |error: jiff::Error| format!("`{text}` is no time: {error}");
    if let Ok(moment) = text.parse::<Timestamp>() {
        return Ok(moment);
    }
    if let Ok(time) = Time::strptime("%H:%M", text).or_else(|_| Time::strptime("%H:%M:%S", text)) {
        let of_day = |day: &ZonedDateTime| day.with().time(time).build().map_err(wrong);
        let today = of_day(now)?;
        let next = if today < *now { of_day(&now.checked_add(1.day()).map_err(wrong)?)? } else { today };
        return Ok(next.timestamp());
    }
    let local: DateTime = text.replacen(' ', "T", 1).parse().map_err(wrong)?;
    Ok(local.to_zoned_datetime(now.time_zone().clone()).map_err(wrong)?.timestamp())
}

/// Part of each day: `22:00-04:30`. It may begin before midnight and end after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DailyWindow {
    begin: Time,
    end: Time,
}

impl DailyWindow {
    fn has(&self, time: Time) -> bool {
        let DailyWindow { begin, end } = *self;
        if begin <= end { (begin..end).contains(&time) } else { time >= begin || time < end }
    }
}

impl FromStr for DailyWindow {
    type Err = String;

    fn from_str(text: &str) -> Result<DailyWindow, String> {
        let time = |text: &str| Time::strptime("%H:%M", text.trim()).map_err(|error| error.to_string());
        let (begin, end) = text.split_once('-').ok_or_else(|| format!("`{text}` is no window such as 22:00-04:00"))?;
        let window = DailyWindow { begin: time(begin)?, end: time(end)? };
        if window.begin == window.end { Err(format!("the window {text} is empty")) } else { Ok(window) }
    }
}

impl fmt::Display for DailyWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.begin.strftime("%H:%M"), self.end.strftime("%H:%M"))
    }
}

impl TryFrom<String> for DailyWindow {
    type Error = String;

    fn try_from(text: String) -> Result<DailyWindow, String> {
        text.parse()
    }
}

impl From<DailyWindow> for String {
    fn from(window: DailyWindow) -> String {
        window.to_string()
    }
}

/// Measure that a condition is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Measure {
    Lag,
    Tps,
}

/// A condition on the load: `lag<1s`, `tps<500`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Condition {
    measure: Measure,
    is_below: bool,
    /// Limit in seconds, or in transactions a second.
    limit: f64,
    text: String,
}

impl Condition {
    /// Reads conditions that are joined by `and`.
    ///
    /// # Errors
    ///
    /// A description of what is wrong with the text.
    pub fn all(text: &str) -> Result<Vec<Condition>, String> {
        text.split(" and ").map(str::parse).collect()
    }

    fn holds(&self, load: &FollowLoad) -> bool {
        let value = match self.measure {
            Measure::Lag => load.lag_s,
            Measure::Tps => load.tps,
        };
        if self.is_below { value < self.limit } else { value > self.limit }
    }
}

impl FromStr for Condition {
    type Err = String;

    fn from_str(text: &str) -> Result<Condition, String> {
        let text = text.trim();
        let wrong = || format!("`{text}` is no condition such as lag<1s or tps<500");
        let (at, is_below) = match (text.find('<'), text.find('>')) {
            (Some(at), None) => (at, true),
            (None, Some(at)) => (at, false),
            _ => return Err(wrong()),
        };
        let (name, limit) = (text[..at].trim(), text[at + 1..].trim());
        let (measure, limit) = match name {
            "lag" => {
                let digits = limit.trim_end_matches(|c: char| c.is_ascii_alphabetic());
                let unit = match &limit[digits.len()..] {
                    "ms" => 1e-3,
                    "s" => 1.0,
                    "m" | "min" => 60.0,
                    _ => return Err(wrong()),
                };
                (Measure::Lag, digits.parse::<f64>().map_err(|_| wrong())? * unit)
            }
            "tps" => (Measure::Tps, limit.parse::<f64>().map_err(|_| wrong())?),
            _ => return Err(wrong()),
        };
        if !limit.is_finite() || limit < 0.0 {
            return Err(wrong());
        }
        Ok(Condition { measure, is_below, limit, text: text.to_owned() })
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl TryFrom<String> for Condition {
    type Error = String;

    fn try_from(text: String) -> Result<Condition, String> {
        text.parse()
    }
}

impl From<Condition> for String {
    fn from(condition: Condition) -> String {
        condition.text
    }
}

impl FollowLoad {
    /// Makes a load of what was measured.
    pub(crate) fn new(lag: Duration, lag_bytes: u64, tps: f64) -> FollowLoad {
        FollowLoad { lag_s: lag.as_secs_f64(), lag_bytes, tps }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> ZonedDateTime {
        "2026-11-30T13:45:00+01:00[+01:00]".parse().unwrap()
    }

    #[test]
    fn moments_are_read_with_an_offset_and_locally() {
        let at = |text: &str| moment(text, &now()).unwrap().to_string();
        assert_eq!(at("2026-12-01T02:00:00Z"), "2026-12-01T02:00:00Z");
        assert_eq!(at("2026-12-01 02:00"), "2026-12-01T01:00:00Z");
        assert_eq!(at("14:00"), "2026-11-30T13:00:00Z");
        assert_eq!(at("13:00"), "2026-12-01T12:00:00Z", "today's has passed");
        for wrong in ["", "25:00", "tomorrow", "2026-13-01 02:00"] {
            assert!(moment(wrong, &now()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn windows_may_pass_midnight() {
        let has = |window: &str, time: &str| window.parse::<DailyWindow>().unwrap().has(time.parse().unwrap());
        assert!(has("22:00-04:00", "23:59:59") && has("22:00-04:00", "00:00:00") && !has("22:00-04:00", "04:00:00"));
        assert!(has("04:00-22:00", "04:00:00") && !has("04:00-22:00", "22:00:00"));
        assert!(["", "1-2", "22:00", "22:00-22:00", "22:00-25:00"].iter().all(|w| w.parse::<DailyWindow>().is_err()));
    }

    #[test]
    fn each_part_of_an_order_must_hold() {
        let load = FollowLoad { lag_s: 0.2, lag_bytes: 10, tps: 400.0 };
        let order = SwitchOrder { when: Condition::all("lag<1s and tps < 500").unwrap(), ..SwitchOrder::default() };
        assert_eq!(order.why_not(&now(), &load), None);
        let busy = FollowLoad { tps: 500.0, ..load };
        assert_eq!(order.why_not(&now(), &busy).as_deref(), Some("tps < 500 does not hold"));
        let later = SwitchOrder { at: Some(moment("14:00", &now()).unwrap()), ..order.clone() };
        assert!(later.why_not(&now(), &load).unwrap().contains("2026-11-30T13:00:00Z"));
        let night = SwitchOrder { window: Some("22:00-04:00".parse().unwrap()), ..order.clone() };
        assert!(night.why_not(&now(), &load).unwrap().contains("22:00-04:00"));
        assert!(!night.is_immediate() && SwitchOrder::default().is_immediate());
        let text = serde_json::to_string(&night).unwrap();
        assert_eq!(serde_json::from_str::<SwitchOrder>(&text).unwrap(), night);
        for wrong in ["", "lag", "lag<1", "lag<-1s", "tps<x", "tps<1s", "rows<5", "lag<1s or tps<5", "tps<inf", "a<b>c"]
        {
            assert!(Condition::all(wrong).is_err(), "{wrong}");
        }
    }
}

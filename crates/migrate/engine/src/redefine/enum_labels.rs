//! Labels of an enum that were added or renamed; data only.

use stillpoint_migrate_postgres::link::literal;

/// Statements that bring an enum's labels to `wanted`, each with its number on the source. No label is ever dropped, so each one
/// that only the target has was renamed; of the labels that only the source has, the renamed ones have the lowest numbers.
pub(crate) fn statements(name: &str, wanted: &[(String, u32)], there: &[String]) -> String {
    let is_wanted = |label: &String| wanted.iter().any(|(known, _)| known == label);
    let old: Vec<&String> = there.iter().filter(|label| !is_wanted(label)).collect();
    let mut new: Vec<&(String, u32)> = wanted.iter().filter(|(label, _)| !there.contains(label)).collect();
    new.sort_by_key(|(_, number)| *number);
    let renamed: Vec<&String> = new.iter().take(old.len()).map(|(label, _)| label).collect();
    // In the order of the type again.
    let in_order = wanted.iter().map(|(label, _)| label).filter(|label| renamed.contains(label));
    let rename = |(old, new): (&&String, &String)| {
        format!("ALTER TYPE {name} RENAME VALUE {} TO {}; ", literal(old), literal(new))
    };
    let mut made: String = old.iter().zip(in_order).map(rename).collect();
    let mut present: Vec<&String> = there.iter().filter(|label| is_wanted(label)).chain(renamed).collect();
    for (at, (label, _)) in wanted.iter().enumerate().filter(|(_, (label, _))| !there.contains(label)) {
        if present.contains(&label) {
            continue;
        }
        let place = match at.checked_sub(1) {
            Some(before) => format!("AFTER {}", literal(&wanted[before].0)),
            None => wanted
                .iter()
                .find(|(label, _)| present.contains(&label))
                .map_or(String::new(), |(label, _)| format!("BEFORE {}", literal(label))),
        };
        made += &format!("ALTER TYPE {name} ADD VALUE IF NOT EXISTS {} {place}; ", literal(label));
        present.push(label);
    }
    made
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_that_were_renamed_are_told_from_new_ones() {
        let of =
            |labels: &[(&str, u32)]| labels.iter().map(|(label, oid)| ((*label).to_owned(), *oid)).collect::<Vec<_>>();
        let there = ["ok", "bad"].map(str::to_owned);
        let made = |labels: &[(&str, u32)]| statements("m", &of(labels), &there);
        assert_eq!(made(&[("ok", 1), ("bad", 3)]), "");
        assert_eq!(
            made(&[("ok", 1), ("worse", 3), ("worst", 4)]),
            "ALTER TYPE m RENAME VALUE 'bad' TO 'worse'; \
             ALTER TYPE m ADD VALUE IF NOT EXISTS 'worst' AFTER 'worse'; "
        );
        assert_eq!(
            made(&[("best", 8), ("ok", 1), ("new", 6), ("worse", 3)]),
            "ALTER TYPE m RENAME VALUE 'bad' TO 'worse'; \
             ALTER TYPE m ADD VALUE IF NOT EXISTS 'best' BEFORE 'ok'; ALTER TYPE m ADD VALUE IF NOT EXISTS 'new' AFTER 'ok'; "
        );
        assert_eq!(
            made(&[("a", 1), ("b", 3)]),
            "ALTER TYPE m RENAME VALUE 'ok' TO 'a'; ALTER TYPE m RENAME VALUE 'bad' TO 'b'; "
        );
    }
}

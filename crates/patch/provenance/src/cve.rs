//! Names of security problems in texts.

/// Returns the CVE identifiers in a text, in upper case, sorted, each once.
pub fn cves(text: &str) -> Vec<String> {
    let upper = text.to_ascii_uppercase();
    let mut found = Vec::new();
    for (at, _) in upper.match_indices("CVE-") {
        let rest = &upper[at + 4..];
        let Some((year, rest)) = rest.split_once('-') else { continue };
        let number: String = rest.chars().take_while(char::is_ascii_digit).collect();
        if year.len() == 4 && year.bytes().all(|b| b.is_ascii_digit()) && number.len() >= 4 {
            found.push(format!("CVE-{year}-{number}"));
        }
    }
    found.sort();
    found.dedup();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_are_found_in_any_case_and_once() {
        assert_eq!(cves("cve-2024-12345, (CVE-2024-99999) CVE-2024-12345."), ["CVE-2024-12345", "CVE-2024-99999"]);
        for text in ["CVE-24-1", "CVE-2024-1", "CVE-", "CVE-2024", "CVE-20x4-12345"] {
            assert_eq!(cves(text), [""; 0], "{text}");
        }
    }
}

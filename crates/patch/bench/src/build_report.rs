//! Results of calls of the builder, in a few words.

use stillpoint_patch_tests::cli::Run;

/// Returns the reason why a call of the builder made no patch, in a few words.
pub fn why(run: &Run) -> String {
    if run.code == Some(6) {
        return "makes no difference to its code".into();
    }
    let refusal = run.json().into_iter().find(|line| line["event"] == "refused");
    let reasons = refusal.and_then(|line| line["refusals"].as_array().cloned()).unwrap_or_default();
    let first = reasons.first().map(|r| format!("{}: {}", r["code"].as_str().unwrap_or("?"), r["text"]));
    let line = first.unwrap_or_else(|| run.stderr.lines().next().unwrap_or("no reason given").to_owned());
    let more = if reasons.len() > 1 { format!(" (and {} more)", reasons.len() - 1) } else { String::new() };
    let short: String = line.chars().filter(|c| *c != '|').take(200).collect();
    short + &more
}

/// Returns the number of functions that a patch replaces.
pub fn functions(run: &Run) -> usize {
    let built = run.json().into_iter().find(|line| line["event"] == "built");
    built.and_then(|line| line["functions"].as_array().map(Vec::len)).unwrap_or_default()
}

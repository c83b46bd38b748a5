//! Keeps the numbering of untouched code: `#line` after each change.
//!
//! `__LINE__` is part of asserts and log calls, so a diff that adds one line changes every function below it. The
//! numbering of the shipped file is restored where its own lines continue:
//!
//! ```text
//! number of a line in the result = its number in the shipped file, for every line that both have
//! ```
//!
//! A directive only counts where the preprocessor sees it: not in a comment, a continued line or a group that is left
//! out. So it goes to the first place after the change that is outside of those and outside of parentheses (the
//! arguments of a macro). It is repeated after each `#else`, `#elif` and `#endif` that ends a group open at the change.
//! A directive too many does no harm: each states the truth.

use std::collections::HashMap;

/// Returns `after`, with directives that give the lines it shares with `shipped` their numbers of `shipped`.
pub fn number(shipped: &str, after: &str) -> String {
    let old: Vec<&str> = shipped.split_inclusive('\n').collect();
    let new: Vec<&str> = after.split_inclusive('\n').collect();
    let numbers = matches(&old, &new);
    let mut out = String::with_capacity(after.len() + 256);
    let mut scan = Scan::default();
    // line N of the text has the number N + offset, unless a group that is left out may hold a directive (`restate`)
    let (mut offset, mut restate) = (0i64, false);
    // for each open group: true if it holds a directive of ours
    let mut groups: Vec<bool> = Vec::new();
    for (at, line) in new.iter().enumerate() {
        let place = at as i64 + 1;
        if let Some(number) = numbers[at].map(|n| n as i64 + 1)
            && (number != place + offset || restate)
            && scan.is_free()
        {
            out.push_str(&format!("#line {number}\n"));
            (offset, restate) = (number - place, false);
            groups.fill(true);
        }
        out.push_str(line);
        match scan.line(line) {
            Conditional::Open => groups.push(false),
            Conditional::Other => restate |= groups.last().copied().unwrap_or(true),
            Conditional::Close => restate |= groups.pop().unwrap_or(true),
            Conditional::None => {}
        }
    }
    out
}

/// Effect of a line on conditional groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Conditional {
    None,
    Open,
    Other,
    Close,
}

/// State of the preprocessor at the end of a line.
#[derive(Debug, Default)]
struct Scan {
    comment: bool,
    continued: bool,
    /// True inside a directive that continues on the next line.
    directive: bool,
    /// End of the raw string that continues on the next line.
    raw: Option<String>,
    parentheses: i64,
}

impl Scan {
    fn is_free(&self) -> bool {
        !self.comment && !self.continued && self.raw.is_none() && self.parentheses <= 0
    }

    fn line(&mut self, line: &str) -> Conditional {
        let fresh = !self.comment && !self.continued && self.raw.is_none();
        let starts = fresh && line.trim_start().starts_with('#');
        let in_directive = starts || self.directive;
        let outside = if line.starts_with('}') {
            // conditional groups can hold halves of a pair; a brace in the first column ends a function
            0
        } else {
            self.parentheses
        };
        self.parentheses = outside;
        self.tokens(line.as_bytes());
        if in_directive {
            // parentheses of a macro's definition are not those of the code around it
            self.parentheses = outside;
        }
        self.continued = line.trim_end_matches(['\n', '\r']).ends_with('\\');
        self.directive = in_directive && self.continued;
        if starts { conditional(line) } else { Conditional::None }
    }

    fn tokens(&mut self, line: &[u8]) {
        let mut at = 0;
        while at < line.len() {
            let rest = &line[at..];
            let before = at.checked_sub(1).map_or(b' ', |i| line[i]);
            if let Some(end) = &self.raw {
                let Some(skip) = find(rest, end.as_bytes()) else { return };
                at += skip + end.len();
                self.raw = None;
            } else if self.comment {
                let Some(skip) = find(rest, b"*/") else { return };
                at += skip + 2;
                self.comment = false;
            } else if rest.starts_with(b"//") {
                return;
            } else if rest.starts_with(b"/*") {
                self.comment = true;
                at += 2;
            } else if rest.starts_with(b"R\"") && !before.is_ascii_alphanumeric() && before != b'_' {
                let open = rest.iter().position(|b| *b == b'(').unwrap_or(rest.len());
                self.raw = Some(format!("){}\"", String::from_utf8_lossy(rest.get(2..open).unwrap_or_default())));
                at += open;
            } else if rest[0] == b'"' || rest[0] == b'\'' && !before.is_ascii_digit() {
                at += literal(rest);
            } else {
                self.parentheses += i64::from(rest[0] == b'(') - i64::from(rest[0] == b')');
                at += 1;
            }
        }
    }
}

fn find(text: &[u8], wanted: &[u8]) -> Option<usize> {
    text.windows(wanted.len()).position(|w| w == wanted)
}

/// Returns the length of a string or character literal; one that does not end on its line ends with it.
fn literal(text: &[u8]) -> usize {
    let mut at = 1;
    while at < text.len() {
        match text[at] {
            b'\\' => at += 1,
            b if b == text[0] => return at + 1,
            _ => {}
        }
        at += 1;
    }
    text.len()
}

fn conditional(line: &str) -> Conditional {
    let word = line.trim_start().trim_start_matches('#').trim_start();
    let word: String = word.chars().take_while(char::is_ascii_alphabetic).collect();
    match word.as_str() {
        "if" | "ifdef" | "ifndef" => Conditional::Open,
        "else" | "elif" | "elifdef" | "elifndef" => Conditional::Other,
        "endif" => Conditional::Close,
        _ => Conditional::None,
    }
}

/// Finds for each line of `new` the same line of `old`: a longest common subsequence between common ends.
fn matches(old: &[&str], new: &[&str]) -> Vec<Option<usize>> {
    let mut result = vec![None; new.len()];
    for (a, b) in between(old, new) {
        result[b] = Some(a);
    }
    result
}

/// Finds pairs of equal lines, increasing on both sides, anchored at lines that are unique on both sides ("patience"):
/// the pairing stays the same when a diff adds lines elsewhere.
fn common(old: &[&str], new: &[&str]) -> Vec<(usize, usize)> {
    if old.is_empty() || new.is_empty() {
        return Vec::new();
    }
    let chain = longest_increasing(&unique_pairs(old, new));
    let mut pairs = Vec::new();
    let (mut from_old, mut from_new) = (0, 0);
    for anchor in chain.iter().copied().chain([(old.len(), new.len())]) {
        let (until_old, until_new) = anchor;
        pairs.extend(
            between(&old[from_old..until_old], &new[from_new..until_new])
                .into_iter()
                .map(|(a, b)| (from_old + a, from_new + b)),
        );
        if until_old < old.len() {
            pairs.push(anchor);
        }
        (from_old, from_new) = (until_old + 1, until_new + 1);
    }
    pairs
}

/// Pairs the lines of a gap between two anchors: equal ends first, then a recursion while there are anchors inside.
fn between(old: &[&str], new: &[&str]) -> Vec<(usize, usize)> {
    let head = old.iter().zip(new).take_while(|(a, b)| a == b).count();
    let limit = old.len().min(new.len()) - head;
    let tail = old.iter().rev().zip(new.iter().rev()).take(limit).take_while(|(a, b)| a == b).count();
    let mut pairs: Vec<_> = (0..head).map(|i| (i, i)).collect();
    let (old_end, new_end) = (old.len() - tail, new.len() - tail);
    let (inner_old, inner_new) = (&old[head..old_end], &new[head..new_end]);
    if !unique_pairs(inner_old, inner_new).is_empty() {
        pairs.extend(common(inner_old, inner_new).into_iter().map(|(a, b)| (head + a, head + b)));
    }
    pairs.extend((0..tail).map(|i| (old_end + i, new_end + i)));
    pairs
}

fn unique_pairs(old: &[&str], new: &[&str]) -> Vec<(usize, usize)> {
    let mut seen: HashMap<&str, (usize, usize, usize)> = HashMap::new();
    for (at, line) in old.iter().enumerate() {
        let entry = seen.entry(line).or_default();
        *entry = (entry.0 + 1, at, 0);
    }
    let mut places: HashMap<&str, usize> = HashMap::new();
    for (at, line) in new.iter().enumerate() {
        if let Some(entry) = seen.get_mut(line) {
            entry.2 += 1;
            places.insert(line, at);
        }
    }
    let mut pairs: Vec<(usize, usize)> = seen
        .iter()
        .filter(|(_, (in_old, _, in_new))| *in_old == 1 && *in_new == 1)
        .map(|(line, (_, at, _))| (*at, places[line]))
        .collect();
    pairs.sort_unstable();
    pairs
}

/// Finds the longest chain of pairs that increases in its second part too.
fn longest_increasing(pairs: &[(usize, usize)]) -> Vec<(usize, usize)> {
    let mut tails: Vec<usize> = Vec::new();
    let mut previous: Vec<Option<usize>> = vec![None; pairs.len()];
    for (index, pair) in pairs.iter().enumerate() {
        let at = tails.partition_point(|&t| pairs[t].1 < pair.1);
        previous[index] = at.checked_sub(1).map(|i| tails[i]);
        if at == tails.len() {
            tails.push(index);
        } else {
            tails[at] = index;
        }
    }
    let mut chain = Vec::new();
    let mut next = tails.last().copied();
    while let Some(index) = next {
        chain.push(pairs[index]);
        next = previous[index];
    }
    chain.reverse();
    chain
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;
    use std::process::{Command, Stdio};

    /// Returns line numbers as the preprocessor sees them: `mark(NAME, __LINE__)` in the text to NAME and number.
    fn seen(text: &str, options: &[&str]) -> BTreeMap<String, u32> {
        use std::io::Write;
        let mut cc = Command::new("cc")
            .args(["-E", "-P", "-x", "c", "-"])
            .args(options)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a C compiler is needed for these tests");
        cc.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        let output = cc.wait_with_output().unwrap();
        assert!(output.status.success());
        let text = String::from_utf8(output.stdout).unwrap().replace('\n', " ");
        let calls =
            text.split("mark(").skip(1).map(|call| call.split(')').next().unwrap().split(',').collect::<Vec<_>>());
        calls.map(|c| (c[0].trim().to_owned(), c[1].trim().parse().unwrap())).collect()
    }

    fn check(shipped: &str, after: &str, options: &[&str]) {
        let numbered = number(shipped, after);
        let (old, new) = (seen(shipped, options), seen(&numbered, options));
        assert!(!old.is_empty());
        for (name, line) in &old {
            assert_eq!(new.get(name), Some(line), "{name} in:\n{numbered}");
        }
    }

    const BASE: &str = "int a;\n/* one\n two */\n#define TWO(x) \\\n  do { x; \\\n  } while (0)\n#ifdef LEFT\nmark(left, __LINE__)\n\
        #else\nmark(right, __LINE__)\n#endif\nint f(int b,\n  int c)\n{\n  mark(f, __LINE__);\n}\nmark(end, __LINE__)\n";

    #[test]
    fn numbers_hold_wherever_lines_are_added_or_removed() {
        let lines: Vec<&str> = BASE.split_inclusive('\n').collect();
        for at in 0..=lines.len() {
            let addition = if (4..6).contains(&at) { "  y; \\\n" } else { "\n\n\n" };
            let added = [&lines[..at], &[addition], &lines[at..]].concat().concat();
            for options in [&["-DLEFT"][..], &[]] {
                check(BASE, &added, options);
                check(&added, BASE, options);
            }
        }
    }

    #[test]
    fn unchanged_text_stays_as_it_is() {
        assert_eq!(number(BASE, BASE), BASE);
        assert_eq!(number("", ""), "");
    }

    #[test]
    fn a_second_change_leaves_the_numbers_of_the_first() {
        let first = BASE.replace("int a;\n", "int a;\nint b;\n");
        let second = first.replace("{\n", "{\n  int local;\n");
        check(BASE, &second, &[]);
        let shared = |text: &str| text.lines().filter(|l| l.contains("end")).count();
        assert_eq!(shared(&number(BASE, &first)), shared(&number(BASE, &second)));
    }

    #[test]
    fn quotes_and_raw_strings_do_not_confuse() {
        let shipped = "char q = '\"'; char *s = \"/* no comment\"; int big = 1'0;\nint x;\nmark(a, __LINE__)\n";
        let after = shipped.replace("int x;\n", "int x;\nint y;\n");
        assert_eq!(number(shipped, &after), after.replace("mark", "#line 3\nmark"));
        let raw = "auto r = R\"x(\n\"(\n)x\";\nint k;\n";
        let after = raw.replace("\"(\n)", "\"(\nmore\n)");
        assert_eq!(number(raw, &after), after.replace("int k", "#line 4\nint k"));
    }
}

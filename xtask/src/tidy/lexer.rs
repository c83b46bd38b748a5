//! Part of Rust's lexical grammar, enough to separate code from comments and strings.

/// Returns `source` with every comment, string and character literal replaced by spaces; line numbers do not change.
pub(crate) fn code_only(source: &str) -> String {
    only(source, |part| part.is_none())
}

/// Returns `source` with all but its string literals replaced by spaces; line numbers do not change.
pub(crate) fn strings_only(source: &str) -> String {
    only(source, |part| {
        part.is_some_and(|part| !part.starts_with("//") && !part.starts_with("/*") && !part.starts_with('\''))
    })
}

/// Returns `source` with spaces in place of the parts that are not wanted. A part is a whole comment or literal, or `None` for a
/// character of code.
fn only(source: &str, is_wanted: impl Fn(Option<&str>) -> bool) -> String {
    let mut kept = String::with_capacity(source.len());
    let (mut rest, mut previous) = (source, ' ');
    while let Some(first) = rest.chars().next() {
        let skipped = skipped_len(rest, previous.is_alphanumeric() || previous == '_');
        let len = if skipped == 0 { first.len_utf8() } else { skipped };
        let (taken, after) = rest.split_at(len);
        previous = if skipped == 0 { first } else { ' ' };
        if is_wanted((skipped > 0).then_some(taken)) {
            kept.push_str(taken);
        } else {
            kept.extend(taken.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        }
        rest = after;
    }
    kept
}

/// Length of the comment or literal at the start of `text`, 0 if it begins with code.
fn skipped_len(text: &str, in_word: bool) -> usize {
    if text.starts_with("//") {
        return text.find('\n').unwrap_or(text.len());
    }
    if text.starts_with("/*") {
        return block_comment_len(text);
    }
    if text.starts_with('"') {
        return quoted_len(text, 1, '"');
    }
    if text.starts_with('\'') {
        return char_literal_len(text);
    }
    if !in_word {
        return raw_string_len(text);
    }
    0
}

fn block_comment_len(text: &str) -> usize {
    let (mut depth, mut at) = (0u32, 0);
    while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
        if rest.starts_with("/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if rest.starts_with("*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

/// Length up to and including the closing quote; the body starts at `from` and a backslash escapes.
fn quoted_len(text: &str, from: usize, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip_while(|(at, _)| *at < from) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of a character literal: `'a'` and `'\n'` are literals, `'a` is a lifetime.
fn char_literal_len(text: &str) -> usize {
    let mut chars = text.char_indices().skip(1);
    match (chars.next(), chars.next()) {
        (Some((_, '\\')), _) => quoted_len(text, 1, '\''),
        (Some(_), Some((at, '\''))) => at + 1,
        _ => 0,
    }
}

/// Length of `r"..."`, `r#"..."#`, with `b` or `c` before it; also of `b"..."`.
fn raw_string_len(text: &str) -> usize {
    let prefix = text.strip_prefix(['b', 'c']).unwrap_or(text);
    if prefix.len() < text.len() && prefix.starts_with('"') {
        return quoted_len(text, 2, '"');
    }
    let Some(after_r) = prefix.strip_prefix('r') else { return 0 };
    let hashes = after_r.len() - after_r.trim_start_matches('#').len();
    if !after_r[hashes..].starts_with('"') {
        return 0;
    }
    let body_at = text.len() - after_r.len() + hashes + 1;
    let end = format!("\"{}", "#".repeat(hashes));
    text[body_at..].find(&end).map_or(text.len(), |at| body_at + at + end.len())
}

/// Returns the lines of `code` (numbered from 1) that are not in an item under `#[cfg(test)]`.
pub(crate) fn lines_outside_tests(code: &str) -> Vec<(usize, &str)> {
    let mut lines = Vec::new();
    let mut numbered = code.lines().enumerate().map(|(i, line)| (i + 1, line));
    while let Some((number, line)) = numbered.next() {
        if !line.trim_start().starts_with("#[cfg(test)]") {
            lines.push((number, line));
            continue;
        }
        // The item ends with the brace that closes its first one, or with a semicolon before any.
        let mut depth = 0i64;
        for (_, line) in numbered.by_ref() {
            let (opened, closed) = (line.matches('{').count() as i64, line.matches('}').count() as i64);
            depth += opened - closed;
            if depth <= 0 && (opened > 0 || closed > 0 || line.trim_end().ends_with(';')) {
                break;
            }
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> Vec<String> {
        code_only(source).split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn comments_and_literals_are_no_code() {
        assert_eq!(words("a // unsafe\nb /* x /* y */ z */ c"), ["a", "b", "c"]);
        assert_eq!(words(r#"f("unsafe \" x") g"#), ["f(", ")", "g"]);
        assert_eq!(words("h(r#\"un\"safe\"#) b\"x\" 'q' '\\'' i"), ["h(", ")", "i"]);
    }

    #[test]
    fn strings_are_all_that_is_left() {
        let source = "a // \"no\"\nf(\"yes // x\") 'c' r#\"raw \"x\" \"# /* \"no\" */";
        let words: Vec<String> = strings_only(source).split_whitespace().map(str::to_owned).collect();
        assert_eq!(words, ["\"yes", "//", "x\"", "r#\"raw", "\"x\"", "\"#"]);
        assert_eq!(strings_only(source).lines().count(), 2);
    }

    #[test]
    fn lifetimes_and_identifiers_are_code() {
        assert_eq!(words("fn f<'a>(x: &'a str) { bar\"x\" }"), ["fn", "f<'a>(x:", "&'a", "str)", "{", "bar", "}"]);
    }

    #[test]
    fn lines_keep_their_numbers() {
        let code = code_only("a\n/* \n\n */ b\n\"x\ny\" c\n");
        assert_eq!(code.lines().position(|line| line.contains('b')), Some(3));
        assert_eq!(code.lines().position(|line| line.contains('c')), Some(5));
    }

    #[test]
    fn an_unfinished_literal_ends_with_the_text() {
        assert_eq!(words("a \"b"), ["a"]);
        assert_eq!(words("a /* b"), ["a"]);
        assert_eq!(words("a r#\"b\""), ["a"]);
    }

    #[test]
    fn items_of_tests_are_left_out() {
        let code = "a\n#[cfg(test)]\nmod tests {\n  fn f() {\n  }\n}\nb\n#[cfg(test)]\nuse x;\nc";
        let kept: Vec<&str> = lines_outside_tests(code).into_iter().map(|(_, line)| line).collect();
        assert_eq!(kept, ["a", "b", "c"]);
    }
}

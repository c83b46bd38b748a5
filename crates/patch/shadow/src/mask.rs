//! Preprocessed text in a form that a parser of standard C reads: extensions of compilers are replaced by blanks of the
//! same length, so that places stay.

/// Words of extensions that say nothing about types.
const BLANK: [&str; 12] = [
    "__extension__",
    "__inline",
    "__inline__",
    "__restrict",
    "__restrict__",
    "__volatile__",
    "__volatile",
    "__const",
    "__const__",
    "_Noreturn",
    "__signed",
    "__signed__",
];
/// Words whose argument in parentheses goes too.
const BLANK_CALLS: [&str; 7] =
    ["__attribute__", "__attribute", "__asm__", "__asm", "asm", "_Alignas", "_Static_assert"];
/// Words with an argument, that stand for a type.
const TYPES_OF: [&str; 3] = ["__typeof__", "__typeof", "typeof"];
/// Functions of compilers with types as arguments.
const ODD_ARGUMENTS: [&str; 3] = ["__builtin_va_arg", "__builtin_types_compatible_p", "__builtin_offsetof"];

/// Text for the parser, and what it lost.
pub(crate) struct Masked {
    pub(crate) text: Vec<u8>,
    /// Places where `int` stands for `typeof (...)`, or for the type that an initialiser gives.
    pub(crate) types_of: Vec<usize>,
}

/// A word or another piece of C.
pub(crate) struct Token<'a> {
    pub(crate) start: usize,
    pub(crate) text: &'a [u8],
}

/// Splits C into words, literals and single characters, without blanks and line markers.
pub(crate) fn tokens(text: &[u8]) -> Vec<Token<'_>> {
    let (mut found, mut at, mut line_begins) = (Vec::new(), 0, true);
    let is_word = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'$';
    while at < text.len() {
        let start = at;
        match text[at] {
            b'\n' => line_begins = true,
            b' ' | b'\t' | b'\r' | 12 => {}
            b'#' if line_begins => {
                at += text[at..].iter().position(|b| *b == b'\n').unwrap_or(text.len() - at);
                continue;
            }
            quote @ (b'"' | b'\'') => {
                line_begins = false;
                at += 1;
                while at < text.len() && text[at] != quote && text[at] != b'\n' {
                    at += if text[at] == b'\\' { 2 } else { 1 };
                }
                at = (at + 1).min(text.len());
                found.push(Token { start, text: &text[start..at] });
                continue;
            }
            byte => {
                line_begins = false;
                at += 1;
                while is_word(byte) && at < text.len() && is_word(text[at]) {
                    at += 1;
                }
                found.push(Token { start, text: &text[start..at] });
                continue;
            }
        }
        at += 1;
    }
    found
}

/// Masks a preprocessed text.
pub(crate) fn mask(text: &[u8]) -> Masked {
    let mut masked = Masked { text: text.to_vec(), types_of: Vec::new() };
    let mut line = 0;
    for part in text.split_inclusive(|b| *b == b'\n') {
        if part.trim_ascii_start().starts_with(b"#") {
            blank(&mut masked.text, line, line + part.len());
        }
        line += part.len();
    }
    let tokens = tokens(text);
    let mut at = 0;
    while at < tokens.len() {
        let (start, word) = (tokens[at].start, std::str::from_utf8(tokens[at].text).unwrap_or(""));
        let end_of = |index: usize| tokens[index].start + tokens[index].text.len();
        if BLANK.contains(&word) {
            blank(&mut masked.text, start, end_of(at));
        } else if word == "__auto_type" {
            blank(&mut masked.text, start, end_of(at));
            masked.text[start..start + 3].copy_from_slice(b"int");
            masked.types_of.push(start);
        } else if BLANK_CALLS.contains(&word) {
            let open = (at + 1..tokens.len()).find(|&i| !is_name(tokens[i].text));
            if let Some(close) = open.and_then(|open| closing(&tokens, open)) {
                blank(&mut masked.text, start, end_of(close));
                at = close;
            }
        } else if TYPES_OF.contains(&word) {
            if let Some(close) = closing(&tokens, at + 1) {
                blank(&mut masked.text, start, end_of(close));
                masked.text[start..start + 3].copy_from_slice(b"int");
                masked.types_of.push(start);
                at = close;
            }
        } else if ODD_ARGUMENTS.contains(&word)
            && let Some(close) = closing(&tokens, at + 1)
        {
            blank(&mut masked.text, end_of(at + 1), tokens[close].start);
            at = close;
        }
        at += 1;
    }
    masked
}

fn is_name(text: &[u8]) -> bool {
    text[0].is_ascii_alphabetic() || text[0] == b'_'
}

/// Returns the token that closes the parenthesis at `open`.
fn closing(tokens: &[Token<'_>], open: usize) -> Option<usize> {
    if tokens.get(open)?.text != b"(" {
        return None;
    }
    let mut depth = 0;
    for (index, token) in tokens.iter().enumerate().skip(open) {
        match token.text {
            b"(" => depth += 1,
            b")" if depth == 1 => return Some(index),
            b")" => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Overwrites all but ends of lines.
pub(crate) fn blank(text: &mut [u8], start: usize, end: usize) {
    text[start..end].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_stay() {
        let text = b"# 1 \"a.c\"\n__extension__ typedef __typeof__ (x->m) *t __attribute__ ((a (\")\"), b));\nint f(void) { __asm__ volatile (\"x\" : : \"r\" (1)); return __builtin_va_arg (ap, long *); }\n";
        let masked = mask(text);
        assert_eq!(masked.text.len(), text.len());
        let shown = String::from_utf8(masked.text).unwrap();
        let words: Vec<&str> = shown.split_whitespace().collect();
        assert_eq!(words.join(" "), "typedef int *t ; int f(void) { ; return __builtin_va_arg ( ); }");
        assert_eq!(masked.types_of, [32]);
    }
}

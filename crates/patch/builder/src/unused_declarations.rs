//! Declarations of functions that nothing in a unit uses: they make no code.
//!
//! A header that gains a declaration changes the text of every unit that reads it, hundreds in a large program. The
//! obvious way is to compile all of them on both sides and find that nothing differs, which takes half an hour. So
//! declarations without effect are removed from the text before the comparison. Text in doubt stays.

use std::collections::HashMap;

/// Words that may precede the parenthesis of text that declares no function, or a function by another name.
const OTHERS: &str = "__attribute__ __attribute __typeof__ __typeof typeof _Alignas __declspec _Atomic sizeof __asm__";
/// Words that give a function another name for the linker: compilers call some functions that no text names.
const RENAMING: [&[u8]; 3] = [b"asm", b"__asm", b"__asm__"];

/// Returns pieces of preprocessed C without `extern` declarations of functions whose name occurs nowhere else.
pub(crate) fn without(text: &[u8]) -> Vec<&[u8]> {
    let pieces = pieces(text);
    let mut counts: HashMap<&[u8], u32> = HashMap::new();
    for word in pieces.iter().flat_map(|piece| words(piece)) {
        *counts.entry(word).or_default() += 1;
    }
    let is_unused = |piece: &&[u8]| declared(piece).is_some_and(|name| counts.get(name) == Some(&1));
    pieces.into_iter().filter(|piece| !is_unused(piece)).collect()
}

/// Cuts after each `;` and each `}` outside of brackets, and around lines that are directives.
fn pieces(text: &[u8]) -> Vec<&[u8]> {
    let (mut found, mut start, mut depth, mut at) = (Vec::new(), 0, 0u32, 0);
    while at < text.len() {
        let line_begins = at == 0 || text[at - 1] == b'\n';
        match text[at] {
            b'#' if line_begins && depth == 0 => {
                let end = text[at..].iter().position(|b| *b == b'\n').map_or(text.len(), |n| at + n + 1);
                found.extend([&text[start..at], &text[at..end]]);
                (start, at) = (end, end);
                continue;
            }
            quote @ (b'"' | b'\'') => at = literal_end(text, at, quote),
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' => depth = depth.saturating_sub(1),
            end @ (b'}' | b';') => {
                depth = depth.saturating_sub(u32::from(end == b'}'));
                if depth == 0 {
                    found.push(&text[start..=at]);
                    start = at + 1;
                }
            }
            _ => {}
        }
        at += 1;
    }
    found.push(&text[start..]);
    found
}

/// Returns the index of the quote that ends a literal.
fn literal_end(text: &[u8], begin: usize, quote: u8) -> usize {
    let mut at = begin + 1;
    while at < text.len() && text[at] != quote {
        at += 1 + usize::from(text[at] == b'\\');
    }
    at
}

/// Returns identifiers and numbers. Words in literals count too, which only keeps more text.
fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|b| !is_word(*b)).filter(|word| !word.is_empty())
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'$' || byte >= 0x80
}

/// Returns the function that a piece declares, if it does nothing else: `extern TYPE NAME(PARAMETERS) ATTRIBUTES;`.
fn declared(piece: &[u8]) -> Option<&[u8]> {
    let rest = piece.trim_ascii().strip_prefix(b"extern")?.strip_suffix(b";")?;
    let plain = !rest.iter().any(|b| matches!(b, b'{' | b'}' | b'=' | b'"' | b'#' | b';'));
    if !plain || !rest.first()?.is_ascii_whitespace() || words(rest).any(|word| RENAMING.contains(&word)) {
        return None;
    }
    let open = rest.iter().position(|b| *b == b'(')?;
    if rest[open + 1..].trim_ascii_start().starts_with(b"*") {
        // a pointer to a function is a variable
        return None;
    }
    let head = rest[..open].trim_ascii_end();
    let simple = head.iter().all(|b| is_word(*b) || *b == b'*' || b.is_ascii_whitespace());
    let name = words(head)
        .last()
        .filter(|name| head.ends_with(name) && OTHERS.split(' ').all(|other| other.as_bytes() != *name))?;
    // a comma would begin another declarator, after the parameters as well as before
    let depths = rest.iter().scan(0i32, |depth, b| {
        *depth += i32::from(*b == b'(') - i32::from(*b == b')');
        Some((*depth, *b))
    });
    let several = depths.into_iter().any(|(depth, b)| depth == 0 && b == b',');
    (simple && !several && words(head).count() > 1).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(text: &str) -> String {
        String::from_utf8(without(text.as_bytes()).concat()).unwrap()
    }

    #[test]
    fn only_what_nothing_uses_goes() {
        let used = "extern int used(int a);\nint main(void) { return used(1); }";
        let header = "extern void gone(const char *s, ...) __attribute__((format(printf, 1, 2)));\n";
        assert_eq!(kept(&format!("{header}{used}")), format!("\n{used}"));
        assert_eq!(kept(&format!("{used}\nextern char *\nalso_gone\n(int x);")), used);
    }

    #[test]
    fn everything_else_stays() {
        for text in [
            "extern int variable;",
            "extern int (*pointer)(void);",
            "extern int array[sizeof(long)];",
            "extern __attribute__((cold)) int attributed(void);",
            "extern __typeof__(int) typed;",
            "extern implicit(void);",
            "extern int here(void) { return 1; }",
            "extern void renamed(void) __asm__(\"other\");",
            "extern void another(void) __attribute__((alias(\"other\")));",
            "extern int one(void), two(void);",
            "int plain(void);",
            "static int local(void);",
            "typedef struct s { int a; } s;",
            "char *text = \"extern int f(void);\"; char c = ';';",
            "#pragma GCC extern int f(void);\nint x;",
            "struct t { int a; };\nextern int f(void); int g(void) { return f(); }",
            "extern int unfinished(void)",
        ] {
            assert_eq!(kept(text), text);
        }
    }
}

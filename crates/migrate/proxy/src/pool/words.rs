//! Words with an effect, looked for in a text.

use super::effect::Effect;
use aho_corasick::AhoCorasick;

/// Words, and the effects that they have.
#[derive(Debug)]
pub(super) struct Words {
    /// `None` if it could not be built: then every text is unknown.
    matcher: Option<AhoCorasick>,
    effects: Vec<(Effect, bool)>,
}

impl Words {
    /// Looks for `anywhere` also inside other words, and for `names` as whole words only.
    pub(super) fn new<'a>(
        anywhere: impl Iterator<Item = (&'a str, Effect)>,
        names: impl Iterator<Item = (&'a str, Effect)>,
    ) -> Words {
        let all = anywhere
            .map(|(word, effect)| (word, effect, false))
            .chain(names.map(|(word, effect)| (word, effect, true)));
        let (words, effects): (Vec<&str>, Vec<_>) = all.map(|(word, effect, whole)| (word, (effect, whole))).unzip();
        let matcher = AhoCorasick::builder().ascii_case_insensitive(true).build(words).ok();
        Words { matcher, effects }
    }

    /// Names that all have an effect.
    pub(super) fn names<'a>(names: impl Iterator<Item = &'a str>) -> Words {
        Words::new(std::iter::empty(), names.map(|name| (name, Effect::Unknown)))
    }

    /// The greatest effect of a word in the text.
    pub(super) fn effect(&self, text: &[u8]) -> Effect {
        let Some(matcher) = &self.matcher else { return Effect::Unknown };
        let mut greatest = Effect::Nothing;
        for found in matcher.find_overlapping_iter(text) {
            let (effect, is_whole_word) = self.effects[found.pattern().as_usize()];
            if effect > greatest {
                let is_of_word =
                    |byte: Option<&u8>| byte.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_' || *b >= 0x80);
                let before = found.start().checked_sub(1).and_then(|at| text.get(at));
                if !is_whole_word || !(is_of_word(before) || is_of_word(text.get(found.end()))) {
                    greatest = effect;
                }
            }
        }
        greatest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_count_as_whole_words_and_other_words_anywhere() {
        let words = Words::new(
            [("temp", Effect::Unknown)].into_iter(),
            [("f", Effect::Sequences), ("f_g", Effect::Hidden)].into_iter(),
        );
        for (text, effect) in [
            ("select from t", Effect::Nothing),
            ("select F(1)", Effect::Sequences),
            ("select s.\"f\" (1)", Effect::Sequences),
            ("create TEMPORARY table f", Effect::Unknown),
            ("select f_g()", Effect::Hidden),
            ("select f_gh(), xf_g()", Effect::Nothing),
        ] {
            assert_eq!(words.effect(text.as_bytes()), effect, "{text}");
        }
    }
}

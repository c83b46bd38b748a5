//! Insertions and replacements in a text, which nest.

/// Changes of a text, in any order.
#[derive(Default)]
pub(crate) struct Edits {
    /// Place, order at this place, bytes that go, text that comes.
    all: Vec<(usize, (u8, usize), usize, String)>,
}

impl Edits {
    /// Puts a text before and one after a range; ranges may contain one another.
    pub(crate) fn around(&mut self, (start, end): (usize, usize), before: String, after: String) {
        let len = end - start;
        self.all.push((start, (2, usize::MAX - len), 0, before));
        self.all.push((end, (0, len), 0, after));
    }

    /// Replaces a range, which contains no other change.
    pub(crate) fn replace(&mut self, (start, end): (usize, usize), text: String) {
        self.all.push((start, (1, 0), end - start, text));
    }

    pub(crate) fn apply(mut self, text: &[u8]) -> Vec<u8> {
        self.all.sort_by_key(|(at, order, ..)| (*at, *order));
        let (mut out, mut done) = (Vec::with_capacity(text.len()), 0);
        for (at, _, removed, inserted) in self.all {
            out.extend_from_slice(&text[done..at.max(done)]);
            out.extend_from_slice(inserted.as_bytes());
            done = done.max(at + removed);
        }
        out.extend_from_slice(&text[done..]);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_nest() {
        let mut edits = Edits::default();
        edits.around((0, 1), "[".into(), "]".into());
        edits.around((0, 3), "(".into(), ")".into());
        edits.replace((1, 2), "*".into());
        edits.around((3, 4), "{".into(), "}".into());
        assert_eq!(edits.apply(b"a+bc"), b"([a]*b){c}");
    }
}

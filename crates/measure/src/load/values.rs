//! Values stored under keys, so that every answer can be checked: each contains its key, run and number of the write.

use stillpoint_base::Random;

/// Minimum size of a value in bytes: the stamp has to fit.
pub(crate) const VALUE_BYTES_MIN: u32 = 27;
/// Number of start offsets in the filler, so that values of other keys and writes differ in all bytes.
const SHIFTS: u64 = 1024;

/// Values of one run: `KKKKKKKK.RRRRRRRR.SSSSSSSS.` (key, run and write in hexadecimal) and a filler that depends on key and write.
#[derive(Debug)]
pub(crate) struct Values {
    run: u32,
    value_bytes: usize,
    filler: Vec<u8>,
    keys: Vec<KeyState>,
    writes: u32,
    /// True if every key had a value before this run began.
    pub(crate) loaded: bool,
}

/// Knowledge of this run about a key.
#[derive(Debug, Clone, Copy, Default)]
struct KeyState {
    /// Last write that the server confirmed; 0 when there was none.
    confirmed: u32,
    /// True while a write is in progress: its order relative to another one would be unknown.
    writing: bool,
    /// True if a write timed out and may take effect at any time.
    unsure: bool,
}

/// Write in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Write {
    pub(crate) key: u32,
    pub(crate) seq: u32,
}

impl Values {
    pub(crate) fn new(run: u32, keys: u64, value_bytes: u32) -> Self {
        let mut rng = Random::new(0x5744_11aa);
        // Printable, so that a value can be read in a terminal; never a line end, so that line protocols are safe.
        let filler = (0..u64::from(value_bytes) + SHIFTS)
            .map(|_| b"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ-_"[rng.below(64) as usize])
            .collect();
        let keys = vec![KeyState::default(); keys as usize];
        Values { run, value_bytes: value_bytes as usize, filler, keys, writes: 0, loaded: false }
    }

    pub(crate) fn value_bytes(&self) -> usize {
        self.value_bytes
    }

    /// Draws any key.
    pub(crate) fn draw(&self, rng: &mut Random) -> u32 {
        rng.below(self.keys.len() as u64) as u32
    }

    /// Draws a key for a write, and numbers the write.
    pub(crate) fn begin_write(&mut self, rng: &mut Random) -> Write {
        let mut key = self.draw(rng);
        // The order of two concurrent writes to one key is unknown. With very few keys there may be no other key.
        for _ in 0..16 {
            if !self.keys[key as usize].writing {
                break;
            }
            key = self.draw(rng);
        }
        let state = &mut self.keys[key as usize];
        state.unsure |= state.writing;
        state.writing = true;
        self.writes += 1;
        Write { key, seq: self.writes }
    }

    pub(crate) fn confirm_write(&mut self, write: Write) {
        let state = &mut self.keys[write.key as usize];
        state.writing = false;
        state.confirmed = state.confirmed.max(write.seq);
    }

    pub(crate) fn abandon_write(&mut self, write: Write) {
        let state = &mut self.keys[write.key as usize];
        state.writing = false;
        state.unsure = true;
    }

    /// Returns the oldest write that a read sent now may return.
    pub(crate) fn floor(&self, key: u32) -> u32 {
        self.keys[key as usize].confirmed
    }

    /// Appends the value of write `seq` (0: the initial one) to `key`.
    pub(crate) fn append(&self, key: u32, seq: u32, out: &mut Vec<u8>) {
        push_hex(out, key);
        push_hex(out, self.run);
        push_hex(out, seq);
        out.extend_from_slice(self.filler(key, seq));
    }

    /// Checks an answer to a read of `key`; `floor` is the result of [`Values::floor`] when the read was sent.
    pub(crate) fn check(&self, key: u32, floor: u32, value: Option<&[u8]>) -> Result<(), String> {
        let Some(value) = value else {
            let written = floor > 0 || self.loaded;
            return if written { Err(format!("key {key} has lost its value")) } else { Ok(()) };
        };
        let wrong = |what: &str| Err(format!("key {key} contains {what}"));
        if value.len() != self.value_bytes {
            return wrong("a value of another size");
        }
        let (stamp, filler) = value.split_at(VALUE_BYTES_MIN as usize);
        let (Some(of), Some(run), Some(seq)) = (hex(&stamp[..9]), hex(&stamp[9..18]), hex(&stamp[18..])) else {
            return wrong("a value without a stamp");
        };
        if of != key {
            return wrong("the value of another key");
        }
        if filler != self.filler(key, seq) {
            return wrong("a damaged value");
        }
        let state = &self.keys[key as usize];
        let stale = if run == self.run { seq < floor } else { floor > 0 };
        // After a lost write the order of two values is unknown.
        if stale && !state.unsure {
            return Err(format!("key {key} has lost write {floor}"));
        }
        Ok(())
    }

    fn filler(&self, key: u32, seq: u32) -> &[u8] {
        let shift = Random::new(u64::from(key) << 32 | u64::from(seq)).below(SHIFTS);
        &self.filler[shift as usize..][..self.value_bytes - VALUE_BYTES_MIN as usize]
    }
}

fn push_hex(out: &mut Vec<u8>, number: u32) {
    let digits = (0..8).rev().map(|digit| b"0123456789abcdef"[(number >> (4 * digit)) as usize & 15]);
    out.extend(digits);
    out.push(b'.');
}

/// Parses eight hexadecimal digits and a dot.
fn hex(text: &[u8]) -> Option<u32> {
    let (digits, dot) = text.split_at_checked(8)?;
    if dot != b"." {
        return None;
    }
    digits.iter().try_fold(0u32, |number, &digit| Some(number << 4 | (digit as char).to_digit(16)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(values: &Values, key: u32, seq: u32) -> Vec<u8> {
        let mut out = Vec::new();
        values.append(key, seq, &mut out);
        out
    }

    #[test]
    fn a_value_passes_for_its_own_key_only() {
        let values = Values::new(9, 100, 64);
        let stored = value(&values, 5, 0);
        assert_eq!(stored.len(), 64);
        assert_eq!(values.check(5, 0, Some(&stored)), Ok(()));
        assert!(values.check(6, 0, Some(&stored)).is_err());
        assert!(values.check(5, 0, Some(&stored[1..])).is_err());
        for index in 0..stored.len() {
            let mut flipped = stored.clone();
            flipped[index] ^= 0x02;
            // A changed number of the run gives a value of another run, which is right; any other change is wrong.
            let of_another_run = (9..17).contains(&index) && flipped[index].is_ascii_hexdigit();
            assert_eq!(values.check(5, 0, Some(&flipped)).is_ok(), of_another_run, "byte {index}");
        }
    }

    #[test]
    fn a_lost_write_is_found_out() {
        let mut values = Values::new(9, 1, 64);
        let mut rng = Random::new(1);
        let first = values.begin_write(&mut rng);
        values.confirm_write(first);
        let second = values.begin_write(&mut rng);
        assert_eq!(values.floor(0), first.seq);
        assert_eq!(values.check(0, first.seq, Some(&value(&values, 0, first.seq))), Ok(()));
        assert_eq!(values.check(0, first.seq, Some(&value(&values, 0, second.seq))), Ok(()));
        values.confirm_write(second);
        let floor = values.floor(0);
        assert!(values.check(0, floor, Some(&value(&values, 0, first.seq))).is_err());
        assert!(values.check(0, floor, Some(&value(&values, 0, 0))).is_err());
        assert!(values.check(0, floor, None).is_err());
    }

    #[test]
    fn after_an_abandoned_write_any_order_is_accepted() {
        let mut values = Values::new(9, 1, 64);
        let mut rng = Random::new(1);
        let lost = values.begin_write(&mut rng);
        values.abandon_write(lost);
        let next = values.begin_write(&mut rng);
        values.confirm_write(next);
        assert_eq!(values.check(0, values.floor(0), Some(&value(&values, 0, lost.seq))), Ok(()));
    }

    #[test]
    fn a_miss_is_wrong_only_where_there_must_be_a_value() {
        let mut values = Values::new(9, 10, 64);
        assert_eq!(values.check(3, 0, None), Ok(()));
        values.loaded = true;
        assert!(values.check(3, 0, None).is_err());
    }
}

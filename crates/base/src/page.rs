//! Pages of memory, as x86-64 maps them.

/// Size of a page in bytes.
pub const PAGE: u64 = 4096;

/// Returns the address of the page that contains `address`.
pub const fn page_start(address: u64) -> u64 {
    address & !(PAGE - 1)
}

/// Returns true if `bytes` bytes at `address` are not all in one page.
pub const fn crosses_page(address: u64, bytes: usize) -> bool {
    address % PAGE + bytes as u64 > PAGE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_rounded_down_to_their_page() {
        assert_eq!([0, 4095, 4096, u64::MAX].map(page_start), [0, 0, 4096, u64::MAX - 4095]);
    }

    #[test]
    fn bytes_cross_a_page_only_if_one_is_behind_its_end() {
        assert!(!crosses_page(4096, 4096) && !crosses_page(4091, 5) && crosses_page(4092, 5) && crosses_page(1, 4096));
    }
}

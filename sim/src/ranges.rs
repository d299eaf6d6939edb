//! Free address ranges: first fit, coalescing.

use std::collections::BTreeMap;

pub struct FreeRanges {
    ranges: BTreeMap<u64, u64>,
}

pub fn round_up(value: u64, step: u64) -> Option<u64> {
    Some(value.checked_add(step - 1)? / step * step)
}

impl FreeRanges {
    pub const fn none() -> FreeRanges {
        FreeRanges { ranges: BTreeMap::new() }
    }

    pub fn new(base: u64, size: u64) -> FreeRanges {
        FreeRanges { ranges: BTreeMap::from([(base, size)]) }
    }

    /// The lowest range that fits.
    pub fn take(&mut self, size: u64, alignment: u64) -> Option<u64> {
        let (start, length, base) = self.ranges.iter().find_map(|(&start, &length)| {
            let base = round_up(start, alignment)?;
            let end = base.checked_add(size)?;
            (end <= start + length).then_some((start, length, base))
        })?;
        self.ranges.remove(&start);
        if base > start {
            self.ranges.insert(start, base - start);
        }
        let end = start + length;
        if end > base + size {
            self.ranges.insert(base + size, end - base - size);
        }
        Some(base)
    }

    /// Whether all of the range is free.
    pub fn contains(&self, base: u64, size: u64) -> bool {
        let around = self.ranges.range(..=base).next_back();
        around.is_some_and(|(&start, &length)| start + length >= base + size)
    }

    /// Takes this very range, which is free.
    pub fn remove(&mut self, base: u64, size: u64) {
        let Some((&start, &length)) = self.ranges.range(..=base).next_back() else {
            return;
        };
        self.ranges.remove(&start);
        if start < base {
            self.ranges.insert(start, base - start);
        }
        let (end, taken) = (start + length, base + size);
        if taken < end {
            self.ranges.insert(taken, end - taken);
        }
    }

    pub fn give(&mut self, base: u64, size: u64) {
        let mut start = base;
        let mut end = base + size;
        if let Some((&before, &length)) = self.ranges.range(..base).next_back()
            && before + length == base
        {
            start = before;
        }
        if let Some(&length) = self.ranges.get(&end) {
            self.ranges.remove(&end);
            end += length;
        }
        self.ranges.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_fit_is_taken_and_neighbours_join() {
        let mut free = FreeRanges::new(4096, 4096);
        assert_eq!(free.take(512, 512), Some(4096));
        assert_eq!(free.take(1024, 1024), Some(5120));
        assert_eq!(free.take(512, 512), Some(4608), "the gap left for alignment");
        assert_eq!(free.take(4096, 512), None);
        free.give(5120, 1024);
        free.give(4096, 512);
        free.give(4608, 512);
        assert!(free.contains(4096, 4096));
        assert_eq!(free.take(4096, 4096), Some(4096));
    }

    #[test]
    fn a_given_range_can_be_taken_out_of_the_middle() {
        let mut free = FreeRanges::new(0, 100);
        free.remove(40, 20);
        assert!(free.contains(0, 40) && free.contains(60, 40) && !free.contains(30, 20));
        free.give(40, 20);
        assert!(free.contains(0, 100));
    }

    #[test]
    fn rounding_up_does_not_wrap() {
        assert_eq!(round_up(1, 512), Some(512));
        assert_eq!(round_up(512, 512), Some(512));
        assert_eq!(round_up(u64::MAX, 512), None);
    }
}

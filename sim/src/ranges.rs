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
        if let Some((&before, &length)) = self.ranges.range(..base).next_back() {
            if before + length == base {
                start = before;
            }
        }
        if let Some(&length) = self.ranges.get(&end) {
            self.ranges.remove(&end);
            end += length;
        }
        self.ranges.insert(start, end - start);
    }
}

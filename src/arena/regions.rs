//! Regions: the translation between the heap's offsets and device addresses.
//!
//! The reserved range, if there is one, is region 0. Each `cuMemAlloc` chunk gets a slot of offsets of its own that is congruent to its
//! address modulo 1 GiB, so that what is aligned in offsets is aligned in addresses; slots of different chunks never touch, so nothing
//! coalesces across them.

use super::Range;
use crate::error::NoHostMemory;

const SLOT: u64 = 1 << 30;

/// A `cuMemAlloc` chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Region {
    address: u64,
    len: u64,
    off: u64,
    /// It is being given back: the driver may give its addresses again before that is booked.
    hidden: bool,
}

/// See the module.
pub struct Regions {
    range: Option<Range>,
    /// By address.
    chunks: Vec<Region>,
    /// For each slot past the range, the chunk address minus its offset, wrapping.
    deltas: Vec<u64>,
    /// Slots not in use: first and count.
    vacant: Vec<(u64, u64)>,
}

impl Regions {
    pub fn new(range: Option<Range>) -> Regions {
        Regions { range, chunks: Vec::new(), deltas: Vec::new(), vacant: Vec::new() }
    }

    fn range_len(&self) -> u64 {
        self.range.map_or(0, |r| r.len)
    }

    #[inline]
    pub fn address(&self, off: u64) -> u64 {
        match self.range {
            Some(range) if off < range.len => range.base.wrapping_add(off),
            _ => {
                let slot = off.saturating_sub(self.range_len()) / SLOT;
                off.wrapping_add(self.deltas.get(slot as usize).copied().unwrap_or(0))
            }
        }
    }

    /// The offset of an address and the start of its region, if the arena has it.
    #[inline]
    pub fn offset(&self, address: u64) -> Option<(u64, u64)> {
        if let Some(range) = self.range {
            let off = address.wrapping_sub(range.base);
            if off < range.len {
                return Some((off, 0));
            }
        }
        let at = self.chunks.partition_point(|r| r.address <= address);
        let region = self.chunks.get(..at)?.iter().rev().find(|region| !region.hidden)?;
        let inside = address.saturating_sub(region.address);
        (inside < region.len).then_some((region.off.saturating_add(inside), region.off))
    }

    /// Makes room for one more chunk, so that [`Regions::add`] for `len` bytes needs no memory.
    pub fn reserve(&mut self, len: u64) -> Result<(), NoHostMemory> {
        self.chunks.try_reserve(1).map_err(|_| NoHostMemory)?;
        // Every chunk in use gives at most one run of slots back.
        let most = self.chunks.len().saturating_add(self.vacant.len()).saturating_add(2);
        self.vacant.try_reserve(most).map_err(|_| NoHostMemory)?;
        self.deltas.try_reserve(slots(len) as usize).map_err(|_| NoHostMemory)
    }

    /// Adds a chunk and returns its offset.
    pub fn add(&mut self, address: u64, len: u64) -> u64 {
        let count = slots(len);
        let first = match self.vacant.iter().position(|(_, c)| *c >= count) {
            Some(at) => {
                let first = self.vacant.get(at).map_or(0, |v| v.0);
                if let Some(run) = self.vacant.get_mut(at) {
                    *run = (run.0.saturating_add(count), run.1.saturating_sub(count));
                }
                self.vacant.retain(|v| v.1 > 0);
                first
            }
            None => {
                let first = self.deltas.len() as u64;
                self.deltas.resize(first.saturating_add(count) as usize, 0);
                first
            }
        };
        let off = self.range_len().saturating_add(first.saturating_mul(SLOT)).saturating_add(address % SLOT);
        for slot in first..first.saturating_add(count) {
            if let Some(delta) = self.deltas.get_mut(slot as usize) {
                *delta = address.wrapping_sub(off);
            }
        }
        // Behind one of the same address: that one is being given back, and the driver was faster than its booking.
        let at = self.chunks.partition_point(|r| r.address <= address);
        self.chunks.insert(at, Region { address, len, off, hidden: false });
        off
    }

    /// Hides the chunk at offset `off` from look-ups by address, or shows it again.
    pub fn hide(&mut self, off: u64, hidden: bool) {
        if let Some(region) = self.chunks.iter_mut().find(|region| region.off == off) {
            region.hidden = hidden;
        }
    }

    /// Forgets the chunk at offset `off`.
    pub fn remove(&mut self, off: u64) {
        let Some(at) = self.chunks.iter().position(|r| r.off == off) else { return };
        let region = self.chunks.remove(at);
        let first = region.off.saturating_sub(self.range_len()) / SLOT;
        self.vacant.push((first, slots(region.len)));
        // Neighbouring runs become one, so that large chunks find room again.
        self.vacant.sort_unstable();
        self.vacant.dedup_by(|next, run| {
            let touch = run.0.saturating_add(run.1) == next.0;
            if touch {
                run.1 = run.1.saturating_add(next.1);
            }
            touch
        });
    }
}

/// Slots for a chunk wherever it starts in its first one.
fn slots(len: u64) -> u64 {
    len.div_ceil(SLOT).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn translates_both_ways_and_keeps_alignment() {
        let range = Range { base: 7 << 30, len: 4 << 30 };
        let mut regions = Regions::new(Some(range));
        assert_eq!(regions.offset((7 << 30) + 5), Some((5, 0)));
        assert_eq!(regions.address(5), (7 << 30) + 5);
        let chunks =
            [(0x7f00_0020_0000u64, 3 << 30), (0x1000_0000_0200, 1 << 20), (0x2000_3ff0_0000, 2 << 20)];
        for (address, len) in chunks {
            regions.reserve(len).unwrap();
            let off = regions.add(address, len);
            for at in [off, off + len - 1] {
                let to = regions.address(at);
                assert_eq!(to % SLOT, at % SLOT);
                assert_eq!(regions.offset(to).unwrap().0, at);
            }
            assert_eq!(regions.offset(address + len), None);
        }
        for (address, _) in chunks {
            regions.remove(regions.offset(address).unwrap().0);
            assert_eq!(regions.offset(address), None);
        }
        // A larger chunk that begins lower may come to lie over one that is being given back.
        let [old, new] =
            [(0x5000_0040_0000u64, 2u64 << 20), (0x5000_0020_0000, 8 << 20)].map(|(address, len)| {
                regions.reserve(len).unwrap();
                let off = regions.add(address, len);
                regions.hide(off, len == 2 << 20);
                off
            });
        assert_eq!(regions.offset(0x5000_0040_0000), Some((new + (2 << 20), new)));
        regions.remove(old);
        regions.remove(new);
        // The driver gives an address again before the pool has booked its return.
        let [old, new] = [0, 0].map(|_: i32| {
            regions.reserve(1 << 20).unwrap();
            regions.add(chunks[1].0, 1 << 20)
        });
        regions.remove(old);
        assert_eq!(regions.offset(chunks[1].0), Some((new, new)));
        regions.remove(new);
        let slots_used = regions.deltas.len();
        regions.reserve(3 << 30).unwrap();
        regions.add(chunks[0].0, 3 << 30);
        assert_eq!(regions.deltas.len(), slots_used, "slots are used again");
    }
}

//! AddressMap: the translation between the heap's offsets and device addresses.
//!
//! The reserved range, if there is one, is region 0. Each `cuMemAlloc` chunk gets slots of offsets of its
//! own, congruent to its address modulo 1 GiB, so that what is aligned in offsets is aligned in addresses;
//! slots of different chunks never touch, so nothing coalesces across them. Slots come in runs of powers of
//! two, and are used again by chunks that need as many.
//!
//! No operation looks at more than a few of the chunks: a program may have any number of them.

use super::Range;
use crate::error::NoHostMemory;

const SLOT: u64 = 1 << 30;
/// More kinds of runs than addresses have bits.
const KINDS: usize = 48;
/// Most chunks in a block of the sorted list.
const BLOCK: usize = 256;

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
pub struct AddressMap {
    range: Option<Range>,
    /// By address, in blocks of which none is empty, so that one comes and goes without all others being
    /// moved.
    blocks: Vec<Vec<Region>>,
    /// An empty block, for the next one that is cut in two.
    spare: Vec<Region>,
    /// For each slot past the range, the chunk address minus its offset, wrapping.
    deltas: Vec<u64>,
    /// First slots of the runs of `1 << kind` slots that are not in use, and how many such runs there are in
    /// all.
    vacant: [Vec<u64>; KINDS],
    runs: [usize; KINDS],
}

impl AddressMap {
    pub fn new(range: Option<Range>) -> AddressMap {
        AddressMap {
            range,
            blocks: Vec::new(),
            spare: Vec::new(),
            deltas: Vec::new(),
            vacant: [const { Vec::new() }; KINDS],
            runs: [0; KINDS],
        }
    }

    fn range_len(&self) -> u64 {
        self.range.map_or(0, |r| r.len)
    }

    #[inline]
    pub fn address(&self, off: u64) -> u64 {
        match self.range {
            Some(range) if off < range.len => range.base.wrapping_add(off),
            _ => {
                let slot = (off - self.range_len()) / SLOT;
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
        let region = self.up_to(address).find(|region| !region.hidden)?;
        let inside = address - region.address;
        (inside < region.len).then_some((region.off + inside, region.off))
    }

    /// The block that a chunk at `address` belongs in, and where in it: behind all that begin at or below the
    /// address.
    fn place(&self, address: u64) -> (usize, usize) {
        let starts_below = |block: &Vec<Region>| block.first().is_some_and(|r| r.address <= address);
        let at = self.blocks.partition_point(starts_below).saturating_sub(1);
        (at, self.blocks.get(at).map_or(0, |block| block.partition_point(|r| r.address <= address)))
    }

    /// The chunks that begin at or below the address, the nearest first.
    fn up_to(&self, address: u64) -> impl Iterator<Item = &Region> {
        let (block, at) = self.place(address);
        let near = self.blocks.get(block).and_then(|b| b.get(..at)).unwrap_or_default();
        let below = self.blocks.get(..block).unwrap_or_default();
        near.iter().rev().chain(below.iter().rev().flat_map(|b| b.iter().rev()))
    }

    /// Where the chunk at offset `off` is in the list.
    fn find(&self, off: u64) -> Option<(usize, usize)> {
        if off < self.range_len() {
            return None;
        }
        let address = self.address(off);
        let (mut block, mut at) = self.place(address);
        // Several may begin there, all but one of them on their way out.
        loop {
            match at.checked_sub(1) {
                Some(before) => at = before,
                None => {
                    block = block.checked_sub(1)?;
                    at = self.blocks.get(block)?.len().checked_sub(1)?;
                }
            }
            let region = self.blocks.get(block)?.get(at)?;
            if region.address != address {
                return None;
            }
            if region.off == off {
                return Some((block, at));
            }
        }
    }

    /// Makes room for one more chunk, so that [`AddressMap::add`] for `len` bytes needs no memory, and
    /// removing it neither.
    pub fn reserve(&mut self, len: u64) -> Result<(), NoHostMemory> {
        let kind = kind(len);
        let (Some(vacant), Some(runs)) = (self.vacant.get_mut(kind), self.runs.get(kind)) else {
            return Err(NoHostMemory);
        };
        let room = runs + 1 - vacant.len();
        vacant.try_reserve(room)?;
        self.deltas.try_reserve(1 << kind)?;
        self.blocks.try_reserve(2)?;
        self.spare.try_reserve_exact(BLOCK)?;
        if self.blocks.is_empty() {
            let mut first = Vec::new();
            first.try_reserve_exact(BLOCK)?;
            self.blocks.push(first);
        }
        Ok(())
    }

    /// Adds a chunk and returns its offset.
    pub fn add(&mut self, address: u64, len: u64) -> u64 {
        let kind = kind(len);
        let count = 1u64 << kind;
        let first = self.vacant.get_mut(kind).and_then(Vec::pop).unwrap_or_else(|| {
            if let Some(runs) = self.runs.get_mut(kind) {
                *runs += 1;
            }
            let first = self.deltas.len() as u64;
            self.deltas.resize((first + count) as usize, 0);
            first
        });
        let off = self.range_len() + first * SLOT + address % SLOT;
        for slot in first..first + count {
            if let Some(delta) = self.deltas.get_mut(slot as usize) {
                *delta = address.wrapping_sub(off);
            }
        }
        // Behind one of the same address: that one is being given back, and the driver was faster than its
        // booking.
        let (mut block, mut at) = self.place(address);
        if self.blocks.get(block).is_some_and(|b| b.len() >= BLOCK) {
            let mut upper = core::mem::take(&mut self.spare);
            if let Some(full) = self.blocks.get_mut(block) {
                upper.extend(full.drain(BLOCK / 2..));
            }
            self.blocks.insert(block + 1, upper);
            if at > BLOCK / 2 {
                (block, at) = (block + 1, at - BLOCK / 2);
            }
        }
        if let Some(block) = self.blocks.get_mut(block) {
            block.insert(at, Region { address, len, off, hidden: false });
        }
        off
    }

    /// Hides the chunk at offset `off` from look-ups by address, or shows it again.
    pub fn hide(&mut self, off: u64, hidden: bool) {
        let Some((block, at)) = self.find(off) else { return };
        if let Some(region) = self.blocks.get_mut(block).and_then(|b| b.get_mut(at)) {
            region.hidden = hidden;
        }
    }

    /// Forgets the chunk at offset `off`.
    pub fn remove(&mut self, off: u64) {
        let Some((block, at)) = self.find(off) else { return };
        let Some(chunks) = self.blocks.get_mut(block) else { return };
        let region = chunks.remove(at);
        if chunks.is_empty() {
            self.blocks.remove(block);
        }
        let first = (region.off - self.range_len()) / SLOT;
        if let Some(vacant) = self.vacant.get_mut(kind(region.len)) {
            vacant.push(first); // Reserved when the run was made.
        }
    }
}

/// The kind of run for a chunk wherever it starts in its first slot.
fn kind(len: u64) -> usize {
    (len.div_ceil(SLOT) + 1).next_power_of_two().trailing_zeros() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn translates_both_ways_and_keeps_alignment() {
        let range = Range { base: 7 << 30, len: 4 << 30 };
        let mut regions = AddressMap::new(Some(range));
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

    #[test]
    fn many_chunks_come_and_go_in_any_order() {
        let mut regions = AddressMap::new(None);
        let mut model = std::collections::BTreeMap::new();
        let mut random = 1u64;
        let mut most = 0;
        for step in 0..20_000 {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            // Fewer and fewer are left in the second half.
            let address = ((random >> 33) % 4000) << 22;
            let remove = if step < 10_000 { random >> 62 == 0 } else { random >> 62 != 0 };
            match model.get(&address).copied() {
                Some(off) if remove => {
                    regions.remove(off);
                    model.remove(&address);
                }
                None if !remove => {
                    regions.reserve(4 << 20).unwrap();
                    model.insert(address, regions.add(address, 4 << 20));
                }
                _ => {}
            }
            most = most.max(model.len());
            if step % 500 == 0 {
                for at in 0..4000u64 {
                    let off = model.get(&(at << 22)).copied();
                    assert_eq!(regions.offset((at << 22) + 5), off.map(|off| (off + 5, off)));
                }
                assert!(regions.blocks.iter().all(|b| !b.is_empty() && b.len() <= BLOCK));
            }
        }
        assert!(most > 8 * BLOCK && model.len() < most / 2);
        for off in model.into_values() {
            regions.remove(off);
        }
        assert!(regions.blocks.is_empty());
        assert_eq!(regions.deltas.len(), most * 2, "slots are used again");
    }
}

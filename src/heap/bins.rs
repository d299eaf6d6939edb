//! Bins: the free extents of one stream by size, two levels deep, so that the best fit is found
//! without looking at every extent.
//!
//! A bin spans a sixteenth of a doubling; sixteen quanta and less have a bin each.

use super::node::{NIL, NodeId, Nodes};
use super::size::QUANTUM;

const STEPS: usize = 16;
const ROWS: usize = 34; // Up to 2^37 quanta, more than MAX_SIZE.

/// How many extents of one bin are looked at for the best fit. A limit, because a program may leave
/// any number of extents of nearly one size; past it the fit is within a sixteenth of the best.
const SCAN: usize = 48;

/// The free extents of a stream, by size.
pub struct Bins {
    heads: [[NodeId; STEPS]; ROWS],
    /// Bit r: row r has a bin in use.
    rows: u64,
    /// Bit s of word r: bin (r, s) is in use.
    steps: [u16; ROWS],
}

fn place(len: u64) -> (usize, usize) {
    let quanta = len / QUANTUM;
    if quanta < STEPS as u64 {
        return (0, quanta as usize);
    }
    let log = quanta.ilog2();
    let row = (log as usize).saturating_sub(3).min(ROWS - 1);
    (row, (quanta >> log.saturating_sub(4)) as usize & (STEPS - 1))
}

impl Bins {
    pub const fn new() -> Self {
        Bins { heads: [[NIL; STEPS]; ROWS], rows: 0, steps: [0; ROWS] }
    }

    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    fn head(&self, (row, step): (usize, usize)) -> NodeId {
        self.heads.get(row).and_then(|r| r.get(step)).copied().unwrap_or(NIL)
    }

    fn set_head(&mut self, (row, step): (usize, usize), id: NodeId) {
        if let Some(head) = self.heads.get_mut(row).and_then(|r| r.get_mut(step)) {
            *head = id;
        }
        if let Some(steps) = self.steps.get_mut(row) {
            let bit = 1u16 << step;
            *steps = if id == NIL { *steps & !bit } else { *steps | bit };
            let bit = 1u64 << row;
            self.rows = if *steps == 0 { self.rows & !bit } else { self.rows | bit };
        }
    }

    pub fn insert(&mut self, nodes: &mut Nodes, id: NodeId) {
        let bin = place(nodes.get(id).len);
        let head = self.head(bin);
        let node = nodes.at(id);
        node.bin_prev = NIL;
        node.bin_next = head;
        if head != NIL {
            nodes.at(head).bin_prev = id;
        }
        self.set_head(bin, id);
    }

    /// Takes an extent out; its length must be what it was when it went in.
    pub fn remove(&mut self, nodes: &mut Nodes, id: NodeId) {
        let node = *nodes.get(id);
        if node.bin_prev == NIL {
            self.set_head(place(node.len), node.bin_next);
        } else {
            nodes.at(node.bin_prev).bin_next = node.bin_next;
        }
        if node.bin_next != NIL {
            nodes.at(node.bin_next).bin_prev = node.bin_prev;
        }
    }

    /// The first bin in use at or after `bin`.
    fn in_use_from(&self, (row, step): (usize, usize)) -> Option<(usize, usize)> {
        let here = self.steps.get(row)? & (u16::MAX.checked_shl(step as u32).unwrap_or(0));
        if here != 0 {
            return Some((row, here.trailing_zeros() as usize));
        }
        let above = self.rows & u64::MAX.checked_shl(row as u32 + 1).unwrap_or(0);
        if above == 0 {
            return None;
        }
        let row = above.trailing_zeros() as usize;
        Some((row, self.steps.get(row)?.trailing_zeros() as usize))
    }

    /// The smallest extent that holds `len` bytes at a multiple of `align` (the lowest address among
    /// equals), as far as the scan limit lets it see.
    pub fn best_fit(&self, nodes: &Nodes, len: u64, align: u64) -> Option<NodeId> {
        let mut bin = place(len);
        loop {
            bin = self.in_use_from(bin)?;
            let (mut best, mut best_len, mut best_off) = (NIL, u64::MAX, u64::MAX);
            let (mut id, mut seen) = (self.head(bin), 0);
            while id != NIL && seen < SCAN {
                let node = nodes.get(id);
                let better = node.len < best_len || (node.len == best_len && node.off < best_off);
                if better && fits(node.off, node.len, len, align) {
                    (best, best_len, best_off) = (id, node.len, node.off);
                }
                id = node.bin_next;
                seen += 1;
            }
            if best != NIL {
                return Some(best);
            }
            bin = if bin.1 + 1 < STEPS { (bin.0, bin.1 + 1) } else { (bin.0 + 1, 0) };
        }
    }

    /// Whether the best fit for `len` bytes would rather be an extent of these bins, other than `except`, than one of `whole` bytes
    /// at `off`. Yes where the scan limit is reached.
    #[inline]
    pub fn has_better(&self, nodes: &Nodes, len: u64, (whole, off): (u64, u64), except: NodeId) -> bool {
        let (mut bin, last) = (place(len), place(whole));
        let mut seen = 0;
        while let Some(used) = self.in_use_from(bin) {
            if used > last {
                return false;
            }
            let mut id = self.head(used);
            while id != NIL {
                let node = nodes.get(id);
                seen += 1;
                let better = node.len >= len && (node.len, node.off) < (whole, off);
                if (better && id != except) || seen > SCAN {
                    return true;
                }
                id = node.bin_next;
            }
            bin = if used.1 + 1 < STEPS { (used.0, used.1 + 1) } else { (used.0 + 1, 0) };
        }
        false
    }

    /// The largest length that is certainly available, to within a bin.
    pub fn largest(&self, nodes: &Nodes) -> u64 {
        let Some(row) = 63u32.checked_sub(self.rows.leading_zeros()) else {
            return 0;
        };
        let steps = self.steps.get(row as usize).copied().unwrap_or(0);
        let Some(step) = 15u32.checked_sub(steps.leading_zeros()) else {
            return 0;
        };
        let (mut id, mut largest) = (self.head((row as usize, step as usize)), 0);
        while id != NIL {
            let node = nodes.get(id);
            largest = largest.max(node.len);
            id = node.bin_next;
        }
        largest
    }

    /// Every extent, in no order; for validation.
    pub fn for_each(&self, nodes: &Nodes, mut f: impl FnMut(NodeId)) {
        for (row, heads) in self.heads.iter().enumerate() {
            for (step, head) in heads.iter().enumerate() {
                let mut id = *head;
                while id != NIL {
                    assert_eq!(place(nodes.get(id).len), (row, step), "an extent is in the wrong bin");
                    f(id);
                    id = nodes.get(id).bin_next;
                }
            }
        }
    }
}

/// Whether `len` bytes at a multiple of `align` fit into the extent.
pub fn fits(off: u64, have: u64, len: u64, align: u64) -> bool {
    let start = off.wrapping_add(align - 1) & !(align - 1);
    (start - off).saturating_add(len) <= have
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heap::node::Node;

    #[test]
    fn bins_grow_with_length() {
        let mut last = (0, 0);
        for shift in 12..48 {
            for sixteenth in 16..32u64 {
                let at = place((sixteenth << shift >> 4) / QUANTUM * QUANTUM);
                assert!(at >= last);
                last = at;
            }
        }
        assert!(last.0 < ROWS);
    }

    #[test]
    fn best_fit_is_the_smallest_that_fits() {
        let mut nodes = Nodes::new();
        let mut bins = Bins::new();
        nodes.reserve(100).unwrap();
        let lens = [8, 12, 16, 40, 44, 400].map(|k| k << 12);
        for (i, len) in lens.iter().enumerate() {
            let id = nodes.take(Node { off: (i as u64) << 30, len: *len, ..Node::BLANK });
            bins.insert(&mut nodes, id);
        }
        let want = |len: u64, align| bins.best_fit(&nodes, len, align).map(|id| nodes.get(id).len >> 12);
        assert_eq!(want(1 << 12, 4096), Some(8));
        assert_eq!(want(13 << 12, 4096), Some(16));
        assert_eq!(want(41 << 12, 4096), Some(44));
        assert_eq!(want(45 << 12, 1 << 30), Some(400));
        assert_eq!(want(401 << 12, 4096), None);
    }
}

//! Bins: the free extents of one stream, or the unmapped ones, by size, two levels deep, so that a place for
//! a request is found without looking at every extent; and which of the places that hold it is taken.
//!
//! A bin spans a sixteenth of a doubling; sixteen quanta and less have a bin each.

use super::node::{NIL, NodeId, Nodes};
use super::size::{PAGE, QUANTUM};

const STEPS: usize = 16;
const ROWS: usize = 34; // Up to 2^37 quanta, more than MAX_SIZE.

/// How many extents of one bin are looked at for the best fit. A limit, because a program may leave
/// any number of extents of nearly one size; past it the fit is within a sixteenth of the best.
const SCAN: usize = 48;
/// How many extents are looked at, where none is a good fit, for the one at the lowest address; a limit for
/// the same reason.
const LOWEST_SCAN: usize = 24;

/// The same for the largest, which only the report of an out-of-memory answer asks for.
const LARGEST_SCAN: usize = 1024;

/// Extents by size: the free ones of a stream, or the unmapped ones.
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
    let row = (log as usize - 3).min(ROWS - 1);
    (row, (quanta >> (log - 4)) as usize & (STEPS - 1))
}

/// The next bin after one.
fn after((row, step): (usize, usize)) -> (usize, usize) {
    if step + 1 < STEPS { (row, step + 1) } else { (row + 1, 0) }
}

/// How good a place is, less being better: first the good fits by length and address, then from [`FAR`] on
/// the others by address.
pub type Rank = (u64, u64);
/// More than any length.
const FAR: u64 = 1 << 63;

/// The rank of an extent of `whole` bytes at `off` for a request of `len`. A block smaller than a page that
/// finds only extents of more than 2.5 times its length would break one up wherever it went: it goes to the
/// lowest, so that those further up become idle whole. For larger blocks every fit is good.
#[inline]
fn rank(len: u64, whole: u64, off: u64) -> Rank {
    let good = len >= PAGE || whole <= len.wrapping_mul(5) / 2;
    if good { (whole, off) } else { (FAR | off, 0) }
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

    /// The last bin in use before `bin`.
    fn in_use_below(&self, (row, step): (usize, usize)) -> Option<(usize, usize)> {
        let here = self.steps.get(row)? & !(u16::MAX.checked_shl(step as u32).unwrap_or(0));
        let (row, steps) = if here != 0 {
            (row, here)
        } else {
            let below = self.rows & !(u64::MAX.checked_shl(row as u32).unwrap_or(0));
            let row = 63u32.checked_sub(below.leading_zeros())? as usize;
            (row, *self.steps.get(row)?)
        };
        Some((row, 15u32.checked_sub(steps.leading_zeros())? as usize))
    }

    /// Where `len` bytes at a multiple of `align` are best put: the extent of the least [`rank`], as far as
    /// the scan limits let it see.
    pub fn best(&self, nodes: &Nodes, len: u64, align: u64) -> Option<(Rank, NodeId)> {
        let (mut bin, mut all) = (place(len), 0);
        let (mut best, mut least) = (NIL, (u64::MAX, u64::MAX));
        while let Some(used) = self.in_use_from(bin) {
            let (mut id, mut seen) = (self.head(used), 0);
            while id != NIL && seen < SCAN {
                let node = nodes.get(id);
                let this = rank(len, node.len, node.off);
                if this < least && fits(node.off, node.len, len, align) {
                    (best, least) = (id, this);
                }
                id = node.bin_next;
                seen += 1;
            }
            all += seen;
            // Later bins hold larger extents, of which none is a better fit, but one may lie lower.
            if best != NIL && (least.0 < FAR || all >= LOWEST_SCAN) {
                break;
            }
            bin = after(used);
        }
        (best != NIL).then_some((least, best))
    }

    /// Whether an extent of these bins, other than `except`, is a better place for `len` bytes than one of
    /// `whole` bytes at `off`. Yes where the scan limits are reached.
    #[inline]
    pub fn has_better(&self, nodes: &Nodes, len: u64, (whole, off): (u64, u64), except: NodeId) -> bool {
        let mine = rank(len, whole, off);
        let (mut bin, mut seen) = (place(len), 0);
        while let Some(used) = self.in_use_from(bin) {
            // None from here on fits better.
            if mine.0 < FAR && used > place(whole) {
                return false;
            }
            let mut id = self.head(used);
            while id != NIL {
                let node = nodes.get(id);
                seen += 1;
                let better = id != except && node.len >= len && rank(len, node.len, node.off) < mine;
                if better || seen >= LOWEST_SCAN {
                    return true;
                }
                id = node.bin_next;
            }
            bin = after(used);
        }
        false
    }

    /// Calls `f` with the extents of the bin of `len` bytes and of those above it, smallest first, or with
    /// those below it, largest first, until it answers false.
    pub fn visit(&self, nodes: &Nodes, len: u64, above: bool, mut f: impl FnMut(NodeId) -> bool) {
        let first = place(len);
        let mut bin = first;
        loop {
            let found = if above { self.in_use_from(bin) } else { self.in_use_below(bin) };
            let Some(used) = found else { return };
            let mut id = self.head(used);
            while id != NIL {
                if !f(id) {
                    return;
                }
                id = nodes.get(id).bin_next;
            }
            bin = if above { after(used) } else { used };
        }
    }

    /// The length of the largest extent; within a sixteenth of it where many are nearly as large.
    pub fn largest(&self, nodes: &Nodes) -> u64 {
        let Some(last) = self.in_use_below((ROWS - 1, STEPS)) else { return 0 };
        let (mut id, mut seen, mut largest) = (self.head(last), 0, 0);
        while id != NIL && seen < LARGEST_SCAN {
            let node = nodes.get(id);
            largest = largest.max(node.len);
            id = node.bin_next;
            seen += 1;
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
    start - off + len <= have
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
    fn visits_go_up_and_down() {
        let mut nodes = Nodes::new();
        let mut bins = Bins::new();
        nodes.reserve(100).unwrap();
        for k in [1u64, 8, 12, 16, 40, 47, 400, 1 << 30] {
            let id = nodes.take(Node { len: k << 12, ..Node::BLANK });
            bins.insert(&mut nodes, id);
        }
        let visited = |len: u64, above, most: usize| {
            let mut seen = Vec::new();
            bins.visit(&nodes, len << 12, above, |id| {
                seen.push(nodes.get(id).len >> 12);
                seen.len() < most
            });
            seen
        };
        assert_eq!(visited(12, true, 99), [12, 16, 40, 47, 400, 1 << 30]);
        assert_eq!(visited(12, false, 99), [8, 1]);
        assert_eq!(visited(13, true, 2), [16, 40]);
        assert_eq!(visited(1 << 36, false, 3), [1 << 30, 400, 47]);
        assert_eq!(visited(1, false, 99), []);
        assert_eq!(bins.largest(&nodes), 1 << 42);
        assert_eq!(Bins::new().largest(&nodes), 0);
    }

    #[test]
    fn a_good_fit_is_the_smallest_that_fits() {
        let mut nodes = Nodes::new();
        let mut bins = Bins::new();
        nodes.reserve(100).unwrap();
        let lens = [8, 12, 16, 40, 44, 400].map(|k| k << 12);
        for (i, len) in lens.iter().enumerate() {
            let id = nodes.take(Node { off: (i as u64) << 30, len: *len, ..Node::BLANK });
            bins.insert(&mut nodes, id);
        }
        let want = |len: u64, align| bins.best(&nodes, len, align).map(|(_, id)| nodes.get(id).len >> 12);
        assert_eq!(want(1 << 12, 4096), Some(8));
        assert_eq!(want(13 << 12, 4096), Some(16));
        assert_eq!(want(41 << 12, 4096), Some(44));
        assert_eq!(want(45 << 12, 1 << 30), Some(400));
        assert_eq!(want(401 << 12, 4096), None);
    }

    #[test]
    fn what_fits_nowhere_well_goes_low() {
        let mut nodes = Nodes::new();
        let mut bins = Bins::new();
        nodes.reserve(100).unwrap();
        // Two good fits for 100 quanta, the better one further up; then larger extents at lower addresses.
        let lens = [(3u64, 900u64), (4, 600), (8, 250), (9, 110)];
        for (at, quanta) in lens {
            let id = nodes.take(Node { off: at << 30, len: quanta * QUANTUM, ..Node::BLANK });
            bins.insert(&mut nodes, id);
        }
        let at =
            |quanta: u64| bins.best(&nodes, quanta * QUANTUM, QUANTUM).map(|(_, id)| nodes.get(id).off >> 30);
        assert_eq!(at(100), Some(9));
        assert_eq!(at(111), Some(8));
        assert_eq!(at(300), Some(4), "twice the length is a good fit");
        assert_eq!(at(99 * 2 / 5), Some(3), "a good fit for none of them");
        // From a page on the smallest is taken.
        assert_eq!(at(PAGE / QUANTUM), Some(4));
    }
}

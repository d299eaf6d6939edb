//! The heap's invariants, checked from the records alone: the main test of everything in this module.
//!
//! It panics where an invariant does not hold. In the library it runs only after a panic was caught, and
//! inside a catch of its own.
#![allow(clippy::indexing_slicing, clippy::expect_used)]

use super::node::{AgeList, Kind, NIL, SHARED, StreamId};
use super::size::{PAGE, QUANTUM, class_size, slab_blocks};
use super::{Bytes, Heap, SLAB_PAGE, block_flags};

pub fn validate(heap: &Heap) {
    let mut bytes = Bytes::default();
    let mut seen = 0;
    let mut unmapped = 0;
    let (mut free, mut last_freed, mut pending) = (0, 0, 0);

    for id in region_starts(heap) {
        let (mut id, mut last) = (id, NIL);
        while id != NIL {
            let node = *heap.nodes.get(id);
            seen += 1;
            assert_ne!(node.kind, Kind::Blank, "a blank node is linked");
            assert!(
                node.len > 0 && node.len.is_multiple_of(QUANTUM) && node.off.is_multiple_of(QUANTUM),
                "{node:?} is not made of quanta"
            );
            assert_eq!(node.prev, last, "the address list is broken at {node:?}");
            assert_eq!(heap.pages.start(node.off), id, "the page table does not know {node:?}");
            if last != NIL {
                let before = heap.nodes.get(last);
                assert_eq!(before.end(), node.off, "a gap before {node:?}");
                let own = (before.flags | node.flags) & block_flags::OWN_ALLOCATION != 0;
                let mergeable = before.kind == Kind::Free
                    && node.kind == Kind::Free
                    && !own
                    && before.flags & SLAB_PAGE == node.flags & SLAB_PAGE
                    && (node.flags & SLAB_PAGE == 0 || before.off / PAGE == node.off / PAGE)
                    && before.stream == node.stream;
                assert!(!mergeable, "{before:?} and {node:?} should be one");
                assert!(
                    !(before.kind == Kind::Unmapped && node.kind == Kind::Unmapped),
                    "two unmapped extents side by side"
                );
            }
            if node.kind != Kind::Unmapped && node.kind != Kind::Busy {
                bytes.mapped += node.len;
                covered(heap, node.off, node.end());
            }
            match node.kind {
                Kind::Unmapped => unmapped += 1,
                Kind::Free => {
                    free += 1;
                    bytes.cached += node.len;
                }
                Kind::LastFreed => {
                    last_freed += 1;
                    bytes.cached += node.len;
                }
                Kind::Used => {
                    bytes.live += node.len;
                    bytes.requested += node.requested;
                    bytes.live_blocks += 1;
                }
                Kind::Pending => {
                    pending += 1;
                    bytes.pending += node.len;
                }
                Kind::Slab => {
                    let (owner, class, ..) =
                        heap.slabs.describe(node.slab).expect("a slab extent has a slab");
                    assert_eq!(owner, id);
                    let blocks = slab_blocks(class) * class_size(class);
                    assert!(blocks <= node.len);
                    bytes.overhead += node.len - blocks;
                    bytes.cached += blocks; // Corrected by the totals below.
                    for at in (node.off..node.end()).step_by(QUANTUM as usize) {
                        assert_eq!(heap.pages.start(at), id, "the page table does not know all of a slab");
                    }
                }
                Kind::Busy | Kind::Blank => {}
            }
            last = id;
            id = node.next;
        }
    }
    let (live, waiting, requested, blocks) = heap.slabs.totals();
    bytes.live += live;
    bytes.requested += requested;
    bytes.live_blocks += blocks;
    bytes.pending += waiting;
    bytes.cached -= live + waiting;

    bytes.overhead += heap.unreclaimable;
    bytes.mapped += heap.unreclaimable;
    assert_eq!(seen, heap.nodes.in_use(), "nodes are lost");
    // A busy extent that is being unmapped still counts as mapped and cached.
    let busy = heap.bytes.mapped - bytes.mapped;
    assert_eq!(
        Bytes {
            mapped: heap.bytes.mapped,
            cached: bytes.cached + busy,
            live_peak: heap.bytes.live_peak,
            mapped_peak: heap.bytes.mapped_peak,
            ..bytes
        },
        heap.bytes,
        "the counters are wrong"
    );
    let b = heap.bytes;
    assert!(b.live_peak >= b.live && b.mapped_peak >= b.mapped, "a peak is below its value");
    assert_eq!(b.mapped, b.live + b.cached + b.pending + b.overhead, "the identity does not hold");

    let mut listed = 0;
    heap.unmapped.for_each(&heap.nodes, |id| {
        assert_eq!(heap.nodes.get(id).kind, Kind::Unmapped);
        listed += 1;
    });
    assert_eq!(listed, unmapped, "unmapped extents are lost");
    assert_eq!(ages(heap, &heap.pending, Kind::Pending), pending);

    let (mut aged, mut binned, mut kept, mut own) = (0, 0, 0, 0);
    for (stream, queue) in heap.queues.iter().enumerate() {
        for list in [&queue.whole, &queue.own, &queue.parts] {
            let mut at = list.head;
            while at != NIL {
                let node = heap.nodes.get(at);
                assert_eq!(node.stream as usize, stream, "{node:?} is in another stream's list");
                let is_own = node.flags & block_flags::OWN_ALLOCATION != 0;
                let is_whole = !is_own && holds_chunk(heap, node.off, node.end());
                assert_eq!(is_own, core::ptr::eq(list, &queue.own));
                assert_eq!(is_whole, core::ptr::eq(list, &queue.whole));
                own += usize::from(is_own);
                at = node.age_next;
            }
            aged += ages(heap, list, Kind::Free);
        }
        for (class, (first, last)) in queue.slabs.iter().zip(queue.last_slabs).enumerate() {
            heap.slabs.check_list(*first, last, class, stream as StreamId);
        }
        for (at, bins) in queue.bins.iter().enumerate() {
            bins.for_each(&heap.nodes, |id| {
                assert_eq!(usize::from(heap.nodes.get(id).flags & SLAB_PAGE != 0), at);
                assert_eq!(heap.nodes.get(id).kind, Kind::Free);
                assert_eq!(heap.nodes.get(id).stream as usize, stream);
                binned += 1;
            });
        }
        if queue.last_freed != NIL {
            assert_eq!(heap.nodes.get(queue.last_freed).kind, Kind::LastFreed);
            assert_eq!(heap.nodes.get(queue.last_freed).len, queue.last_freed_len);
            kept += 1;
        }
    }
    assert_eq!(aged, free, "free extents are in no age list");
    assert_eq!(binned + own, free, "free extents are in no bin");
    assert_eq!(kept, last_freed, "extents freed last are lost");
    assert!(!heap.queues.is_empty() && SHARED == 0);
}

/// The first extent of every region.
fn region_starts(heap: &Heap) -> Vec<u32> {
    (0..heap.nodes.len())
        .filter(|id| {
            let node = heap.nodes.get(*id);
            node.kind != Kind::Blank && node.prev == NIL
        })
        .collect()
}

/// Every page of the range has a chunk that covers it.
fn covered(heap: &Heap, off: u64, end: u64) {
    let mut at = off;
    while at < end {
        let chunk = heap.chunks.get(heap.pages.chunk(at)).expect("mapped memory has a chunk");
        assert!(chunk.off <= at && at < chunk.off + chunk.len, "{chunk:?} is not behind {at}");
        at = chunk.off + chunk.len;
    }
}

/// Whether a chunk lies wholly in the range.
fn holds_chunk(heap: &Heap, off: u64, end: u64) -> bool {
    let mut at = off;
    while at < end {
        let chunk = heap.chunks.get(heap.pages.chunk(at)).expect("mapped memory has a chunk");
        at = chunk.off + chunk.len;
        if chunk.off >= off && at <= end {
            return true;
        }
    }
    false
}

/// The length of an age list, whose members must be of the kind and in order of age.
fn ages(heap: &Heap, list: &AgeList, kind: Kind) -> usize {
    let (mut count, mut seq, mut last, mut at) = (0, 0, NIL, list.head);
    while at != NIL {
        let node = heap.nodes.get(at);
        assert_eq!(node.kind, kind);
        assert_eq!(node.age_prev, last, "an age list is broken");
        assert!(node.seq >= seq, "an age list is out of order");
        (count, seq, last, at) = (count + 1, node.seq, at, node.age_next);
    }
    assert_eq!(list.tail, last, "an age list has a wrong end");
    count
}

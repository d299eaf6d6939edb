//! Properties of the heap: random operations against a model that knows only ranges.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const SPACE: u64 = 4 << 30;

fn heap() -> Heap {
    let mut heap = Heap::new().unwrap();
    heap.add_hole(0, SPACE).unwrap();
    heap
}

/// Maps what `stream` needs for the request, as chunks of powers of two.
fn grow(heap: &mut Heap, stream: StreamId, len: u64, align: u64) -> bool {
    let Some(plan) = heap.plan_growth(stream, len, align) else {
        return false;
    };
    let mut pieces = Vec::new();
    let mut left = plan.need;
    while left > 0 {
        let piece = (1u64 << left.ilog2()).min(16 * PAGE);
        pieces.push((piece, left));
        left -= piece;
    }
    let busy = heap.begin_map(&plan, plan.need, pieces.len()).unwrap();
    heap.validate();
    heap.commit_map(busy, &plan, pieces.into_iter(), stream);
    true
}

fn take(heap: &mut Heap, stream: StreamId, len: u64, align: u64) -> Option<u64> {
    let info = BlockInfo { requested: len, ..BlockInfo::default() };
    if align <= UNIT {
        if let Some(off) = heap.allocate_fast(stream, len, info) {
            return Some(off);
        }
    }
    if let Some(off) = heap.allocate(stream, len, align, info).unwrap() {
        return Some(off);
    }
    let extent = Heap::extent_for(len, align).unwrap();
    if !heap.stitch(stream, extent, align) && !grow(heap, stream, extent, align) {
        return None;
    }
    let off = heap.allocate(stream, len, align, info).unwrap();
    assert!(off.is_some(), "no room after a growth for {len} bytes at {align}");
    off
}

/// Unmaps up to `wanted` bytes of idle chunks.
fn shrink(heap: &mut Heap, wanted: u64, done: u64) -> u64 {
    let mut idle = Vec::new();
    heap.collect_idle(wanted, &|_| done, [NIL, NIL], &mut idle, &|_, _| true).unwrap();
    let mut sum = 0;
    for chunk in idle {
        sum += heap.chunk(chunk).unwrap().len;
        let busy = heap.begin_unmap(chunk).unwrap();
        heap.validate();
        heap.commit_unmap(busy, chunk);
        heap.validate();
    }
    sum
}

#[derive(Clone, Debug)]
enum Op {
    Alloc { stream: StreamId, len: u64, align_log: u32 },
    Free { which: usize, stream: StreamId },
    FreePending { which: usize },
    CompletePending { back: u64 },
    Settle { stream: StreamId, back: u64 },
    Flush { stream: StreamId },
    Shrink { wanted: u64, back: u64 },
    Query { which: usize, inside: u64 },
}

fn len() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 1..=MAX_SMALL,
        3 => MAX_SMALL..=2 * PAGE,
        2 => PAGE..=40 * PAGE,
        1 => Just(PAGE),
        1 => Just(MAX_SMALL + 1),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        6 => (0..4u32, len(), prop_oneof![8 => Just(9u32), 2 => 9..30u32])
            .prop_map(|(stream, len, align_log)| Op::Alloc { stream, len, align_log }),
        5 => (any::<usize>(), 0..4u32).prop_map(|(which, stream)| Op::Free { which, stream }),
        2 => any::<usize>().prop_map(|which| Op::FreePending { which }),
        1 => (0..20u64).prop_map(|back| Op::CompletePending { back }),
        1 => (1..4u32, 0..20u64).prop_map(|(stream, back)| Op::Settle { stream, back }),
        1 => (0..4u32).prop_map(|stream| Op::Flush { stream }),
        1 => (1..64 * PAGE, 0..20u64).prop_map(|(wanted, back)| Op::Shrink { wanted, back }),
        2 => (any::<usize>(), any::<u64>()).prop_map(|(which, inside)| Op::Query { which, inside }),
    ]
}

fn pick(live: &BTreeMap<u64, u64>, which: usize) -> Option<(u64, u64)> {
    let at = which.checked_rem(live.len())?;
    live.iter().nth(at).map(|(off, len)| (*off, *len))
}

fn run(ops: Vec<Op>, single: bool) {
    let mut heap = heap();
    for _ in 1..4 {
        heap.add_stream().unwrap();
    }
    heap.merge_all = single;
    let stream = |s: StreamId| if single { 1 } else { s };
    let mut live: BTreeMap<u64, u64> = BTreeMap::new();
    let mut freed: Vec<u64> = Vec::new();
    for op in ops {
        match op {
            Op::Alloc { stream: s, len, align_log } => {
                let align = 1 << align_log;
                let Some(off) = take(&mut heap, stream(s), len, align) else {
                    continue;
                };
                assert_eq!(off % align, 0);
                let block = heap.block_at(off).unwrap();
                assert!(block.len >= len && block.info.requested == len);
                let before = live.range(..=off).next_back();
                assert!(before.is_none_or(|(o, l)| o + l <= off), "overlap");
                let after = live.range(off..).next();
                assert!(after.is_none_or(|(o, _)| off + block.len <= *o), "overlap");
                live.insert(off, block.len);
            }
            Op::Free { which, stream: s } => {
                let Some((off, _)) = pick(&live, which) else {
                    continue;
                };
                let block = heap.block_at(off).unwrap();
                let on = if block.len <= MAX_SMALL { block.stream } else { stream(s) };
                // Half of the frees try the fast path, which must agree with the general one.
                if which % 2 == 0 || heap.free_fast(off, on).is_none() {
                    heap.free_on(&heap.block_at(off).unwrap(), on);
                }
                assert_eq!(heap.free_fast(off, on), None);
                live.remove(&off);
                freed.push(off);
            }
            Op::FreePending { which } => {
                let Some((off, _)) = pick(&live, which) else {
                    continue;
                };
                let block = heap.block_at(off).unwrap();
                heap.free_pending(&block);
                assert_eq!(heap.block_at(off), Err(NotLive::Freed));
                live.remove(&off);
                freed.push(off);
            }
            Op::CompletePending { back } => heap.complete_pending(heap.seq().saturating_sub(back)),
            Op::Settle { stream: s, back } if !single => heap.settle(s, heap.seq().saturating_sub(back)),
            Op::Settle { .. } => {}
            Op::Flush { stream: s } => heap.flush(stream(s)),
            Op::Shrink { wanted, back } => {
                let done = heap.seq().saturating_sub(back);
                shrink(&mut heap, wanted, done);
            }
            Op::Query { which, inside } => {
                if let Some((off, len)) = pick(&live, which) {
                    let block = heap.block_around(off + inside % len, 0).unwrap();
                    assert_eq!((block.off, block.len), (off, len));
                }
                if let Some(off) = freed.get(which.checked_rem(freed.len().max(1)).unwrap_or(0)) {
                    let inside = live.range(..=*off).next_back().is_some_and(|(o, l)| *off < o + l);
                    assert_eq!(heap.block_around(*off, 0).is_ok(), inside);
                }
            }
        }
        heap.validate();
    }
    // Everything can be given back: nothing is lost, whatever happened.
    for off in live.keys() {
        let block = heap.block_at(*off).unwrap();
        heap.free_pending(&block);
    }
    heap.complete_pending(u64::MAX);
    for s in 0..4 {
        heap.flush(s);
        heap.settle(s, u64::MAX);
    }
    heap.validate();
    shrink(&mut heap, u64::MAX, u64::MAX);
    let end = heap.bytes();
    assert_eq!(Bytes { live_peak: 0, mapped_peak: 0, ..end }, Bytes::default());
    assert_eq!(
        heap.plan_growth(1, SPACE, PAGE).map(|p| p.need),
        Some(SPACE),
        "the address space is whole again"
    );
}

proptest! {
    #[test]
    fn many_streams(ops in proptest::collection::vec(op(), 1..160)) {
        run(ops, false);
    }

    #[test]
    fn one_stream(ops in proptest::collection::vec(op(), 1..160)) {
        run(ops, true);
    }
}

#[test]
fn a_stream_keeps_what_it_freed_until_it_is_settled() {
    let mut heap = heap();
    let (a, b) = (heap.add_stream().unwrap(), heap.add_stream().unwrap());
    let info = BlockInfo::default();
    let off = take(&mut heap, a, 8 * PAGE, UNIT).unwrap();
    heap.free_on(&heap.block_at(off).unwrap(), a);
    assert_eq!(heap.allocate(b, 8 * PAGE, UNIT, info), Ok(None));
    heap.flush(a);
    heap.settle(a, heap.seq() - 1);
    assert_eq!(heap.allocate(b, 8 * PAGE, UNIT, info), Ok(None));
    heap.settle(a, heap.seq());
    assert_eq!(heap.allocate(b, 8 * PAGE, UNIT, info), Ok(Some(off)));
}

#[test]
fn unfinished_chunks_are_not_idle() {
    let mut heap = heap();
    let a = heap.add_stream().unwrap();
    let off = take(&mut heap, a, 8 * PAGE, UNIT).unwrap();
    heap.free_on(&heap.block_at(off).unwrap(), a);
    heap.flush(a);
    let before = heap.seq() - 1;
    assert_eq!(shrink(&mut heap, u64::MAX, before), 0);
    let now = heap.seq();
    assert_eq!(shrink(&mut heap, u64::MAX, now), 8 * PAGE);
}

#[test]
fn a_growth_uses_the_idle_end_of_what_is_mapped() {
    let mut heap = heap();
    let a = heap.add_stream().unwrap();
    let first = take(&mut heap, a, 3 * PAGE, UNIT).unwrap();
    let second = take(&mut heap, a, 4 * PAGE, UNIT).unwrap();
    heap.free_on(&heap.block_at(second).unwrap(), a);
    heap.flush(a);
    let plan = heap.plan_growth(a, 6 * PAGE, UNIT).unwrap();
    assert_eq!(plan.need, 2 * PAGE);
    heap.free_on(&heap.block_at(first).unwrap(), a);
}

#[test]
fn own_allocations_serve_no_other_request() {
    let mut heap = heap();
    let a = heap.add_stream().unwrap();
    let info = BlockInfo { requested: PAGE, flags: block_flags::OWN_ALLOCATION, ..BlockInfo::default() };
    heap.add_chunk_region(8 << 30, PAGE, 1, Some(info)).unwrap();
    heap.validate();
    let block = heap.block_at(8 << 30).unwrap();
    heap.free_on(&block, a);
    heap.validate();
    assert_eq!(heap.allocate(a, PAGE, UNIT, BlockInfo::default()), Ok(None));
    assert_eq!(shrink(&mut heap, 1, u64::MAX), PAGE);
    assert_eq!(heap.block_at(8 << 30), Err(NotLive::Unknown));
}

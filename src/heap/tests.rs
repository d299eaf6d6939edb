//! Properties of the heap: random operations against a model that knows only ranges.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const SPACE: u64 = 4 << 30;

fn heap() -> Heap {
    let mut heap = Heap::new().unwrap();
    heap.add_unmapped(0, SPACE).unwrap();
    heap
}

/// Chunks of powers of two, `largest` at most, that fill a plan.
fn pieces(plan: &Growth, largest: u64) -> Vec<(u64, u64, u64)> {
    let mut pieces = Vec::new();
    for part in &plan.parts {
        let (mut off, end) = (part.off, part.off + part.len);
        while off < end {
            let piece = (1u64 << (end - off).ilog2()).min(largest);
            pieces.push((off, piece, off));
            off += piece;
        }
    }
    pieces
}

/// Maps what `stream` needs for the request.
fn grow(heap: &mut Heap, stream: StreamId, len: u64, align: u64) -> bool {
    let Some(mut plan) = heap.plan_growth(stream, len, align).unwrap() else { return false };
    let pieces = pieces(&plan, 16 * PAGE);
    heap.begin_map(&mut plan, pieces.len()).unwrap();
    heap.validate();
    heap.commit_map(&plan, pieces.into_iter(), stream);
    true
}

fn take(heap: &mut Heap, stream: StreamId, len: u64, align: u64) -> Option<u64> {
    let info = BlockMeta { requested: len, ..BlockMeta::default() };
    if align <= UNIT
        && let Some(off) = heap.allocate_fast(stream, len, info)
    {
        return Some(off);
    }
    if let Some(off) = heap.allocate(stream, len, align, info).unwrap() {
        return Some(off);
    }
    let (extent, extent_align) = Heap::extent_for(len, align).unwrap();
    if !heap.coalesce_across_streams(stream, extent, extent_align)
        && !grow(heap, stream, extent, extent_align)
    {
        return None;
    }
    let off = heap.allocate(stream, len, align, info).unwrap();
    assert!(off.is_some(), "no room after a growth for {len} bytes at {align}");
    off
}

/// Unmaps up to `wanted` bytes of idle chunks.
fn shrink(heap: &mut Heap, wanted: u64, device: &Device) -> u64 {
    let mut idle = Vec::new();
    heap.collect_idle(wanted, &|s| device.done[s as usize], &[], &mut idle, &|_, _| true).unwrap();
    let mut sum = 0;
    for chunk in idle {
        let Chunk { off, len, .. } = heap.chunk(chunk).unwrap();
        device.check_idle(off, len);
        sum += len;
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
    Retire { stream: StreamId, back: u64 },
    Flush { stream: StreamId },
    Shrink { wanted: u64 },
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
        1 => (1..4u32, 0..20u64).prop_map(|(stream, back)| Op::Retire { stream, back }),
        1 => (0..4u32).prop_map(|stream| Op::Flush { stream }),
        1 => (1..64 * PAGE).prop_map(|wanted| Op::Shrink { wanted }),
        2 => (any::<usize>(), any::<u64>()).prop_map(|(which, inside)| Op::Query { which, inside }),
    ]
}

fn pick(live: &BTreeMap<u64, u64>, which: usize) -> Option<(u64, u64)> {
    let at = which.checked_rem(live.len())?;
    live.iter().nth(at).map(|(off, len)| (*off, *len))
}

/// What the device may still be doing: for each freed range the stream it was freed on ([`SHARED`]: device
/// order) and when.
#[derive(Default)]
struct Device {
    freed: Vec<(u64, u64, StreamId, u64)>,
    done: [u64; 4],
}

impl Device {
    /// The free of a block is ordered after every earlier use of its memory, which is the caller's duty.
    fn free(&mut self, off: u64, len: u64, stream: StreamId, seq: u64) {
        let end = off + len;
        for (o, l, s, q) in std::mem::take(&mut self.freed) {
            let head = off.min(o + l).saturating_sub(o);
            let tail = (o + l).saturating_sub(end.max(o));
            let parts = [(o, head), (o + l - tail, tail)];
            self.freed.extend(parts.iter().filter(|(_, len)| *len > 0).map(|(o, l)| (*o, *l, s, q)));
        }
        self.freed.push((off, len, stream, seq));
    }

    /// `stream` gets the range: nobody else may still be using any of it.
    fn check(&self, off: u64, len: u64, stream: StreamId) {
        for &(o, l, s, seq) in self.freed.iter().filter(|(o, l, ..)| *o < off + len && off < o + l) {
            let own = s == stream && s != SHARED;
            assert!(
                own || seq <= self.done[s as usize],
                "{o}+{l} freed on {s} at {seq} went to {stream} too early"
            );
        }
    }

    /// The range is given back or moved: nobody at all may still be using it.
    fn check_idle(&self, off: u64, len: u64) {
        self.check(off, len, SHARED);
    }

    fn advance(&mut self, stream: StreamId, done: u64) {
        self.done[stream as usize] = self.done[stream as usize].max(done);
        let done = self.done;
        self.freed.retain(|(_, _, s, seq)| *seq > done[*s as usize]);
    }
}

fn run(ops: Vec<Op>, single: bool) {
    let mut device = Device::default();
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
                device.check(off, block.len, stream(s));
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
                if on == SHARED {
                    device.advance(SHARED, heap.seq());
                }
                device.free(off, block.len, on, heap.seq());
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
                device.free(off, block.len, SHARED, heap.seq());
                live.remove(&off);
                freed.push(off);
            }
            Op::CompletePending { back } => {
                device.advance(SHARED, heap.seq().saturating_sub(back));
                heap.complete_pending(device.done[0]);
            }
            Op::Retire { stream: s, back } => {
                device.advance(stream(s), heap.seq().saturating_sub(back));
                if !single {
                    heap.retire(s, device.done[s as usize]);
                }
            }
            Op::Flush { stream: s } => heap.flush(stream(s)),
            Op::Shrink { wanted } => {
                shrink(&mut heap, wanted, &device);
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
        heap.retire(s, u64::MAX);
    }
    heap.validate();
    (0..4).for_each(|s| device.advance(s, u64::MAX));
    shrink(&mut heap, u64::MAX, &device);
    let end = heap.bytes();
    assert_eq!(Bytes { live_peak: 0, mapped_peak: 0, ..end }, Bytes::default());
    assert_eq!(
        heap.plan_growth(1, SPACE, PAGE).unwrap().map(|p| p.need),
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
    let info = BlockMeta::default();
    let off = take(&mut heap, a, 8 * PAGE, UNIT).unwrap();
    heap.free_on(&heap.block_at(off).unwrap(), a);
    assert_eq!(heap.allocate(b, 8 * PAGE, UNIT, info), Ok(None));
    heap.flush(a);
    heap.retire(a, heap.seq() - 1);
    assert_eq!(heap.allocate(b, 8 * PAGE, UNIT, info), Ok(None));
    heap.retire(a, heap.seq());
    assert_eq!(heap.allocate(b, 8 * PAGE, UNIT, info), Ok(Some(off)));
}

#[test]
fn incomplete_chunks_are_not_idle() {
    let mut heap = heap();
    let a = heap.add_stream().unwrap();
    let off = take(&mut heap, a, 8 * PAGE, UNIT).unwrap();
    heap.free_on(&heap.block_at(off).unwrap(), a);
    heap.flush(a);
    let mut device = Device::default();
    device.free(off, 8 * PAGE, a, heap.seq());
    device.advance(a, heap.seq() - 1);
    assert_eq!(shrink(&mut heap, u64::MAX, &device), 0);
    device.advance(a, heap.seq());
    assert_eq!(shrink(&mut heap, u64::MAX, &device), 8 * PAGE);
}

#[test]
fn a_growth_uses_the_idle_end_of_what_is_mapped() {
    let mut heap = heap();
    let a = heap.add_stream().unwrap();
    let first = take(&mut heap, a, 3 * PAGE, UNIT).unwrap();
    let second = take(&mut heap, a, 4 * PAGE, UNIT).unwrap();
    heap.free_on(&heap.block_at(second).unwrap(), a);
    heap.flush(a);
    let plan = heap.plan_growth(a, 6 * PAGE, UNIT).unwrap().unwrap();
    assert_eq!(plan.need, 2 * PAGE);
    heap.free_on(&heap.block_at(first).unwrap(), a);
}

#[test]
fn own_allocations_serve_no_other_request() {
    let mut heap = heap();
    let a = heap.add_stream().unwrap();
    let info = BlockMeta { requested: PAGE, flags: block_flags::OWN_ALLOCATION, ..BlockMeta::default() };
    heap.add_chunk_region(8 << 30, PAGE, 1, Some(info)).unwrap();
    heap.validate();
    let block = heap.block_at(8 << 30).unwrap();
    heap.free_on(&block, a);
    heap.validate();
    assert_eq!(heap.allocate(a, PAGE, UNIT, BlockMeta::default()), Ok(None));
    let mut device = Device::default();
    device.advance(a, u64::MAX);
    assert_eq!(shrink(&mut heap, 1, &device), PAGE);
    assert_eq!(heap.block_at(8 << 30), Err(NotLive::Unknown));
}

#[test]
fn growths_under_way_do_not_take_each_others_records() {
    let mut heap = heap();
    let a = heap.add_stream().unwrap();
    let plans: Vec<_> = (1..6u64)
        .map(|n| {
            let mut plan = heap.plan_growth(a, 9 * n * PAGE, UNIT).unwrap().unwrap();
            let pieces = pieces(&plan, PAGE);
            heap.begin_map(&mut plan, pieces.len()).unwrap();
            (plan, pieces)
        })
        .collect();
    for (i, (plan, pieces)) in plans.into_iter().enumerate() {
        if i % 2 == 0 {
            heap.commit_map(&plan, pieces.into_iter(), a);
        } else {
            heap.abort_map(&plan);
        }
        // Every page of what is mapped has a chunk, which this checks.
        heap.validate();
        take(&mut heap, a, 40 * PAGE, UNIT).unwrap();
        heap.validate();
    }
    assert_eq!(heap.bytes().mapped, heap.chunks().map(|c| c.len).sum::<u64>());
}

#[test]
fn a_growth_uses_what_is_left_between_survivors() {
    let mut heap = heap();
    let a = heap.add_stream().unwrap();
    let half = PAGE / 2;
    // A survivor in the middle of its page, then half a page and four whole ones that are given up.
    let survivor = take(&mut heap, a, half, UNIT).unwrap();
    let free = take(&mut heap, a, half + 4 * PAGE, UNIT).unwrap();
    let last = take(&mut heap, a, 4 * PAGE, UNIT).unwrap();
    assert_eq!((survivor, free, last), (0, half, 5 * PAGE));
    heap.free_on(&heap.block_at(free).unwrap(), a);
    heap.flush(a);
    let mut device = Device::default();
    device.advance(a, u64::MAX);
    assert_eq!(shrink(&mut heap, u64::MAX, &device), 4 * PAGE);
    let plan = heap.plan_growth(a, 4 * PAGE + half, UNIT).unwrap().unwrap();
    assert_eq!((plan.parts.len(), plan.parts[0].off, plan.need), (1, PAGE, 4 * PAGE));
    assert_eq!(plan.frees.len(), 1, "the half page before the unmapped extent is part of it");
}

#[test]
fn the_extent_freed_last_changes_no_placement() {
    // A twin that never parks: every free of it coalesces at once.
    let (mut heap, mut twin) = (heap(), heap());
    let (a, b) = (heap.add_stream().unwrap(), twin.add_stream().unwrap());
    let mut live = Vec::new();
    let mut seed = 7u64;
    for _ in 0..4000 {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let random = seed >> 33;
        if live.len() < 20 || random.is_multiple_of(2) {
            let len = MAX_SMALL + 1 + [1, 2, 3, 5, 8][(random >> 1) as usize % 5] * (300 << 10);
            let off = take(&mut heap, a, len, UNIT).unwrap();
            assert_eq!(off, take(&mut twin, b, len, UNIT).unwrap());
            live.push(off);
        } else {
            let off = live.swap_remove(random as usize / 2 % live.len());
            if heap.free_fast(off, a).is_none() {
                heap.free_on(&heap.block_at(off).unwrap(), a);
            }
            twin.free_on(&twin.block_at(off).unwrap(), b);
            twin.flush(b);
        }
        heap.validate();
    }
}

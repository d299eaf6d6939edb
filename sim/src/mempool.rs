//! Stream-ordered memory: pools, `cuMemAllocAsync` and `cuMemFreeAsync`.
//!
//! A pool takes segments of device memory and cuts blocks from them. A freed block can be had again at once
//! on the stream that freed it, and elsewhere once that stream has got past the free; when the device is
//! full, a block that is still being freed is given out with a wait in front. (Reuse along event dependencies
//! is not modelled: such a block is taken for one still being freed.) What a pool holds counts as used device
//! memory.

use crate::call::Res;
use crate::context::Context;
use crate::knobs::MAX_DEVICES;
use crate::memory::{self, Backing, Block, Kind, NO_RIGHTS, PoolSegment, Rights};
use crate::physical::{Physical, Place};
use crate::ranges::{FreeRanges, round_up};
use crate::registry::{Found, Registry};
use crate::stream::{self, Stream, Ticket};
use crate::sync::lock;
use crate::work::Work;
use crate::{code, device};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

const STEP: u64 = 512;
/// A pool grows by at least this, if the device has it.
const GROWTH: u64 = 32 << 20;

/// A pool's rules; the numbers are those of the attributes.
pub struct Rules {
    pub follow_event: i32,
    pub opportunistic: i32,
    pub internal_dependencies: i32,
    pub threshold: u64,
}

/// A range whose free was submitted and may not have been reached.
struct Freed {
    base: u64,
    size: u64,
    stream: u64,
    ticket: Option<Ticket>,
}

struct Segment {
    size: u64,
    mapped: u64,
    physical: Physical,
}

pub struct State {
    pub rules: Rules,
    pub rights: Rights,
    segments: BTreeMap<u64, Segment>,
    free: FreeRanges,
    freed: Vec<Freed>,
    pub reserved: u64,
    pub reserved_peak: u64,
    pub used: u64,
    pub used_peak: u64,
    destroyed: bool,
}

pub struct Pool {
    pub handle: AtomicUsize,
    pub place: Place,
    /// The device that its default pool is of; the first, for host pools.
    pub device: usize,
    pub is_default: bool,
    pub exportable: bool,
    limit: u64,
    pub state: Mutex<State>,
}

static POOLS: Registry<Pool> = Registry::new(0x5a00_0000_1000);

/// Whether some pool may hold more than its threshold allows, so that a synchronisation has something to do.
static UNSETTLED: AtomicBool = AtomicBool::new(false);

fn require(condition: bool, code: i32) -> Res {
    match condition {
        true => Ok(()),
        false => Err(code),
    }
}

/// `limit` 0: none.
pub fn create(place: Place, is_default: bool, exportable: bool, limit: u64) -> Res<Arc<Pool>> {
    let device = match place {
        Place::Device(ordinal) => ordinal,
        Place::Host => 0,
    };
    let mut rights = NO_RIGHTS;
    rights[device] = memory::READ_WRITE;
    let state = State {
        rules: Rules { follow_event: 1, opportunistic: 1, internal_dependencies: 1, threshold: 0 },
        rights,
        segments: BTreeMap::new(),
        free: FreeRanges::none(),
        freed: Vec::new(),
        reserved: 0,
        reserved_peak: 0,
        used: 0,
        used_peak: 0,
        destroyed: false,
    };
    let made = POOLS.add(|handle| {
        Arc::new(Pool {
            handle: AtomicUsize::new(handle),
            place,
            device,
            is_default,
            exportable,
            limit: if limit == 0 { u64::MAX } else { limit },
            state: Mutex::new(state),
        })
    });
    Ok(made.ok_or(code::OUT_OF_MEMORY)?.1)
}

pub fn find(handle: usize) -> Res<Arc<Pool>> {
    match POOLS.find(handle) {
        Found::Live(pool) => Ok(pool),
        _ => Err(code::INVALID_VALUE),
    }
}

/// The pools of a device: its default one, and the current one where that is another.
struct DevicePools {
    default: Arc<Pool>,
    current: Mutex<Arc<Pool>>,
}

fn device_pools(ordinal: usize) -> Res<&'static DevicePools> {
    static ALL: [OnceLock<DevicePools>; MAX_DEVICES] = [const { OnceLock::new() }; MAX_DEVICES];
    if let Some(pools) = ALL[ordinal].get() {
        return Ok(pools);
    }
    let default = create(Place::Device(ordinal), true, false, 0)?;
    Ok(ALL[ordinal].get_or_init(|| DevicePools { current: Mutex::new(default.clone()), default }))
}

pub fn default_of(ordinal: usize) -> Res<Arc<Pool>> {
    Ok(device_pools(ordinal)?.default.clone())
}

pub fn current_of(ordinal: usize) -> Res<Arc<Pool>> {
    Ok(lock(&device_pools(ordinal)?.current).clone())
}

pub fn set_current(ordinal: usize, pool: Arc<Pool>) -> Res {
    *lock(&device_pools(ordinal)?.current) = pool;
    Ok(())
}

pub fn destroy(handle: usize) -> Res {
    let pool = find(handle)?;
    require(!pool.is_default, code::INVALID_VALUE)?;
    POOLS.remove(handle);
    for device in device::all() {
        let pools = device_pools(device.ordinal)?;
        let mut current = lock(&pools.current);
        if Arc::ptr_eq(&current, &pool) {
            *current = pools.default.clone();
        }
    }
    let mut state = lock(&pool.state);
    state.destroyed = true;
    pool.settle(&mut state, 0);
    drop(state);
    UNSETTLED.store(true, Ordering::Release);
    lock(&GRAVEYARD).push(pool);
    Ok(())
}

/// Destroyed pools with blocks still out.
static GRAVEYARD: Mutex<Vec<Arc<Pool>>> = Mutex::new(Vec::new());

/// Gives back what pools hold beyond their thresholds: called by every synchronisation.
pub fn settle_all() {
    if !UNSETTLED.swap(false, Ordering::AcqRel) {
        return;
    }
    let mut again = false;
    let mut pools = POOLS.all();
    pools.extend(lock(&GRAVEYARD).iter().cloned());
    for pool in pools {
        let mut state = lock(&pool.state);
        let keep = match state.destroyed {
            true => 0,
            false => state.rules.threshold,
        };
        pool.settle(&mut state, keep);
        again |= !state.freed.is_empty();
    }
    lock(&GRAVEYARD).retain(|pool| lock(&pool.state).reserved > 0);
    if again {
        UNSETTLED.store(true, Ordering::Release);
    }
}

impl Pool {
    /// Takes back what was freed and reached, and releases whole segments until at most `keep` is reserved.
    pub fn settle(&self, state: &mut State, keep: u64) {
        state.collect();
        if state.reserved <= keep {
            return;
        }
        let idle: Vec<(u64, u64)> = state
            .segments
            .iter()
            .filter(|&(&base, segment)| state.free.contains(base, segment.size))
            .map(|(&base, segment)| (base, segment.size))
            .collect();
        for (base, size) in idle.into_iter().rev() {
            if state.reserved - size < keep {
                continue;
            }
            state.free.remove(base, size);
            if let Some(segment) = state.segments.remove(&base) {
                let mut memory = memory::writing();
                memory.pool_segments.remove(&base);
                memory.unmap_block(base, segment.mapped);
                drop(memory);
                drop(segment.physical);
            }
            state.reserved -= size;
        }
    }

    /// A range for this stream, perhaps with something to wait for first.
    fn take(self: &Arc<Self>, stream: &Arc<Stream>, size: u64) -> Res<(u64, Option<Ticket>)> {
        let mut state = lock(&self.state);
        require(!state.destroyed, code::INVALID_VALUE)?;
        if let Some(base) = state.retake(size, |freed| freed.stream == stream.id) {
            return Ok((base.0, None));
        }
        state.collect();
        if let Some(base) = state.free.take(size, STEP) {
            return Ok((base, None));
        }
        match self.grow(&mut state, size) {
            Ok(()) => {}
            Err(code) => {
                if state.rules.internal_dependencies != 0
                    && let Some((base, ticket)) = state.retake(size, |_| true)
                {
                    return Ok((base, ticket));
                }
                // Idle segments of the wrong sizes make way.
                self.settle(&mut state, 0);
                self.grow(&mut state, size).map_err(|_| code)?;
            }
        }
        let base = state.free.take(size, STEP).ok_or(code::OUT_OF_MEMORY)?;
        Ok((base, None))
    }

    fn grow(self: &Arc<Self>, state: &mut State, size: u64) -> Res {
        let exact = round_up(size, memory::LARGE_PAGE).ok_or(code::OUT_OF_MEMORY)?;
        let mut made = Err(code::OUT_OF_MEMORY);
        for segment in [exact.max(GROWTH), exact] {
            let fits = state.reserved.checked_add(segment);
            if fits.is_none_or(|sum| sum > self.limit) {
                continue;
            }
            let mut memory = memory::writing();
            made = memory.map_anew(self.place, segment, segment);
            if let Ok((base, _, _)) = made {
                let entry = PoolSegment { size: segment, pool: self.clone(), rights: state.rights };
                memory.pool_segments.insert(base, entry);
                break;
            }
        }
        let (base, mapped, physical) = made?;
        let size = physical.size;
        state.segments.insert(base, Segment { size, mapped, physical });
        state.free.give(base, size);
        state.reserved += size;
        state.reserved_peak = state.reserved_peak.max(state.reserved);
        Ok(())
    }

    /// Gives a range back; it may be used again once `ticket` is done.
    fn give(&self, base: u64, size: u64, stream: u64, ticket: Option<Ticket>) {
        let mut state = lock(&self.state);
        state.used -= size;
        state.freed.push(Freed { base, size, stream, ticket });
        UNSETTLED.store(true, Ordering::Release);
    }
}

impl State {
    /// Moves what was freed and reached to the free ranges.
    fn collect(&mut self) {
        let done = |freed: &Freed| freed.ticket.as_ref().is_none_or(Ticket::is_done);
        for freed in self.freed.extract_if(.., |freed| done(freed)) {
            self.free.give(freed.base, freed.size);
        }
    }

    /// Takes a range that is still being freed, the best fit.
    fn retake(&mut self, size: u64, wanted: impl Fn(&Freed) -> bool) -> Option<(u64, Option<Ticket>)> {
        let candidates = self.freed.iter().enumerate();
        let fitting = candidates.filter(|(_, freed)| freed.size >= size && wanted(freed));
        let (index, _) = fitting.min_by_key(|(_, freed)| freed.size)?;
        let freed = &mut self.freed[index];
        let (base, ticket) = (freed.base, freed.ticket.clone());
        if freed.size == size {
            self.freed.swap_remove(index);
        } else {
            freed.base += size;
            freed.size -= size;
        }
        Some((base, ticket))
    }
}

/// A block from a pool, in the order of a stream.
pub fn allocate(pool: &Arc<Pool>, stream: &Arc<Stream>, size: u64) -> Res<u64> {
    let rounded = round_up(size, STEP).ok_or(code::OUT_OF_MEMORY)?;
    let (base, ticket) = pool.take(stream, rounded)?;
    if let Some(ticket) = ticket {
        stream.submit(Work::Nothing, vec![ticket]);
    }
    {
        let mut state = lock(&pool.state);
        state.used += rounded;
        state.used_peak = state.used_peak.max(state.used);
    }
    let mut memory = memory::writing();
    let block = Block {
        size,
        kind: Kind::Pool(pool.handle.load(Ordering::Relaxed)),
        device: pool.device,
        context: stream.context,
        id: memory.fresh_id(),
        flags: 0,
        backing: Backing::Foreign,
        charged: rounded,
        dying: false,
    };
    memory.blocks.insert(base, block);
    Ok(base)
}

/// Takes the block out of the map: no call knows it any more, though work submitted before may still use it.
fn forget(address: u64) -> Res<(Arc<Pool>, u64)> {
    let mut memory = memory::writing();
    let (_, segment) = memory.pool_segment_at(address).ok_or(code::INVALID_VALUE)?;
    let pool = segment.pool.clone();
    let block = memory.blocks.remove(&address).ok_or(code::INVALID_VALUE)?;
    Ok((pool, block.charged))
}

/// `cuMemFreeAsync` of a pool's block.
pub fn free_in_order(address: u64, stream: &Arc<Stream>) -> Res {
    let (pool, size) = forget(address)?;
    let ticket = stream.outstanding().pop().is_some();
    let ticket = ticket.then(|| stream.submit(Work::Nothing, Vec::new()));
    pool.give(address, size, stream.id, ticket);
    Ok(())
}

/// `cuMemFree` of a pool's block: no order at all.
pub fn free_at_once(address: u64, size: u64) -> Res {
    stream::check_untouched(address, size, "cuMemFree");
    let (pool, size) = forget(address)?;
    pool.give(address, size, 0, None);
    Ok(())
}

/// `cuMemFreeAsync` of a block of `cuMemAlloc`: freed when the stream gets there.
pub fn free_classic_in_order(address: u64, stream: &Arc<Stream>) -> Res {
    {
        let mut memory = memory::writing();
        let block = memory.blocks.get_mut(&address).ok_or(code::INVALID_VALUE)?;
        require(!block.dying, code::INVALID_VALUE)?;
        block.dying = true;
    }
    stream.submit(Work::Release { address }, Vec::new());
    Ok(())
}

/// Whether the device of this context may use the pool's memory.
pub fn check_access(pool: &Pool, context: &Context) -> Res {
    let right = lock(&pool.state).rights[context.device];
    require(right != 0, code::INVALID_VALUE)
}

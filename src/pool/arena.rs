//! An arena: the memory of one pool in one context, behind one lock; here is what needs no driver call.
//!
//! What does need one goes through [`super::ladder`] and [`super::settle`], with the lock released meanwhile.

use super::options::Options;
use super::order::{PER_THREAD, StreamKey};
use super::owners::{TAG_SIZE, Tag};
use super::pools::PoolId;
use super::report::Climb;
use super::state::State;
use super::{registry, waiters};
use crate::driver::{Api, context, is_capturing, relaxed};
use crate::error::{NoHostMemory, Result, Status, bail, fail};
use crate::heap::{self, BlockMeta, NotLive, block_flags};
use crate::sync::lock::{Guard, Lock};
use crate::vmem::Mapper;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};

/// Blocks of this many bytes and more are worth an event when they are freed in an arena of several streams; smaller ones stay with
/// their stream until a later mark covers them.
pub const MARK_BYTES: u64 = 1 << 20;

/// A request, checked and complete.
#[derive(Clone, Copy, Debug)]
pub struct Want {
    pub pool: PoolId,
    /// Bytes, not 0 and at most the device's.
    pub size: u64,
    /// A power of two, 512 at least.
    pub align: u64,
    pub key: StreamKey,
    pub owner: Tag,
    pub own_allocation: bool,
    /// It may take the device reserve.
    pub urgent: bool,
    /// Memory has been refused, so that a slab may do without a home.
    pub refused: bool,
}

/// How a block is freed.
#[derive(Clone, Copy, Debug)]
pub enum Release {
    Device,
    Stream(StreamKey),
}

/// A live block, as `pool_query` tells it.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    pub base: u64,
    pub requested: u64,
    pub usable: u64,
    pub device: i32,
    pub stream_ordered: bool,
    pub handle: u64,
    pub owner: [u8; TAG_SIZE],
    pub pool: PoolId,
}

/// See the module.
pub struct Arena {
    pub mapper: Mapper,
    /// Its place among all arenas.
    pub slot: usize,
    /// Bytes of the device.
    pub total: u64,
    /// The context is gone, and the arena with it; only its addresses are still known.
    pub lost: AtomicBool,
    /// Whose it is. It changes only when nothing in it is live.
    pool: AtomicU64,
    /// When it was last used, in counts of [`registry::now`]; the fast path does not keep it.
    pub used: AtomicU64,
    /// A panic broke the invariants: no operation but harmless frees goes on.
    fenced: AtomicBool,
    state: Lock<State>,
}

pub fn host_oom(_: NoHostMemory) -> Status {
    fail(
        Status::POOL_ERROR_HOST_OUT_OF_MEMORY,
        format_args!("the host has no memory for the pool's bookkeeping"),
    )
}

impl Arena {
    pub fn new(
        slot: usize,
        mapper: Mapper,
        total: u64,
        pool: PoolId,
        options: Options,
    ) -> core::result::Result<Arena, NoHostMemory> {
        let state = State::new(&mapper, pool, options)?;
        Ok(Arena {
            slot,
            mapper,
            total,
            lost: AtomicBool::new(false),
            pool: AtomicU64::new(pool.0),
            used: AtomicU64::new(registry::now()),
            fenced: AtomicBool::new(false),
            state: Lock::new(state),
        })
    }

    pub fn device(&self) -> i32 {
        self.mapper.context.device
    }

    pub fn pool(&self) -> PoolId {
        PoolId(self.pool.load(Relaxed))
    }

    pub(super) fn set_pool(&self, pool: PoolId) {
        self.pool.store(pool.0, Relaxed);
    }

    /// Gives an arena that was retired to another pool, if it is empty.
    pub(super) fn start_over(&self, pool: PoolId, options: &Options) -> bool {
        let Ok(mut state) = self.lock() else { return false };
        let taken = self.pool() == PoolId::NONE && state.start_over(pool, options);
        if taken {
            self.set_pool(pool);
        }
        taken
    }

    /// Notes that the arena is used now.
    pub(super) fn set_used(&self) {
        self.used.store(registry::now(), Relaxed);
    }

    /// The same where the fast path did not: frees were counted since.
    pub(super) fn catch_up_use(&self) {
        let Ok(mut state) = self.lock() else { return };
        let seq = state.heap.seq();
        if core::mem::replace(&mut state.seen, seq) != seq {
            self.set_used();
        }
    }

    /// Whether some stream of the context must be taken to be captured: any pool may have been told.
    pub fn is_captured(&self) -> bool {
        let here = registry::all().filter(|a| !a.is_lost() && a.mapper.context == self.mapper.context);
        here.filter_map(|arena| arena.lock().ok().map(|state| state.is_captured())).any(|captured| captured)
    }

    /// Locks the state of an arena that is in order.
    #[inline]
    pub fn lock(&self) -> Result<Guard<'_, State>> {
        let state = self.state.lock();
        if self.state.take_broken() || self.fenced.load(Relaxed) {
            return self.inspect(state);
        }
        Ok(state)
    }

    /// A panic was caught while the lock was held: goes on only if the invariants still hold.
    #[cold]
    fn inspect<'a>(&self, state: Guard<'a, State>) -> Result<Guard<'a, State>> {
        if !self.fenced.load(Relaxed) {
            let sound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| state.heap.validate()));
            match sound {
                Ok(()) => return Ok(state),
                Err(payload) => core::mem::forget(payload),
            }
            self.fenced.store(true, Relaxed);
        }
        bail!(
            POOL_ERROR_INTERNAL,
            "an earlier failure inside the pool broke its bookkeeping; the pool on this device is closed"
        )
    }

    pub fn is_lost(&self) -> bool {
        self.lost.load(Relaxed)
    }

    /// Notices that the context is gone.
    pub fn check_alive(&self, api: &Api) -> Result<()> {
        if !self.is_lost() && self.mapper.context.is_alive(api) {
            return Ok(());
        }
        self.lose(api);
        bail!(
            POOL_ERROR_CONTEXT_LOST,
            "the context of this block on device {} was destroyed or reset",
            self.device()
        )
    }

    /// Whether the stream has been used with this arena before.
    pub fn knows(&self, key: StreamKey) -> bool {
        self.lock().is_ok_and(|state| state.streams.iter().any(|s| s.key == key))
    }

    /// Whether the stream is of another context than this arena.
    fn is_foreign(&self, api: &Api, key: StreamKey) -> bool {
        let own = self.mapper.context.handle;
        match context::of_stream(api, key.handle) {
            Some(handle) => handle != own,
            // The default streams are those of the current context.
            None => !matches!(context::current_handle(api), handle if handle == 0 || handle == own),
        }
    }

    /// Frees on a stream of another context: nothing here can tell when that has got so far, so this waits for it.
    #[cold]
    fn free_foreign(&self, api: &Api, address: u64, key: StreamKey) -> Result<()> {
        if let Some(synchronize) = api.stream_synchronize
            && is_capturing(api, key.handle) == Some(false)
        {
            // SAFETY: the stream is the caller's own, in this call.
            let _ = relaxed(api, || unsafe { synchronize(key.handle) });
        }
        self.free(api, address, Release::Device)
    }

    /// Whether the address is in the reserved range: no lock is needed to tell.
    #[inline]
    pub fn has_in_range(&self, address: u64) -> bool {
        self.mapper.range.is_some_and(|r| address.wrapping_sub(r.base) < r.len)
    }

    /// Whether the address is in a `cuMemAlloc` chunk of this arena.
    pub fn has_in_chunks(&self, address: u64) -> bool {
        self.state.lock().addresses.offset(address).is_some()
    }

    /// Allocates on the stream of the arena's last call from what is idle. 0 where there is nothing, or the stream is another.
    #[inline]
    pub fn allocate_fast(&self, size: u64, key: StreamKey) -> Result<u64> {
        if waiters::any() {
            // They may have to come first.
            return Ok(0);
        }
        let mut state = self.lock()?;
        let Some(stream) = state.recall(key) else { return Ok(0) };
        let flags = block_flags::STREAM_ORDERED;
        let info = BlockMeta { requested: size, handle: key.handle, owner: 0, flags };
        let off = match state.heap.allocate_fast(stream, size, info) {
            Some(off) => off,
            // The search that follows needs no driver either.
            None => match state.heap.allocate(stream, size, heap::UNIT, info).map_err(host_oom)? {
                Some(off) => off,
                None => return Ok(0),
            },
        };
        state.counters.allocs = state.counters.allocs.wrapping_add(1);
        Ok(state.addresses.address(off))
    }

    /// Allocates from what is idle, or climbs the ladder.
    pub fn allocate(&self, api: &Api, want: &Want) -> Result<u64> {
        if want.size > self.total {
            // Nothing need be tried, but the numbers are those of the device all the same.
            return Err(Climb::new(self).out_of_memory(api, want, false));
        }
        registry::note_use(self);
        if !want.own_allocation && !waiters::any() {
            let mut state = self.lock()?;
            if let Some(address) = state.try_allocate(want)? {
                return Ok(address);
            }
        }
        self.allocate_slowly(api, want)
    }

    /// Frees a block on a stream, if that takes no more than putting it back. False, and nothing done, otherwise.
    #[inline]
    pub fn free_fast(&self, api: &Api, address: u64, key: StreamKey) -> Result<bool> {
        let Some(range) = self.mapper.range else { return Ok(false) };
        let off = address.wrapping_sub(range.base);
        if off >= range.len {
            return Ok(false);
        }
        let mut state = self.lock()?;
        let Some(stream) = state.recall(key) else { return Ok(false) };
        let Some(len) = state.heap.free_fast(off, stream) else { return Ok(false) };
        state.counters.frees = state.counters.frees.wrapping_add(1);
        let worth_marking = len >= MARK_BYTES && !state.heap.merge_all;
        drop(state);
        if worth_marking {
            self.mark_stream(api, key);
        }
        if waiters::any() {
            waiters::wake();
        }
        Ok(true)
    }

    /// Frees the block that starts at `address`.
    pub fn free(&self, api: &Api, address: u64, release: Release) -> Result<()> {
        registry::note_use(self);
        self.put_back(api, address, release)?;
        if waiters::any() {
            waiters::wake();
        }
        Ok(())
    }

    fn put_back(&self, api: &Api, address: u64, release: Release) -> Result<()> {
        if let Release::Stream(key) = release
            && !((key.handle > PER_THREAD || registry::is_one_context()) && self.knows(key))
            && self.is_foreign(api, key)
        {
            return self.free_foreign(api, address, key);
        }
        let mut state = self.lock()?;
        let (off, _) = state.addresses.offset(address).ok_or_else(|| not_a_block(address))?;
        let block = state.heap.block_at(off).map_err(|why| not_live(address, why))?;
        state.counters.frees = state.counters.frees.wrapping_add(1);
        let info = block.info;
        if info.owner != 0 {
            state.owners.subtract(info.owner, block.len);
        }
        // Its time was noted; what `catch_up_use` finds is what the fast path frees.
        state.seen = state.heap.seq().saturating_add(1);
        let Release::Stream(key) = release else {
            state.heap.free_pending(&block);
            return Ok(());
        };
        // A stream that cannot be told for lack of memory is as good as all of them.
        let stream = match state.stream(key) {
            Ok(stream) if !waits_for_all(&info, key) => stream,
            _ => {
                state.heap.free_pending(&block);
                return Ok(());
            }
        };
        if block.len <= heap::MAX_SMALL && block.stream != stream {
            state.heap.free_pending(&block);
            return Ok(());
        }
        state.heap.free_on(&block, stream);
        let captured = state.streams.get(stream as usize).is_some_and(|s| s.captured.is_some());
        if captured || (block.len >= MARK_BYTES && !state.heap.merge_all) {
            drop(state);
            self.mark_stream(api, key);
        }
        Ok(())
    }

    /// The live block around `address`.
    pub fn query(&self, address: u64) -> Result<Found> {
        let state = self.lock()?;
        let (off, floor) = state.addresses.offset(address).ok_or_else(|| not_a_block(address))?;
        let block = state.heap.block_around(off, floor).map_err(|_| not_a_block(address))?;
        Ok(Found {
            base: state.addresses.address(block.off),
            requested: block.info.requested,
            usable: block.len,
            device: self.device(),
            stream_ordered: block.info.flags & block_flags::STREAM_ORDERED != 0,
            handle: block.info.handle,
            owner: state.owners.tag(block.info.owner),
            pool: state.pool,
        })
    }

    /// Notes that the block is used on a stream that its free will not name.
    pub fn use_elsewhere(&self, address: u64, key: StreamKey) -> Result<()> {
        let mut state = self.lock()?;
        let (off, _) = state.addresses.offset(address).ok_or_else(|| not_a_block(address))?;
        let block = state.heap.block_at(off).map_err(|why| not_live(address, why))?;
        let own = block.info.flags & block_flags::STREAM_ORDERED != 0 && block.info.handle == key.handle;
        // The per-thread stream's handle does not say whose it is, so a use of it always counts.
        let own = own && key.handle != super::order::PER_THREAD;
        state.heap.set_flag(&block, if own { block_flags::USED_ON_OWN } else { block_flags::USED_ELSEWHERE });
        Ok(())
    }
}

/// Whether a block freed on the stream of `key` must wait for more than that stream.
fn waits_for_all(info: &BlockMeta, key: StreamKey) -> bool {
    let elsewhere = info.flags & block_flags::USED_ELSEWHERE != 0;
    elsewhere || (info.flags & block_flags::USED_ON_OWN != 0 && key.handle != info.handle)
}

#[cold]
fn not_live(address: u64, why: NotLive) -> Status {
    match why {
        NotLive::Unknown => not_a_block(address),
        NotLive::Freed => fail(
            Status::POOL_ERROR_DOUBLE_FREE,
            format_args!("the block at {address:#x} has been freed already"),
        ),
    }
}

#[cold]
pub fn not_a_block(address: u64) -> Status {
    fail(Status::POOL_ERROR_INVALID_POINTER, format_args!("{address:#x} is not in a live block of the pool"))
}

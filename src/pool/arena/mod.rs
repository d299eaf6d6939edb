//! An arena: the memory of one pool in one context, behind one lock. It knows only itself; what concerns a
//! whole device or the pool's other arenas comes in as an argument. Here is what needs no driver call but for
//! streams of other contexts.
//!
//! `state` is what the lock protects; `events` finds out what the device has completed, `grow`, `release` and
//! `spill` move memory between the arena and the driver. The lock is never held across a driver call.

pub mod events;
mod fence;
pub mod grow;
mod owners;
pub mod release;
mod spill;
mod spilled;
pub mod state;

pub use owners::Owner;

use super::options::Options;
use super::types::{AllocRequest, BlockInfo, FreeOrder, PoolId, StreamKey};
use crate::driver::{Api, context, is_capturing, relaxed};
use crate::error::{NoHostMemory, Result, Status, bail, fail};
use crate::heap::{self, BlockMeta, block_flags};
use crate::sync::lock::{Guard, Lock, Rank};
use crate::vmem::Mapper;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use state::State;

/// Counts uses of arenas, to tell which was used least recently.
static USES: AtomicU64 = AtomicU64::new(0);

/// A moment in counts of uses, different from all others.
pub fn next_use() -> u64 {
    USES.fetch_add(1, Relaxed).wrapping_add(1)
}

/// Tells whether some stream of the arena's context must be taken to be captured. Any of the context's arenas
/// may know of it, so an arena is told how to ask.
pub type IsCaptured<'a> = &'a dyn Fn() -> bool;

/// See the module.
pub struct Arena {
    pub mapper: Mapper,
    /// Its place among all arenas.
    pub slot: usize,
    /// Bytes of the device.
    pub total: u64,
    /// The context is gone, and the arena with it; only its addresses are still known.
    lost: AtomicBool,
    /// Whose it is. It changes only when nothing in it is live.
    pool: AtomicU64,
    /// When it was last used, in counts of [`next_use`]; the fast path does not keep it.
    used: AtomicU64,
    /// A panic broke the invariants: no operation but harmless frees goes on.
    fenced_off: AtomicBool,
    state: Lock<State>,
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
            used: AtomicU64::new(next_use()),
            fenced_off: AtomicBool::new(false),
            state: Lock::new(Rank::Arena, state),
        })
    }

    pub fn device(&self) -> i32 {
        self.mapper.context.device
    }

    pub fn pool(&self) -> PoolId {
        PoolId(self.pool.load(Relaxed))
    }

    pub fn set_pool(&self, pool: PoolId) {
        self.pool.store(pool.0, Relaxed);
    }

    pub fn is_lost(&self) -> bool {
        self.lost.load(Relaxed)
    }

    /// Takes the arena from its pool, if nobody holds or is just getting memory of it. Without `really` it
    /// only looks whether that is so.
    pub fn detach(&self, really: bool) -> Result<()> {
        let mut state = self.lock()?;
        let bytes = state.bytes();
        if bytes.live_blocks > 0 {
            bail!(
                POOL_ERROR_IN_USE,
                "the pool cannot be destroyed: {} blocks of {} bytes are live on device {}",
                bytes.live_blocks,
                bytes.live,
                self.device()
            );
        }
        if state.is_growing() {
            bail!(
                POOL_ERROR_IN_USE,
                "the pool cannot be destroyed: another thread is taking memory for it on device {}",
                self.device()
            );
        }
        if really {
            state.set_pool(PoolId::NONE);
        }
        Ok(())
    }

    /// Gives an arena back to the pool that it was just taken from.
    pub fn reattach(&self, pool: PoolId) {
        if let Ok(mut state) = self.lock() {
            state.set_pool(pool);
        }
    }

    /// Gives an arena that belongs to no pool to another one, if it is empty.
    pub fn start_over(&self, pool: PoolId, options: &Options) -> bool {
        let Ok(mut state) = self.lock() else { return false };
        let taken = self.pool() == PoolId::NONE && state.start_over(pool, options);
        if taken {
            self.set_pool(pool);
        }
        taken
    }

    /// When it was last used.
    pub fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    /// Notes that the arena is used now.
    pub fn set_used(&self) {
        self.used.store(next_use(), Relaxed);
    }

    /// The same where the fast path did not: frees were counted since.
    pub fn catch_up_use(&self) {
        if self.lock().is_ok_and(|mut state| state.was_used()) {
            self.set_used();
        }
    }

    /// Locks the state of an arena that is in order.
    #[inline]
    pub fn lock(&self) -> Result<Guard<'_, State>> {
        let state = self.state.lock();
        if self.state.take_broken() || self.fenced_off.load(Relaxed) {
            return self.inspect(state);
        }
        Ok(state)
    }

    /// A panic was caught while the lock was held: goes on only if the invariants still hold.
    #[cold]
    fn inspect<'a>(&self, state: Guard<'a, State>) -> Result<Guard<'a, State>> {
        if !self.fenced_off.load(Relaxed) {
            let sound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| state.validate()));
            match sound {
                Ok(()) => return Ok(state),
                Err(payload) => core::mem::forget(payload),
            }
            self.fenced_off.store(true, Relaxed);
        }
        bail!(
            POOL_ERROR_INTERNAL,
            "an earlier failure inside the pool broke its bookkeeping; the pool on this device is closed"
        )
    }

    #[cold]
    pub fn lost_error(&self) -> Status {
        let device = self.device();
        fail(
            Status::POOL_ERROR_CONTEXT_LOST,
            format_args!("the context on device {device} was destroyed or reset, and its blocks with it"),
        )
    }

    /// Whether the arena serves the stream already.
    pub fn knows(&self, key: StreamKey) -> bool {
        !self.is_lost() && self.lock().is_ok_and(|state| state.knows(key))
    }

    /// Whether the stream is of another context than this arena.
    fn is_foreign(&self, api: &Api, key: StreamKey) -> bool {
        let own = self.mapper.context.handle;
        let handle = match context::of_stream(api, key.handle) {
            // The default streams are those of the current context.
            Ok(None) => context::current_handle(api).map(|handle| if handle == 0 { own } else { handle }),
            Ok(Some(handle)) => Ok(handle),
            Err(status) => Err(status),
        };
        // One that cannot be told may be any.
        handle != Ok(own)
    }

    /// Whether the address is in the reserved range: no lock is needed to tell.
    #[inline]
    pub fn has_in_range(&self, address: u64) -> bool {
        self.mapper.range.is_some_and(|r| address.wrapping_sub(r.base) < r.len)
    }

    /// Whether the address is in a `cuMemAlloc` chunk of this arena.
    pub fn has_in_chunks(&self, address: u64) -> bool {
        self.state.lock().has_address(address)
    }

    /// Allocates on the stream of the arena's last call from what is idle. `None` where there is nothing, or
    /// the stream is another.
    #[inline]
    pub fn allocate_fast(&self, size: u64, key: StreamKey) -> Result<Option<u64>> {
        let mut state = self.lock()?;
        let Some(stream) = state.recall(key) else { return Ok(None) };
        let flags = block_flags::STREAM_ORDERED;
        let meta = BlockMeta { requested: size, handle: key.handle, owner: 0, flags };
        state.allocate_fast(stream, size, meta)
    }

    /// Allocates from what is idle, without asking the driver anything.
    #[inline]
    pub fn allocate_idle(&self, request: &AllocRequest) -> Result<Option<u64>> {
        self.lock()?.try_allocate(request)
    }

    /// Frees a block on a stream, if that takes no more than putting it back. False, and nothing done,
    /// otherwise.
    #[inline]
    pub fn free_fast(&self, api: &Api, address: u64, key: StreamKey) -> Result<bool> {
        let Some(range) = self.mapper.range else { return Ok(false) };
        let off = address.wrapping_sub(range.base);
        if off >= range.len {
            return Ok(false);
        }
        let mut state = self.lock()?;
        let Some(len) = state.free_fast(off, key) else { return Ok(false) };
        let worth_a_fence = state.is_worth_a_fence(len);
        drop(state);
        if worth_a_fence {
            self.fence_stream(api, key);
        }
        Ok(true)
    }

    /// Frees the block that starts at `address`. With `one_context` the process has shown one context only,
    /// so that a default stream is that one's.
    pub fn free(&self, api: &Api, address: u64, order: FreeOrder, one_context: bool) -> Result<()> {
        if let FreeOrder::Stream(key) = order
            && !((key.is_created() || one_context) && self.knows(key))
            && self.is_foreign(api, key)
        {
            synchronize_foreign(api, key);
            return self.put_back(api, address, FreeOrder::Device);
        }
        self.put_back(api, address, order)
    }

    fn put_back(&self, api: &Api, address: u64, order: FreeOrder) -> Result<()> {
        let mut state = self.lock()?;
        let block = state.block_at(address)?;
        state.note_free(&block);
        let FreeOrder::Stream(key) = order else {
            state.free_pending(&block);
            return Ok(());
        };
        // A stream that cannot be told for lack of memory is as good as all of them.
        let stream = match state.stream(key) {
            Ok(stream) if !waits_for_all(&block.info, key) => stream,
            _ => {
                state.free_pending(&block);
                return Ok(());
            }
        };
        if block.len <= heap::MAX_SMALL && block.stream != stream {
            state.free_pending(&block);
            return Ok(());
        }
        state.free_on(&block, stream);
        if state.was_captured(stream) || state.is_worth_a_fence(block.len) {
            drop(state);
            self.fence_stream(api, key);
        }
        Ok(())
    }

    /// The live block around `address`.
    pub fn query(&self, address: u64) -> Result<BlockInfo> {
        self.lock()?.query(address, self.device())
    }

    /// Notes that the block is used on a stream that its free will not name.
    pub fn use_elsewhere(&self, address: u64, key: StreamKey) -> Result<()> {
        let mut state = self.lock()?;
        let block = state.block_at(address)?;
        let own = block.info.flags & block_flags::STREAM_ORDERED != 0 && block.info.handle == key.handle;
        // The per-thread stream's handle does not say whose it is, so a use of it always counts.
        let own = own && key.handle != super::types::PER_THREAD;
        state.set_flag(&block, if own { block_flags::USED_ON_OWN } else { block_flags::USED_ELSEWHERE });
        Ok(())
    }
}

/// For a free on a stream of another context: nothing here can tell when that has got so far, so this waits
/// for it.
#[cold]
fn synchronize_foreign(api: &Api, key: StreamKey) {
    if let Some(synchronize) = api.stream_synchronize
        && is_capturing(api, key.handle) == Some(false)
    {
        // SAFETY: the stream is the caller's own, in this call.
        let _ = relaxed(api, || unsafe { synchronize(key.handle) });
    }
}

/// Whether a block freed on the stream of `key` must wait for more than that stream.
fn waits_for_all(meta: &BlockMeta, key: StreamKey) -> bool {
    let elsewhere = meta.flags & block_flags::USED_ELSEWHERE != 0;
    elsewhere || (meta.flags & block_flags::USED_ON_OWN != 0 && key.handle != meta.handle)
}

//! The words of the pool layer: pools, streams, requests, blocks and the order of frees. Plain data; nothing
//! here takes a lock or calls the driver.

/// A pool, by a number that is never given twice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolId(pub(super) u64);

impl PoolId {
    /// The process's pool, which is always there.
    pub const DEFAULT: PoolId = PoolId(0);
    /// The owner of arenas whose pool was destroyed; they serve the next pool in their context.
    pub(super) const NONE: PoolId = PoolId(u64::MAX);
}

/// Handle of the legacy default stream (`CU_STREAM_LEGACY`).
pub const LEGACY: u64 = 1;
/// Handle of the per-thread default stream (`CU_STREAM_PER_THREAD`).
pub const PER_THREAD: u64 = 2;

/// A stream as the pool tells them apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StreamKey {
    pub handle: u64,
    /// Which thread's, for the per-thread default stream; 0 for all others.
    thread: u64,
}

impl StreamKey {
    /// Not a stream: device order.
    pub const DEVICE: StreamKey = StreamKey { handle: 0, thread: 0 };

    /// No call's key.
    pub const NONE: StreamKey = StreamKey { handle: 0, thread: u64::MAX };

    /// The key of a handle in a call of this thread.
    #[inline]
    pub fn of(handle: u64) -> StreamKey {
        match handle {
            0 | LEGACY => StreamKey { handle: LEGACY, thread: 0 },
            PER_THREAD => StreamKey { handle: PER_THREAD, thread: this_thread() },
            handle => StreamKey { handle, thread: 0 },
        }
    }

    pub fn is_device_order(&self) -> bool {
        self.handle == 0
    }

    /// Whether it is none of the default streams, whose context only the driver can tell.
    pub fn is_created(&self) -> bool {
        self.handle > PER_THREAD
    }
}

/// A number for the calling thread that no other thread of the process ever has.
pub fn this_thread() -> u64 {
    use core::cell::Cell;
    use core::sync::atomic::{AtomicU64, Ordering::Relaxed};
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: Cell<u64> = const { Cell::new(0) };
    }
    NUMBER
        .try_with(|number| {
            if number.get() == 0 {
                number.set(NEXT.fetch_add(1, Relaxed));
            }
            number.get()
        })
        .unwrap_or(0)
}

/// Bytes of an owner tag, with its terminating zero.
pub const TAG_SIZE: usize = 32;

/// An owner tag: a short name that callers give their blocks, zero-filled.
pub type Tag = [u8; TAG_SIZE];

/// The tag of a block without an owner.
pub const NO_OWNER: Tag = [0; TAG_SIZE];

/// The part of a tag before its terminating zero.
pub fn tag_text(tag: &Tag) -> &[u8] {
    tag.split(|byte| *byte == 0).next().unwrap_or_default()
}

/// Alignment in bytes of every block for which no other is asked.
pub const DEFAULT_ALIGN: u64 = crate::heap::UNIT;

/// A request for a block.
#[derive(Clone, Copy, Debug)]
pub struct AllocRequest {
    pub pool: PoolId,
    /// Bytes.
    pub size: u64,
    /// Bytes; a power of two, 512 at least.
    pub align: u64,
    /// The stream it is ordered by, or [`StreamKey::DEVICE`].
    pub key: StreamKey,
    pub owner: Tag,
    /// The block is to be a driver allocation of its own.
    pub own_allocation: bool,
}

impl AllocRequest {
    /// One with nothing but a size and an order.
    pub fn plain(size: u64, key: StreamKey) -> AllocRequest {
        AllocRequest {
            pool: PoolId::DEFAULT,
            size,
            align: DEFAULT_ALIGN,
            key,
            owner: NO_OWNER,
            own_allocation: false,
        }
    }
}

/// How a block is freed.
#[derive(Clone, Copy, Debug)]
pub enum FreeOrder {
    Device,
    Stream(StreamKey),
}

/// A live block, as `pool_query` tells it.
#[derive(Clone, Copy, Debug)]
pub struct BlockInfo {
    pub base: u64,
    /// Bytes that were asked for.
    pub requested: u64,
    /// Bytes that may be used.
    pub usable: u64,
    pub device: i32,
    pub stream_ordered: bool,
    /// The stream it was allocated on, as the handle was then.
    pub handle: u64,
    pub owner: Tag,
    pub pool: PoolId,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_names_of_the_legacy_stream_are_one() {
        assert_eq!(StreamKey::of(0), StreamKey::of(1));
        assert_ne!(StreamKey::of(0), StreamKey::DEVICE);
        let mine = StreamKey::of(2);
        assert_eq!(mine, StreamKey::of(2));
        let other = std::thread::spawn(|| StreamKey::of(2)).join().unwrap();
        assert_ne!(mine, other);
    }
}

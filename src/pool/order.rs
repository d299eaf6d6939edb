//! Ordering: which freed memory the device is known to be finished with.
//!
//! Frees are counted; a *mark* is an event together with the count at which it was recorded. When a mark of a
//! stream is complete, everything freed on that stream up to its count is finished with; when a mark of the whole
//! context is, everything freed anywhere up to its count is. A stream's handle is only used in the call that carried it.

use crate::driver::Event;
use crate::heap::StreamId;
use crate::sync::clock::Moment;
use core::time::Duration;

/// Handle of the legacy default stream (`CU_STREAM_LEGACY`).
pub const LEGACY: u64 = 1;
/// Handle of the per-thread default stream (`CU_STREAM_PER_THREAD`).
pub const PER_THREAD: u64 = 2;

/// How many marks of one stream are kept. A limit on what polling costs; beyond it the newest mark
/// replaces the one before, whose frees then wait for the newer event.
const MARKS: usize = 8;

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

/// An event recorded when `seq` frees had been counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mark {
    pub event: Event,
    pub seq: u64,
}

/// The marks of a stream that are not known to be complete, oldest first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Marks {
    list: [Mark; MARKS],
    len: usize,
}

impl Marks {
    pub fn oldest(&self) -> Option<Mark> {
        self.list.get(..self.len)?.first().copied()
    }

    /// Adds a mark. If there is no room the newest makes way: its event is returned, to be used again.
    pub fn push(&mut self, mark: Mark) -> Option<Event> {
        let mut replaced = None;
        if self.len == MARKS {
            self.len = MARKS - 1;
            replaced = self.list.last().map(|m| m.event);
        }
        if let Some(slot) = self.list.get_mut(self.len) {
            *slot = mark;
            self.len = self.len.saturating_add(1);
        }
        replaced
    }

    /// Takes the oldest mark off if it is `mark`: somebody else may have seen it complete first.
    pub fn pop(&mut self, mark: Mark) -> bool {
        if self.oldest() != Some(mark) {
            return false;
        }
        self.list.copy_within(1.., 0);
        self.len = self.len.saturating_sub(1);
        true
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// What the pool knows of one stream.
pub struct Stream {
    pub key: StreamKey,
    pub marks: Marks,
    /// Everything freed on it up to here is finished with.
    pub done: u64,
    /// Everything freed on it up to here is covered by a mark, of its own or of the context.
    pub covered: u64,
    /// When a call last found it captured, if the last one that looked did.
    pub captured: Option<Moment>,
}

/// How long a stream counts as captured after it was last seen so. Its handle must not be touched to ask, and its owner may
/// never name it again, so there has to be an end; captures take milliseconds.
pub const CAPTURE_MEMORY: Duration = Duration::from_secs(10);

impl Stream {
    pub const fn new(key: StreamKey) -> Stream {
        Stream {
            key,
            marks: Marks { list: [Mark { event: 0, seq: 0 }; MARKS], len: 0 },
            done: 0,
            covered: 0,
            captured: None,
        }
    }

    /// Whether it must be taken to be captured.
    pub fn is_captured(&self) -> bool {
        self.captured.is_some_and(|seen| seen.elapsed() < CAPTURE_MEMORY)
    }
}

/// Where a mark belongs: a stream, or with [`crate::heap::SHARED`] the context.
pub type Whose = StreamId;

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

    #[test]
    fn a_full_ring_gives_up_its_newest() {
        let mut marks = Marks::default();
        for i in 1..=MARKS as u64 {
            assert_eq!(marks.push(Mark { event: i, seq: i }), None);
        }
        assert_eq!(marks.push(Mark { event: 100, seq: 100 }), Some(MARKS as u64));
        assert!(!marks.pop(Mark { event: 2, seq: 2 }));
        for i in 1..MARKS as u64 {
            assert!(marks.pop(Mark { event: i, seq: i }));
        }
        assert!(marks.pop(Mark { event: 100, seq: 100 }));
        assert!(marks.is_empty());
    }
}

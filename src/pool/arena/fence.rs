//! Ordering: which frees the device is known to have got past.
//!
//! Frees are counted; a *fence* is an event together with the count at which it was recorded. When a fence of
//! a stream is complete, everything freed on that stream up to its count is complete; when a fence of
//! the whole context is, everything freed anywhere up to its count is. A stream's handle is only used in the
//! call that carried it.

use crate::driver::Event;
use crate::heap::StreamId;
use crate::pool::types::StreamKey;
use crate::sync::clock::Moment;
use core::time::Duration;

/// How many fences of one stream are kept. A limit on what polling costs; beyond it the newest fence
/// replaces the one before, whose frees then wait for the newer event.
const MAX_FENCES: usize = 8;

/// An event recorded when `seq` frees had been counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Fence {
    pub event: Event,
    pub seq: u64,
}

/// The fences of a stream that are not known to be complete, oldest first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fences {
    list: [Fence; MAX_FENCES],
    len: usize,
}

impl Fences {
    pub fn oldest(&self) -> Option<Fence> {
        self.list.get(..self.len)?.first().copied()
    }

    /// Adds a fence. If there is no room the newest makes way: its event is returned, to be used again.
    pub fn push(&mut self, fence: Fence) -> Option<Event> {
        let mut replaced = None;
        if self.len == MAX_FENCES {
            self.len = MAX_FENCES - 1;
            replaced = self.list.last().map(|m| m.event);
        }
        if let Some(slot) = self.list.get_mut(self.len) {
            *slot = fence;
            self.len += 1;
        }
        replaced
    }

    /// Takes the oldest fence off if it is `fence`: somebody else may have seen it complete first.
    pub fn pop(&mut self, fence: Fence) -> bool {
        if self.oldest() != Some(fence) {
            return false;
        }
        self.list.copy_within(1.., 0);
        self.len -= 1;
        true
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// What the pool knows of one stream.
pub struct Stream {
    pub key: StreamKey,
    pub fences: Fences,
    /// The device has got past everything freed on it up to here.
    pub done: u64,
    /// Everything freed on it up to here is covered by a fence, of its own or of the context.
    pub covered: u64,
    /// When a call last found it captured, if the last one that looked did.
    pub captured: Option<Moment>,
}

/// How long a stream counts as captured after it was last seen so. Its handle must not be touched to ask, and
/// its owner may never name it again, so there has to be an end; captures take milliseconds.
pub const CAPTURE_MEMORY: Duration = Duration::from_secs(10);

impl Stream {
    pub const fn new(key: StreamKey) -> Stream {
        Stream {
            key,
            fences: Fences { list: [Fence { event: 0, seq: 0 }; MAX_FENCES], len: 0 },
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

/// Where a fence belongs: a stream, or with [`crate::heap::SHARED`] the context.
pub type Whose = StreamId;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_ring_gives_up_its_newest() {
        let mut fences = Fences::default();
        for i in 1..=MAX_FENCES as u64 {
            assert_eq!(fences.push(Fence { event: i, seq: i }), None);
        }
        assert_eq!(fences.push(Fence { event: 100, seq: 100 }), Some(MAX_FENCES as u64));
        assert!(!fences.pop(Fence { event: 2, seq: 2 }));
        for i in 1..MAX_FENCES as u64 {
            assert!(fences.pop(Fence { event: i, seq: i }));
        }
        assert!(fences.pop(Fence { event: 100, seq: 100 }));
        assert!(fences.is_empty());
    }
}

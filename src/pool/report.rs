//! The report: an out-of-memory answer in a sentence whose numbers add up.

use super::arena::{Arena, Want};
use super::owners::Owner;
use crate::driver::{Api, relaxed};
use crate::error::{Status, fail};
use crate::heap::SHARED;

impl Arena {
    pub(super) fn out_of_memory(&self, api: &Api, want: &Want, capturing: bool) -> Status {
        let device = relaxed(api, || self.mapper.device_memory(api)).unwrap_or((0, self.total));
        let Ok(mut state) = self.lock() else { return Status::POOL_ERROR_INTERNAL };
        state.counters.oom = state.counters.oom.wrapping_add(1);
        let bytes = state.heap.bytes();
        let stream = state.stream(want.key).unwrap_or(SHARED);
        let limit = state.options.limit(self.total);
        let foreign = device.1.saturating_sub(device.0).saturating_sub(bytes.mapped);
        let largest = state.heap.largest_free(stream);
        let why = if capturing {
            "; the stream is captured, so idle memory could not be moved or waited for"
        } else if bytes.mapped.saturating_add(want.size) > limit {
            "; the pool's limit is in the way"
        } else {
            ""
        };
        fail(
            Status::POOL_ERROR_OUT_OF_MEMORY,
            format_args!(
                "out of memory: {} bytes were requested on device {}; the pool holds {} (live {}, cached {}, pending {}, \
                 overhead {}; largest free extent {}; limit {}{}); the device has {} free of {}, others hold {}{why}",
                want.size,
                self.device(),
                bytes.mapped,
                bytes.live,
                bytes.cached,
                bytes.pending,
                bytes.overhead,
                largest,
                Limit(limit),
                MostOwned(state.owners.largest()),
                device.0,
                device.1,
                foreign,
            ),
        )
    }
}

struct Limit(u64);

impl core::fmt::Display for Limit {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        if self.0 == u64::MAX { f.write_str("none") } else { write!(f, "{}", self.0) }
    }
}

struct MostOwned(Option<Owner>);

impl core::fmt::Display for MostOwned {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let Some(owner) = self.0 else { return Ok(()) };
        let tag = owner.tag.split(|byte| *byte == 0).next().unwrap_or_default();
        write!(f, "; most is {}'s: {}", tag.escape_ascii(), owner.live_bytes)
    }
}

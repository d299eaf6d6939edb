//! The reserve: device memory that the pools leave free once somebody beside them has asked for some, so that the next foreign allocation does
//! not fail first.
//!
//! What was asked for with `pool_reclaim` is remembered for the device and halves every [`HALF_LIFE`]; each pool keeps so much free of it as its
//! option `reserve` allows. Growth respects it as long as idle memory can be moved or released instead, and no longer: an own request is never
//! answered with out of memory, nor made to wait, for the reserve's sake.

use super::arena::Arena;
use super::registry;
use crate::driver::{Api, relaxed};
use crate::sync::clock::{self, Moment};
use crate::sync::lock::Lock;
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use core::time::Duration;

/// In which time the reserve halves if nobody asks again: some steps of a program, not its whole run.
const HALF_LIFE: Duration = Duration::from_secs(30);
/// Devices that can have a reserve: more than a machine has.
const DEVICES: usize = 64;

/// What others were last known to need on a device.
#[derive(Clone, Copy)]
struct Demand {
    bytes: u64,
    since: Moment,
}

static DEMANDS: Lock<[Option<Demand>; DEVICES]> = Lock::new([None; DEVICES]);
/// Whether anybody has ever asked.
static ANY: AtomicBool = AtomicBool::new(false);

/// Somebody needs so many bytes on the device.
pub fn note_demand(device: i32, bytes: u64) {
    if bytes == 0 {
        return;
    }
    let mut demands = DEMANDS.lock();
    if let Some(slot) = demands.get_mut(device as usize) {
        let now = clock::now();
        let left = slot.map_or(0, |d| decayed(d.bytes, now.since(d.since)));
        *slot = Some(Demand { bytes: bytes.max(left), since: now });
        ANY.store(true, Relaxed);
    }
}

/// What others may need on the device, as far as it is not forgotten.
fn demand(device: i32) -> u64 {
    if !ANY.load(Relaxed) {
        return 0;
    }
    let demand = DEMANDS.lock().get(device as usize).copied().flatten();
    demand.map_or(0, |d| decayed(d.bytes, d.since.elapsed()))
}

/// Halved for each half-life, and in a straight line in between.
fn decayed(bytes: u64, age: Duration) -> u64 {
    let half = HALF_LIFE.as_millis();
    let halvings = u32::try_from(age.as_millis() / half).unwrap_or(u32::MAX);
    let whole = u128::from(bytes.checked_shr(halvings).unwrap_or(0));
    let part = whole * (age.as_millis() % half) / (2 * half);
    (whole - part) as u64
}

impl Arena {
    /// Bytes that this pool leaves free on the device now.
    pub(super) fn reserve(&self) -> u64 {
        match demand(self.device()) {
            0 => 0,
            demand => self.lock().map_or(0, |state| demand.min(state.options.reserve(self.total))),
        }
    }

    /// The most that may be taken from the device without touching the reserve; the largest number where there is none.
    pub(super) fn spare_on_device(&self, api: &Api) -> u64 {
        match self.reserve() {
            0 => u64::MAX,
            reserve => self.free_on_device(api).map_or(u64::MAX, |free| free.saturating_sub(reserve)),
        }
    }

    /// What the driver has free on the device, if it says so.
    pub(super) fn free_on_device(&self, api: &Api) -> Option<u64> {
        relaxed(api, || self.mapper.device_memory(api)).ok().map(|(free, _)| free)
    }
}

/// After `wanted` bytes were given up for others: gives up as much more of what is idle as fills the reserve, now that they will be taken. Returns
/// the bytes.
pub fn refill(api: &Api, device: i32, wanted: u64) -> u64 {
    let mut released = 0u64;
    for arena in registry::idlest_first(device) {
        let reserve = arena.reserve();
        if reserve == 0 {
            continue;
        }
        let Some(free) = arena.free_on_device(api) else { break };
        let missing = wanted.saturating_add(reserve).saturating_sub(free);
        if missing > 0 {
            released = released.saturating_add(arena.release_idle(api, missing).unwrap_or(0));
        }
    }
    released
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_and_ends() {
        let at = |seconds| decayed(1 << 30, Duration::from_secs(seconds));
        assert_eq!([at(0), at(15), at(30), at(60)], [1 << 30, 3 << 28, 1 << 29, 1 << 28]);
        assert_eq!(at(30 * 31), 0);
        assert_eq!(at(u64::MAX / 1000), 0);
        assert_eq!(decayed(u64::MAX, Duration::from_millis(1)).leading_zeros(), 0);
    }
}

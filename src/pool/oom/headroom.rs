//! The headroom: device memory that the pools leave free once somebody beside them has asked for some, so
//! that the next foreign allocation does not fail first.
//!
//! What was asked for with `pool_reclaim` is remembered for the device and halves every 30 seconds; each pool
//! keeps so much free of it as its option `headroom` allows. Growth respects it as long as idle memory can be
//! moved or released instead, and no longer: an own request is never answered with out of memory, nor made to
//! wait, for the headroom's sake.

use crate::driver::{Api, relaxed};
use crate::pool::arena::Arena;
use crate::pool::registry;
use crate::sync::clock::{self, Moment};
use crate::sync::lock::{Lock, Rank};
use core::sync::atomic::{AtomicBool, Ordering::Relaxed};
use core::time::Duration;

/// In which time the headroom halves if nobody asks again: some steps of a program, not its whole run.
const HALF_LIFE: Duration = Duration::from_secs(30);
/// Devices that can have headroom: more than a machine has.
const MAX_DEVICES: usize = 64;

/// What others were last known to need on a device.
#[derive(Clone, Copy)]
struct Demand {
    bytes: u64,
    since: Moment,
}

static DEMANDS: Lock<[Option<Demand>; MAX_DEVICES]> = Lock::new(Rank::Headroom, [None; MAX_DEVICES]);
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

/// Bytes that the arena's pool leaves free on the device now.
pub fn of(arena: &Arena) -> u64 {
    match demand(arena.device()) {
        0 => 0,
        demand => arena.lock().map_or(0, |state| demand.min(state.options().headroom(arena.total))),
    }
}

/// The most that the arena may take from the device without touching the headroom; the largest number where
/// there is none.
pub fn spare(api: &Api, arena: &Arena) -> u64 {
    match of(arena) {
        0 => u64::MAX,
        // With less free than the headroom, nothing is.
        headroom => free_on_device(api, arena).map_or(u64::MAX, |free| free.saturating_sub(headroom)),
    }
}

/// What the driver has free on the arena's device, if it says so.
pub fn free_on_device(api: &Api, arena: &Arena) -> Option<u64> {
    relaxed(api, || arena.mapper.device_memory(api)).ok().map(|(free, _)| free)
}

/// After `wanted` bytes were given up for others: gives up as much more of what is idle as fills the
/// headroom, now that they will be taken. Returns the bytes.
pub fn refill(api: &Api, device: i32, wanted: u64) -> u64 {
    let mut released = 0;
    for arena in registry::idlest_first(device) {
        let headroom = of(arena);
        if headroom == 0 {
            continue;
        }
        let Some(free) = free_on_device(api, arena) else { break };
        // `wanted` is any number of the caller's.
        let missing = wanted.saturating_add(headroom).saturating_sub(free);
        if missing > 0 {
            released += arena.release_idle(api, missing).unwrap_or(0);
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

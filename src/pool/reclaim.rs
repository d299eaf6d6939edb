//! Reclaim for others: a foreign allocation on the device needs memory that the pools hold.

use super::ladder::{LONGEST_SLICE, SHORTEST_SLICE};
use super::registry::FreeEpochs;
use super::settle::Waited;
use super::{callbacks, registry, reserve};
use crate::driver::Api;
use crate::error::Result;
use crate::sync::clock;
use core::cell::Cell;

/// Somebody else on the device needs `wanted` bytes: gives back to the driver at least so much of what is idle in any pool, and
/// waits for what is freed but not finished with, and asks the callbacks, if there is less. Then fills the device reserve, as far as idle memory
/// goes. Returns the bytes given back.
pub fn reclaim(api: &Api, device: i32, wanted: u64) -> Result<u64> {
    registry::lose_the_dead(api, device);
    let mut deadline = clock::now();
    for arena in registry::on(device) {
        deadline = arena.lock().map_or(deadline, |state| state.options.deadline().max(deadline));
    }
    let released = Cell::new(0u64);
    let missing = || wanted.saturating_sub(released.get());
    let release = || {
        let (mut slice, freed) = (SHORTEST_SLICE, FreeEpochs::until_now(device));
        loop {
            // Each arena gets a little time in turn: what one waits for long, another one may have at once.
            let until = deadline.min(clock::now().after(slice));
            slice = (slice * 2).min(LONGEST_SLICE);
            let mut unsettled = false;
            for arena in registry::idlest_first(device) {
                let least = missing();
                if least == 0 {
                    return true;
                }
                if !arena.is_captured() {
                    // An arena whose context is gone, or that is in trouble itself, has nothing to give; the others have.
                    unsettled |=
                        arena.wait_for_idle(api, until, freed.of(arena), least) == Ok(Waited::TimeIsUp);
                }
                let more = arena.release_idle(api, least).unwrap_or(0);
                released.set(released.get().saturating_add(more));
            }
            if missing() == 0 || !unsettled || clock::now() >= deadline {
                return missing() == 0;
            }
        }
    };
    for arena in registry::idlest_first(device).filter(|_| missing() > 0) {
        arena.poll(api);
        let more = arena.release_idle(api, missing()).unwrap_or(0);
        released.set(released.get().saturating_add(more));
    }
    if missing() > 0 && !release() && !callbacks::is_inside() {
        callbacks::ask(device, missing, |claimed| {
            // What a callback freed through a pool is idle there now; what it gave to the driver is out of our books.
            Ok((release() || claimed >= missing()).then_some(()))
        })?;
    }
    reserve::note_demand(device, wanted);
    let more = reserve::refill(api, device, wanted);
    Ok(released.get().saturating_add(more))
}

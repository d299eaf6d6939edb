//! Reclaim for others: a foreign allocation on the device needs memory that the pools hold.

use super::{callbacks, headroom};
use crate::driver::Api;
use crate::error::Result;
use crate::pool::arena::events::Waited;
use crate::pool::registry::{self, FreeEpochs, Turns};
use crate::sync::clock::{self, Moment};
use core::cell::Cell;

/// Somebody else on the device needs `wanted` bytes: gives back to the driver at least so much of what is
/// idle in any pool, and waits for what is freed but not complete, and asks the callbacks, if there is less.
/// Then fills the headroom, as far as idle memory goes. Returns the bytes given back.
pub fn reclaim(api: &Api, device: i32, wanted: u64) -> Result<u64> {
    registry::lose_the_dead(api, device);
    let mut deadline = clock::now();
    for arena in registry::on(device) {
        deadline = arena.lock().map_or(deadline, |state| state.options().deadline().max(deadline));
    }
    let reclaim = Reclaim { api, device, wanted, deadline, released: Cell::new(0) };
    reclaim.release();
    if reclaim.missing() > 0 && !reclaim.retire_pending() && !callbacks::is_inside() {
        callbacks::ask(
            device,
            || reclaim.missing(),
            |claimed| {
                // What a callback freed through a pool is idle there now; what it gave to the driver is out
                // of our books.
                Ok((reclaim.retire_pending() || claimed >= reclaim.missing()).then_some(()))
            },
        )?;
    }
    headroom::note_demand(device, wanted);
    Ok(reclaim.released.get() + headroom::refill(api, device, wanted))
}

struct Reclaim<'a> {
    api: &'a Api,
    device: i32,
    wanted: u64,
    deadline: Moment,
    /// Bytes so far.
    released: Cell<u64>,
}

impl Reclaim<'_> {
    /// None where more was released than was wanted.
    fn missing(&self) -> u64 {
        self.wanted.saturating_sub(self.released.get())
    }

    /// Gives back what is known to be idle.
    fn release(&self) {
        for arena in registry::idlest_first(self.device).filter(|_| self.missing() > 0) {
            arena.poll(self.api);
            let more = arena.release_idle(self.api, self.missing()).unwrap_or(0);
            self.released.set(self.released.get() + more);
        }
    }

    /// Waits for what the device may still be using, and gives it back. True if nothing is missing then.
    fn retire_pending(&self) -> bool {
        let (mut turns, freed) = (Turns::until(self.deadline), FreeEpochs::until_now(self.device));
        loop {
            let until = turns.begin();
            let mut pending = false;
            for arena in registry::idlest_first(self.device) {
                let least = self.missing();
                if least == 0 {
                    return true;
                }
                let is_captured = || registry::is_captured(arena);
                if !is_captured() {
                    // An arena whose context is gone, or that is in trouble itself, has nothing to give; the
                    // others have.
                    let waited = arena.wait_for_idle(self.api, &is_captured, until, freed.of(arena), least);
                    pending |= waited == Ok(Waited::TimeIsUp);
                }
                let more = arena.release_idle(self.api, least).unwrap_or(0);
                self.released.set(self.released.get() + more);
            }
            if self.missing() == 0 || !pending || turns.is_over() {
                return self.missing() == 0;
            }
        }
    }
}

//! The report: an out-of-memory answer in numbers that add up, as a struct and in a sentence.

use super::arena::{Arena, Want};
use super::owners::{Owner, TAG_SIZE, Tag};
use super::registry;
use super::state::State;
use crate::driver::{Api, relaxed};
use crate::error::{Status, fail};
use crate::heap::SHARED;
use crate::sync::clock::{self, Moment};
use core::cell::Cell;
use core::fmt::{Display, Formatter};

/// Rungs are numbered from 1; 0 is not used.
pub const RUNGS: usize = 11;
/// How many owners are named.
pub const OWNERS: usize = 4;

/// What would help most, as far as the numbers tell.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Advice {
    None = 0,
    RaiseLimit = 1,
    FreeForeign = 2,
    Defragment = 3,
    EndCapture = 4,
    UseLess = 5,
    Wait = 6,
}

/// What the advice goes by, beside the numbers of the report. Bytes.
#[derive(Clone, Copy, Default)]
struct Situation {
    /// The pool's limit leaves no room beside its live blocks.
    limited: bool,
    capturing: bool,
    /// In no caller's hands, in all pools on the device.
    idle: u64,
    /// The part of it that the device may still be using.
    unsettled: u64,
}

/// The last out-of-memory answer of a thread.
#[derive(Clone, Copy, Debug)]
pub struct OomInfo {
    pub requested: u64,
    /// -1 where the size alone was too large for any device.
    pub device: i32,
    /// Bit n: rung n was tried.
    pub tried: u32,
    pub gained: [u64; RUNGS],
    pub micros: [u64; RUNGS],
    pub live: u64,
    pub cached: u64,
    pub pending: u64,
    pub overhead: u64,
    pub reserved: u64,
    /// 0 for none.
    pub limit: u64,
    pub largest_free: u64,
    pub device_free: u64,
    pub device_total: u64,
    /// Held by all pools on the device, this one included.
    pub pools: u64,
    pub foreign: u64,
    pub owners: [(Tag, u64); OWNERS],
    pub advice: Advice,
}

const NOTHING: OomInfo = OomInfo {
    requested: 0,
    device: 0,
    tried: 0,
    gained: [0; RUNGS],
    micros: [0; RUNGS],
    live: 0,
    cached: 0,
    pending: 0,
    overhead: 0,
    reserved: 0,
    limit: 0,
    largest_free: 0,
    device_free: 0,
    device_total: 0,
    pools: 0,
    foreign: 0,
    owners: [([0; TAG_SIZE], 0); OWNERS],
    advice: Advice::None,
};

thread_local! {
    static LAST: Cell<OomInfo> = const { Cell::new(NOTHING) };
}

/// The calling thread's last out-of-memory answer; all zero if there was none.
pub fn last() -> OomInfo {
    LAST.try_with(Cell::get).unwrap_or(NOTHING)
}

fn remember(info: OomInfo) {
    let _ = LAST.try_with(|last| last.set(info));
}

/// Answers a request that is larger than any device. It is about none of them, so that there are no numbers of one.
pub fn too_large(requested: u64, largest: u64) -> Status {
    remember(OomInfo { requested, device: -1, advice: Advice::UseLess, ..NOTHING });
    fail(
        Status::POOL_ERROR_OUT_OF_MEMORY,
        format_args!("out of memory: {requested} bytes were requested, and the largest device has {largest}"),
    )
}

/// What the rungs of one climb gained, and how long they took.
pub struct Climb<'a> {
    arena: &'a Arena,
    /// The driver or the limit refused memory.
    pub refused: bool,
    tried: u32,
    gained: [u64; RUNGS],
    micros: [u64; RUNGS],
}

impl<'a> Climb<'a> {
    pub fn new(arena: &'a Arena) -> Self {
        Climb { arena, refused: false, tried: 0, gained: [0; RUNGS], micros: [0; RUNGS] }
    }

    /// Bytes idle in the arena, and bytes that all pools hold on the device.
    fn measure(&self) -> (u64, u64) {
        let cached = self.arena.lock().map_or(0, |state| state.heap.bytes().cached);
        (cached, held_on(self.arena.device()))
    }

    /// Runs a rung that every miss goes through, and notes its time alone: what it gains serves the request.
    pub fn first_rung<R>(&mut self, rung: usize, f: impl FnOnce() -> R) -> R {
        let start = clock::now();
        let result = f();
        self.note(rung, 0, start);
        result
    }

    fn note(&mut self, rung: usize, gain: u64, start: Moment) {
        if let (Some(gained), Some(spent)) = (self.gained.get_mut(rung), self.micros.get_mut(rung)) {
            *gained = gained.saturating_add(gain);
            *spent = spent.saturating_add(start.elapsed().as_micros() as u64);
            self.tried |= 1 << rung;
        }
    }

    /// Runs a rung, and notes what became idle or went back to the driver meanwhile.
    pub fn rung<R>(&mut self, rung: usize, f: impl FnOnce() -> R) -> R {
        let (cached, held) = self.measure();
        let start = clock::now();
        let result = f();
        let (cached_after, held_after) = self.measure();
        let gain = cached_after.saturating_sub(cached).saturating_add(held.saturating_sub(held_after));
        self.note(rung, gain, start);
        result
    }

    /// Answers out of memory, with the numbers as they are now.
    pub fn out_of_memory(&self, api: &Api, want: &Want, capturing: bool) -> Status {
        let arena = self.arena;
        let asked = relaxed(api, || arena.mapper.device_memory(api));
        let (idle, unsettled) = idle_on(arena.device());
        let (pools, elsewhere) = (held_on(arena.device()), arena.held_elsewhere());
        let Ok(mut state) = arena.lock() else { return Status::POOL_ERROR_INTERNAL };
        state.counters.oom = state.counters.oom.wrapping_add(1);
        // Of a device that the driver says nothing about, only what the pools hold is known.
        let mut info = state.oom_info(self, want, asked.unwrap_or((0, pools)), pools);
        // The limit is one for all contexts of the device, and only for device memory.
        let held = info.live.saturating_sub(state.spilled.bytes).saturating_add(elsewhere);
        let limit = state.options.limit(arena.total);
        let limited = limit < arena.total && held.saturating_add(want.size) > limit;
        info.advice = info.advise(Situation { limited, capturing, idle, unsettled });
        remember(info);
        fail(Status::POOL_ERROR_OUT_OF_MEMORY, format_args!("{info}"))
    }
}

/// Bytes that all pools hold on a device.
fn held_on(device: i32) -> u64 {
    let held = |arena: &Arena| arena.lock().map_or(0, |state| state.on_device());
    registry::on(device).map(held).fold(0, u64::saturating_add)
}

/// Bytes on a device that pools could give up, and how many of them the device may still be using.
fn idle_on(device: i32) -> (u64, u64) {
    let mut sums = (0u64, 0u64);
    for arena in registry::on(device) {
        let Ok(state) = arena.lock() else { continue };
        let bytes = state.heap.bytes();
        let idle = if state.options.pinned { 0 } else { bytes.cached.saturating_add(bytes.pending) };
        sums.0 = sums.0.saturating_add(idle);
        sums.1 = sums.1.saturating_add(if state.is_unsettled() { idle } else { 0 });
    }
    sums
}

impl State {
    fn oom_info(&mut self, climb: &Climb, want: &Want, device: (u64, u64), pools: u64) -> OomInfo {
        let bytes = self.heap.bytes();
        let stream = self.stream(want.key).unwrap_or(SHARED);
        let limit = self.options.limit(climb.arena.total);
        let (device_free, device_total, pools) = consistent(device, pools.max(self.on_device()));
        let mut owners = [([0; TAG_SIZE], 0); OWNERS];
        for (slot, owner) in owners.iter_mut().zip(self.owners.largest::<OWNERS>()) {
            *slot = owner.map_or(([0; TAG_SIZE], 0), |Owner { tag, live_bytes }| (tag, live_bytes));
        }
        OomInfo {
            requested: want.size,
            device: climb.arena.device(),
            tried: climb.tried,
            gained: climb.gained,
            micros: climb.micros,
            live: bytes.live,
            cached: bytes.cached,
            pending: bytes.pending,
            overhead: bytes.overhead,
            reserved: bytes.mapped,
            limit: if limit == u64::MAX { 0 } else { limit },
            largest_free: self.heap.largest_free(stream),
            device_free,
            device_total,
            pools,
            foreign: device_total.saturating_sub(device_free).saturating_sub(pools),
            owners,
            advice: Advice::None,
        }
    }
}

/// The device's free and total bytes, and what all pools hold. They were read one after the other, while other threads took and gave back
/// memory: what pools hold is not free any more.
fn consistent((free, total): (u64, u64), pools: u64) -> (u64, u64, u64) {
    let pools = pools.min(total);
    (free.min(total.saturating_sub(pools)), total, pools)
}

impl OomInfo {
    /// The first that fits, from what is easiest to change to what is hardest.
    fn advise(&self, now: Situation) -> Advice {
        let wanted = self.requested;
        let could_be_had = self.device_free.saturating_add(now.idle);
        // What is larger than the device nobody can make room for.
        if wanted > self.device_total {
            return Advice::UseLess;
        }
        if now.capturing
            && self.cached.saturating_add(self.pending).saturating_add(self.device_free) >= wanted
        {
            return Advice::EndCapture;
        }
        // Only if the device has what the limit keeps back.
        if now.limited && could_be_had >= wanted {
            return Advice::RaiseLimit;
        }
        if now.unsettled > 0 && could_be_had >= wanted && could_be_had.saturating_sub(now.unsettled) < wanted
        {
            return Advice::Wait;
        }
        if self.device_free.saturating_add(self.cached) >= wanted {
            return Advice::Defragment;
        }
        if self.foreign >= wanted || self.foreign > self.live {
            return Advice::FreeForeign;
        }
        Advice::UseLess
    }
}

impl Display for OomInfo {
    fn fmt(&self, f: &mut Formatter<'_>) -> core::fmt::Result {
        write!(
            f,
            "out of memory: {} bytes were requested on device {}; the pool holds {} (live {}, cached {}, pending {}, \
             overhead {}; largest free extent {}; limit ",
            self.requested,
            self.device,
            self.reserved,
            self.live,
            self.cached,
            self.pending,
            self.overhead,
            self.largest_free,
        )?;
        if self.limit == 0 {
            f.write_str("none")?
        } else {
            write!(f, "{}", self.limit)?
        }
        for (tag, bytes) in self.owners.iter().filter(|(_, bytes)| *bytes > 0) {
            let tag = tag.split(|byte| *byte == 0).next().unwrap_or_default();
            write!(f, "; {}: {bytes}", tag.escape_ascii())?;
        }
        write!(
            f,
            "); the device has {} free of {}, pools hold {}, others {}; tried:",
            self.device_free, self.device_total, self.pools, self.foreign
        )?;
        let rungs = self.gained.iter().zip(&self.micros).enumerate();
        for (rung, (gained, micros)) in rungs.filter(|(rung, _)| self.tried >> rung & 1 == 1) {
            write!(f, " {} ({gained} bytes, {micros} us)", rung_name(rung))?;
        }
        f.write_str(match self.advice {
            Advice::None => "",
            Advice::RaiseLimit => "; the pool's limit is in the way: raise it",
            Advice::FreeForeign => "; the memory is held by others on the device",
            Advice::Defragment => "; there is enough in pieces that cannot be moved together",
            Advice::EndCapture => "; the stream is captured, so idle memory could not be moved or waited for",
            Advice::UseLess => "; the program itself holds too much",
            Advice::Wait => "; the device is still using what was freed: wait longer for it (settle_ms)",
        })
    }
}

/// A rung in a word.
fn rung_name(rung: usize) -> &'static str {
    match rung {
        1 => "search",
        2 => "grow",
        3 => "remap",
        4 => "release",
        5 => "settle",
        6 => "callbacks",
        7 => "empty",
        8 => "wait",
        9 => "spill",
        _ => "?",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(live: u64, cached: u64, free: u64, foreign: u64) -> OomInfo {
        let reserved = live + cached;
        OomInfo {
            requested: 100,
            live,
            cached,
            reserved,
            pools: reserved,
            device_free: free,
            foreign,
            device_total: reserved + free + foreign,
            ..NOTHING
        }
    }

    #[test]
    fn figures_that_were_read_at_different_moments_add_up() {
        assert_eq!(consistent((30, 100), 60), (30, 100, 60));
        // Another thread's pool took 20 of the 30 in between.
        assert_eq!(consistent((30, 100), 80), (20, 100, 80));
        // Another one gave back memory that a third took after.
        assert_eq!(consistent((30, 100), 110), (0, 100, 100));
    }

    #[test]
    fn advice_fits_the_numbers() {
        let plain = Situation::default();
        let limited = Situation { limited: true, ..plain };
        let capturing = Situation { capturing: true, ..plain };
        let unsettled = Situation { idle: 80, unsettled: 80, ..plain };
        assert_eq!(OomInfo { requested: 1000, ..info(50, 0, 50, 400) }.advise(limited), Advice::UseLess);
        assert_eq!(info(500, 0, 50, 10).advise(plain), Advice::UseLess);
        assert_eq!(info(500, 0, 50, 400).advise(plain), Advice::FreeForeign);
        assert_eq!(info(500, 80, 50, 10).advise(plain), Advice::Defragment);
        assert_eq!(info(500, 0, 500, 0).advise(limited), Advice::RaiseLimit);
        assert_eq!(info(50, 0, 50, 400).advise(limited), Advice::FreeForeign);
        assert_eq!(info(500, 200, 50, 0).advise(capturing), Advice::EndCapture);
        assert_eq!(info(500, 20, 50, 0).advise(capturing), Advice::UseLess);
        assert_eq!(info(500, 80, 50, 10).advise(unsettled), Advice::Wait);
        assert_eq!(info(500, 80, 10, 10).advise(unsettled), Advice::UseLess);
    }
}

//! The report: an out-of-memory answer in numbers that add up, as a struct and in a sentence.

use crate::driver::{Api, relaxed};
use crate::error::{Status, fail};
use crate::pool::arena::Arena;
use crate::pool::registry;
use crate::pool::types::{AllocRequest, NO_OWNER, Tag, tag_text};
use crate::sync::clock::Moment;
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
    pending: u64,
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
    owners: [(NO_OWNER, 0); OWNERS],
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

/// Answers a request that is larger than any device. It is about none of them, so that there are no numbers
/// of one.
pub fn too_large(requested: u64, largest: u64) -> Status {
    remember(OomInfo { requested, device: -1, advice: Advice::UseLess, ..NOTHING });
    fail(
        Status::POOL_ERROR_OUT_OF_MEMORY,
        format_args!("out of memory: {requested} bytes were requested, and the largest device has {largest}"),
    )
}

/// What the rungs that a request climbed gained, and how long they took.
#[derive(Default)]
pub struct RungLog {
    tried: u32,
    gained: [u64; RUNGS],
    micros: [u64; RUNGS],
}

impl RungLog {
    /// Notes a rung that began at `start` and has just ended.
    pub fn note(&mut self, rung: usize, gain: u64, start: Moment) {
        if let (Some(gained), Some(spent)) = (self.gained.get_mut(rung), self.micros.get_mut(rung)) {
            *gained += gain;
            *spent += start.elapsed().as_micros() as u64;
            self.tried |= 1 << rung;
        }
    }
}

/// Answers out of memory, with the numbers as they are now.
pub fn out_of_memory(
    api: &Api,
    arena: &Arena,
    request: &AllocRequest,
    capturing: bool,
    log: &RungLog,
) -> Status {
    let asked = relaxed(api, || arena.mapper.device_memory(api));
    let (idle, pending) = registry::idle_on(arena.device());
    let (pools, elsewhere) = (registry::held_on(arena.device()), registry::held_elsewhere(arena));
    let Ok(mut state) = arena.lock() else { return Status::POOL_ERROR_INTERNAL };
    state.count_oom();
    let limit = state.options().limit(arena.total);
    // The limit is one for all contexts of the device, and only for device memory.
    let held = state.bytes().live.saturating_sub(state.spilled()) + elsewhere;
    let limited = limit < arena.total && held + request.size > limit;
    // Of a device that the driver says nothing about, only what the pools hold is known.
    let (device_free, device_total, pools) =
        consistent(asked.unwrap_or((0, pools)), pools.max(state.on_device()));
    let bytes = state.bytes();
    let mut info = OomInfo {
        requested: request.size,
        device: arena.device(),
        tried: log.tried,
        gained: log.gained,
        micros: log.micros,
        live: bytes.live,
        cached: bytes.cached,
        pending: bytes.pending,
        overhead: bytes.overhead,
        reserved: bytes.mapped,
        limit: if limit == u64::MAX { 0 } else { limit },
        largest_free: state.largest_free(request.key),
        device_free,
        device_total,
        pools,
        // What adds up by the lines before.
        foreign: device_total - device_free - pools,
        owners: state.largest_owners().map(|o| o.map_or((NO_OWNER, 0), |o| (o.tag, o.live_bytes))),
        advice: Advice::None,
    };
    drop(state);
    info.advice = info.advise(Situation { limited, capturing, idle, pending });
    remember(info);
    fail(Status::POOL_ERROR_OUT_OF_MEMORY, format_args!("{info}"))
}

/// The device's free and total bytes, and what all pools hold. They were read one after the other, while
/// other threads took and gave back memory: what pools hold is not free any more.
fn consistent((free, total): (u64, u64), pools: u64) -> (u64, u64, u64) {
    let pools = pools.min(total);
    (free.min(total - pools), total, pools)
}

impl OomInfo {
    /// The first that fits, from what is easiest to change to what is hardest.
    fn advise(&self, now: Situation) -> Advice {
        let wanted = self.requested;
        let could_be_had = self.device_free + now.idle;
        // What is larger than the device nobody can make room for.
        if wanted > self.device_total {
            return Advice::UseLess;
        }
        if now.capturing && self.cached + self.pending + self.device_free >= wanted {
            return Advice::EndCapture;
        }
        // Only if the device has what the limit keeps back.
        if now.limited && could_be_had >= wanted {
            return Advice::RaiseLimit;
        }
        if now.pending > 0 && could_be_had >= wanted && could_be_had - now.pending < wanted {
            return Advice::Wait;
        }
        if self.device_free + self.cached >= wanted {
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
            "out of memory: {} bytes were requested on device {}; the pool holds {} (live {}, cached {}, \
             pending {}, overhead {}; largest free extent {}; limit ",
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
            write!(f, "; {}: {bytes}", tag_text(tag).escape_ascii())?;
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
        let pending = Situation { idle: 80, pending: 80, ..plain };
        assert_eq!(OomInfo { requested: 1000, ..info(50, 0, 50, 400) }.advise(limited), Advice::UseLess);
        assert_eq!(info(500, 0, 50, 10).advise(plain), Advice::UseLess);
        assert_eq!(info(500, 0, 50, 400).advise(plain), Advice::FreeForeign);
        assert_eq!(info(500, 80, 50, 10).advise(plain), Advice::Defragment);
        assert_eq!(info(500, 0, 500, 0).advise(limited), Advice::RaiseLimit);
        assert_eq!(info(50, 0, 50, 400).advise(limited), Advice::FreeForeign);
        assert_eq!(info(500, 200, 50, 0).advise(capturing), Advice::EndCapture);
        assert_eq!(info(500, 20, 50, 0).advise(capturing), Advice::UseLess);
        assert_eq!(info(500, 80, 50, 10).advise(pending), Advice::Wait);
        assert_eq!(info(500, 80, 10, 10).advise(pending), Advice::UseLess);
    }
}

//! The `cudasim_*` functions, by which tests look into the simulated driver and turn its knobs.
//!
//! They take no part in counting, latencies and failure rules, and work before `cuInit`.
//! `sim/include/cudasim.h` says what each does.

use crate::call::Entry;
use crate::stream::StreamArg;
use crate::work::Work;
use crate::{clock, code, device, event, knobs, memory, report, stream, vmm};
use std::ffi::{CStr, c_char};

/// The tables of all modules with exports.
static TABLES: &[&[Entry]] = &[
    crate::code::TABLE,
    crate::lifecycle::TABLE,
    crate::lookup::TABLE,
    crate::device::TABLE,
    crate::primary::TABLE,
    crate::context::TABLE,
    crate::classic::TABLE,
    crate::vmm::TABLE,
    crate::hostmem::TABLE,
    crate::arrays::TABLE,
    crate::share::TABLE,
    crate::settings::TABLE,
    crate::pointer::TABLE,
    crate::mempool_api::TABLE,
    crate::stream_api::TABLE,
    crate::event::TABLE,
    crate::transfer::TABLE,
    crate::copy2d::TABLE,
    crate::memop::TABLE,
    crate::capture::TABLE,
    crate::graph::TABLE,
];

pub fn all_exports() -> impl Iterator<Item = &'static Entry> {
    TABLES.iter().flat_map(|table| table.iter())
}

/// The driver version that brought this symbol.
pub fn since(symbol: &str) -> i32 {
    crate::procaddress::since(symbol).unwrap_or(0)
}

/// The C string, or `*` for NULL; `None` if no call goes by it.
fn known(name: *const c_char) -> Option<String> {
    if name.is_null() {
        return Some("*".to_string());
    }
    // SAFETY: the caller passes a terminated string that lives during the call.
    let name = unsafe { CStr::from_ptr(name) }.to_str().ok()?;
    knobs::known(name).then(|| name.to_string())
}

fn answer(result: Result<(), i32>) -> i32 {
    result.err().unwrap_or(code::SUCCESS)
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_used_bytes(device: i32) -> u64 {
    device::get(device).map_or(0, |device| device.used())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_peak_bytes(device: i32) -> u64 {
    device::get(device).map_or(0, |device| device.peak())
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_reset_peak(device: i32) {
    if let Ok(device) = device::get(device) {
        device.reset_peak();
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_set_memory(device: i32, bytes: u64) -> i32 {
    answer(device::get(device).map(|device| device.set_total(bytes)))
}

/// # Safety
/// `name` is NULL or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudasim_call_count(name: *const c_char) -> u64 {
    let Some(name) = known(name) else { return 0 };
    all_exports().filter(|entry| entry.call.is_named(&name)).map(|entry| entry.call.count()).sum()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_reset_counts() {
    all_exports().for_each(|entry| entry.call.reset());
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_time_calls(on: i32) {
    all_exports().for_each(|entry| entry.call.mark(crate::call::TIMED, on != 0));
}

/// # Safety
/// `name` is NULL or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudasim_call_time(name: *const c_char) -> u64 {
    let Some(name) = known(name) else { return 0 };
    all_exports().filter(|entry| entry.call.is_named(&name)).map(|entry| entry.call.spent_ns()).sum()
}

/// # Safety
/// `name` is NULL or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudasim_fail(name: *const c_char, nth: u64, sticky: i32, result: i32) -> i32 {
    knobs::fixed();
    let Some(name) = known(name) else {
        return code::INVALID_VALUE;
    };
    if nth == 0 {
        knobs::clear_rules(&name);
    } else {
        knobs::add_rule(&name, nth, sticky != 0, result);
    }
    code::SUCCESS
}

/// # Safety
/// `name` is NULL or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudasim_set_latency(name: *const c_char, nanoseconds: u64) -> i32 {
    knobs::fixed();
    let Some(name) = known(name) else {
        return code::INVALID_VALUE;
    };
    knobs::set_latency(&name, nanoseconds);
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_misuse_count() -> u64 {
    report::misuse_count()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_set_misuse_aborts(aborts: i32) {
    knobs::fixed();
    knobs::set_misuse_aborts(aborts != 0);
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_set_silent(silent: i32) {
    report::set_silent(silent != 0);
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_set_free_waits(waits: i32) {
    knobs::fixed();
    knobs::set_free_waits(waits != 0);
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_live_handles() -> u64 {
    vmm::live_handles()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_live_mappings() -> u64 {
    memory::live_mappings()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_live_reservations() -> u64 {
    memory::live_reservations()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_live_allocations() -> u64 {
    memory::live_blocks()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_live_streams() -> u64 {
    stream::live()
}

#[unsafe(no_mangle)]
pub extern "C" fn cudasim_live_events() -> u64 {
    event::live()
}

/// Who submits work takes part in the virtual clock.
fn take_part() {
    if clock::is_virtual() {
        clock::enrol();
    }
}

/// Work that keeps the stream busy for that long.
#[unsafe(no_mangle)]
pub extern "C" fn cudasim_spin(stream: usize, microseconds: u64) -> i32 {
    take_part();
    answer(stream::launch(StreamArg::legacy(stream), Work::Spin { microseconds }))
}

/// Like a kernel: waits, then writes `value` to `count` 32-bit words at `address`, checked when it runs.
#[unsafe(no_mangle)]
pub extern "C" fn cudasim_poke(stream: usize, address: u64, value: u32, count: u64, delay_us: u64) -> i32 {
    take_part();
    answer(stream::launch(StreamArg::legacy(stream), Work::Poke { address, value, count, delay_us }))
}

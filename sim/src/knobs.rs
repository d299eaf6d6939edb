//! What a test or benchmark can turn: read from the environment at first use, changed later by `control`.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `CUDASIM_MEMORY` | memory of each device: bytes, or with KiB, MiB, GiB, TiB (default 8GiB) |
//! | `CUDASIM_DEVICES` | number of devices (default 1; 0: `cuInit` answers 100) |
//! | `CUDASIM_DRIVER_VERSION` | version played (default 12080); newer names are not found, and answer 801 |
//! | `CUDASIM_NO_VMM` | 1: no virtual memory management (attribute 102 is 0, its calls answer 801) |
//! | `CUDASIM_FAIL` | `cuMemMap:3=2`: the third call answers 2; `:3+=2`: from then on; several by comma |
//! | `CUDASIM_LATENCY` | `cuMemCreate=30us,...`: how long calls take at least (ns, us, ms) |
//! | `CUDASIM_CLOCK` | `virtual`: time passes only while all threads sleep (default `host`) |
//! | `CUDASIM_LOG` | file that reports are appended to |
//! | `CUDASIM_MISUSE` | `report`: misuse of a dead handle answers 400 instead of ending the process |
//! | `CUDASIM_FREE_WAITS` | 0: `cuMemFree` does not wait for the context's work (default 1: it does) |

use crate::call::{CLOCKED, Entry, FAILING, TOO_NEW};
use crate::sync::lock;
use crate::{clock, control, report};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};

/// The settings that do not change after first use.
pub struct Fixed {
    pub memory: u64,
    pub devices: usize,
    pub driver_version: i32,
    pub vmm: bool,
}

struct Rule {
    name: String,
    /// Which matching call fails first, counting from 1.
    nth: u64,
    sticky: bool,
    code: i32,
    seen: u64,
}

static RULES: Mutex<Vec<Rule>> = Mutex::new(Vec::new());
static MISUSE_ABORTS: AtomicBool = AtomicBool::new(true);
static FREE_WAITS: AtomicBool = AtomicBool::new(true);

/// A test whose knob is misspelt must not run without it.
fn refuse(variable: &str, value: &str) -> ! {
    report::note(&format!("{variable} has a value it cannot have: {value:?}"));
    std::process::abort()
}

fn variable(name: &str) -> Option<String> {
    let value = std::env::var(name).ok()?;
    Some(value.trim().to_string()).filter(|value| !value.is_empty())
}

fn number<T>(name: &str, default: T, parse: impl Fn(&str) -> Option<T>) -> T {
    match variable(name) {
        None => default,
        Some(text) => parse(&text).unwrap_or_else(|| refuse(name, &text)),
    }
}

fn flag(name: &str, default: bool) -> bool {
    number(name, default, |text| match text {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    })
}

/// Splits `30us` into 30 and `us`.
fn split_unit(text: &str) -> Option<(u64, &str)> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    Some((text[..digits].parse().ok()?, text[digits..].trim()))
}

fn parse_bytes(text: &str) -> Option<u64> {
    let (value, unit) = split_unit(text)?;
    let shift = match unit {
        "" | "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return None,
    };
    value.checked_mul(1 << shift)
}

fn parse_nanoseconds(text: &str) -> Option<u64> {
    let (value, unit) = split_unit(text)?;
    let factor = match unit {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        _ => return None,
    };
    value.checked_mul(factor)
}

/// `cuMemMap:3=2` or `cuMemMap:3+=2`.
fn parse_rule(text: &str) -> Option<(&str, u64, bool, i32)> {
    let (name, rest) = text.split_once(':')?;
    let (nth, code) = rest.split_once('=')?;
    let (nth, sticky) = match nth.strip_suffix('+') {
        Some(nth) => (nth, true),
        None => (nth, false),
    };
    let nth = nth.parse().ok().filter(|&nth| nth > 0)?;
    Some((name.trim(), nth, sticky, code.trim().parse().ok()?))
}

/// Reads the environment, unless that was done before.
pub fn first_use() -> bool {
    let first = FIXED.get().is_none();
    fixed();
    first
}

/// Settles which clock time goes by, and reads no other knob: a program may look at the clock and turn these
/// then.
pub fn choose_clock() {
    clock::decide(number("CUDASIM_CLOCK", false, |text| match text {
        "host" => Some(false),
        "virtual" => Some(true),
        _ => None,
    }));
}

static FIXED: OnceLock<Fixed> = OnceLock::new();

/// The settings; the first use reads the environment.
pub fn fixed() -> &'static Fixed {
    FIXED.get_or_init(|| {
        let fixed = Fixed {
            memory: number("CUDASIM_MEMORY", 8 << 30, parse_bytes),
            devices: number("CUDASIM_DEVICES", 1, |text| text.parse().ok().filter(|&n| n <= MAX_DEVICES)),
            driver_version: number("CUDASIM_DRIVER_VERSION", 12080, |text| text.parse().ok()),
            vmm: !flag("CUDASIM_NO_VMM", false),
        };
        FREE_WAITS.store(flag("CUDASIM_FREE_WAITS", true), Ordering::Relaxed);
        let aborts = number("CUDASIM_MISUSE", true, |text| match text {
            "report" => Some(false),
            "abort" => Some(true),
            _ => None,
        });
        MISUSE_ABORTS.store(aborts, Ordering::Relaxed);
        if let Some(list) = variable("CUDASIM_FAIL") {
            for item in list.split(',') {
                match parse_rule(item.trim()) {
                    Some((name, nth, sticky, code)) if known(name) => add_rule(name, nth, sticky, code),
                    _ => refuse("CUDASIM_FAIL", item),
                }
            }
        }
        if let Some(list) = variable("CUDASIM_LATENCY") {
            for item in list.split(',') {
                let parts = item.trim().split_once('=');
                match parts.map(|(name, time)| (name, parse_nanoseconds(time))) {
                    Some((name, Some(time))) if known(name) => set_latency(name, time),
                    _ => refuse("CUDASIM_LATENCY", item),
                }
            }
        }
        choose_clock();
        for entry in control::all_exports() {
            entry.call.mark(CLOCKED, clock::is_virtual());
            let newer = control::since(entry.call.name) > fixed.driver_version;
            entry.call.mark(TOO_NEW, newer);
        }
        fixed
    })
}

/// More would not fit the access flags of a mapping.
pub const MAX_DEVICES: usize = 16;

pub fn driver_version() -> i32 {
    fixed().driver_version
}

pub fn misuse_aborts() -> bool {
    MISUSE_ABORTS.load(Ordering::Relaxed)
}

pub fn set_misuse_aborts(aborts: bool) {
    MISUSE_ABORTS.store(aborts, Ordering::Relaxed);
}

pub fn free_waits() -> bool {
    FREE_WAITS.load(Ordering::Relaxed)
}

pub fn set_free_waits(waits: bool) {
    FREE_WAITS.store(waits, Ordering::Relaxed);
}

fn named(name: &str) -> impl Iterator<Item = &'static Entry> + '_ {
    control::all_exports().filter(move |entry| entry.call.is_named(name))
}

/// Whether any exported function goes by this name.
pub fn known(name: &str) -> bool {
    named(name).next().is_some()
}

pub fn set_latency(name: &str, nanoseconds: u64) {
    named(name).for_each(|entry| entry.call.set_latency(nanoseconds));
}

pub fn add_rule(name: &str, nth: u64, sticky: bool, code: i32) {
    lock(&RULES).push(Rule { name: name.to_string(), nth, sticky, code, seen: 0 });
    named(name).for_each(|entry| entry.call.mark(FAILING, true));
}

/// Forgets the rules for `name` (for all names, if it is `*`).
pub fn clear_rules(name: &str) {
    let mut rules = lock(&RULES);
    rules.retain(|rule| name != "*" && rule.name != name);
    for entry in control::all_exports() {
        let still = rules.iter().any(|rule| entry.call.is_named(&rule.name));
        entry.call.mark(FAILING, still);
    }
}

/// Counts this call against the rules that name it; the code of the first that strikes.
pub fn injected_failure(call: &str) -> Option<i32> {
    let mut rules = lock(&RULES);
    let mut answer = None;
    for rule in rules.iter_mut() {
        let base = crate::call::base_name(call);
        if rule.name != "*" && rule.name != call && rule.name != base {
            continue;
        }
        rule.seen += 1;
        if rule.seen == rule.nth || (rule.sticky && rule.seen > rule.nth) {
            answer = answer.or(Some(rule.code));
        }
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_times_have_units() {
        assert_eq!(parse_bytes("8GiB"), Some(8 << 30));
        assert_eq!(parse_bytes("141 GiB"), Some(141 << 30));
        assert_eq!(parse_bytes("123"), Some(123));
        assert_eq!(parse_bytes("8GB"), None);
        assert_eq!(parse_bytes("99999999TiB"), None);
        assert_eq!(parse_nanoseconds("30us"), Some(30_000));
        assert_eq!(parse_nanoseconds("30"), None);
    }

    #[test]
    fn rules_name_a_call_a_count_and_a_code() {
        assert_eq!(parse_rule("cuMemMap:3=2"), Some(("cuMemMap", 3, false, 2)));
        assert_eq!(parse_rule("cuMemMap:1+=999"), Some(("cuMemMap", 1, true, 999)));
        assert_eq!(parse_rule("cuMemMap:0=2"), None);
        assert_eq!(parse_rule("cuMemMap=2"), None);
    }
}

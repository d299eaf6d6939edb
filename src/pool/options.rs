//! The options: one table behind the API, the environment and the documentation.

use crate::error::{Result, Status, bail, fail};
use crate::sync::clock::{self, Moment};
use core::ffi::CStr;
use core::time::Duration;

/// Chunks: virtual memory where possible, only so, or `cuMemAlloc`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Backend {
    Auto,
    Vmm,
    Malloc,
}

/// What the calls without a stream mean.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    Device,
    LegacyStream,
}

/// Where memory comes from when the device has no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spill {
    Off,
    Host,
}

/// The values of all options.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Most bytes held on a device; 0 for no limit.
    pub limit_bytes: u64,
    /// The same in percent of the device; 0 for no limit.
    pub limit_percent: u32,
    pub max_idle_percent: u32,
    pub backend: Backend,
    pub order: Order,
    pub settle_ms: u32,
    /// Idle memory stays where it is, for graphs that use its addresses. Not in the table: only pools of
    /// graphs have it.
    pub pinned: bool,
    /// 0 off to 4 debug.
    pub log: i32,
    /// The most headroom on a device; 0: the share in percent counts.
    pub headroom_bytes: u64,
    pub headroom_percent: u32,
    pub oom_wait_ms: u32,
    pub spill: Spill,
}

pub const DEFAULTS: Options = Options {
    limit_bytes: 0,
    limit_percent: 0,
    // The knee of reserved over live against driver calls on recorded traces; `make bench` prints both.
    max_idle_percent: 5,
    backend: Backend::Auto,
    order: Order::Device,
    // Longer than any sane kernel, shorter than a user's patience.
    settle_ms: 30_000,
    log: 0,
    headroom_bytes: 0,
    // A library's workspace or a few buffers, and little enough to go without.
    headroom_percent: 5,
    oom_wait_ms: 0,
    spill: Spill::Off,
    pinned: false,
};

/// Largest share that `max_idle` takes, in percent: a hundred times the live bytes is as good as no bound.
const MAX_IDLE_PERCENT: u32 = 10_000;
/// Longest wait that `settle_ms` and `oom_wait_ms` take: an hour.
const MAX_WAIT_MS: u32 = 3_600_000;

/// One option as the environment writes it.
pub struct Spec {
    pub key: &'static str,
    /// What a value looks like, for the error message.
    pub values: &'static str,
    set: fn(&mut Options, &str) -> Option<()>,
}

/// All options.
pub const TABLE: &[Spec] = &[
    Spec {
        key: "limit",
        values: "bytes such as 512MiB or 4GiB, or percent of the device such as 80%",
        set: |options, value| {
            if value.ends_with('%') {
                options.limit_percent = percent(value, 100)?;
            } else {
                options.limit_bytes = bytes(value)?;
            }
            Some(())
        },
    },
    Spec {
        key: "max_idle",
        values: "percent of the live bytes, from 0% to 10000%",
        set: |options, value| percent(value, MAX_IDLE_PERCENT).map(|p| options.max_idle_percent = p),
    },
    Spec {
        key: "backend",
        values: "auto, vmm or malloc",
        set: |options, value| {
            options.backend = match value {
                "auto" => Backend::Auto,
                "vmm" => Backend::Vmm,
                "malloc" => Backend::Malloc,
                _ => return None,
            };
            Some(())
        },
    },
    Spec {
        key: "order",
        values: "device or stream:legacy",
        set: |options, value| {
            options.order = match value {
                "device" => Order::Device,
                "stream:legacy" => Order::LegacyStream,
                _ => return None,
            };
            Some(())
        },
    },
    Spec {
        key: "settle_ms",
        values: "milliseconds, from 0 to 3600000",
        set: |options, value| {
            options.settle_ms = milliseconds(value)?;
            Some(())
        },
    },
    Spec {
        key: "headroom",
        values: "bytes such as 512MiB, or percent of the device such as 5%; 0 for none",
        set: |options, value| {
            (options.headroom_bytes, options.headroom_percent) =
                if value.ends_with('%') { (0, percent(value, 100)?) } else { (bytes(value)?, 0) };
            Some(())
        },
    },
    Spec {
        key: "oom_wait_ms",
        values: "milliseconds, from 0 to 3600000",
        set: |options, value| {
            options.oom_wait_ms = milliseconds(value)?;
            Some(())
        },
    },
    Spec {
        key: "spill",
        values: "off or host",
        set: |options, value| {
            options.spill = match value {
                "off" => Spill::Off,
                "host" => Spill::Host,
                _ => return None,
            };
            Some(())
        },
    },
    Spec {
        key: "log",
        values: "off, error, warn, info or debug",
        set: |options, value| {
            let at = ["off", "error", "warn", "info", "debug"].iter().position(|name| *name == value)?;
            options.log = at as i32;
            Some(())
        },
    },
];

/// Keys of earlier versions, and what they are called now.
const RENAMED: &[(&str, &str)] = &[("reserve", "headroom")];

fn milliseconds(value: &str) -> Option<u32> {
    digits(value)?.parse().ok().filter(|ms| *ms <= MAX_WAIT_MS)
}

fn percent(value: &str, most: u32) -> Option<u32> {
    digits(value.strip_suffix('%')?)?.parse().ok().filter(|p| *p <= most)
}

/// Nothing but digits: `parse` would take a sign too.
fn digits(value: &str) -> Option<&str> {
    value.bytes().all(|c| c.is_ascii_digit()).then_some(value)
}

fn bytes(value: &str) -> Option<u64> {
    let split = value.find(|c: char| !c.is_ascii_digit()).unwrap_or(value.len());
    let (number, unit) = value.split_at_checked(split)?;
    let unit: u64 = match unit {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(unit)
}

/// Applies `key:value,key:value` to `options`; all entries or none.
pub fn apply(options: &mut Options, conf: &[u8]) -> Result<()> {
    let Ok(conf) = core::str::from_utf8(conf) else {
        bail!(POOL_ERROR_INVALID_OPTION, "CUDAPOOL_CONF is not UTF-8 text");
    };
    let mut changed = *options;
    for entry in conf.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let Some((key, value)) = entry.split_once(':') else {
            bail!(POOL_ERROR_INVALID_OPTION, "CUDAPOOL_CONF: \"{entry}\" is not of the form key:value");
        };
        if let Some((_, new)) = RENAMED.iter().find(|(old, _)| *old == key) {
            bail!(POOL_ERROR_INVALID_OPTION, "CUDAPOOL_CONF: the option \"{key}\" is called \"{new}\" now");
        }
        let Some(spec) = TABLE.iter().find(|spec| spec.key == key) else {
            bail!(
                POOL_ERROR_INVALID_OPTION,
                "CUDAPOOL_CONF: there is no option \"{key}\"; there are {}",
                Keys
            );
        };
        if (spec.set)(&mut changed, value).is_none() {
            bail!(
                POOL_ERROR_INVALID_OPTION,
                "CUDAPOOL_CONF: \"{value}\" is not a value of {key}, which takes {}",
                spec.values
            );
        }
    }
    *options = changed;
    Ok(())
}

struct Keys;

impl core::fmt::Display for Keys {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        for (i, spec) in TABLE.iter().enumerate() {
            write!(f, "{}{}", if i == 0 { "" } else { ", " }, spec.key)?;
        }
        Ok(())
    }
}

/// The options of a new process, and whether the environment could be read.
pub fn initial() -> (Options, Result<()>) {
    // SAFETY: the name is terminated; the value is read before anything here could change the environment.
    let conf = unsafe {
        let value = libc::getenv(c"CUDAPOOL_CONF".as_ptr());
        if value.is_null() { c"" } else { CStr::from_ptr(value) }
    };
    let mut options = DEFAULTS;
    let result = apply(&mut options, conf.to_bytes());
    (options, result)
}

/// Checks values that did not come through the table.
pub fn check(options: &Options) -> Result<()> {
    let bad =
        |what: &str| Err(fail(Status::POOL_ERROR_INVALID_OPTION, format_args!("{what} is out of range")));
    if options.limit_percent > 100 {
        return bad("limit_percent");
    }
    if options.max_idle_percent > MAX_IDLE_PERCENT {
        return bad("max_idle_percent");
    }
    if options.settle_ms > MAX_WAIT_MS {
        return bad("settle_ms");
    }
    if options.oom_wait_ms > MAX_WAIT_MS {
        return bad("oom_wait_ms");
    }
    if options.headroom_percent > 100 {
        return bad("headroom_percent");
    }
    if !(0..=4).contains(&options.log) {
        return bad("log");
    }
    Ok(())
}

impl Options {
    /// When a wait that begins now gives up.
    pub fn deadline(&self) -> Moment {
        clock::now().after(Duration::from_millis(u64::from(self.settle_ms)))
    }

    /// When a wait for other threads' frees that begins now gives up.
    pub fn oom_deadline(&self) -> Moment {
        clock::now().after(Duration::from_millis(u64::from(self.oom_wait_ms)))
    }

    /// The most headroom on a device of `total` bytes.
    pub fn headroom(&self, total: u64) -> u64 {
        match self.headroom_bytes {
            0 => share(total, self.headroom_percent),
            bytes => bytes,
        }
    }

    /// The limit in bytes on a device of `total` bytes; the largest number for none.
    pub fn limit(&self, total: u64) -> u64 {
        let absolute = if self.limit_bytes == 0 { u64::MAX } else { self.limit_bytes };
        let share = match self.limit_percent {
            0 => u64::MAX,
            percent => share(total, percent),
        };
        absolute.min(share)
    }
}

fn share(total: u64, percent: u32) -> u64 {
    (u128::from(total) * u128::from(percent) / 100) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(conf: &str) -> core::result::Result<Options, String> {
        let mut options = DEFAULTS;
        apply(&mut options, conf.as_bytes()).map(|()| options).map_err(|_| {
            let mut buf = [0; 512];
            let n = crate::error::last_error(&mut buf);
            String::from_utf8_lossy(&buf[..n]).into_owned()
        })
    }

    #[test]
    fn reads_every_key() {
        let all = parse(
            "limit:4GiB, limit:80%,max_idle:25%,backend:malloc,order:stream:legacy,settle_ms:7,log:info,\
             headroom:1GiB,oom_wait_ms:250,spill:host",
        )
        .unwrap();
        let want = Options {
            limit_bytes: 4 << 30,
            limit_percent: 80,
            max_idle_percent: 25,
            backend: Backend::Malloc,
            order: Order::LegacyStream,
            settle_ms: 7,
            log: 3,
            headroom_bytes: 1 << 30,
            headroom_percent: 0,
            oom_wait_ms: 250,
            spill: Spill::Host,
            pinned: false,
        };
        assert_eq!(all, want);
        assert_eq!(parse("").unwrap(), DEFAULTS);
        assert_eq!(all.limit(4 << 30), (4u64 << 30) * 80 / 100);
        assert_eq!(all.headroom(4 << 30), 1 << 30);
        assert_eq!(parse("headroom:10%").unwrap().headroom(1000), 100);
        assert_eq!(parse("headroom:0").unwrap().headroom(1000), 0);
    }

    #[test]
    fn names_what_is_wrong() {
        assert!(parse("colour:red").unwrap_err().contains("no option \"colour\"; there are limit, max_idle"));
        assert!(parse("reserve:5%").unwrap_err().ends_with("\"reserve\" is called \"headroom\" now"));
        assert!(parse("limit:4GB").unwrap_err().contains("\"4GB\" is not a value of limit"));
        assert!(parse("limit:101%").is_err());
        assert!(parse("limit:99999999TiB").is_err());
        assert!(parse("limit").unwrap_err().contains("key:value"));
        assert!(parse("order:stream").is_err());
        assert!(parse("settle_ms:-1").is_err());
        assert!(parse("settle_ms:+5").is_err() && parse("max_idle:+5%").is_err());
        assert!(parse("log:loud").is_err());
        assert!(
            parse("headroom:101%").is_err()
                && parse("oom_wait_ms:3600001").is_err()
                && parse("spill:disk").is_err()
        );
    }
}

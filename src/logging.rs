//! The log: one line per event on stderr, off unless the option `log` says otherwise.

use crate::host_alloc::without_failing;
use core::fmt::{Arguments, Display, Formatter};
use log::{Level, LevelFilter};
use std::sync::Once;

static LOGGER: Once = Once::new();

/// Sets the level: 0 off, 1 error, 2 warn, 3 info, 4 debug.
pub fn set_level(level: i32) {
    let filter = match level {
        1 => LevelFilter::Error,
        2 => LevelFilter::Warn,
        3 => LevelFilter::Info,
        4 => LevelFilter::Debug,
        _ => LevelFilter::Off,
    };
    if filter != LevelFilter::Off {
        LOGGER.call_once(|| {
            without_failing(|| {
                // Fails only where the process has a logger of this crate already, and then that one serves.
                let _ = env_logger::Builder::new().filter_level(LevelFilter::Trace).try_init();
            });
        });
    }
    log::set_max_level(filter);
}

/// Whether a line of this level would be written.
#[inline]
pub fn enabled(level: Level) -> bool {
    level <= log::max_level()
}

/// Writes a line.
#[cold]
pub fn write(level: Level, message: Arguments<'_>) {
    without_failing(|| log::log!(target: "cudapool", level, "{message}"));
}

/// Writes a line if its level is enabled: `log_line!(Warn, "format", ..)`.
macro_rules! log_line {
    ($level:ident, $($arg:tt)*) => {
        if $crate::logging::enabled(log::Level::$level) {
            $crate::logging::write(log::Level::$level, format_args!($($arg)*));
        }
    };
}
pub(crate) use log_line;

/// A number of bytes for a reader: in the largest binary unit of which it is one at least, to a tenth.
#[derive(Clone, Copy)]
pub struct Size(pub u64);

impl Display for Size {
    fn fmt(&self, f: &mut Formatter<'_>) -> core::fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let shifts = (1u32..).map(|n| 10 * n).zip(UNITS);
        let Some((shift, unit)) = shifts.take_while(|(shift, _)| self.0 >> shift != 0).last() else {
            return write!(f, "{} B", self.0);
        };
        let tenths = (u128::from(self.0) * 10 + (1 << (shift - 1))) >> shift;
        match tenths % 10 {
            0 => write!(f, "{} {unit}", tenths / 10),
            tenth => write!(f, "{}.{tenth} {unit}", tenths / 10),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        let of = |bytes: u64| Size(bytes).to_string();
        assert_eq!([of(0), of(1023), of(1024), of(1536)], ["0 B", "1023 B", "1 KiB", "1.5 KiB"]);
        assert_eq!([of(2 << 20), of((1 << 30) - 1), of(139 << 30)], ["2 MiB", "1024 MiB", "139 GiB"]);
        assert_eq!(of(u64::MAX), "16 EiB");
    }
}

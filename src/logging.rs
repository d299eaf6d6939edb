//! The log: one line per event on stderr, off unless the option `log` says otherwise.

pub use crate::bytes::Size;
use crate::host_alloc::without_failing;
use core::fmt::Arguments;
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

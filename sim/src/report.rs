//! Loud reports: misuse that the real driver leaves undefined, and notes about limits of this simulation.
//!
//! Each goes to stderr and, if `CUDASIM_LOG` names a file, there too. Misuse is counted.

use crate::code;
use crate::knobs;
use crate::sync::lock;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

static MISUSES: AtomicU64 = AtomicU64::new(0);
static SILENT: AtomicBool = AtomicBool::new(false);

fn log_file() -> Option<&'static Mutex<File>> {
    static LOG: OnceLock<Option<Mutex<File>>> = OnceLock::new();
    LOG.get_or_init(|| {
        let path = std::env::var_os("CUDASIM_LOG")?;
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.ok().map(Mutex::new)
    })
    .as_ref()
}

/// One line, unconditionally.
pub fn note(text: &str) {
    let line = format!("cudasim: {text}\n");
    if !SILENT.load(Ordering::Relaxed) {
        let _ = std::io::stderr().lock().write_all(line.as_bytes());
    }
    if let Some(file) = log_file() {
        let _ = lock(file).write_all(line.as_bytes());
    }
}

/// Reports what a correct program never does, and counts it.
pub fn misuse(text: &str) {
    MISUSES.fetch_add(1, Ordering::SeqCst);
    note(&format!("misuse: {text}"));
}

/// Misuse after which the real driver would most likely have crashed: so does the process, unless
/// `CUDASIM_MISUSE=report` asks for a code instead.
pub fn fatal_misuse(text: &str) -> i32 {
    misuse(text);
    if knobs::misuse_aborts() {
        std::process::abort();
    }
    code::INVALID_HANDLE
}

pub fn misuse_count() -> u64 {
    MISUSES.load(Ordering::SeqCst)
}

/// Keeps the reports off stderr (the count and the log stay), for tests that provoke them.
pub fn set_silent(silent: bool) {
    SILENT.store(silent, Ordering::Relaxed);
}

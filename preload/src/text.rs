//! What the shim writes to stderr: single lines, put together without memory.

use core::fmt::{self, Write};

/// Longer lines are cut.
pub struct Line {
    bytes: [u8; 512],
    len: usize,
}

impl Line {
    pub const fn new() -> Line {
        Line { bytes: [0; 512], len: 0 }
    }

    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    /// As a C string; the bytes behind the text are 0.
    pub fn as_c(&self) -> *const core::ffi::c_char {
        self.bytes.as_ptr().cast()
    }
}

impl Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        // One byte stays 0.
        let room = self.bytes.len().saturating_sub(1).saturating_sub(self.len);
        let taken = text.len().min(room);
        let end = self.len.saturating_add(taken);
        if let (Some(to), Some(from)) = (self.bytes.get_mut(self.len..end), text.as_bytes().get(..taken)) {
            to.copy_from_slice(from);
            self.len = end;
        }
        Ok(())
    }
}

/// Writes one line.
#[cold]
pub fn say(message: fmt::Arguments<'_>) {
    let mut line = Line::new();
    let _ = write!(line, "cudapool_preload: {message}");
    // The end of a line that was cut.
    if let Some(last) = line.bytes.get_mut(line.len) {
        *last = b'\n';
        line.len = line.len.saturating_add(1);
    }
    let bytes = line.as_bytes();
    // SAFETY: writes bytes of a local.
    unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
}

/// Text of others, which need not be UTF-8 nor a single line: what cannot be shown is a question mark.
pub struct Shown<'a>(&'a [u8]);

impl Shown<'_> {
    /// # Safety
    /// NULL or a terminated string that lives long enough.
    pub unsafe fn of_c<'a>(text: *const core::ffi::c_char) -> Shown<'a> {
        // SAFETY: by the contract of this function.
        Shown(if text.is_null() { b"" } else { unsafe { core::ffi::CStr::from_ptr(text) }.to_bytes() })
    }

    pub fn bytes(&self) -> &[u8] {
        self.0
    }
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            for letter in chunk.valid().chars() {
                to.write_char(if letter.is_control() { '?' } else { letter })?;
            }
            if !chunk.invalid().is_empty() {
                to.write_char('?')?;
            }
        }
        Ok(())
    }
}

/// A C string as text; whatever is not UTF-8 is left out.
///
/// # Safety
/// NULL or a terminated string that lives long enough.
pub unsafe fn of_c<'a>(text: *const core::ffi::c_char) -> &'a str {
    if text.is_null() {
        return "";
    }
    // SAFETY: by the contract of this function.
    unsafe { core::ffi::CStr::from_ptr(text) }.to_str().unwrap_or("")
}

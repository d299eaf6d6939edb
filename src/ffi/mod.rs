//! The C boundary: the only `extern "C"` functions of the library, and what translates for them.

pub mod constants;
mod convert;
pub mod functions;
mod guard;
mod text;
pub mod types;

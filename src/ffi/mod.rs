//! The C boundary: the only `extern "C"` functions of the library, and what translates for them. `functions`
//! is the library itself, `adapters` what runtimes with prototypes of their own take.

pub mod adapters;
pub mod constants;
mod convert;
pub mod functions;
mod guard;
mod text;
pub mod types;

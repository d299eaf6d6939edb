//! What threads meet at: the lock, and the clock that waits go by. Knows nothing of CUDA.

pub mod clock;
pub mod lock;

//! Out of memory: what is done before a request is answered so, what the answer says, and what is given up
//! for others.

pub mod callbacks;
pub mod climb;
pub mod headroom;
pub mod reclaim;
pub mod report;

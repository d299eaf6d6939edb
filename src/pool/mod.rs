//! The pool: policy. Which arena serves a call, in which order memory is reused, what is given up when it
//! runs out.
//!
//! The modules in the order in which each knows only those before it: [`types`], [`options`], [`settings`],
//! [`waiters`], [`arena`], [`registry`], [`pools`], [`oom`], [`api`], [`graphs`]. The boundary calls [`api`]
//! and [`graphs`].

pub mod api;
pub mod arena;
pub mod graphs;
pub mod oom;
pub mod options;
pub mod pools;
pub mod registry;
pub mod settings;
pub mod types;
pub mod waiters;

// What the heap hands out, the arena can map.
const _: () = assert!(crate::heap::PAGE == crate::vmem::PAGE);

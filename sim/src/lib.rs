//! A simulated CUDA driver: a `libcuda.so.1` for machines without a GPU.
//!
//! Device memory is sparse host memory behind real mappings, streams run their work later on threads of their
//! own, and whatever the real driver leaves undefined (a destroyed stream used, memory unmapped under running
//! work) is reported instead of silently tolerated. The exported functions stand in tables made by
//! `exports!`, one line each; the logic behind them is in ordinary functions of the same module.
//!
//! Where to look: `call` (what happens around every call), `lifecycle` (init, fork, exit), `knobs` and
//! `control` (everything a test can turn), `clock` (time, which may be virtual), `report` (misuse), `device`,
//! `context`, `primary`; for memory `physical` (what there is), `memory` (the map of all addresses),
//! `classic`, `vmm`, `mempool`, `hostmem`, `arrays`, `share` and `pointer` (questions about addresses); for
//! asynchronous work `stream` (order), `work` (what is run), `event`, `transfer`, `copy2d`, `memop`;
//! `capture` and `graph`; `lookup` and `procaddress` for symbol lookup; `settings` for the rest.
#![allow(non_snake_case)] // The exported names are CUDA's.

#[macro_use]
mod call;
#[macro_use]
#[path = "../../preload/src/layout.rs"]
mod layout;
mod arrays;
mod capture;
mod classic;
mod clock;
mod code;
mod context;
mod control;
mod copy2d;
mod device;
mod event;
mod graph;
mod hostmem;
mod knobs;
mod lifecycle;
mod lookup;
mod memop;
mod memory;
mod mempool;
mod mempool_api;
mod physical;
mod pointer;
mod primary;
mod procaddress;
mod ranges;
mod registry;
mod report;
mod settings;
mod share;
mod stream;
mod stream_api;
mod sync;
mod transfer;
mod vmm;
mod work;

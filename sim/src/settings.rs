//! Settings and objects that change nothing in the simulation, but that programs use: limits, cache
//! preferences, profiling, modules. A module can be loaded and unloaded; it has no functions.

use crate::call::{In, Out, Res};
use crate::registry::{Found, Registry};
use crate::stream::{self, StreamArg};
use crate::sync::lock;
use crate::{capture, code, context, device};
use cudarc::driver::sys::{
    CUfunc_cache, CUgraphMem_attribute, CUlimit, CUsharedconfig, CUstreamAttrValue_v1,
};
use std::sync::Arc;

/// Stack, printf buffer, heap, and others that only newer devices have.
pub const LIMITS: usize = CUlimit::CU_LIMIT_SHMEM_SIZE as usize + 1;
pub const DEFAULT_LIMITS: [usize; LIMITS] = [1024, 1 << 20, 8 << 20, 2, 2048, 128, 0, 0];

fn get_limit(out: Out<usize>, which: u32) -> Res {
    let context = context::current()?;
    out.check()?;
    let limits = lock(&context.limits);
    out.put(*limits.get(which as usize).ok_or(code::INVALID_VALUE)?)
}

fn set_limit(which: u32, value: usize) -> Res {
    let context = context::current()?;
    let mut limits = lock(&context.limits);
    *limits.get_mut(which as usize).ok_or(code::INVALID_VALUE)? = value;
    Ok(())
}

fn get_preference(out: Out<u32>) -> Res {
    context::current()?;
    out.put(0)
}

/// `most`: the last value that there is.
fn set_preference(value: u32, most: u32) -> Res {
    context::current()?;
    match value <= most {
        true => Ok(()),
        false => Err(code::INVALID_VALUE),
    }
}

struct Module;

static MODULES: Registry<Module> = Registry::new(0x5e00_0000_1000);

fn load(out: Out<usize>, image: In<u8>) -> Res {
    context::current()?;
    out.check()?;
    image.get()?;
    let made = MODULES.add(|_| Arc::new(Module));
    out.put(made.ok_or(code::OUT_OF_MEMORY)?.0)
}

fn unload(module: usize) -> Res {
    context::current()?;
    capture::unsafe_call()?;
    match MODULES.remove(module) {
        Found::Live(_) => Ok(()),
        _ => Err(code::INVALID_HANDLE),
    }
}

fn no_function(module: usize) -> Res {
    match MODULES.find(module) {
        Found::Live(_) => Err(code::NOT_FOUND),
        _ => Err(code::INVALID_HANDLE),
    }
}

type StreamAttribute = [u8; size_of::<CUstreamAttrValue_v1>()];

/// Attributes of a stream (cache policy and the like) can be set, and read as nothing.
fn set_stream_attribute(s: StreamArg) -> Res {
    stream::usable(s).map(|_| ())
}

fn get_stream_attribute(s: StreamArg, out: Out<StreamAttribute>) -> Res {
    out.check()?;
    stream::usable(s)?;
    out.put([0; size_of::<StreamAttribute>()])
}

/// Memory of graphs is not counted apart.
fn graph_memory(out: Out<u64>, device: i32, which: u32) -> Res {
    out.check()?;
    device::get(device)?;
    match which <= CUgraphMem_attribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH as u32 {
        true => out.put(0),
        false => Err(code::INVALID_VALUE),
    }
}

exports! {
    stream fn cuStreamGetAttribute, cuStreamGetAttribute_ptsz(; s; _which: u32, out: Out<StreamAttribute>)
        => get_stream_attribute(s, out);
    stream fn cuStreamSetAttribute, cuStreamSetAttribute_ptsz(; s; _which: u32, _value: usize)
        => set_stream_attribute(s);
    fn cuDeviceGetGraphMemAttribute(device: i32, which: u32, out: Out<u64>)
        => graph_memory(out, device, which);
    fn cuDeviceGraphMemTrim(device: i32) => device::get(device).map(|_| ());
    fn cuCtxGetLimit(out: Out<usize>, which: u32) => get_limit(out, which);
    fn cuCtxSetLimit(which: u32, value: usize) => set_limit(which, value);
    fn cuCtxGetCacheConfig(out: Out<u32>) => get_preference(out);
    fn cuCtxSetCacheConfig(value: u32)
        => set_preference(value, CUfunc_cache::CU_FUNC_CACHE_PREFER_EQUAL as u32);
    fn cuCtxGetSharedMemConfig(out: Out<u32>) => get_preference(out);
    fn cuCtxSetSharedMemConfig(value: u32)
        => set_preference(value, CUsharedconfig::CU_SHARED_MEM_CONFIG_EIGHT_BYTE_BANK_SIZE as u32);
    fn cuCtxResetPersistingL2Cache() => context::current().map(|_| ());
    fn cuProfilerStart() => context::current().map(|_| ());
    fn cuProfilerStop() => context::current().map(|_| ());
    fn cuModuleLoad(out: Out<usize>, path: In<u8>) => load(out, path);
    fn cuModuleLoadData(out: Out<usize>, image: In<u8>) => load(out, image);
    fn cuModuleLoadDataEx(out: Out<usize>, image: In<u8>, _count: u32, _options: usize, _values: usize)
        => load(out, image);
    fn cuModuleLoadFatBinary(out: Out<usize>, image: In<u8>) => load(out, image);
    fn cuModuleUnload(module: usize) => unload(module);
    fn cuModuleGetFunction(_out: usize, module: usize, _name: usize) => no_function(module);
    fn cuModuleGetGlobal_v2(_out: usize, _size: usize, module: usize, _name: usize) => no_function(module);
}

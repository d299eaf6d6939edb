//! The exported functions of streams.

use crate::call::{Out, Res};
use crate::event;
use crate::stream::{self, StreamArg};
use crate::work::Work;
use crate::{capture, code, lifecycle, mempool};
use std::ffi::c_void;

fn create(out: Out<usize>, flags: u32, priority: i32) -> Res {
    out.check()?;
    out.put(stream::create(flags, priority)?)
}

fn destroy(handle: usize) -> Res {
    if handle == 0 {
        return Err(code::INVALID_HANDLE);
    }
    lifecycle::usable()?;
    stream::destroy(handle)
}

fn query(argument: StreamArg) -> Res {
    let stream = stream::usable(argument)?;
    capture::observed(&stream)?;
    match stream.is_idle() {
        true => stream.context.check_error(),
        false => Err(code::NOT_READY),
    }
}

fn synchronize(argument: StreamArg) -> Res {
    let stream = stream::usable(argument)?;
    capture::observed(&stream)?;
    stream.wait();
    mempool::settle_all();
    stream.context.check_error()
}

fn get_context(argument: StreamArg, out: Out<usize>) -> Res {
    out.check()?;
    out.put(stream::usable(argument)?.context.handle)
}

fn get_context_v2(argument: StreamArg, context: Out<usize>, green: Out<usize>) -> Res {
    get_context(argument, context)?;
    green.put_if_wanted(0);
    Ok(())
}

fn get<T>(argument: StreamArg, out: Out<T>, pick: impl Fn(&stream::Stream) -> T) -> Res {
    out.check()?;
    out.put(pick(&*stream::usable(argument)?))
}

type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;
type Callback = Option<unsafe extern "C" fn(usize, i32, *mut c_void)>;

fn host_function(argument: StreamArg, function: HostFunction, data: usize) -> Res {
    let function = function.ok_or(code::INVALID_VALUE)?;
    stream::launch(argument, Work::HostFunction { function, data })
}

fn callback(argument: StreamArg, function: Callback, data: usize, flags: u32) -> Res {
    let function = function.ok_or(code::INVALID_VALUE)?;
    if flags != 0 {
        return Err(code::INVALID_VALUE);
    }
    capture::not_capturable(&stream::usable(argument)?)?;
    let stream = argument.raw;
    stream::launch(argument, Work::Callback { function, stream, data })
}

exports! {
    fn cuStreamCreate(out: Out<usize>, flags: u32) => create(out, flags, 0);
    fn cuStreamCreateWithPriority(out: Out<usize>, flags: u32, priority: i32) => create(out, flags, priority);
    early fn cuStreamDestroy(stream: usize) => destroy(stream);
    early fn cuStreamDestroy_v2(stream: usize) => destroy(stream);
    stream fn cuStreamQuery, cuStreamQuery_ptsz(; s) => query(s);
    stream fn cuStreamSynchronize, cuStreamSynchronize_ptsz(; s) => synchronize(s);
    stream fn cuStreamWaitEvent, cuStreamWaitEvent_ptsz(; s; event: usize, flags: u32)
        => event::wait_on_stream(s, event, flags);
    stream fn cuStreamGetCtx, cuStreamGetCtx_ptsz(; s; out: Out<usize>) => get_context(s, out);
    stream fn cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz(; s; out: Out<usize>, green: Out<usize>)
        => get_context_v2(s, out, green);
    stream fn cuStreamGetId, cuStreamGetId_ptsz(; s; out: Out<u64>) => get(s, out, |stream| stream.id);
    stream fn cuStreamGetFlags, cuStreamGetFlags_ptsz(; s; out: Out<u32>)
        => get(s, out, |stream| stream.flags);
    stream fn cuStreamGetPriority, cuStreamGetPriority_ptsz(; s; out: Out<i32>)
        => get(s, out, |stream| stream.priority);
    stream fn cuStreamGetDevice, cuStreamGetDevice_ptsz(; s; out: Out<i32>)
        => get(s, out, |stream| stream.context.device as i32);
    stream fn cuLaunchHostFunc, cuLaunchHostFunc_ptsz(; s; function: HostFunction, data: usize)
        => host_function(s, function, data);
    stream fn cuStreamAddCallback, cuStreamAddCallback_ptsz(; s; function: Callback, data: usize, flags: u32)
        => callback(s, function, data, flags);
}

//! Stream memory operations: a stream writes a value, or waits for one.

use crate::call::Res;
use crate::code;
use crate::memory::{self, Access};
use crate::stream::{self, StreamArg};
use crate::work::{Comparison, Work};
use cudarc::driver::sys::{CUstreamWaitValue_flags, CUstreamWriteValue_flags};

const WRITE_FLAGS: u32 = CUstreamWriteValue_flags::CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER as u32;
const WAIT_FLUSH: u32 = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_FLUSH as u32;
const AT_LEAST: u32 = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
const EQUAL: u32 = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32;
const AND: u32 = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_AND as u32;
const NOR: u32 = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_NOR as u32;

fn check(address: u64, bytes: u64, stream: StreamArg, access: Access) -> Res {
    let stream = stream::usable(stream)?;
    let memory = memory::reading();
    let usable = memory.accepts(stream.context.device, address, bytes, access);
    match usable && address.is_multiple_of(bytes) {
        true => Ok(()),
        false => Err(code::INVALID_VALUE),
    }
}

fn write(address: u64, value: u64, bytes: u64, flags: u32, stream: StreamArg) -> Res {
    check(address, bytes, stream, Access::Write)?;
    if flags & !WRITE_FLAGS != 0 {
        return Err(code::INVALID_VALUE);
    }
    stream::launch(stream, Work::Write { address, value, bytes })
}

fn wait(address: u64, value: u64, bytes: u64, flags: u32, stream: StreamArg) -> Res {
    check(address, bytes, stream, Access::Read)?;
    let comparison = match flags & !WAIT_FLUSH {
        AT_LEAST => Comparison::AtLeast,
        EQUAL => Comparison::Equal,
        AND => Comparison::And,
        NOR => Comparison::Nor,
        _ => return Err(code::INVALID_VALUE),
    };
    stream::launch(stream, Work::Await { address, value, bytes, comparison })
}

exports! {
    stream fn cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz(; s; address: u64, value: u32, flags: u32)
        => write(address, value as u64, 4, flags, s);
    stream fn cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz(; s; address: u64, value: u64, flags: u32)
        => write(address, value, 8, flags, s);
    stream fn cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz(; s; address: u64, value: u32, flags: u32)
        => wait(address, value as u64, 4, flags, s);
    stream fn cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz(; s; address: u64, value: u64, flags: u32)
        => wait(address, value, 8, flags, s);
}

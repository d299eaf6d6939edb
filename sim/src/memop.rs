//! Stream memory operations: a stream writes a value, or waits for one.

use crate::call::Res;
use crate::code;
use crate::memory::{self, Access};
use crate::stream::{self, StreamArg};
use crate::work::{Comparison, Work};

const WRITE_FLAGS: u32 = 1; // without a barrier
const WAIT_FLUSH: u32 = 1 << 30;

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
        0 => Comparison::AtLeast,
        1 => Comparison::Equal,
        2 => Comparison::And,
        3 => Comparison::Nor,
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

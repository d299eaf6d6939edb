//! The operations that streams run, as data, and running them.
//!
//! Like a kernel they check their memory when they run. What they cannot touch is reported and poisons the
//! context (700), after which its later operations do nothing.

use crate::context::Context;
use crate::event::Stamp;
use crate::graph::Instance;
use crate::memory::{self, Access, Kind, PIECE};
use crate::stream::Stream;
use crate::{classic, clock, code, lifecycle, report};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// One end of a copy.
#[derive(Clone)]
pub enum Side {
    /// Memory the driver knows; checked when it is touched.
    Known(u64),
    /// The program's own memory.
    Host(u64),
    /// A copy of the source, made when the operation was submitted.
    Staged(Arc<Vec<u8>>),
}

impl Side {
    fn address(&self) -> u64 {
        match self {
            Side::Known(address) | Side::Host(address) => *address,
            Side::Staged(bytes) => bytes.as_ptr() as u64,
        }
    }

    fn is_known(&self) -> bool {
        matches!(self, Side::Known(_))
    }
}

/// Rows of a pitched copy or fill; a plain one is a single row.
#[derive(Clone, Copy)]
pub struct Rows {
    pub width: u64,
    pub count: u64,
}

/// How a stream compares memory with the value it waits for.
#[derive(Clone, Copy)]
pub enum Comparison {
    AtLeast,
    Equal,
    And,
    Nor,
}

#[derive(Clone)]
pub enum Work {
    /// Only order.
    Nothing,
    /// Keeps something alive until here.
    Hold(#[allow(dead_code)] Arc<Instance>),
    /// Notes when the stream got here.
    Stamp(Arc<Stamp>),
    Spin {
        microseconds: u64,
    },
    Poke {
        address: u64,
        value: u32,
        count: u64,
        delay_us: u64,
    },
    /// `cuMemFreeAsync` of a block that is no pool's.
    Release {
        address: u64,
    },
    Fill {
        address: u64,
        value: u32,
        /// Bytes of the value that count: 1, 2 or 4.
        element: u64,
        rows: Rows,
        pitch: u64,
    },
    Copy {
        to: Side,
        from: Side,
        rows: Rows,
        to_pitch: u64,
        from_pitch: u64,
    },
    /// The stream writes a value of 4 or 8 bytes.
    Write {
        address: u64,
        value: u64,
        bytes: u64,
    },
    /// The stream waits until memory compares so with a value.
    Await {
        address: u64,
        value: u64,
        bytes: u64,
        comparison: Comparison,
    },
    /// `cuLaunchHostFunc`: not called once the context is lost.
    HostFunction {
        function: unsafe extern "C" fn(*mut c_void),
        data: usize,
    },
    /// `cuStreamAddCallback`: called in any case, with the state.
    Callback {
        function: unsafe extern "C" fn(usize, i32, *mut c_void),
        stream: usize,
        data: usize,
    },
}

impl Rows {
    pub fn one(width: u64) -> Rows {
        Rows { width, count: 1 }
    }

    pub fn is_empty(self) -> bool {
        self.width == 0 || self.count == 0
    }

    /// From the first byte to the last.
    pub fn extent(self, pitch: u64) -> u64 {
        match self.is_empty() {
            true => 0,
            false => pitch.saturating_mul(self.count - 1).saturating_add(self.width),
        }
    }
}

impl Work {
    /// The known memory it will touch.
    pub fn touches(&self) -> [(u64, u64); 2] {
        match self {
            Work::Poke { address, count, .. } => [(*address, count.saturating_mul(4)), (0, 0)],
            Work::Fill { address, rows, pitch, .. } => [(*address, rows.extent(*pitch)), (0, 0)],
            Work::Write { address, bytes, .. } | Work::Await { address, bytes, .. } => {
                [(*address, *bytes), (0, 0)]
            }
            Work::Copy { to, from, rows, to_pitch, from_pitch } => {
                [(to.address(), rows.extent(*to_pitch)), (from.address(), rows.extent(*from_pitch))]
            }
            _ => [(0, 0), (0, 0)],
        }
    }
}

/// Operations being run.
static RUNNING: AtomicU64 = AtomicU64::new(0);

/// Waits until no operation runs, but not for ever: by the host's clock, as work may hang where no other sees
/// it. This thread does not hold virtual time up meanwhile.
pub fn wait_until_quiet(limit: Duration) {
    let took_part = clock::leave();
    let start = std::time::Instant::now();
    while RUNNING.load(Ordering::Acquire) > 0 && start.elapsed() < limit {
        std::thread::sleep(Duration::from_micros(100));
    }
    if took_part {
        clock::enrol();
    }
}

pub fn run(stream: &Arc<Stream>, work: Work) {
    RUNNING.fetch_add(1, Ordering::AcqRel);
    if lifecycle::exiting() {
        RUNNING.fetch_sub(1, Ordering::AcqRel);
        clock::leave();
        loop {
            // The process is on its way out and takes this thread along.
            std::thread::park();
        }
    }
    // A panic here must not leave the queue without its worker.
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| perform(stream, work)));
    if let Err(payload) = result {
        std::mem::forget(payload);
        report::note("internal error: a panic in stream work");
    }
    RUNNING.fetch_sub(1, Ordering::AcqRel);
}

fn perform(stream: &Arc<Stream>, work: Work) {
    let context = stream.context;
    let error = context.check_error().err();
    if let Work::Callback { function, stream, data } = work {
        let status = error.unwrap_or(code::SUCCESS);
        // SAFETY: by the C contract the function may be called once with this data.
        lifecycle::in_host_function(|| unsafe { function(stream, status, data as *mut c_void) });
        return;
    }
    if let Work::Stamp(stamp) = &work {
        stamp.set();
    }
    if error.is_some() {
        return;
    }
    let device = context.device;
    let fault = match work {
        Work::Spin { microseconds } => {
            pass(microseconds);
            None
        }
        Work::Poke { address, value, count, delay_us } => {
            pass(delay_us);
            let done =
                reaches(context, address) && fill_row(device, address, value, 4, count.saturating_mul(4));
            (!done).then_some(address)
        }
        Work::Fill { address, value, element, rows, pitch } => (0..rows.count)
            .map(|row| address + row * pitch)
            .find(|&start| !fill_row(device, start, value, element, rows.width)),
        Work::Copy { to, from, rows, to_pitch, from_pitch } => {
            copy_rows(device, &to, &from, rows, to_pitch, from_pitch).err()
        }
        Work::Write { address, value, bytes } => {
            let value = value.to_le_bytes();
            let done = memory::touch(device, address, bytes, Access::Write, |to, _, size| {
                // SAFETY: `touch` checked the memory; the size is at most 8.
                unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), to, size as usize) }
            });
            (!done).then_some(address)
        }
        Work::Await { address, value, bytes, comparison } => {
            wait_for_value(stream, address, value, bytes, comparison)
        }
        Work::HostFunction { function, data } => {
            // SAFETY: by the C contract the function may be called with this data.
            lifecycle::in_host_function(|| unsafe { function(data as *mut c_void) });
            None
        }
        Work::Release { address } => {
            let remains = classic::remove(&mut memory::writing(), address);
            drop(remains);
            None
        }
        Work::Nothing | Work::Hold(_) | Work::Stamp(_) | Work::Callback { .. } => None,
    };
    // What the context was already lost for is not reported again.
    let fault = fault.filter(|_| context.check_error().is_ok());
    if let Some(address) = fault {
        report::misuse(&format!(
            "work of stream {} of context {} touches {address:#x}, \
             which it may not (unmapped, freed or without access)",
            stream.id, context.id
        ));
        context.fail(code::ILLEGAL_ADDRESS);
    }
}

/// Whether a kernel of the context may use the address, if it is another device's classic memory.
fn reaches(context: &Context, address: u64) -> bool {
    let memory = memory::reading();
    let block = memory.block_at(address).map(|(_, block)| block);
    block.is_none_or(|block| {
        let peers = context.peers.load(Ordering::Acquire);
        block.kind != Kind::Device || block.device == context.device || peers >> block.device & 1 != 0
    })
}

/// Polls until the memory compares; the address if it cannot be read.
fn wait_for_value(
    stream: &Stream,
    address: u64,
    value: u64,
    bytes: u64,
    comparison: Comparison,
) -> Option<u64> {
    let mask = if bytes == 4 { u32::MAX as u64 } else { u64::MAX };
    while !lifecycle::exiting() && stream.context.check().is_ok() {
        let mut now = [0; 8];
        let device = stream.context.device;
        let read = memory::touch(device, address, bytes, Access::Read, |from, _, size| {
            // SAFETY: `touch` checked the memory; the size is at most 8.
            unsafe { std::ptr::copy_nonoverlapping(from, now.as_mut_ptr(), size as usize) }
        });
        if !read {
            return Some(address);
        }
        let now = u64::from_le_bytes(now);
        let holds = match comparison {
            // Cyclic: a counter may wrap.
            Comparison::AtLeast if bytes == 4 => (now as u32).wrapping_sub(value as u32) as i32 >= 0,
            Comparison::AtLeast => now.wrapping_sub(value) as i64 >= 0,
            Comparison::Equal => now == value,
            Comparison::And => now & value != 0,
            Comparison::Nor => !(now | value) & mask != 0,
        };
        if holds {
            return None;
        }
        clock::sleep(Duration::from_micros(20));
    }
    None
}

fn pass(microseconds: u64) {
    const SLICE_NS: u64 = 10_000_000;
    let end = clock::now().saturating_add(microseconds.saturating_mul(1_000));
    // The end of the process must not have to wait for long. It wakes those who sleep in virtual time.
    let slice = if clock::is_virtual() { u64::MAX } else { SLICE_NS };
    while !lifecycle::exiting() && clock::now() < end {
        clock::sleep_until(end.min(clock::now().saturating_add(slice)));
    }
}

/// False: some of it may not be written.
fn fill_row(device: usize, address: u64, value: u32, element: u64, width: u64) -> bool {
    let bytes = value.to_le_bytes();
    let uniform = element == 1 || bytes[..element as usize].iter().all(|&b| b == bytes[0]);
    memory::touch(device, address, width, Access::Write, |start, _, size| {
        // SAFETY: `touch` checked that these bytes are mapped and keeps them so; rows are multiples of the
        // element, and pieces too, as the alignment was checked at submission.
        unsafe {
            if uniform {
                start.write_bytes(bytes[0], size as usize);
            } else {
                for at in (0..size).step_by(element as usize) {
                    let element = (size - at).min(element) as usize;
                    std::ptr::copy_nonoverlapping(bytes.as_ptr(), start.add(at as usize), element);
                }
            }
        }
    })
}

/// `Err`: the first address that may not be touched.
pub fn copy_rows(
    device: usize,
    to: &Side,
    from: &Side,
    rows: Rows,
    to_pitch: u64,
    from_pitch: u64,
) -> Result<(), u64> {
    for row in 0..rows.count {
        let (to_row, from_row) = (to.address() + row * to_pitch, from.address() + row * from_pitch);
        let mut done = 0;
        while done < rows.width {
            let size = (rows.width - done).min(PIECE);
            let (to_at, from_at) = (to_row + done, from_row + done);
            let memory = memory::reading();
            if to.is_known() && !memory.permits(device, to_at, size, Access::Write) {
                return Err(to_at);
            }
            if from.is_known() && !memory.permits(device, from_at, size, Access::Read) {
                return Err(from_at);
            }
            // SAFETY: known memory was just checked and stays mapped under the lock; host memory is the
            // caller's by the C contract; the ends may overlap.
            unsafe {
                std::ptr::copy(from_at as *const u8, to_at as *mut u8, size as usize);
            }
            drop(memory);
            done += size;
        }
    }
    Ok(())
}

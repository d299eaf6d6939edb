//! Graphs, as far as capturing needs them: made by a capture, instantiated, launched as one operation of a
//! stream.
//!
//! Nodes run in the order of their capture, which satisfies all dependencies; branches do not run at once.

use crate::call::{Out, Res};
use crate::event;
use crate::registry::{Found, Registry};
use crate::stream::{self, StreamArg};
use crate::sync::lock;
use crate::work::Work;
use crate::{capture, classic, code, memory};
use std::sync::{Arc, Mutex};

#[derive(Clone)]
pub enum NodeWork {
    Run(Work),
    /// Memory allocated in the capture; its address is the graph's as long as it lives.
    Allocate(u64),
    Free(u64),
    /// An event recorded or waited for with the external flag.
    RecordEvent(usize),
    WaitEvent(usize),
}

impl NodeWork {
    pub fn allocates(&self) -> Option<u64> {
        match self {
            NodeWork::Allocate(address) => Some(*address),
            _ => None,
        }
    }

    pub fn frees(&self) -> Option<u64> {
        match self {
            NodeWork::Free(address) => Some(*address),
            _ => None,
        }
    }
}

#[derive(Clone)]
pub struct Node {
    /// The nodes it depends on.
    pub after: Vec<usize>,
    pub work: NodeWork,
}

/// The nodes of a graph and its instances; the memory they allocated goes with the last of them.
pub struct Body {
    nodes: Vec<Node>,
}

impl Drop for Body {
    fn drop(&mut self) {
        let addresses = self.nodes.iter().filter_map(|node| node.work.allocates());
        for address in addresses {
            let remains = classic::remove(&mut memory::writing(), address);
            drop(remains);
        }
    }
}

pub struct Graph {
    body: Mutex<Arc<Body>>,
}

pub struct Instance {
    body: Arc<Body>,
}

static GRAPHS: Registry<Graph> = Registry::new(0x5700_0000_1000);
static INSTANCES: Registry<Instance> = Registry::new(0x5800_0000_1000);

const NODE_SPACE: usize = 0x5900_0000_0000;

impl Graph {
    pub fn create(nodes: Vec<Node>) -> Res<usize> {
        let body = Mutex::new(Arc::new(Body { nodes }));
        let made = GRAPHS.add(|_| Arc::new(Graph { body }));
        Ok(made.ok_or(code::OUT_OF_MEMORY)?.0)
    }

    /// Gives a captured graph its nodes.
    pub fn fill(handle: usize, nodes: Vec<Node>) {
        if let Found::Live(graph) = GRAPHS.find(handle) {
            *lock(&graph.body) = Arc::new(Body { nodes });
        }
    }

    /// Drops the graph of a failed capture, and what it had allocated.
    pub fn discard(handle: usize, nodes: Vec<Node>) {
        Graph::fill(handle, nodes);
        GRAPHS.remove(handle);
    }

    /// Nodes have handles made of their graph's and their number.
    pub fn node_handle(graph: usize, index: usize) -> usize {
        NODE_SPACE + ((graph & 0xffff_ffff) << 12) + index
    }

    pub fn node_index(graph: usize, handle: usize) -> Option<usize> {
        handle.checked_sub(Graph::node_handle(graph, 0))
    }
}

fn find(handle: usize) -> Res<Arc<Graph>> {
    match GRAPHS.find(handle) {
        Found::Live(graph) => Ok(graph),
        _ => Err(code::INVALID_VALUE),
    }
}

fn create(out: Out<usize>, flags: u32) -> Res {
    out.check()?;
    if flags != 0 {
        return Err(code::INVALID_VALUE);
    }
    out.put(Graph::create(Vec::new())?)
}

fn destroy(handle: usize) -> Res {
    match GRAPHS.remove(handle) {
        Found::Live(_) => Ok(()),
        _ => Err(code::INVALID_VALUE),
    }
}

fn instantiate(out: Out<usize>, graph: usize) -> Res {
    out.check()?;
    let body = lock(&find(graph)?.body).clone();
    let made = INSTANCES.add(|_| Arc::new(Instance { body }));
    out.put(made.ok_or(code::OUT_OF_MEMORY)?.0)
}

fn destroy_instance(handle: usize) -> Res {
    match INSTANCES.remove(handle) {
        Found::Live(_) => Ok(()),
        _ => Err(code::INVALID_VALUE),
    }
}

fn launch(handle: usize, argument: StreamArg) -> Res {
    let Found::Live(instance) = INSTANCES.find(handle) else {
        return Err(code::INVALID_VALUE);
    };
    let stream = stream::usable(argument)?;
    capture::not_capturable(&stream)?;
    for node in &instance.body.nodes {
        match &node.work {
            NodeWork::Run(work) => {
                stream.submit(work.clone(), Vec::new());
            }
            NodeWork::RecordEvent(event) => event::record(*event, argument, 0)?,
            NodeWork::WaitEvent(event) => event::wait_on_stream(argument, *event, 0)?,
            NodeWork::Allocate(_) | NodeWork::Free(_) => {}
        }
    }
    // The instance may be destroyed while it runs.
    stream.submit(Work::Hold(instance), Vec::new());
    Ok(())
}

fn nodes(graph: usize, out: Out<usize>, count: Out<usize>) -> Res {
    count.check()?;
    let total = lock(&find(graph)?.body).nodes.len();
    if !out.is_null() {
        // SAFETY: not null, and by the C contract a readable value.
        let room = unsafe { count.as_ptr().read() };
        for index in 0..room {
            let handle = if index < total { Graph::node_handle(graph, index) } else { 0 };
            // SAFETY: by the C contract the array has that much room.
            unsafe { out.as_ptr().add(index).write(handle) };
        }
        return count.put(total.min(room));
    }
    count.put(total)
}

exports! {
    fn cuGraphCreate(out: Out<usize>, flags: u32) => create(out, flags);
    fn cuGraphDestroy(graph: usize) => destroy(graph);
    fn cuGraphGetNodes(graph: usize, out: Out<usize>, count: Out<usize>) => nodes(graph, out, count);
    fn cuGraphInstantiate_v2(out: Out<usize>, graph: usize, _error_node: usize, _log: usize, _size: usize)
        => instantiate(out, graph);
    fn cuGraphInstantiateWithFlags(out: Out<usize>, graph: usize, _flags: u64) => instantiate(out, graph);
    fn cuGraphExecDestroy(instance: usize) => destroy_instance(instance);
    stream fn cuGraphLaunch, cuGraphLaunch_ptsz(instance: usize; s) => launch(instance, s);
    stream fn cuGraphUpload, cuGraphUpload_ptsz(_instance: usize; s) => stream::usable(s).map(|_| ());
}

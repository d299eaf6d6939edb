//! Nodes: the records of extents, and the lists they are linked in.
//!
//! Nodes stand in one growing array and name each other by index. An index that is out of range reads
//! as a blank node instead of panicking; [`super::Heap::validate`] would find such a link.

use crate::error::NoHostMemory;

/// Index of a node. [`NIL`] is none.
pub type NodeId = u32;
/// No node, slab or chunk.
pub const NIL: u32 = u32::MAX;

/// Who may use free memory: [`SHARED`] is everyone, other values are streams of the pool layer.
pub type StreamId = u32;
/// Memory that no work on the device uses any more: any stream, and device-ordered requests, may have it.
pub const SHARED: StreamId = 0;

/// What an extent is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Kind {
    /// The record is not in use.
    #[default]
    Blank,
    /// Address space with no memory mapped.
    Unmapped,
    /// Idle memory, in the bins of its stream.
    Free,
    /// Idle memory, the last that its stream freed, in no bin: it coalesces when the stream's next call wants
    /// something else.
    LastFreed,
    /// A block in a caller's hands.
    Used,
    /// A block freed, that work on the device may still be using.
    Pending,
    /// Cut into equal small blocks.
    Slab,
    /// Being mapped, unmapped or returned by a thread that does not hold the lock.
    Busy,
}

/// An extent: a contiguous range of offsets, all mapped or all unmapped.
#[derive(Clone, Copy, Debug)]
pub struct Node {
    /// First byte, in heap offsets.
    pub off: u64,
    /// Bytes.
    pub len: u64,
    /// Neighbours by address in the same region.
    pub prev: NodeId,
    pub next: NodeId,
    /// Neighbours in a bin.
    pub bin_prev: NodeId,
    pub bin_next: NodeId,
    /// Neighbours by age among the free nodes of a stream, or among the pending ones.
    pub age_prev: NodeId,
    pub age_next: NodeId,
    /// Free, freed last: who may use it. Slab: whose it is.
    pub stream: StreamId,
    /// Slab: its index.
    pub slab: u32,
    /// When it was freed, in the arena's count of frees.
    pub seq: u64,
    /// Used: bytes that the caller asked for.
    pub requested: u64,
    /// Used: the stream it was allocated on, as the caller named it.
    pub handle: u64,
    /// Used: index of the owner tag.
    pub owner: u16,
    pub kind: Kind,
    /// Used: see [`super::block_flags`].
    pub flags: u8,
}

impl Node {
    pub(crate) const BLANK: Node = Node {
        off: 0,
        len: 0,
        prev: NIL,
        next: NIL,
        bin_prev: NIL,
        bin_next: NIL,
        age_prev: NIL,
        age_next: NIL,
        stream: SHARED,
        slab: NIL,
        seq: 0,
        requested: 0,
        handle: 0,
        owner: 0,
        kind: Kind::Blank,
        flags: 0,
    };

    /// One past the last byte.
    pub fn end(&self) -> u64 {
        self.off + self.len
    }
}

/// All nodes of a heap.
pub struct Nodes {
    array: Vec<Node>,
    /// Blank records, linked by `next`.
    blank: NodeId,
    blanks: usize,
    /// What an index out of range reads and writes.
    nowhere: Node,
}

impl Nodes {
    pub const fn new() -> Self {
        Nodes { array: Vec::new(), blank: NIL, blanks: 0, nowhere: Node::BLANK }
    }

    pub fn get(&self, id: NodeId) -> &Node {
        self.array.get(id as usize).unwrap_or(&self.nowhere)
    }

    #[inline]
    pub fn find(&mut self, id: NodeId) -> Option<&mut Node> {
        self.array.get_mut(id as usize)
    }

    pub fn at(&mut self, id: NodeId) -> &mut Node {
        match self.array.get_mut(id as usize) {
            Some(node) => node,
            None => {
                self.nowhere = Node::BLANK;
                &mut self.nowhere
            }
        }
    }

    /// Makes sure that `count` nodes can be taken without memory.
    pub fn reserve(&mut self, count: usize) -> Result<(), NoHostMemory> {
        while self.blanks < count {
            if self.array.len() == self.array.capacity() {
                let more = self.array.len().clamp(64, 1 << 16);
                self.array.try_reserve(more)?;
            }
            if self.array.len() >= NIL as usize {
                return Err(NoHostMemory);
            }
            let id = self.array.len() as NodeId;
            self.array.push(Node { next: self.blank, ..Node::BLANK });
            self.blank = id;
            self.blanks += 1;
        }
        Ok(())
    }

    /// Takes a node. [`Nodes::reserve`] must have made sure of it; NIL otherwise.
    pub fn take(&mut self, node: Node) -> NodeId {
        let id = self.blank;
        debug_assert_ne!(id, NIL, "a node was taken that was not reserved");
        self.blank = self.get(id).next;
        self.blanks -= 1;
        *self.at(id) = node;
        id
    }

    pub fn give(&mut self, id: NodeId) {
        *self.at(id) = Node { next: self.blank, ..Node::BLANK };
        self.blank = id;
        self.blanks += 1;
    }

    pub fn in_use(&self) -> usize {
        self.array.len() - self.blanks
    }

    pub fn len(&self) -> NodeId {
        self.array.len() as NodeId
    }
}

/// A list of nodes, oldest first, linked by `age_prev` and `age_next`.
#[derive(Clone, Copy, Debug)]
pub struct AgeList {
    pub head: NodeId,
    pub tail: NodeId,
}

impl AgeList {
    pub const EMPTY: AgeList = AgeList { head: NIL, tail: NIL };

    pub fn push_back(&mut self, nodes: &mut Nodes, id: NodeId) {
        let tail = self.tail;
        let node = nodes.at(id);
        node.age_prev = tail;
        node.age_next = NIL;
        if tail == NIL {
            self.head = id;
        } else {
            nodes.at(tail).age_next = id;
        }
        self.tail = id;
    }

    pub fn remove(&mut self, nodes: &mut Nodes, id: NodeId) {
        let Node { age_prev, age_next, .. } = *nodes.get(id);
        if age_prev == NIL {
            self.head = age_next;
        } else {
            nodes.at(age_prev).age_next = age_next;
        }
        if age_next == NIL {
            self.tail = age_prev;
        } else {
            nodes.at(age_next).age_prev = age_prev;
        }
    }
}

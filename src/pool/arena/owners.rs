//! Owner tags: short names that callers give their blocks, kept once each.

use crate::error::NoHostMemory;
use crate::pool::types::{TAG_SIZE, Tag};

/// How many different tags are told apart; a limit, because a caller may make one up for every block. Further
/// ones share the last entry.
const MAX_OWNERS: usize = 512;

/// What is known of the blocks of one owner.
#[derive(Clone, Copy)]
pub struct Owner {
    pub tag: Tag,
    pub live_bytes: u64,
}

/// All owners of an arena. Index 0 is "none".
pub struct Owners {
    list: Vec<Owner>,
}

impl Owners {
    pub const fn new() -> Owners {
        Owners { list: Vec::new() }
    }

    /// The index of a tag, added if it is new.
    pub fn intern(&mut self, tag: &Tag) -> Result<u16, NoHostMemory> {
        if tag.first().is_none_or(|c| *c == 0) {
            return Ok(0);
        }
        if let Some(at) = self.list.iter().position(|o| o.tag == *tag) {
            return Ok((at + 1) as u16);
        }
        if self.list.len() < MAX_OWNERS {
            let last = self.list.len() == MAX_OWNERS - 1;
            let mut tag = *tag;
            if last {
                tag = [0; TAG_SIZE];
                tag.iter_mut().zip(b"(others)").for_each(|(to, from)| *to = *from);
            }
            self.list.try_reserve(1)?;
            self.list.push(Owner { tag, live_bytes: 0 });
        }
        Ok(self.list.len() as u16)
    }

    #[inline]
    pub fn add(&mut self, owner: u16, bytes: u64) {
        if let Some(owner) = self.at(owner) {
            owner.live_bytes += bytes;
        }
    }

    #[inline]
    pub fn subtract(&mut self, owner: u16, bytes: u64) {
        if let Some(owner) = self.at(owner) {
            owner.live_bytes -= bytes;
        }
    }

    #[inline]
    fn at(&mut self, owner: u16) -> Option<&mut Owner> {
        self.list.get_mut(usize::from(owner).checked_sub(1)?)
    }

    pub fn tag(&self, owner: u16) -> Tag {
        let at = usize::from(owner).checked_sub(1);
        at.and_then(|at| self.list.get(at)).map_or([0; TAG_SIZE], |o| o.tag)
    }

    /// The owners with most live bytes, most first.
    pub fn largest<const N: usize>(&self) -> [Option<Owner>; N] {
        let mut largest = [None; N];
        for owner in self.list.iter().filter(|o| o.live_bytes > 0) {
            let mut next = Some(*owner);
            for slot in &mut largest {
                let more = |o: &Option<Owner>| o.map_or(0, |o: Owner| o.live_bytes);
                if more(&next) > more(slot) {
                    core::mem::swap(slot, &mut next);
                }
            }
        }
        largest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(text: &str) -> Tag {
        let mut tag = [0; TAG_SIZE];
        tag[..text.len()].copy_from_slice(text.as_bytes());
        tag
    }

    #[test]
    fn tags_are_kept_once_and_bounded() {
        let mut owners = Owners::new();
        assert_eq!(owners.intern(&tag("")), Ok(0));
        let a = owners.intern(&tag("weights")).unwrap();
        assert_eq!(owners.intern(&tag("weights")), Ok(a));
        for i in 0..2 * MAX_OWNERS {
            owners.intern(&tag(&format!("tag {i}"))).unwrap();
        }
        let last = owners.intern(&tag("one more")).unwrap();
        assert_eq!(owners.tag(last), tag("(others)"));
        owners.add(a, 5);
        let b = owners.intern(&tag("tag 3")).unwrap();
        owners.add(b, 7);
        let [first, second, third] = owners.largest::<3>();
        assert_eq!((first.unwrap().tag, second.unwrap().tag), (tag("tag 3"), tag("weights")));
        assert!(third.is_none());
        owners.subtract(a, 5);
        assert!(owners.largest::<3>()[1].is_none());
    }
}

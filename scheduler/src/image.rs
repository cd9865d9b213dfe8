//! The room that the worker has for the images of the sequences that it knows.
//!
//! INVARIANT: a resident sequence holds the room of its images from its start to its end or preemption; residents with equal
//! images hold it once. So a sequence that fits when it is admitted needs no more room later.

use rustc_hash::FxHashMap;

use crate::plan::ImageGroup;

#[derive(Debug)]
pub(crate) struct ImageRoom {
    max_bytes: u64,
    num_bytes: u64,
    /// By the key of a group: its bytes, and the number of residents that have it.
    held: FxHashMap<u64, (u64, usize)>,
}

impl ImageRoom {
    pub(crate) fn new(max_bytes: u64) -> Self {
        Self { max_bytes, num_bytes: 0, held: FxHashMap::default() }
    }

    /// Whether there is room for a sequence with these images.
    pub(crate) fn fits(&self, images: &[ImageGroup]) -> bool {
        let missing = images.iter().filter(|group| !self.held.contains_key(&group.key));
        self.num_bytes + missing.map(|group| group.num_bytes).sum::<u64>() <= self.max_bytes
    }

    /// Like `fits`, for two sequences together.
    pub(crate) fn fits_both(&self, first: &[ImageGroup], second: &[ImageGroup]) -> bool {
        let others = second.iter().filter(|group| first.iter().all(|other| other.key != group.key));
        self.fits(&first.iter().chain(others).copied().collect::<Vec<_>>())
    }

    /// Takes the room of a sequence that starts.
    pub(crate) fn take(&mut self, images: &[ImageGroup]) {
        for group in images {
            let (num_bytes, num_holders) = self.held.entry(group.key).or_insert((group.num_bytes, 0));
            if *num_holders == 0 {
                self.num_bytes += *num_bytes;
            }
            *num_holders += 1;
        }
    }

    /// Returns the room of a sequence whose residency ends.
    pub(crate) fn release(&mut self, images: &[ImageGroup]) {
        for group in images {
            let (num_bytes, num_holders) =
                self.held.get_mut(&group.key).expect("invariant: a resident holds its images");
            *num_holders -= 1;
            if *num_holders == 0 {
                self.num_bytes -= *num_bytes;
                self.held.remove(&group.key);
            }
        }
    }

    /// Forgets all residents.
    pub(crate) fn clear(&mut self) {
        *self = Self::new(self.max_bytes);
    }

    /// Panics unless exactly the images of `residents` are held, and fit.
    pub(crate) fn audit<'a>(&self, residents: impl Iterator<Item = &'a [ImageGroup]>) {
        let mut counted = Self::new(self.max_bytes);
        residents.for_each(|images| counted.take(images));
        assert_eq!((&self.held, self.num_bytes), (&counted.held, counted.num_bytes));
        assert!(self.num_bytes <= self.max_bytes, "{self:?}");
    }
}

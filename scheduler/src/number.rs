//! Hash maps by numbers that nobody outside chooses: ids of sequences, nodes and blocks are counted up.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

pub(crate) type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// PERF: a step looks up every sequence in it some eight times. With std's hasher, which withstands chosen keys, a step of 256
/// sequences and a full cache takes 54 µs of CPU time, with this one 27 (`benches/step.rs`, 2 cores).
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    /// Multiplies by an odd constant near 2^64 / golden ratio: numbers in a row land far apart, in the upper bits too.
    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    /// The upper bits are the best mixed; maps choose a place by the lower ones.
    fn finish(&self) -> u64 {
        self.0.rotate_left(26)
    }
}

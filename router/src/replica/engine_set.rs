//! Sets of engines by number: small for the many prefixes that few engines have.

use std::{array, iter};

/// The most engines that there can be.
pub(super) const MAX_ENGINES: usize = 1024;
pub(super) const NUM_WORDS: usize = MAX_ENGINES / u64::BITS as usize;
/// Engine `n` is bit `n % 64` of word `n / 64`.
pub(super) type Bits = [u64; NUM_WORDS];

/// Engines that fit without an allocation.
const NUM_FEW: usize = 7;
/// No engine.
const NONE: u16 = u16::MAX;

/// 16 bytes, and 128 more for a set that had more than `NUM_FEW` engines.
#[derive(Debug)]
pub(super) enum EngineSet {
    /// The engines, then `NONE`.
    Few([u16; NUM_FEW]),
    Many(Box<Bits>),
}

impl Default for EngineSet {
    fn default() -> Self {
        Self::Few([NONE; NUM_FEW])
    }
}

impl EngineSet {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Few(engines) => engines.iter().take_while(|engine| **engine != NONE).count(),
            Self::Many(bits) => bits.iter().map(|word| word.count_ones() as usize).sum(),
        }
    }

    pub(super) fn bits(&self) -> Bits {
        match self {
            Self::Few(engines) => {
                let mut bits = [0; NUM_WORDS];
                engines.iter().take_while(|engine| **engine != NONE).for_each(|engine| set(&mut bits, *engine));
                bits
            }
            Self::Many(bits) => **bits,
        }
    }

    /// Returns whether it is new.
    pub(super) fn insert(&mut self, engine: usize) -> bool {
        let number = engine as u16;
        match self {
            Self::Few(engines) => match engines.iter().position(|known| [number, NONE].contains(known)) {
                Some(place) => std::mem::replace(&mut engines[place], number) == NONE,
                None => {
                    let mut bits = self.bits();
                    set(&mut bits, number);
                    *self = Self::Many(Box::new(bits));
                    true
                }
            },
            Self::Many(bits) => {
                let is_new = bits[engine / 64] & 1 << (engine % 64) == 0;
                set(bits, number);
                is_new
            }
        }
    }

    pub(super) fn remove(&mut self, engine: usize) {
        match self {
            Self::Few(engines) => {
                let mut rest = engines.iter().copied().filter(|known| usize::from(*known) != engine);
                *engines = array::from_fn(|_| rest.next().unwrap_or(NONE));
            }
            Self::Many(bits) => bits[engine / 64] &= !(1 << (engine % 64)),
        }
    }
}

fn set(bits: &mut Bits, engine: u16) {
    bits[usize::from(engine) / 64] |= 1 << (engine % 64);
}

/// The engines that are set, in ascending order.
pub(super) fn bits(bits: &Bits) -> impl Iterator<Item = usize> {
    bits.iter().enumerate().flat_map(|(index, word)| {
        let mut rest = *word;
        iter::from_fn(move || {
            let bit = (rest != 0).then_some(rest.trailing_zeros() as usize)?;
            rest &= rest - 1;
            Some(64 * index + bit)
        })
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_set_is_small() {
        assert_eq!(size_of::<EngineSet>(), 16);
    }

    proptest! {
        #[test]
        fn a_set_has_what_was_inserted_and_not_removed(
            changes in prop::collection::vec((any::<bool>(), prop_oneof![0..12_usize, 0..MAX_ENGINES]), 0..60),
        ) {
            let (mut engines, mut expected) = (EngineSet::default(), BTreeSet::new());
            for (inserts, engine) in changes {
                match inserts {
                    true => prop_assert_eq!(engines.insert(engine), expected.insert(engine)),
                    false => {
                        engines.remove(engine);
                        expected.remove(&engine);
                    }
                }
                prop_assert_eq!(engines.len(), expected.len());
                prop_assert!(bits(&engines.bits()).eq(expected.iter().copied()));
            }
        }
    }
}

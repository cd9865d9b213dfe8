//! Sets of engines by number: small for the many prefixes that few engines have.

use std::{array, iter};

use crate::generator::MAX_ENGINES;

pub(super) const NUM_WORDS: usize = MAX_ENGINES / u64::BITS as usize;
/// Engine `n` is bit `n % 64` of word `n / 64`.
pub(super) type Bits = [u64; NUM_WORDS];

/// Engines that fit without an allocation.
const NUM_FEW: usize = 5;
/// No engine.
const NONE: u16 = u16::MAX;

/// Engines, and when the set was last checked. 16 bytes, and 136 more for a set that had more than `NUM_FEW` engines.
#[derive(Debug)]
pub(super) enum EngineSet {
    /// The engines, then `NONE`.
    Few {
        engines: [u16; NUM_FEW],
        checked_at: u32,
    },
    Many(Box<Many>),
}

#[derive(Debug)]
pub(super) struct Many {
    engines: Bits,
    checked_at: u32,
}

impl EngineSet {
    /// An empty set, which is checked.
    pub(super) fn new(now: u32) -> Self {
        Self::Few { engines: [NONE; NUM_FEW], checked_at: now }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Few { engines, .. } => engines.iter().take_while(|engine| **engine != NONE).count(),
            Self::Many(many) => many.engines.iter().map(|word| word.count_ones() as usize).sum(),
        }
    }

    pub(super) fn bits(&self) -> Bits {
        match self {
            Self::Few { engines, .. } => {
                let mut bits = [0; NUM_WORDS];
                engines.iter().take_while(|engine| **engine != NONE).for_each(|engine| set(&mut bits, *engine));
                bits
            }
            Self::Many(many) => many.engines,
        }
    }

    /// When `check` was last called.
    pub(super) fn checked_at(&self) -> u32 {
        match self {
            Self::Few { checked_at, .. } => *checked_at,
            Self::Many(many) => many.checked_at,
        }
    }

    /// Removes the engines for which `keeps` is false. Returns how many these were.
    pub(super) fn check(&mut self, now: u32, keeps: impl Fn(usize) -> bool) -> usize {
        let before = self.len();
        match self {
            Self::Few { engines, checked_at } => {
                let mut kept = engines.iter().copied().filter(|engine| *engine != NONE && keeps(usize::from(*engine)));
                *engines = array::from_fn(|_| kept.next().unwrap_or(NONE));
                *checked_at = now;
            }
            Self::Many(many) => {
                let lost = bits(&many.engines).filter(|engine| !keeps(*engine)).collect::<Vec<_>>();
                lost.into_iter().for_each(|engine| many.engines[engine / 64] &= !(1 << (engine % 64)));
                many.checked_at = now;
            }
        }
        before - self.len()
    }

    /// Returns whether it is new.
    pub(super) fn insert(&mut self, engine: usize) -> bool {
        let number = engine as u16;
        match self {
            Self::Few { engines, checked_at } => {
                match engines.iter().position(|known| [number, NONE].contains(known)) {
                    Some(place) => std::mem::replace(&mut engines[place], number) == NONE,
                    None => {
                        let checked_at = *checked_at;
                        let mut engines = self.bits();
                        set(&mut engines, number);
                        *self = Self::Many(Box::new(Many { engines, checked_at }));
                        true
                    }
                }
            }
            Self::Many(many) => {
                let is_new = many.engines[engine / 64] & 1 << (engine % 64) == 0;
                set(&mut many.engines, number);
                is_new
            }
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
            let (mut engines, mut expected) = (EngineSet::new(0), BTreeSet::new());
            for (now, (inserts, engine)) in changes.into_iter().enumerate() {
                match inserts {
                    true => prop_assert_eq!(engines.insert(engine), expected.insert(engine)),
                    false => {
                        let num_removed = engines.check(now as u32, |known| known != engine);
                        prop_assert_eq!(num_removed, usize::from(expected.remove(&engine)));
                        prop_assert_eq!(engines.checked_at(), now as u32);
                    }
                }
                prop_assert_eq!(engines.len(), expected.len());
                prop_assert!(bits(&engines.bits()).eq(expected.iter().copied()));
            }
        }
    }
}

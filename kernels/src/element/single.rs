//! Groups of one element.

use super::Element;
use crate::simd::F32;

/// Consecutive elements along a sum that packed layouts keep together.
pub(crate) const GROUP: usize = 1;

/// An element in each lane, ready to be multiplied.
#[derive(Clone, Copy)]
pub(crate) struct Group(F32);

impl Group {
    /// sum + self·other per lane, over the elements of the group.
    #[inline(always)]
    pub(crate) fn dot(self, other: Group, sum: F32) -> F32 {
        self.0.mul_add(other.0, sum)
    }

    /// Loads the groups of 16 lanes, one after the other.
    ///
    /// # Safety
    /// 16 groups must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load(address: *const Element) -> Group {
        // SAFETY: guaranteed by the caller.
        Group(unsafe { Element::load(address) })
    }

    /// As `load`, with zeros instead of all but the first element of each group, which may be anything.
    ///
    /// # Safety
    /// As for `load`.
    #[inline(always)]
    pub(crate) unsafe fn load_head(address: *const Element) -> Group {
        // SAFETY: guaranteed by the caller.
        unsafe { Group::load(address) }
    }

    /// The same group in every lane.
    ///
    /// # Safety
    /// A group must be readable.
    #[inline(always)]
    pub(crate) unsafe fn broadcast(address: *const Element) -> Group {
        // SAFETY: guaranteed by the caller.
        Group::broadcast_head(unsafe { address.read() })
    }

    /// The same element, followed by zeros, in every lane.
    #[inline(always)]
    pub(crate) fn broadcast_head(element: Element) -> Group {
        Group(F32::splat(element.to_f32()))
    }
}

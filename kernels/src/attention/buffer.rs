//! Buffers of a thread that grow to what its units need.

use crate::element::Element;
use crate::product;
use std::cell::RefCell;
use std::thread::LocalKey;

/// A cache line of elements.
#[derive(Clone, Copy)]
#[repr(align(64))]
#[expect(dead_code, reason = "read and written as a row of numbers")]
pub(super) struct Line([Element; LINE]);

/// Elements per cache line.
const LINE: usize = product::LINE / size_of::<Element>();

/// The address of a thread's buffer, grown to `count` elements.
pub(super) fn room(buffer: &'static LocalKey<RefCell<Vec<Line>>>, count: usize) -> *mut Element {
    buffer.with_borrow_mut(|memory| {
        if memory.len() < count.div_ceil(LINE) {
            memory.resize(count.div_ceil(LINE), Line([Element::default(); LINE]));
        }
        memory.as_mut_ptr().cast()
    })
}

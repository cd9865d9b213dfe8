//! Stands for the products with AMX in builds without them.

use super::softmax::{State, TileRows};
use super::tile::Blocks;
use crate::cpu::Amx;
use crate::product::Factor;

/// Has no value.
pub(super) enum Tiles {}

impl Tiles {
    pub(super) const ROWS: usize = super::tile::ROWS;

    pub(super) fn configure(_: Option<Amx>, _: usize) -> Option<Tiles> {
        None
    }

    pub(super) unsafe fn gather(queries: *const Factor, _: usize, _: usize, _: usize, _: usize) -> *const Factor {
        queries
    }

    pub(super) unsafe fn score(&mut self, _: *const Factor, _: &Blocks, _: *mut f32) {
        match *self {}
    }

    pub(super) unsafe fn weigh(&mut self, _: &TileRows, _: usize, _: &Blocks, _: State) {
        match *self {}
    }
}

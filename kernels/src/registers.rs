//! The tile registers of AMX.

use crate::cpu::Amx;
use std::arch::asm;

/// Rows of a tile register.
pub(crate) const REGISTER_ROWS: usize = 16;
/// Bytes of a row of a tile register.
pub(crate) const REGISTER_BYTES: usize = 64;

/// The operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// The tile registers of this thread, configured, and released when dropped. The thread may be torch's, so the registers are configured
/// before every use and hold nothing afterwards.
pub(crate) struct Registers(());

impl Registers {
    /// Configures the registers: rows, and bytes of a row, of each.
    pub(crate) fn configure(_: Amx, shapes: [(usize, usize); 8]) -> Registers {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        for (register, (num_rows, num_bytes)) in shapes.into_iter().enumerate() {
            debug_assert!((1..=REGISTER_ROWS).contains(&num_rows) && (4..=REGISTER_BYTES).contains(&num_bytes));
            (rows[register], row_bytes[register]) = (num_rows as u8, num_bytes as u16);
        }
        let configuration = Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
        // SAFETY: `Amx` proves that the instruction is permitted; the configuration is valid for palette 1.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack, preserves_flags)) };
        Registers(())
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: `configure` was permitted to use the registers.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

//! Functions of one number.

use super::require;
use super::view::View;
use crate::element::Element;
use crate::pool::Pool;
use crate::table::{self, NUM_PATTERNS};
use pyo3::prelude::*;

/// A function of one number as a table.
#[pyclass(frozen)]
pub(super) struct Table {
    pool: Pool,
    pub(super) table: table::Table,
    /// Has the results.
    pub(super) tensor: Py<PyAny>,
}

impl Table {
    pub(super) fn new(pool: Pool, results: &View<'_, Element, 1>, is_gate: bool) -> PyResult<Table> {
        let address = results.expect("results", [NUM_PATTERNS])?.source("results")?;
        Ok(Table { pool, table: table::Table { results: address, is_gate }, tensor: results.tensor() })
    }
}

#[pymethods]
impl Table {
    /// output [rows, dim] = the function of x [rows, dim], or for a gate of the first half of x [rows, 2 * dim], times the second.
    fn apply(&self, x: View<'_, Element, 2>, output: View<'_, Element, 2>) -> PyResult<()> {
        let [num_rows, width] = x.shape();
        require(!self.table.is_gate || width.is_multiple_of(2), || {
            format!("x has {width} columns, a gate needs an even number")
        })?;
        let output = output.expect("output", [num_rows, self.table.output_columns(width)])?.target("output")?;
        // SAFETY: the table has a result for every argument, and x and output have these sizes.
        unsafe { self.table.apply(&self.pool, x.rows("x")?, output, width, num_rows) };
        Ok(())
    }
}

//! Activation functions.

use super::require;
use super::view::View;
use crate::activation::{self, Function};
use crate::element::Element;
use crate::pool::Pool;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// An activation function.
#[pyclass(frozen)]
pub(super) struct Activation {
    pool: Pool,
    pub(super) activation: activation::Activation,
}

impl Activation {
    pub(super) fn new(pool: Pool, name: &str, parameters: &[f32], is_gate: bool) -> PyResult<Activation> {
        let function = Function::named(name, parameters).map_err(PyValueError::new_err)?;
        require(is_gate || !matches!(function, Function::ClampedSwiglu { .. }), || format!("{name:?} must be a gate"))?;
        Ok(Activation { pool, activation: activation::Activation { function, is_gate } })
    }
}

#[pymethods]
impl Activation {
    /// output [rows, dim] = the function of x [rows, dim], or for a gate of the first half of x [rows, 2 * dim], times the second.
    fn apply(&self, x: View<'_, Element, 2>, output: View<'_, Element, 2>) -> PyResult<()> {
        let [num_rows, width] = x.shape();
        require(!self.activation.is_gate || width.is_multiple_of(2), || {
            format!("x has {width} columns, a gate needs an even number")
        })?;
        let columns = self.activation.output_columns(width);
        let output = output.expect("output", [num_rows, columns])?.target("output")?;
        // SAFETY: x and output have these sizes.
        unsafe { self.activation.apply(&self.pool, x.rows("x")?, output, width, num_rows) };
        Ok(())
    }
}

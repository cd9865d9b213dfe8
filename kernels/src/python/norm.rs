//! Norms.

use super::require;
use super::view::View;
use crate::element::Element;
use crate::norm::{Groups, Kind, Norm};
use crate::pool::Pool;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// A norm's parameters, packed.
#[pyclass(frozen)]
pub(super) struct PackedNorm {
    pool: Pool,
    pub(super) packed: Arc<Norm>,
}

impl PackedNorm {
    pub(super) fn new(
        pool: Pool,
        kind: &str,
        weight: &View<'_, f32, 2>,
        bias: Option<&View<'_, f32, 2>>,
        eps: f32,
    ) -> PyResult<PackedNorm> {
        let kind = match kind {
            "rms" => Kind::Rms,
            "wide rms" => Kind::WideRms,
            "layer" => Kind::Layer,
            other => return Err(PyValueError::new_err(format!("kind is {other:?}, must be rms, wide rms or layer"))),
        };
        let bias = match bias {
            Some(bias) => bias.expect("bias", weight.shape())?.elements("bias")?.to_vec(),
            None => Vec::new(),
        };
        let norm = Norm::new(kind, eps, weight.shape()[1], weight.elements("weight")?.to_vec(), bias);
        Ok(PackedNorm { pool, packed: Arc::new(norm.map_err(PyValueError::new_err)?) })
    }

    /// Fails unless it applies to rows of this many groups.
    fn expect(&self, num_groups: usize, dim: usize) -> PyResult<()> {
        require(dim == self.packed.dim() && self.packed.fits(num_groups), || {
            format!(
                "x has rows of {num_groups} by {dim} elements, which its norm of {} does not fit",
                self.packed.dim()
            )
        })
    }
}

#[pymethods]
impl PackedNorm {
    /// output = norm(x); both [rows, dim]. With a residual [rows, dim]: residual += x; output = norm(residual).
    #[pyo3(signature = (x, output, residual=None))]
    fn apply(
        &self,
        x: View<'_, Element, 2>,
        output: View<'_, Element, 2>,
        residual: Option<View<'_, Element, 2>>,
    ) -> PyResult<()> {
        let [num_rows, dim] = x.shape();
        self.expect(1, dim)?;
        let (address, stride) = x.rows("x")?;
        let groups = Groups { address, stride, num_groups: 1, num_rows };
        let output = output.expect("output", x.shape())?.target("output")?;
        // SAFETY: x, residual and output have the norm's sizes.
        unsafe {
            match &residual {
                Some(residual) => {
                    let residual = residual.expect("residual", x.shape())?.target("residual")?;
                    self.packed.add_apply(&self.pool, groups, residual, output);
                }
                None => self.packed.apply(&self.pool, groups, output),
            }
        }
        Ok(())
    }

    /// output = the norm of each head of x; both [rows, heads, dim].
    fn apply_heads(&self, x: View<'_, Element, 3>, output: View<'_, Element, 3>) -> PyResult<()> {
        let [num_rows, num_groups, dim] = x.shape();
        self.expect(num_groups, dim)?;
        let (address, stride) = x.rows("x")?;
        let output = output.expect("output", x.shape())?.target("output")?;
        // SAFETY: x and output have the norm's sizes.
        unsafe { self.packed.apply(&self.pool, Groups { address, stride, num_groups, num_rows }, output) };
        Ok(())
    }
}

//! All layers of a decoder in one call.

use super::attention::{Batch, PagedAttention};
use super::linear::PackedLinear;
use super::require;
use super::view::View;
use crate::attention::BLOCK;
use crate::pool::Pool;
use crate::stack::{self, Step};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// All layers of a decoder.
#[pyclass(frozen)]
pub(super) struct Stack {
    attention: Py<PagedAttention>,
    pool: Pool,
    stack: stack::Stack,
    hidden: usize,
    /// Rows of the tables of cosines and sines.
    num_positions: usize,
    /// The tensors whose addresses the stack has.
    _tensors: Vec<Py<PyAny>>,
}

/// (attention norm, qkv, output, MLP norm, gate and up, down)
type LayerParts<'py> = (
    View<'py, u16, 1>,
    PyRef<'py, PackedLinear>,
    PyRef<'py, PackedLinear>,
    View<'py, u16, 1>,
    PyRef<'py, PackedLinear>,
    PyRef<'py, PackedLinear>,
);

#[pymethods]
impl Stack {
    /// Norms [hidden]; cos, sin [positions, rotary_dim / 2].
    #[new]
    fn new(
        attention: Bound<'_, PagedAttention>,
        layers: Vec<LayerParts<'_>>,
        final_norm: View<'_, u16, 1>,
        cos: View<'_, f32, 2>,
        sin: View<'_, f32, 2>,
        eps: f32,
    ) -> PyResult<Stack> {
        let [hidden] = final_norm.shape();
        let [num_positions, half] = cos.shape();
        let mut tensors = vec![final_norm.tensor(), cos.tensor(), sin.tensor()];
        let PagedAttention { pool, attention: of_layers } = attention.get();
        require(2 * half <= of_layers.layout.head_dim, || {
            format!("cos has {half} columns, must have at most half of the {} of a head", of_layers.layout.head_dim)
        })?;
        let mut parts = Vec::with_capacity(layers.len());
        for (attention_norm, qkv, output, mlp_norm, gate_up, down) in layers {
            tensors.extend([attention_norm.tensor(), mlp_norm.tensor()]);
            parts.push(stack::Layer {
                attention_norm: attention_norm.expect("attention_norm", [hidden])?.source("attention_norm")?,
                qkv: Arc::clone(&qkv.packed),
                output: Arc::clone(&output.packed),
                mlp_norm: mlp_norm.expect("mlp_norm", [hidden])?.source("mlp_norm")?,
                gate_up: Arc::clone(&gate_up.packed),
                down: Arc::clone(&down.packed),
            });
        }
        let angles = (cos.source("cos")?, sin.expect("sin", cos.shape())?.source("sin")?, half);
        let stack = stack::Stack::new(parts, final_norm.source("final_norm")?, eps, of_layers.clone(), angles)
            .map_err(PyValueError::new_err)?;
        require(stack.hidden() == hidden, || format!("final_norm has {hidden} elements, layers {}", stack.hidden()))?;
        let pool = *pool;
        Ok(Stack { attention: attention.unbind(), pool, stack, hidden, num_positions, _tensors: tensors })
    }

    /// Runs the step's embeddings, residual [tokens, hidden], which are overwritten, and writes the normed output of the sampled rows
    /// to output [samples, hidden]. positions, slots [tokens]; sample_rows [samples]; a cache for each layer.
    #[expect(clippy::too_many_arguments, reason = "the tensors of a step")]
    fn run(
        &self,
        py: Python<'_>,
        residual: View<'_, u16, 2>,
        positions: View<'_, i64, 1>,
        slots: View<'_, i64, 1>,
        batch: PyRef<'_, Batch>,
        caches: Vec<View<'_, u16, 2>>,
        sample_rows: View<'_, i64, 1>,
        output: View<'_, u16, 2>,
    ) -> PyResult<()> {
        let (num_tokens, [num_samples]) = (batch.num_tokens, sample_rows.shape());
        let num_layers = self.stack.layers.len();
        require(caches.len() == num_layers, || format!("{} caches for {num_layers} layers", caches.len()))?;
        require(num_samples <= num_tokens, || format!("sample_rows has {num_samples} rows of {num_tokens}"))?;
        let attention = self.attention.get();
        let caches: Vec<_> = caches.iter().map(|cache| attention.cache(cache)).collect::<PyResult<_>>()?;
        let num_blocks = caches.iter().map(|&(_, num_blocks)| num_blocks).min().unwrap_or(0);
        batch.expect_blocks(num_blocks)?;
        let caches: Vec<_> = caches.into_iter().map(|(address, _)| address).collect();
        let step = Step {
            residual: residual.expect("residual", [num_tokens, self.hidden])?.target("residual")?,
            num_tokens,
            positions: positions.expect("positions", [num_tokens])?.indices(
                "positions",
                self.num_positions,
                "positions",
            )?,
            slots: slots.expect("slots", [num_tokens])?.indices("slots", num_blocks * BLOCK, "slots")?,
            batch: batch.as_kernel(),
            caches: &caches,
            sample_rows: sample_rows.indices("sample_rows", num_tokens, "rows")?,
            num_samples,
            output: output.expect("output", [num_samples, self.hidden])?.target("output")?,
        };
        // SAFETY: the views have the sizes of the layers and of the batch; positions, slots, rows and block ids are inside their tables
        // and caches. The references to tensors and batch live until the call ends.
        py.detach(|| unsafe { self.stack.run(&self.pool, &step) });
        Ok(())
    }
}

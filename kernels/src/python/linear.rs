//! Packed linear layers.

use super::view::View;
use super::{maybe_detached, require};
use crate::cpu::Amx;
use crate::element::Element;
use crate::linear::{self, Linear, Output, Rows, Weight};
use crate::memory::Arena;
use crate::pool::{Pool, Target};
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use std::sync::Arc;

/// Elements of a weight up to which no size of its packed form overflows.
pub(super) const MAX_ELEMENTS: usize = 1 << 48;

/// A weight that is being packed, from its first row on.
#[pyclass]
pub(super) struct Packing {
    pool: Pool,
    packed: Option<linear::PackedLinear>,
    num_filled: usize,
}

impl Packing {
    pub(super) fn new(
        pool: Pool,
        arena: &Arena,
        amx: Option<Amx>,
        [out_features, in_features]: [usize; 2],
        bias: Option<&View<'_, Element, 1>>,
        gated: bool,
    ) -> PyResult<Packing> {
        let elements = out_features.checked_mul(in_features).filter(|elements| (1..=MAX_ELEMENTS).contains(elements));
        require(elements.is_some(), || format!("a weight cannot have the shape {:?}", [out_features, in_features]))?;
        require(!gated || out_features.is_multiple_of(2), || {
            format!("a gated layer has {out_features} rows, must be an even number")
        })?;
        let bias = match bias {
            Some(bias) => bias.expect("bias", [out_features])?.source("bias")?.at(0),
            None => std::ptr::null(),
        };
        let weight = Weight { bias, out_features, in_features, gated };
        // SAFETY: the bias is null or has `out_features` elements.
        let packed = unsafe { linear::PackedLinear::new(arena, weight, amx) };
        let packed = packed.map_err(|error| PyOSError::new_err(format!("no memory for a packed weight: {error}")))?;
        Ok(Packing { pool, packed: Some(packed), num_filled: 0 })
    }
}

#[pymethods]
impl Packing {
    /// Packs the next rows [some rows, in_features] of the weight.
    fn add_rows(&mut self, py: Python<'_>, rows: View<'_, Element, 2>) -> PyResult<()> {
        let Some(packed) = &self.packed else {
            return Err(PyValueError::new_err("the weight is complete"));
        };
        let ([num_rows, _], first, pool) = (rows.shape(), self.num_filled, self.pool);
        require(num_rows <= packed.out_features() - first, || {
            format!("rows has {num_rows} rows, the weight lacks {}", packed.out_features() - first)
        })?;
        let source = rows.expect("rows", [num_rows, packed.in_features()])?.source("rows")?;
        // SAFETY: the rows are inside the weight and as long as its rows; nothing else has a reference to the weight yet.
        py.detach(|| unsafe { packed.fill(&pool, source, first, num_rows) });
        self.num_filled += num_rows;
        Ok(())
    }

    /// The layer, once all rows are packed.
    fn finish(&mut self) -> PyResult<PackedLinear> {
        let num_filled = self.num_filled;
        match self.packed.take_if(|packed| packed.out_features() == num_filled) {
            Some(packed) => Ok(PackedLinear::new(self.pool, Linear::Dense(packed))),
            None => Err(PyValueError::new_err(format!("{num_filled} rows were packed, which are not the weight's"))),
        }
    }
}

/// A linear layer's weight, packed.
#[pyclass(frozen)]
pub(super) struct PackedLinear {
    pool: Pool,
    pub(super) packed: Arc<Linear>,
}

impl PackedLinear {
    pub(super) fn new(pool: Pool, packed: Linear) -> PackedLinear {
        PackedLinear { pool, packed: Arc::new(packed) }
    }
}

#[pymethods]
impl PackedLinear {
    /// output [rows, columns] = x·Wᵀ + bias, or silu(gate)·up when gated, for x [rows, in_features].
    fn apply(&self, py: Python<'_>, x: View<'_, Element, 2>, output: View<'_, Element, 2>) -> PyResult<()> {
        let [num_rows, _] = x.shape();
        let (address, stride) = x.expect("x", [num_rows, self.packed.in_features()])?.rows("x")?;
        let columns = self.packed.output_columns();
        let output = Output::store(output.expect("output", [num_rows, columns])?.target("output")?, columns);
        let work = self.packed.out_features() * self.packed.in_features() * (num_rows + 4);
        let rows = Rows { address, stride, num_rows };
        let mut scratch = vec![0; self.packed.scratch_bytes(num_rows)];
        let scratch = Target::new(scratch.as_mut_ptr());
        // SAFETY: the views have the sizes of the layer and live until the call ends, like the scratch.
        maybe_detached(py, work, || unsafe { self.packed.apply(&self.pool, rows, output, scratch) });
        Ok(())
    }

    /// output[i] = the weight's row `ids[i]`. Not for gated layers.
    fn copy_rows(&self, ids: View<'_, i64, 1>, output: View<'_, Element, 2>) -> PyResult<()> {
        require(!self.packed.is_gated(), || "a gated layer has no rows to copy".to_owned())?;
        let [num_rows] = ids.shape();
        let ids = ids.indices("ids", self.packed.out_features(), "rows")?;
        let output = output.expect("output", [num_rows, self.packed.in_features()])?.target("output")?;
        // SAFETY: the ids are rows of the weight, and the output has room for them.
        unsafe { self.packed.copy_rows(&self.pool, ids, num_rows, output) };
        Ok(())
    }
}

/// A linear layer whose results are float32.
#[pyclass(frozen)]
pub(super) struct WideLinear {
    pool: Pool,
    pub(super) linear: Arc<linear::WideLinear>,
}

impl WideLinear {
    pub(super) fn new(pool: Pool, weight: &View<'_, Element, 2>) -> PyResult<WideLinear> {
        let ([out_features, in_features], elements) = (weight.shape(), weight.elements("weight")?.to_vec());
        let linear = linear::WideLinear::new(elements, out_features, in_features).map_err(PyValueError::new_err)?;
        Ok(WideLinear { pool, linear: Arc::new(linear) })
    }
}

#[pymethods]
impl WideLinear {
    /// output [rows, out_features] = x·Wᵀ for x [rows, in_features].
    fn apply(&self, py: Python<'_>, x: View<'_, Element, 2>, output: View<'_, f32, 2>) -> PyResult<()> {
        let ([num_rows, _], linear) = (x.shape(), &self.linear);
        let (address, stride) = x.expect("x", [num_rows, linear.in_features()])?.rows("x")?;
        let output = output.expect("output", [num_rows, linear.out_features()])?.target("output")?;
        let rows = Rows { address, stride, num_rows };
        let work = linear.out_features() * linear.in_features() * num_rows;
        // SAFETY: the views have the sizes of the layer and live until the call ends.
        maybe_detached(py, work, || unsafe { linear.apply(&self.pool, rows, output) });
        Ok(())
    }
}

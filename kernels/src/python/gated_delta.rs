//! Gated delta networks.

use super::view::{Number, Rows, View};
use super::{maybe_detached, require};
use crate::element::Element;
use crate::gated_delta::{GatedDelta, Operands, Parameters, Sequences};
use crate::pool::{Pool, Source, Target};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// A layer's parameters, packed.
#[pyclass(frozen)]
pub(super) struct PackedGatedDelta {
    pool: Pool,
    pub(super) net: Arc<GatedDelta>,
}

/// The attributes of Python's `GatedDelta` that the kernels know.
#[derive(FromPyObject)]
pub(super) struct GatedDeltaParts<'py> {
    num_key_heads: usize,
    key_dim: usize,
    conv: View<'py, f32, 2>,
    decay: View<'py, f32, 1>,
    decay_bias: View<'py, f32, 1>,
    norm: View<'py, f32, 1>,
    eps: f32,
}

impl PackedGatedDelta {
    pub(super) fn new(pool: Pool, parts: &GatedDeltaParts<'_>) -> PyResult<PackedGatedDelta> {
        let parameters = Parameters {
            conv: parts.conv.elements("conv")?,
            decay: parts.decay.elements("decay")?,
            decay_bias: parts.decay_bias.elements("decay_bias")?,
            norm: parts.norm.elements("norm")?,
            eps: parts.eps,
        };
        let net = GatedDelta::new(parts.num_key_heads, parts.key_dim, &parameters).map_err(PyValueError::new_err)?;
        Ok(PackedGatedDelta { pool, net: Arc::new(net) })
    }
}

/// The address and the number of the slots of a layer.
pub(super) fn slots_of(net: &GatedDelta, slots: &Rows<'_>) -> PyResult<(Target<f32>, usize)> {
    slots.expect("slots", [slots.num_rows, net.slot_floats()], f32::DTYPE)?;
    Ok((Target::new(slots.target("slots")?.at(0).cast()), slots.num_rows))
}

/// The address of the slot of each sequence, which are different and below `num_slots`.
pub(super) fn slots_of_sequences(
    slots: &View<'_, i64, 1>,
    num_sequences: usize,
    num_slots: usize,
) -> PyResult<Source<i64>> {
    let address = slots.expect("state_slots", [num_sequences])?.indices("state_slots", num_slots, "slots")?;
    let mut sorted = slots.elements("state_slots")?.to_vec();
    sorted.sort_unstable();
    require(sorted.windows(2).all(|pair| pair[0] < pair[1]), || {
        "state_slots has a slot twice, each sequence must have its own".to_owned()
    })?;
    Ok(address)
}

#[pymethods]
impl PackedGatedDelta {
    /// Advances sequences by rows of mixed [rows, queries + keys + values + gates] and rates [rows, 2 * heads], to output
    /// [rows, heads * value_dim]. query_starts [sequences + 1], context_lens [sequences], state_slots [sequences]: their rows, lengths
    /// behind these, and slots.
    #[expect(clippy::too_many_arguments, reason = "the tensors of a step")]
    fn apply(
        &self,
        py: Python<'_>,
        mixed: View<'_, Element, 2>,
        rates: View<'_, Element, 2>,
        slots: Rows<'_>,
        query_starts: View<'_, i32, 1>,
        context_lens: View<'_, i32, 1>,
        state_slots: View<'_, i64, 1>,
        output: View<'_, Element, 2>,
    ) -> PyResult<()> {
        let ([num_rows, _], [num_sequences]) = (mixed.shape(), context_lens.shape());
        let (slots, num_slots) = slots_of(&self.net, &slots)?;
        let starts = query_starts.expect("query_starts", [num_sequences + 1])?.elements("query_starts")?;
        let is_whole = starts[0] == 0 && starts[num_sequences] as usize == num_rows;
        require(is_whole && starts.is_sorted(), || {
            format!("query_starts is {starts:?}, must ascend from 0 to {num_rows}")
        })?;
        let counts = starts.windows(2).map(|pair| pair[1] - pair[0]);
        let mut lens = context_lens.elements("context_lens")?.iter().zip(counts);
        require(lens.all(|(&len, count)| len >= count), || "a context is shorter than its new rows".to_owned())?;
        let sequences = Sequences {
            query_starts: query_starts.source("query_starts")?,
            context_lens: context_lens.source("context_lens")?,
            slots: slots_of_sequences(&state_slots, num_sequences, num_slots)?,
            num_sequences,
        };
        let operands = Operands {
            mixed: mixed.expect("mixed", [num_rows, self.net.mixed_width()])?.source("mixed")?,
            rates: rates.expect("rates", [num_rows, self.net.rates_width()])?.source("rates")?,
            slots,
            output: output.expect("output", [num_rows, self.net.value_width()])?.target("output")?,
        };
        // SAFETY: the views have the sizes of the layer; each sequence has a slot of its own.
        maybe_detached(py, num_rows * self.net.work(), || unsafe { self.net.run(&self.pool, &sequences, &operands) });
        Ok(())
    }
}

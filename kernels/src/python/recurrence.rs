//! Layers that keep a state of each sequence.

use super::view::{Number, Rows, View};
use super::{maybe_detached, require};
use crate::element::Element;
use crate::pool::{Pool, Source, Target};
use crate::recurrence::{self, GatedDelta, Mamba2, MambaConv, MambaScan, Operands, Recurrence, Sequences, ShortConv};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// What a layer computes between its projections, packed.
#[pyclass(frozen)]
pub(super) struct PackedRecurrence {
    pool: Pool,
    pub(super) net: Arc<dyn Recurrence>,
}

impl PackedRecurrence {
    pub(super) fn new(pool: Pool, net: impl Recurrence + 'static) -> PackedRecurrence {
        PackedRecurrence { pool, net: Arc::new(net) }
    }
}

/// The attributes of Python's `GatedDelta` that the kernels know.
#[derive(FromPyObject)]
pub(super) struct GatedDeltaParts<'py> {
    num_key_heads: usize,
    key_dim: usize,
    key_heads: View<'py, i64, 1>,
    conv: View<'py, f32, 2>,
    decay: View<'py, f32, 1>,
    decay_bias: View<'py, f32, 1>,
    norm: View<'py, f32, 1>,
    eps: f32,
    strength: f32,
    decay_floor: Option<f32>,
    has_sigmoid_gates: bool,
    is_apart: bool,
}

impl GatedDeltaParts<'_> {
    pub(super) fn pack(&self) -> PyResult<GatedDelta> {
        let parts = recurrence::GatedDeltaParts {
            num_key_heads: self.num_key_heads,
            key_dim: self.key_dim,
            key_heads: self.key_heads.elements("key_heads")?,
            conv: self.conv.elements("conv")?,
            decay: self.decay.elements("decay")?,
            decay_bias: self.decay_bias.elements("decay_bias")?,
            norm: self.norm.elements("norm")?,
            eps: self.eps,
            strength: self.strength,
            decay_floor: self.decay_floor,
            has_sigmoid_gates: self.has_sigmoid_gates,
            is_apart: self.is_apart,
        };
        GatedDelta::new(&parts).map_err(PyValueError::new_err)
    }
}

/// The attributes of Python's `ShortConv`.
#[derive(FromPyObject)]
pub(super) struct ShortConvParts<'py> {
    conv: View<'py, f32, 2>,
    bias: View<'py, f32, 1>,
}

impl ShortConvParts<'_> {
    pub(super) fn pack(&self) -> PyResult<ShortConv> {
        ShortConv::new(self.conv.elements("conv")?, self.bias.elements("bias")?).map_err(PyValueError::new_err)
    }
}

/// The attributes of Python's `MambaConv`.
#[derive(FromPyObject)]
pub(super) struct MambaConvParts<'py> {
    conv: View<'py, f32, 2>,
    bias: View<'py, f32, 1>,
}

impl MambaConvParts<'_> {
    pub(super) fn pack(&self) -> PyResult<MambaConv> {
        MambaConv::new(self.conv.elements("conv")?, self.bias.elements("bias")?).map_err(PyValueError::new_err)
    }
}

/// The attributes of Python's `MambaScan`.
#[derive(FromPyObject)]
pub(super) struct MambaScanParts<'py> {
    part_channels: usize,
    decay: View<'py, f32, 2>,
    dt_bias: View<'py, f32, 1>,
    skip: View<'py, f32, 1>,
}

impl MambaScanParts<'_> {
    pub(super) fn pack(&self) -> PyResult<MambaScan> {
        let (decay, dt_bias) = (self.decay.elements("decay")?, self.dt_bias.elements("dt_bias")?);
        MambaScan::new(self.part_channels, decay, dt_bias, self.skip.elements("skip")?).map_err(PyValueError::new_err)
    }
}

/// The attributes of Python's `Mamba2` that the kernels know.
#[derive(FromPyObject)]
pub(super) struct Mamba2Parts<'py> {
    num_groups: usize,
    block_heads: usize,
    state_dim: usize,
    head_dim: usize,
    conv: Option<View<'py, f32, 2>>,
    conv_bias: Option<View<'py, f32, 1>>,
    decay: View<'py, f32, 1>,
    dt_bias: View<'py, f32, 1>,
    skip: View<'py, f32, 1>,
    dt_limits: (f32, f32),
    gate_factor: f32,
    dt_factor: f32,
    has_gates: bool,
    has_dt: bool,
}

impl Mamba2Parts<'_> {
    pub(super) fn pack(&self) -> PyResult<Mamba2> {
        let parts = recurrence::Mamba2Parts {
            num_groups: self.num_groups,
            block_heads: self.block_heads,
            state_dim: self.state_dim,
            head_dim: self.head_dim,
            conv: self.conv.as_ref().map_or(Ok(&[][..]), |conv| conv.elements("conv"))?,
            conv_bias: self.conv_bias.as_ref().map_or(Ok(&[][..]), |bias| bias.elements("conv_bias"))?,
            decay: self.decay.elements("decay")?,
            dt_bias: self.dt_bias.elements("dt_bias")?,
            skip: self.skip.elements("skip")?,
            dt_limits: self.dt_limits,
            gate_factor: self.gate_factor,
            dt_factor: self.dt_factor,
            has_gates: self.has_gates,
            has_dt: self.has_dt,
        };
        Mamba2::new(&parts).map_err(PyValueError::new_err)
    }
}

/// The address and the number of the slots of a layer.
pub(super) fn slots_of(net: &dyn Recurrence, slots: &Rows<'_>) -> PyResult<(Target<f32>, usize)> {
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
impl PackedRecurrence {
    /// Advances sequences by rows of inputs, to output [rows, columns]. query_starts [sequences + 1], context_lens [sequences], state_slots [sequences]: their rows, lengths
    /// behind these, and slots.
    #[expect(clippy::too_many_arguments, reason = "the tensors of a step")]
    fn apply(
        &self,
        py: Python<'_>,
        inputs: Vec<View<'_, Element, 2>>,
        slots: Rows<'_>,
        query_starts: View<'_, i32, 1>,
        context_lens: View<'_, i32, 1>,
        state_slots: View<'_, i64, 1>,
        output: View<'_, Element, 2>,
    ) -> PyResult<()> {
        let ([num_rows, _], [num_sequences]) = (output.shape(), context_lens.shape());
        let (slots, num_slots) = slots_of(self.net.as_ref(), &slots)?;
        let widths = self.net.input_widths();
        require(inputs.len() == widths.len(), || format!("{} inputs, must be {}", inputs.len(), widths.len()))?;
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
        let source = |(input, width): (&View<'_, Element, 2>, &usize)| {
            input.expect("input", [num_rows, *width])?.source("input")
        };
        let inputs = inputs.iter().zip(widths).map(source).collect::<PyResult<Vec<_>>>()?;
        let operands = Operands {
            inputs: &inputs,
            slots,
            output: output.expect("output", [num_rows, self.net.output_width()])?.target("output")?,
        };
        // SAFETY: the views have the sizes of the layer; each sequence has a slot of its own.
        maybe_detached(py, num_rows * self.net.work(), || unsafe { self.net.run(&self.pool, &sequences, &operands) });
        Ok(())
    }
}

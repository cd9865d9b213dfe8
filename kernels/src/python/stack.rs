//! All layers of a decoder in one call.

use super::activation::Activation;
use super::adapter::{AdaptedRows, adapters_of};
use super::attention::{Batch, PagedAttention, cache_of};
use super::collective::{Collective, error_of};
use super::linear::{PackedLinear, WideLinear};
use super::norm::PackedNorm;
use super::recurrence::{PackedRecurrence, slots_of, slots_of_sequences};
use super::routing::Routing;
use super::view::{Rows, View};
use super::{Kernels, pairs, require};
use crate::attention::{BLOCK, KvScales};
use crate::element::Element;
use crate::linear::Combine;
use crate::low_rank;
use crate::pool::{Pool, Source, Target};
use crate::stack::{self, Cache, Exchange, Expert, Experts, Register, Rotation, Shared, Step, StepAdapters};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

impl<'py> FromPyObject<'_, 'py> for Register {
    type Error = PyErr;

    fn extract(name: Borrowed<'_, 'py, PyAny>) -> PyResult<Register> {
        Ok(match name.extract::<&str>()? {
            "residual" => Register::Residual,
            "normed" => Register::Normed,
            "qkv" => Register::Qkv,
            "attended" => Register::Attended,
            "gated_qkv" => Register::GatedQkv,
            "gates" => Register::Gates,
            "mixed" => Register::Mixed,
            "convolved" => Register::Convolved,
            "rates" => Register::Rates,
            "steps" => Register::Steps,
            "decays" => Register::Decays,
            "latents" => Register::Latents,
            "query_latent" => Register::QueryLatent,
            "queries" => Register::Queries,
            "unpadded" => Register::Unpadded,
            "values" => Register::Values,
            "inner" => Register::Inner,
            "activated" => Register::Activated,
            "projected" => Register::Projected,
            "sum" => Register::Sum,
            "gathered" => Register::Gathered,
            "part" => Register::Part,
            "ordered" => Register::Ordered,
            "logits" => Register::Logits,
            "shared" => Register::Shared,
            "gate" => Register::Gate,
            "output" => Register::Output,
            other => return Err(PyValueError::new_err(format!("there is no register {other:?}"))),
        })
    }
}

/// A stack that is being written: each method appends an operation on named registers, or raises ValueError if it does not fit.
#[pyclass]
pub(super) struct Program {
    /// `None` when the stack is finished.
    program: Option<stack::Program>,
    /// The tensors whose addresses the program has.
    tensors: Vec<Py<PyAny>>,
}

impl Program {
    fn append(&mut self, operation: impl FnOnce(&mut stack::Program) -> Result<(), String>) -> PyResult<()> {
        let program = self.program.as_mut().ok_or_else(|| PyValueError::new_err("the stack is finished"))?;
        operation(program).map_err(PyValueError::new_err)
    }
}

#[pymethods]
impl Program {
    /// A stack over residuals [tokens, hidden].
    #[new]
    fn new(hidden: usize) -> Program {
        Program { program: Some(stack::Program::new(hidden)), tensors: Vec::new() }
    }

    /// target = linear(source), or target += linear(source), or, if `apart`, the gates and ups of a gated layer.
    #[pyo3(signature = (linear, source, target, adds=false, apart=false))]
    fn linear(
        &mut self,
        linear: PyRef<'_, PackedLinear>,
        source: Register,
        target: Register,
        adds: bool,
        apart: bool,
    ) -> PyResult<()> {
        let combine = match (adds, apart) {
            (false, false) => Combine::Store,
            (true, false) => Combine::Add,
            (false, true) => Combine::Apart,
            (true, true) => return Err(PyValueError::new_err("gates and ups cannot be added to a register")),
        };
        self.append(|program| program.linear(Arc::clone(&linear.packed), source, target, combine))
    }

    /// Adds to target, a layer's product with source, what the rows' adapters add to that layer at site `site`. heads:
    /// number of heads, and the columns of each in source and in target; each head has a layer and a site.
    #[pyo3(signature = (site, source, target, heads=None))]
    fn adapt(
        &mut self,
        site: usize,
        source: Register,
        target: Register,
        heads: Option<(usize, [usize; 2])>,
    ) -> PyResult<()> {
        self.append(|program| program.adapt(site, source, target, heads))
    }

    /// Gives a register a width; `heads` and `copy` write its columns.
    fn reserve(&mut self, register: Register, width: usize) -> PyResult<()> {
        self.append(|program| program.reserve(register, width))
    }

    /// target = a dense linear layer of each head, whose inputs follow each other in source, and whose results begin `step` columns apart.
    fn heads(
        &mut self,
        linears: Vec<PyRef<'_, PackedLinear>>,
        source: Register,
        target: Register,
        step: usize,
    ) -> PyResult<()> {
        let linears = linears.iter().map(|linear| Arc::clone(&linear.packed)).collect();
        self.append(|program| program.heads(linears, source, target, step))
    }

    /// Copies `count` pieces of `width` columns; source, target: a register, the first piece's column, and the distance to the next one.
    fn copy(
        &mut self,
        source: (Register, usize, usize),
        target: (Register, usize, usize),
        count: usize,
        width: usize,
    ) -> PyResult<()> {
        self.append(|program| program.copy(source, target, count, width))
    }

    /// target = `count` heads of `width` columns of source, each followed by zeros up to `step` columns.
    fn pad(&mut self, source: Register, target: Register, count: usize, width: usize, step: usize) -> PyResult<()> {
        self.append(|program| program.pad(source, target, count, width, step))
    }

    /// Column i of target becomes column `order[i]` of source.
    fn reorder(&mut self, order: Vec<u32>, source: Register, target: Register) -> PyResult<()> {
        self.append(|program| program.reorder(order.into(), source, target))
    }

    /// target = norm(source), which may be the same.
    fn norm(&mut self, norm: PyRef<'_, PackedNorm>, source: Register, target: Register) -> PyResult<()> {
        self.append(|program| program.norm(Arc::clone(&norm.packed), source, target))
    }

    /// Norms groups of columns in place, from column `first` on.
    fn norm_heads(
        &mut self,
        norm: PyRef<'_, PackedNorm>,
        register: Register,
        first: usize,
        num_groups: usize,
    ) -> PyResult<()> {
        self.append(|program| program.norm_heads(Arc::clone(&norm.packed), register, first, num_groups))
    }

    /// target = activation(source)
    fn activate(&mut self, activation: PyRef<'_, Activation>, source: Register, target: Register) -> PyResult<()> {
        self.append(|program| program.activate(activation.activation, source, target))
    }

    /// register *= factor
    fn scale(&mut self, register: Register, factor: f32) -> PyResult<()> {
        self.append(|program| program.scale(register, factor))
    }

    /// Clamps a register to ± `bound`.
    fn clamp(&mut self, register: Register, bound: f32) -> PyResult<()> {
        self.append(|program| program.clamp(register, bound))
    }

    /// target += source
    fn add(&mut self, source: Register, target: Register) -> PyResult<()> {
        self.append(|program| program.add(source, target))
    }

    /// Rotates queries and keys. cos, sin [positions, rotary_dim / 2]; interleaved: as in `Kernels.rotate`.
    fn rotate(
        &mut self,
        attention: PyRef<'_, PagedAttention>,
        cos: View<'_, f32, 2>,
        sin: View<'_, f32, 2>,
        interleaved: bool,
    ) -> PyResult<()> {
        let [num_positions, half] = cos.shape();
        let sin_address = sin.expect("sin", cos.shape())?.source("sin")?;
        let pairs = pairs(interleaved);
        let rotation = Rotation { cos: cos.source("cos")?, sin: sin_address, num_positions, half, pairs };
        self.tensors.extend([cos.tensor(), sin.tensor()]);
        self.append(|program| program.rotate(&attention.attention, rotation))
    }

    /// Multiplies the queries in "qkv" by the factor of their position: factors[(position + 1) / period].
    fn scale_queries(
        &mut self,
        attention: PyRef<'_, PagedAttention>,
        factors: View<'_, f32, 1>,
        period: usize,
    ) -> PyResult<()> {
        let [num_factors] = factors.shape();
        let given = (factors.source("factors")?, num_factors);
        self.tensors.push(factors.tensor());
        self.append(|program| program.scale_queries(&attention.attention, given, period))
    }

    /// Stores keys and values in the step's next cache. scales: as in `PagedAttention.write`.
    #[pyo3(signature = (attention, scales=None))]
    fn write(&mut self, attention: PyRef<'_, PagedAttention>, scales: Option<KvScales>) -> PyResult<()> {
        let scales = attention.scales(scales)?;
        self.append(|program| program.write(&attention.attention, scales))
    }

    /// Attention over the cache that was written last. sinks [heads] or None.
    #[pyo3(signature = (sinks=None))]
    fn attend(&mut self, sinks: Option<View<'_, Element, 1>>) -> PyResult<()> {
        let address = match &sinks {
            Some(sinks) => Some((sinks.source("sinks")?, sinks.shape()[0])),
            None => None,
        };
        self.tensors.extend(sinks.map(|sinks| sinks.tensor()));
        self.append(|program| program.attend(address))
    }

    /// target = what a layer makes of sources, with the states in the step's next cache.
    fn advance_states(
        &mut self,
        net: PyRef<'_, PackedRecurrence>,
        sources: Vec<Register>,
        target: Register,
    ) -> PyResult<()> {
        self.append(|program| program.advance_states(Arc::clone(&net.net), sources, target))
    }

    /// target *= activation(source), which overwrites source.
    fn gate(&mut self, activation: PyRef<'_, Activation>, source: Register, target: Register) -> PyResult<()> {
        self.append(|program| program.gate(activation.activation, source, target))
    }

    /// target = the columns of source on all ranks side by side; widths: the columns of each rank.
    fn gather(
        &mut self,
        collective: PyRef<'_, Collective>,
        widths: Vec<usize>,
        source: Register,
        target: Register,
    ) -> PyResult<()> {
        self.append(|program| program.gather(Arc::clone(&collective.0), &widths, source, target))
    }

    /// target = the weighted sum of the experts of each row of source, routed by the router, or by "logits" if it is None, plus "shared" if `shared` is "plain", or times
    /// the sigmoid of "gate" if it is "gated". experts: for each of this rank, gate and up, and down; activation: of the former, if they
    /// are not gated, or adapters change their products. ranks: the collective and the numbers of experts of each rank; None: there is one
    /// rank. first_site: of the sites of this rank's experts, two for each; None: adapters change none.
    #[expect(clippy::too_many_arguments, reason = "the parts of a mixture of experts")]
    fn experts(
        &mut self,
        routing: PyRef<'_, Routing>,
        router: Option<PyRef<'_, WideLinear>>,
        experts: Vec<(PyRef<'_, PackedLinear>, PyRef<'_, PackedLinear>)>,
        activation: Option<PyRef<'_, Activation>>,
        ranks: Option<(PyRef<'_, Collective>, Vec<usize>)>,
        shared: Option<&str>,
        first_site: Option<usize>,
        source: Register,
        target: Register,
    ) -> PyResult<()> {
        let shared = match shared {
            None => Shared::Nothing,
            Some("plain") => Shared::Plain,
            Some("gated") => Shared::Gated,
            Some(other) => {
                return Err(PyValueError::new_err(format!("a shared expert is plain or gated, not {other:?}")));
            }
        };
        let experts = experts
            .iter()
            .map(|(gate_up, down)| Expert { gate_up: Arc::clone(&gate_up.packed), down: Arc::clone(&down.packed) });
        let exchange = ranks.map(|(collective, counts)| {
            let mut end = 0usize;
            let next = |count: usize| {
                let start = end;
                end = end.saturating_add(count);
                start..end
            };
            Exchange { collective: Arc::clone(&collective.0), experts: counts.into_iter().map(next).collect() }
        });
        let experts = Experts {
            routing: routing.routing.clone(),
            router: router.map(|router| Arc::clone(&router.linear)),
            experts: experts.collect(),
            exchange,
            activation: activation.map(|activation| activation.activation),
            first_site,
            shared,
            first_end: 0,
            from: source,
            to: target,
        };
        self.append(|program| program.experts(experts))
    }

    /// Keeps the sampled rows of these registers only.
    fn select(&mut self, registers: Vec<Register>) -> PyResult<()> {
        self.append(|program| program.select(&registers))
    }

    /// The stack, which runs on the threads of these kernels.
    fn finish(&mut self, kernels: PyRef<'_, Kernels>) -> PyResult<Stack> {
        let program = self.program.take().ok_or_else(|| PyValueError::new_err("the stack is finished"))?;
        let stack = program.finish().map_err(PyValueError::new_err)?;
        Ok(Stack { pool: kernels.pool, stack, _tensors: std::mem::take(&mut self.tensors) })
    }
}

/// All layers of a decoder.
#[pyclass(frozen)]
pub(super) struct Stack {
    pool: Pool,
    stack: stack::Stack,
    /// The tensors whose addresses the stack has.
    _tensors: Vec<Py<PyAny>>,
}

#[pymethods]
impl Stack {
    /// Runs the step's embeddings, residual [tokens, hidden], which are overwritten, and writes the normed output of the sampled rows
    /// to output [samples, hidden]. positions, slots [tokens]; sample_rows [samples]; a cache for each layer. adapted: adapters, and for
    /// each token [tokens] the index of its adapter among them, or -1. state_slots [sequences]: of their states, if layers keep any. Raises RuntimeError if another rank's process has ended.
    #[pyo3(signature = (residual, positions, slots, batch, caches, sample_rows, output, adapted=None, state_slots=None))]
    #[expect(clippy::too_many_arguments, reason = "the tensors of a step")]
    fn run(
        &self,
        py: Python<'_>,
        residual: View<'_, Element, 2>,
        positions: View<'_, i64, 1>,
        slots: View<'_, i64, 1>,
        batch: PyRef<'_, Batch>,
        caches: Vec<Rows<'_>>,
        sample_rows: View<'_, i64, 1>,
        output: View<'_, Element, 2>,
        adapted: Option<AdaptedRows<'_>>,
        state_slots: Option<View<'_, i64, 1>>,
    ) -> PyResult<()> {
        let (num_tokens, [num_samples], hidden) = (batch.num_tokens, sample_rows.shape(), self.stack.hidden());
        let kinds = self.stack.caches();
        require(caches.len() == kinds.len(), || format!("{} caches for {} layers", caches.len(), kinds.len()))?;
        require(num_samples <= num_tokens, || format!("sample_rows has {num_samples} rows of {num_tokens}"))?;
        // Without layers that have any, neither bounds what a step may name.
        let (mut num_blocks, mut num_slots) = (usize::MAX / BLOCK, None);
        let addresses = kinds.iter().zip(&caches).map(|(kind, cache)| match kind {
            Cache::Kv { attention, .. } => {
                let (address, count) = cache_of(self.stack.attention(*attention), cache)?;
                num_blocks = num_blocks.min(count);
                Ok(address)
            }
            Cache::States(net) => {
                let (address, count) = slots_of(net.as_ref(), cache)?;
                num_slots = Some(num_slots.map_or(count, |least: usize| least.min(count)));
                Ok(Target::new(address.at(0).cast()))
            }
        });
        let caches: Vec<_> = addresses.collect::<PyResult<_>>()?;
        batch.expect_blocks(num_blocks)?;
        let state_slots_of = match (num_slots, &state_slots) {
            (None, _) => Source::new(std::ptr::null()),
            (Some(count), Some(slots)) => slots_of_sequences(slots, batch.as_kernel().num_sequences, count)?,
            (Some(_), None) => return Err(PyValueError::new_err("state_slots is None, must have a slot per sequence")),
        };
        let adapted = adapted.as_ref().map(|adapted| adapters_of(adapted, num_tokens)).transpose()?;
        let (adapters, of_tokens) = adapted.unwrap_or_default();
        require(adapters.iter().all(|adapter| self.stack.takes(adapter)), || {
            "an adapter does not have the sites of the stack".to_owned()
        })?;
        let sample_rows_of = sample_rows.indices("sample_rows", num_tokens, "rows")?;
        let of_samples = sample_rows.elements("sample_rows")?.iter().map(|&row| of_tokens.get(row as usize).copied());
        let sampled_runs = low_rank::runs(of_samples.map(Option::flatten));
        let runs = low_rank::runs(of_tokens.iter().copied());
        let step = Step {
            residual: residual.expect("residual", [num_tokens, hidden])?.target("residual")?,
            num_tokens,
            positions: positions.expect("positions", [num_tokens])?.indices(
                "positions",
                self.stack.num_positions,
                "positions",
            )?,
            slots: slots.expect("slots", [num_tokens])?.indices("slots", num_blocks * BLOCK, "slots")?,
            batch: batch.as_kernel(),
            caches: &caches,
            state_slots: state_slots_of,
            sample_rows: sample_rows_of,
            num_samples,
            output: output.expect("output", [num_samples, hidden])?.target("output")?,
            adapters: StepAdapters { adapters: &adapters, runs, sampled_runs },
        };
        // SAFETY: the views have the sizes of the layers and of the batch; positions, slots, rows and block ids are inside their tables
        // and caches. The references to tensors and batch live until the call ends.
        py.detach(|| unsafe { self.stack.run(&self.pool, &step) }).map_err(|failure| error_of(&failure))
    }
}

//! The Python module `penstock_kernels`. Tensors arrive as addresses and sizes; `penstock_server` checks them before they get here,
//! so every method here is as unsafe as the kernel behind it.

use crate::attention::{
    Alibi, Attention, BLOCK, Batch, DistanceBias, Layout, MAX_DIM, NewTokens, Operands, Part, Sight,
};
use crate::linear::{self, Output, Rows, Weight};
use crate::memory::{self, Arena};
use crate::norm::RmsNorm;
use crate::pool::{Executor, GompParallel, Pool, Source, Target};
use crate::rotate::{Angles, Heads};
use crate::sample::Logits;
use crate::stack::{self, Step};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::sync::Arc;

/// Multiply-adds (or so) from which a call lets other Python threads run. PERF: below, it is some 50 µs at most, and waiting
/// for the lock afterwards can cost a switch interval (5 ms) for each of the hundreds of calls of a step.
const RELEASE_FROM: usize = 1 << 23;

/// Multiply-adds of attention up to which one thread is done before a second has started.
const SERIAL_BELOW: usize = 1 << 17;

fn maybe_detached(py: Python<'_>, work: usize, run: impl FnOnce() + Send) {
    if work >= RELEASE_FROM { py.detach(run) } else { run() }
}

fn source<T>(address: usize) -> Source<T> {
    Source::new(address as *const T)
}

fn target<T>(address: usize) -> Target<T> {
    Target::new(address as *mut T)
}

/// Where the kernels run: a number of threads, and the address of libgomp's `GOMP_parallel` (none: on the calling thread alone).
#[pyclass(frozen)]
struct Kernels {
    pool: Pool,
    arena: Arena,
}

#[pymethods]
impl Kernels {
    #[new]
    fn new(num_threads: usize, gomp_parallel: Option<usize>) -> PyResult<Kernels> {
        if !crate::supported() {
            return Err(PyRuntimeError::new_err("this CPU has no AVX-512 BF16"));
        }
        let pool = match gomp_parallel {
            None | Some(0) => Pool::single(),
            Some(address) => {
                // SAFETY: the caller vouches that this is the address of `GOMP_parallel`; it is not null.
                Pool::new(num_threads, unsafe { std::mem::transmute::<usize, GompParallel>(address) })
            }
        };
        Ok(Kernels { pool, arena: Arena::default() })
    }

    /// A weight [out_features, in_features] of zeros, and a bias or None, which is not needed afterwards.
    fn linear(
        &self,
        out_features: usize,
        in_features: usize,
        bias: Option<usize>,
        gated: bool,
    ) -> PyResult<PackedLinear> {
        if gated && out_features % 2 == 1 {
            return Err(PyValueError::new_err(format!(
                "a gated layer has {out_features} rows, must be an even number"
            )));
        }
        let weight = Weight { bias: bias.unwrap_or(0) as *const u16, out_features, in_features, gated };
        // SAFETY: the caller vouches for the address.
        let packed = unsafe { linear::PackedLinear::new(&self.arena, weight) };
        let packed = packed.map_err(|error| PyOSError::new_err(format!("no memory for a packed weight: {error}")))?;
        Ok(PackedLinear { pool: self.pool, packed: Arc::new(packed) })
    }

    fn rms_norm(&self, x: usize, weight: usize, output: usize, num_rows: usize, dim: usize, eps: f32) {
        let norm = RmsNorm { weight: source(weight), eps, dim, num_rows };
        // SAFETY: the caller vouches for the addresses.
        unsafe { norm.apply(&self.pool, source(x), target(output)) };
    }

    #[expect(clippy::too_many_arguments, reason = "tensors cross as addresses and sizes")]
    fn add_rms_norm(
        &self,
        x: usize,
        residual: usize,
        weight: usize,
        output: usize,
        num_rows: usize,
        dim: usize,
        eps: f32,
    ) {
        let norm = RmsNorm { weight: source(weight), eps, dim, num_rows };
        // SAFETY: the caller vouches for the addresses.
        unsafe { norm.add_apply(&self.pool, source(x), target(residual), target(output)) };
    }

    /// `queries` and `keys` are (address, stride, heads); `angles` (cos, sin, positions, half).
    fn rotate(
        &self,
        queries: (usize, usize, usize),
        keys: (usize, usize, usize),
        angles: (usize, usize, usize, usize),
        head_dim: usize,
        num_tokens: usize,
    ) {
        // SAFETY: the caller vouches for the addresses.
        unsafe {
            crate::rotate::rotate(
                &self.pool,
                &to_angles(angles),
                [to_heads(queries, head_dim), to_heads(keys, head_dim)],
                num_tokens,
            );
        }
    }

    fn silu_multiply(&self, gate_up: usize, output: usize, dim: usize, num_rows: usize) {
        // SAFETY: the caller vouches for the addresses.
        unsafe { crate::gate::silu_multiply(&self.pool, source(gate_up), target(output), dim, num_rows) };
    }

    /// A function of each number: `table` has its results by their argument's bits, `x` is (address, stride, rows).
    fn look_up(&self, table: usize, x: (usize, usize, usize), output: usize, dim: usize) {
        let (address, stride, num_rows) = x;
        // SAFETY: the caller vouches for the addresses.
        unsafe {
            let rows = (source(address), stride);
            crate::table::look_up(&self.pool, source(table), rows, target(output), dim, num_rows);
        }
    }

    /// `logits` is (address, rows, vocab); `masks` the address of the rows' masks' addresses, or None.
    fn argmax_logprob(&self, logits: (usize, usize, usize), masks: Option<usize>, ids: usize, logprobs: usize) {
        let (address, num_rows, vocab) = logits;
        let logits = Logits { address: source(address), num_rows, vocab, masks: source(masks.unwrap_or(0)) };
        // SAFETY: the caller vouches for the addresses.
        unsafe { crate::sample::argmax_logprob(&self.pool, &logits, target(ids), target(logprobs)) };
    }

    /// Attention of this shape.
    fn attention(&self, shape: AttentionShape) -> PyResult<PagedAttention> {
        let AttentionShape { num_heads, num_kv_heads, head_dim, result_dim, values_in_keys, scale, .. } = shape;
        let layout = Layout { num_heads, num_kv_heads, head_dim, value_dim: result_dim, values_in_keys, scale };
        let AttentionShape { sight, soft_cap, alibi, has_bias, .. } = shape;
        let attention = Attention { layout, sight, soft_cap, alibi, has_bias };
        Ok(PagedAttention { pool: self.pool, attention: attention.checked().map_err(PyValueError::new_err)? })
    }
}

/// The attributes of `AttentionShape` that the kernels know.
#[derive(FromPyObject)]
struct AttentionShape {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    result_dim: usize,
    values_in_keys: bool,
    scale: f32,
    sight: Sight,
    soft_cap: Option<f32>,
    alibi: Option<Alibi>,
    has_bias: bool,
}

impl<'py> FromPyObject<'_, 'py> for Part {
    type Error = PyErr;

    fn extract(part: Borrowed<'_, 'py, PyAny>) -> PyResult<Part> {
        match part.extract::<&str>()? {
            "context" => Ok(Part::Context),
            "source" => Ok(Part::Source),
            "answer" => Ok(Part::Answer),
            other => Err(PyValueError::new_err(format!("part is {other:?}, must be context, source or answer"))),
        }
    }
}

fn to_heads((address, stride, num_heads): (usize, usize, usize), head_dim: usize) -> Heads {
    Heads { address: target(address), stride, num_heads, head_dim }
}

fn to_angles((cos, sin, positions, half): (usize, usize, usize, usize)) -> Angles {
    Angles { cos: source(cos), sin: source(sin), positions: source(positions), half }
}

/// A linear layer's weight, packed.
#[pyclass(frozen)]
struct PackedLinear {
    pool: Pool,
    packed: Arc<linear::PackedLinear>,
}

impl PackedLinear {
    fn run(&self, py: Python<'_>, x: usize, stride: usize, num_rows: usize, output: Output) {
        let rows = Rows { address: source(x), stride, num_rows };
        let work = self.packed.out_features() * self.packed.in_features() * (num_rows + 4);
        // SAFETY: the caller vouches for the addresses.
        maybe_detached(py, work, || unsafe { self.packed.apply(&self.pool, rows, output) });
    }
}

#[pymethods]
impl PackedLinear {
    /// Fill rows of the weight from row `first` on. Nobody may apply the layer meanwhile.
    fn fill(&self, py: Python<'_>, rows: usize, first: usize, num_rows: usize) {
        // SAFETY: the caller vouches for the address and the row numbers.
        py.detach(|| unsafe { self.packed.fill(&self.pool, source(rows), first, num_rows) });
    }

    /// output = x·Wᵀ + bias, or silu(gate)·up when gated. Rows of x are `stride` numbers apart, rows of output contiguous.
    fn apply(&self, py: Python<'_>, x: usize, stride: usize, num_rows: usize, output: usize) {
        self.run(py, x, stride, num_rows, Output::Store(target(output)));
    }

    /// output[i] = the weight's row `rows[i]` (int64, each below its number of rows). Not for gated layers.
    fn copy_rows(&self, rows: usize, num_rows: usize, output: usize) {
        // SAFETY: the caller vouches for the addresses and the row numbers.
        unsafe { self.packed.copy_rows(&self.pool, source(rows), num_rows, target(output)) };
    }

    /// residual += x·Wᵀ + bias. Not for gated layers.
    fn add_to(&self, py: Python<'_>, x: usize, stride: usize, num_rows: usize, residual: usize) {
        self.run(py, x, stride, num_rows, Output::Add(target(residual)));
    }
}

/// All layers of a decoder. Norm weights, cosines and sines stay the caller's and must live as long.
#[pyclass(frozen)]
struct Stack {
    pool: Pool,
    stack: stack::Stack,
}

/// (attention norm, qkv, output, MLP norm, gate and up, down)
type LayerParts<'py> = (
    usize,
    PyRef<'py, PackedLinear>,
    PyRef<'py, PackedLinear>,
    usize,
    PyRef<'py, PackedLinear>,
    PyRef<'py, PackedLinear>,
);

#[pymethods]
impl Stack {
    /// `rope` is (cos, sin, half).
    #[new]
    fn new(
        attention: PyRef<'_, PagedAttention>,
        layers: Vec<LayerParts<'_>>,
        final_norm: usize,
        rope: (usize, usize, usize),
        eps: f32,
    ) -> PyResult<Stack> {
        let layers = layers.into_iter().map(|(attention_norm, qkv, output, mlp_norm, gate_up, down)| stack::Layer {
            attention_norm: source(attention_norm),
            qkv: Arc::clone(&qkv.packed),
            output: Arc::clone(&output.packed),
            mlp_norm: source(mlp_norm),
            gate_up: Arc::clone(&gate_up.packed),
            down: Arc::clone(&down.packed),
        });
        let angles = (source(rope.0), source(rope.1), rope.2);
        let stack = stack::Stack::new(layers.collect(), source(final_norm), eps, attention.attention.clone(), angles);
        Ok(Stack { pool: attention.pool, stack: stack.map_err(PyValueError::new_err)? })
    }

    /// `tokens` is (residual, positions, slots, tokens), `samples` (rows, samples, output).
    fn run(
        &self,
        py: Python<'_>,
        tokens: (usize, usize, usize, usize),
        batch: BatchParts,
        caches: Vec<usize>,
        samples: (usize, usize, usize),
    ) -> PyResult<()> {
        let caches: Vec<Target<u16>> = caches.into_iter().map(target).collect();
        if caches.len() != self.stack.layers.len() {
            let (given, wanted) = (caches.len(), self.stack.layers.len());
            return Err(PyValueError::new_err(format!("{given} caches for {wanted} layers")));
        }
        let step = Step {
            residual: target(tokens.0),
            num_tokens: tokens.3,
            positions: source(tokens.1),
            slots: source(tokens.2),
            batch: to_batch(batch),
            caches: &caches,
            sample_rows: source(samples.0),
            num_samples: samples.1,
            output: target(samples.2),
        };
        // SAFETY: the caller vouches for the addresses.
        py.detach(|| unsafe { self.stack.run(&self.pool, &step) });
        Ok(())
    }
}

/// Paged attention of one shape.
#[pyclass(frozen)]
struct PagedAttention {
    pool: Pool,
    attention: Attention,
}

#[pymethods]
impl PagedAttention {
    /// Store tokens: `keys` and `values` are (address, stride).
    fn write(&self, cache: usize, keys: (usize, usize), values: (usize, usize), slots: usize, num_tokens: usize) {
        let tokens = new_tokens(keys, values, slots, num_tokens);
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.attention.layout.write(&self.pool, target(cache), tokens) };
    }

    /// `Kernels.rotate` and `write` in one.
    #[expect(clippy::too_many_arguments, reason = "tensors cross as addresses and sizes")]
    fn rotate_and_write(
        &self,
        cache: usize,
        queries: (usize, usize),
        keys: (usize, usize),
        values: (usize, usize),
        angles: (usize, usize, usize, usize),
        slots: usize,
        num_tokens: usize,
    ) {
        let layout = &self.attention.layout;
        let Layout { num_heads, num_kv_heads, head_dim, .. } = *layout;
        let heads =
            [to_heads((queries.0, queries.1, num_heads), head_dim), to_heads((keys.0, keys.1, num_kv_heads), head_dim)];
        let tokens = new_tokens(keys, values, slots, num_tokens);
        // SAFETY: the caller vouches for the addresses.
        unsafe {
            crate::rotate::rotate_and_write(&self.pool, &to_angles(angles), heads, layout, target(cache), tokens);
        }
    }

    /// Attend `queries` (address, stride). `sinks` is the address of a bf16 number for each head, or None; `bias` (address,
    /// reach) where the shape has one.
    #[expect(clippy::too_many_arguments, reason = "tensors cross as addresses and sizes")]
    fn attend(
        &self,
        py: Python<'_>,
        queries: (usize, usize),
        cache: usize,
        batch: BatchParts,
        sinks: Option<usize>,
        bias: Option<(usize, usize)>,
        output: usize,
        work_tokens: usize,
    ) {
        let batch = to_batch(batch);
        let operands = Operands {
            queries: source(queries.0),
            stride: queries.1,
            cache: source(cache),
            output: target(output),
            sinks: sinks.map(source),
            bias: bias.map(|(table, reach)| DistanceBias { table: source(table), reach }),
        };
        let Layout { num_heads, head_dim, .. } = self.attention.layout;
        let work = work_tokens * num_heads * head_dim;
        // SAFETY: the caller vouches for the addresses.
        maybe_detached(py, work, || unsafe {
            let executor = if work < SERIAL_BELOW { Pool::single() } else { self.pool };
            let plan = self.attention.plan(&batch, executor.num_threads());
            let mut room = vec![0.0; plan.room_floats()];
            self.attention.attend(&executor, &plan, &batch, &operands, Target::new(room.as_mut_ptr()));
        });
    }

    /// Numbers that a block takes.
    fn block_numbers(&self) -> usize {
        self.attention.layout.offset(1, 0)
    }
}

/// (query starts, context lengths, block tables, columns of them, sequences, source lengths or None)
type BatchParts = (usize, usize, usize, usize, usize, Option<usize>);

fn to_batch((starts, contexts, tables, max_blocks, num_sequences, source_lens): BatchParts) -> Batch {
    Batch {
        query_starts: source(starts),
        context_lens: source(contexts),
        block_tables: source(tables),
        max_blocks,
        num_sequences,
        source_lens: source_lens.map(source),
    }
}

fn new_tokens(keys: (usize, usize), values: (usize, usize), slots: usize, num_tokens: usize) -> NewTokens {
    NewTokens {
        keys: source(keys.0),
        keys_stride: keys.1,
        values: source(values.0),
        values_stride: values.1,
        slots: source(slots),
        num_tokens,
    }
}

/// Whether this CPU runs the kernels.
#[pyfunction]
fn supported() -> bool {
    crate::supported()
}

/// Ask for huge pages under memory that the caller owns.
#[pyfunction]
fn advise_huge_pages(address: usize, num_bytes: usize) {
    // SAFETY: the caller vouches for the range.
    unsafe { memory::advise_huge_pages(address as *mut u8, num_bytes) };
}

#[pymodule]
fn penstock_kernels(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("BLOCK_TOKENS", BLOCK)?;
    module.add("MAX_DIM", MAX_DIM)?;
    module.add_class::<Kernels>()?;
    module.add_class::<PackedLinear>()?;
    module.add_class::<PagedAttention>()?;
    module.add_class::<Stack>()?;
    module.add_function(wrap_pyfunction!(supported, module)?)?;
    module.add_function(wrap_pyfunction!(advise_huge_pages, module)?)
}

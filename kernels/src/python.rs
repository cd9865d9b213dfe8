//! The Python module of one build, `penstock_kernels.*.native`. Tensors arrive as typed views, which each method checks against each other before it calls a
//! kernel: a wrong tensor raises TypeError or ValueError and touches no memory.

mod activation;
mod adapter;
mod attention;
mod collective;
mod dlpack;
mod linear;
mod norm;
mod quantized;
mod recurrence;
mod routing;
mod stack;
mod view;

use crate::attention::{BLOCK, MAX_DIM};
use crate::cpu::Amx;
use crate::element::{self, Element};
use crate::memory::{self, Arena};
use crate::pool::{GompParallel, Pool};
use crate::rotate::{Angles, Heads, Pairs};
use crate::sample::Logits;
use crate::simd::{self, Float8};
use activation::Activation;
use adapter::{AdaptedRows, Adapter};
use attention::{AttentionShape, Batch, PagedAttention};
use collective::Collective;
use linear::{PackedLinear, Packing, WideLinear};
use norm::PackedNorm;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use quantized::{QuantizedPacking, SegmentParts};
use recurrence::{GatedDeltaParts, Mamba2Parts, MambaConvParts, MambaScanParts, PackedRecurrence, ShortConvParts};
use routing::{Routing, RoutingSpec};
use stack::{Program, Stack};
use std::ffi::CString;
use view::{Rows, View};

/// Multiply-adds (or so) from which a call lets other Python threads run. PERF: below, it is some 50 µs at most, and waiting
/// for the lock afterwards can cost a switch interval (5 ms) for each of the hundreds of calls of a step.
const RELEASE_FROM: usize = 1 << 23;

fn maybe_detached(py: Python<'_>, work: usize, run: impl FnOnce() + Send) {
    if work >= RELEASE_FROM { py.detach(run) } else { run() }
}

/// ValueError with this message unless the condition holds.
fn require(condition: bool, message: impl FnOnce() -> String) -> PyResult<()> {
    if condition { Ok(()) } else { Err(PyValueError::new_err(message())) }
}

/// The number of threads that the kernels run on, the memory of their weights, and what the CPU has for them.
#[pyclass(frozen)]
struct Kernels {
    pool: Pool,
    arena: Arena,
    amx: Option<Amx>,
}

#[pymethods]
impl Kernels {
    /// `libgomp` is the path of the libgomp that this process has loaded. Without it, kernels run on the calling thread alone.
    /// `may_use_amx`: whether products use AMX, where build, CPU and system have it.
    #[new]
    #[pyo3(signature = (num_threads, libgomp=None, may_use_amx=true))]
    fn new(num_threads: usize, libgomp: Option<CString>, may_use_amx: bool) -> PyResult<Kernels> {
        require(num_threads > 0, || "num_threads is 0, must be at least 1".to_owned())?;
        let parallel = libgomp.and_then(|path| gomp_parallel(&path));
        let pool = parallel.map_or_else(Pool::single, |parallel| Pool::new(num_threads, parallel));
        let amx = if may_use_amx && cfg!(target_feature = "avx512bf16") { Amx::request() } else { None };
        Ok(Kernels { pool, arena: Arena::default(), amx })
    }

    /// An empty weight [out_features, in_features] to pack rows into. The bias [out_features] is copied.
    fn linear(
        &self,
        out_features: usize,
        in_features: usize,
        bias: Option<View<'_, Element, 1>>,
        gated: bool,
    ) -> PyResult<Packing> {
        Packing::new(self.pool, &self.arena, self.amx, [out_features, in_features], bias.as_ref(), gated)
    }

    /// An empty quantized weight to pack rows into, as (rows, bits, group, offset, has mins, dtype of scales, table, code) for each segment
    /// of its rows; `input_bits`: 8 or 16. The bias [all rows] is copied. w = scale · (code - offset), or scale · code + min.
    fn quantized(
        &self,
        segments: Vec<SegmentParts>,
        in_features: usize,
        bias: Option<View<'_, Element, 1>>,
        gated: bool,
        input_bits: usize,
    ) -> PyResult<QuantizedPacking> {
        QuantizedPacking::new(self, &segments, in_features, bias.as_ref(), gated, input_bits)
    }

    /// The norm of the last dimension, of `kind` "rms", "wide rms" or "layer". weight [1, dim], or [heads, dim] for a weight per head;
    /// bias the same, or None. Both are copied.
    fn norm(
        &self,
        kind: &str,
        weight: View<'_, f32, 2>,
        bias: Option<View<'_, f32, 2>>,
        eps: f32,
    ) -> PyResult<PackedNorm> {
        PackedNorm::new(self.pool, kind, &weight, bias.as_ref(), eps)
    }

    /// A function of one number, by its name in `Function::named`. A gate multiplies its results with the second half of each row.
    fn activation(&self, name: &str, parameters: Vec<f32>, is_gate: bool) -> PyResult<Activation> {
        Activation::new(self.pool, name, &parameters, is_gate)
    }

    /// A weight [out_features, in_features], which is copied, of a layer whose results are float32.
    fn wide_linear(&self, weight: View<'_, Element, 2>) -> PyResult<WideLinear> {
        WideLinear::new(self.pool, &weight)
    }

    /// Adds to y [rows, columns], a layer's product with x [rows, in_features], what the rows' adapters add to that
    /// layer at site `site`.
    fn adapt(
        &self,
        py: Python<'_>,
        site: usize,
        x: View<'_, Element, 2>,
        y: View<'_, Element, 2>,
        adapted: AdaptedRows<'_>,
    ) -> PyResult<()> {
        adapter::adapt(py, &self.pool, site, &x, &y, &adapted)
    }

    /// How rows of logits choose experts. correction [experts] is added to their scores for the choice.
    fn routing(&self, spec: RoutingSpec, correction: Option<View<'_, f32, 1>>) -> PyResult<Routing> {
        Routing::new(self.pool, spec, correction.as_ref())
    }

    /// Rotates queries [tokens, heads, head_dim] and keys [tokens, kv_heads, head_dim] in place, by the angles at their positions
    /// [tokens] in the tables cos and sin [max positions, rotary_dim / 2]. Pairs are neighbours if `interleaved`, otherwise they span halves.
    fn rotate(
        &self,
        queries: View<'_, Element, 3>,
        keys: View<'_, Element, 3>,
        cos: View<'_, f32, 2>,
        sin: View<'_, f32, 2>,
        positions: View<'_, i64, 1>,
        interleaved: bool,
    ) -> PyResult<()> {
        let ([num_tokens, _, head_dim], [_, num_kv_heads, _]) = (queries.shape(), keys.shape());
        let [num_positions, half] = cos.shape();
        keys.expect("keys", [num_tokens, num_kv_heads, head_dim])?;
        require(2 * half <= head_dim, || format!("cos has {half} columns for heads of {head_dim} elements"))?;
        let positions = positions.expect("positions", [num_tokens])?;
        let angles = Angles {
            cos: cos.source("cos")?,
            sin: sin.expect("sin", cos.shape())?.source("sin")?,
            positions: positions.indices("positions", num_positions, "positions")?,
            half,
            pairs: pairs(interleaved),
        };
        let heads = [heads("queries", &queries)?, heads("keys", &keys)?];
        // SAFETY: queries and keys have these heads for every token, and every position is in the tables.
        unsafe { crate::rotate::rotate(&self.pool, &angles, heads, num_tokens) };
        Ok(())
    }

    /// Writes the greedy choice of each row of logits [rows, vocab] to ids [rows] and logprobs [rows]. `restricted` is None or rows
    /// [masked rows] and their masks [masked rows, words].
    #[pyo3(signature = (logits, ids, logprobs, restricted=None))]
    fn argmax_logprob(
        &self,
        logits: View<'_, Element, 2>,
        ids: View<'_, i64, 1>,
        logprobs: View<'_, f32, 1>,
        restricted: Option<(View<'_, i64, 1>, View<'_, i32, 2>)>,
    ) -> PyResult<()> {
        let [num_rows, vocab] = logits.shape();
        let mut addresses = Vec::new();
        if let Some((rows, masks)) = &restricted {
            rows.indices("rows", num_rows, "rows")?;
            let ([num_masks], [_, num_words]) = (rows.shape(), masks.shape());
            require(num_words >= vocab.div_ceil(32), || {
                format!("masks has {num_words} words of 32 bits for {vocab} tokens")
            })?;
            let (first, stride) = masks.expect("masks", [num_masks, num_words])?.rows("masks")?;
            addresses.resize(num_rows, 0);
            for (mask, &row) in rows.elements("rows")?.iter().enumerate() {
                addresses[row as usize] = first.at(mask * stride) as usize;
            }
        }
        let masks = if addresses.is_empty() { std::ptr::null() } else { addresses.as_ptr() };
        let logits =
            Logits { address: logits.source("logits")?, num_rows, vocab, masks: crate::pool::Source::new(masks) };
        let ids = ids.expect("ids", [num_rows])?.target("ids")?;
        let logprobs = logprobs.expect("logprobs", [num_rows])?.target("logprobs")?;
        // SAFETY: logits, ids and logprobs have `num_rows` rows, and a mask has a bit for every token.
        unsafe { crate::sample::argmax_logprob(&self.pool, &logits, ids, logprobs) };
        Ok(())
    }

    /// The part of a gated delta network between its projections. Its parameters are copied.
    fn gated_delta(&self, parts: GatedDeltaParts<'_>) -> PyResult<PackedRecurrence> {
        Ok(PackedRecurrence::new(self.pool, parts.pack()?))
    }

    /// The convolution of Mamba, and the activation behind it. Its parameters are copied.
    fn mamba_conv(&self, parts: MambaConvParts<'_>) -> PyResult<PackedRecurrence> {
        Ok(PackedRecurrence::new(self.pool, parts.pack()?))
    }

    /// The scan of Mamba. Its parameters are copied.
    fn mamba_scan(&self, parts: MambaScanParts<'_>) -> PyResult<PackedRecurrence> {
        Ok(PackedRecurrence::new(self.pool, parts.pack()?))
    }

    /// The part of Mamba 2 between its projections. Its parameters are copied.
    fn mamba2(&self, parts: Mamba2Parts<'_>) -> PyResult<PackedRecurrence> {
        Ok(PackedRecurrence::new(self.pool, parts.pack()?))
    }

    /// A short convolution between its projections. Its parameters are copied.
    fn short_conv(&self, parts: ShortConvParts<'_>) -> PyResult<PackedRecurrence> {
        Ok(PackedRecurrence::new(self.pool, parts.pack()?))
    }

    /// Whether dense layers use AMX.
    #[getter]
    fn uses_amx(&self) -> bool {
        self.amx.is_some()
    }

    /// Attention of this shape.
    fn attention(&self, shape: AttentionShape, kv_dtype: Option<Float8>) -> PyResult<PagedAttention> {
        PagedAttention::new(self.pool, shape, kv_dtype, self.amx)
    }
}

fn pairs(interleaved: bool) -> Pairs {
    if interleaved { Pairs::Neighbours } else { Pairs::Halves }
}

fn heads(name: &str, tokens: &View<'_, Element, 3>) -> PyResult<Heads> {
    let [_, num_heads, head_dim] = tokens.shape();
    let (address, stride) = tokens.rows_mut(name)?;
    Ok(Heads { address, stride, num_heads, head_dim })
}

/// `GOMP_parallel` in a library that this process has loaded. It is never unloaded afterwards.
fn gomp_parallel(path: &std::ffi::CStr) -> Option<GompParallel> {
    // SAFETY: the library is loaded already, so no code of it runs here; libgomp's function of that name has this signature.
    unsafe {
        let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if library.is_null() {
            return None;
        }
        let function = libc::dlsym(library, c"GOMP_parallel".as_ptr());
        (!function.is_null()).then(|| std::mem::transmute::<*mut libc::c_void, GompParallel>(function))
    }
}

/// Asks for huge pages under a cache.
#[pyfunction]
fn advise_huge_pages(cache: Rows<'_>) -> PyResult<()> {
    let num_bytes = cache.num_rows * cache.stride_bytes;
    // SAFETY: the range is the tensor's memory.
    unsafe { memory::advise_huge_pages(cache.target("cache")?.at(0).cast(), num_bytes) };
    Ok(())
}

#[pymodule]
fn native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("ISA", simd::ISA)?;
    module.add("DTYPE", element::NAME)?;
    module.add("BLOCK_TOKENS", BLOCK)?;
    module.add("MAX_DIM", MAX_DIM)?;
    module.add_class::<Activation>()?;
    module.add_class::<Adapter>()?;
    module.add_class::<Batch>()?;
    module.add_class::<Collective>()?;
    module.add_class::<Kernels>()?;
    module.add_class::<PackedRecurrence>()?;
    module.add_class::<PackedLinear>()?;
    module.add_class::<PackedNorm>()?;
    module.add_class::<PagedAttention>()?;
    module.add_class::<Program>()?;
    module.add_class::<Routing>()?;
    module.add_class::<Stack>()?;
    module.add_class::<WideLinear>()?;
    module.add_function(wrap_pyfunction!(advise_huge_pages, module)?)
}

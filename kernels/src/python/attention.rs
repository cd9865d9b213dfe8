//! Paged attention and the batches that it serves.

use super::view::{Number, Rows, View};
use super::{maybe_detached, require};
use crate::attention::{
    self, Alibi, Attention, AttentionMask, BLOCK, DistanceBias, KvScales, Layout, NewTokens, Operands, Part,
};
use crate::cpu::Amx;
use crate::element::Element;
use crate::pool::{Executor, Pool, Source, Target};
use crate::simd::Float8;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Arc;

/// Multiply-adds of attention up to which one thread is done before a second has started.
const SERIAL_BELOW: usize = 1 << 17;

/// The attributes of Python's `AttentionShape` that the kernels know.
#[derive(FromPyObject)]
pub(super) struct AttentionShape {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    output_dim: usize,
    values_in_keys: bool,
    scale: f32,
    mask: AttentionMask,
    soft_cap: Option<f32>,
    alibi: Option<Alibi>,
    has_relative_bias: bool,
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

impl<'py> FromPyObject<'_, 'py> for Float8 {
    type Error = PyErr;

    fn extract(name: Borrowed<'_, 'py, PyAny>) -> PyResult<Float8> {
        match name.extract::<&str>()? {
            "float8_e4m3fn" => Ok(Float8::E4m3fn),
            "float8_e5m2" => Ok(Float8::E5m2),
            other => Err(PyValueError::new_err(format!("kv_dtype is {other:?}, must be float8_e4m3fn or float8_e5m2"))),
        }
    }
}

/// The sequences of one step. It has copies of the numbers that address memory, because it checks them once for all layers.
/// INVARIANT: first rows ascend from 0 to `num_tokens`; a context is not shorter than its sequence's new tokens; a block table covers
/// its context and source with ids below `num_blocks`; ends ascend from behind a token's own position up to its context.
#[pyclass(frozen)]
pub(super) struct Batch {
    query_starts: Vec<i32>,
    context_lens: Vec<i32>,
    block_tables: Vec<i32>,
    source_lens: Option<Vec<i32>>,
    ends: Option<Vec<i32>>,
    /// Columns of `block_tables`.
    max_blocks: usize,
    pub(super) num_tokens: usize,
    max_context_tokens: usize,
    /// The lowest number of blocks that a cache must have.
    num_blocks: usize,
}

#[pymethods]
impl Batch {
    /// query_starts [sequences + 1], context_lens [sequences], block_tables [sequences, max blocks], source_lens [sequences] or None,
    /// ends [tokens] or None; all int32.
    #[new]
    #[pyo3(signature = (query_starts, context_lens, block_tables, source_lens=None, ends=None))]
    fn new(
        query_starts: View<'_, i32, 1>,
        context_lens: View<'_, i32, 1>,
        block_tables: View<'_, i32, 2>,
        source_lens: Option<View<'_, i32, 1>>,
        ends: Option<View<'_, i32, 1>>,
    ) -> PyResult<Batch> {
        let [num_sequences] = context_lens.shape();
        let [_, max_blocks] = block_tables.shape();
        block_tables.expect("block_tables", [num_sequences, max_blocks])?;
        let starts = query_starts.expect("query_starts", [num_sequences + 1])?.elements("query_starts")?;
        let sources = match &source_lens {
            Some(lens) => Some(lens.expect("source_lens", [num_sequences])?.elements("source_lens")?),
            None => None,
        };
        let ends = match &ends {
            Some(ends) => Some(ends.expect("ends", [starts[num_sequences].max(0) as usize])?.elements("ends")?),
            None => None,
        };
        require(starts[0] == 0 && starts.is_sorted(), || format!("query_starts is {starts:?}, must ascend from 0"))?;
        let (contexts, tables) = (context_lens.elements("context_lens")?, block_tables.elements("block_tables")?);
        let (mut max_context_tokens, mut num_blocks) = (0, 0);
        for (sequence, &context) in contexts.iter().enumerate() {
            let num_tokens = starts[sequence + 1] - starts[sequence];
            let source = sources.map_or(0, |lens| lens[sequence]);
            require(context >= num_tokens, || {
                format!("context_lens[{sequence}] is {context}, must be at least the {num_tokens} new tokens")
            })?;
            require(source >= 0, || format!("source_lens[{sequence}] is {source}, must not be negative"))?;
            if let Some(ends) = ends {
                let of_sequence = &ends[starts[sequence] as usize..starts[sequence + 1] as usize];
                let mut positions = context - num_tokens..context;
                let are_seen =
                    of_sequence.iter().all(|end| positions.next().is_some_and(|own| (own + 1..=context).contains(end)));
                require(are_seen && of_sequence.is_sorted(), || {
                    format!("ends of sequence {sequence} are {of_sequence:?}, must ascend up to its context, {context}")
                })?;
            }
            let last = context.max(source) as usize;
            require(last.div_ceil(BLOCK) <= max_blocks, || {
                format!("block_tables has {max_blocks} columns, sequence {sequence} has {last} tokens")
            })?;
            for &block in &tables[sequence * max_blocks..][..last.div_ceil(BLOCK)] {
                require(block >= 0, || format!("block_tables[{sequence}] contains {block}, must not be negative"))?;
                num_blocks = num_blocks.max(block as usize + 1);
            }
            max_context_tokens = max_context_tokens.max(last);
        }
        Ok(Batch {
            query_starts: starts.to_vec(),
            context_lens: contexts.to_vec(),
            block_tables: tables.to_vec(),
            source_lens: sources.map(<[i32]>::to_vec),
            ends: ends.map(<[i32]>::to_vec),
            max_blocks,
            num_tokens: starts[num_sequences] as usize,
            max_context_tokens,
            num_blocks,
        })
    }
}

impl Batch {
    /// The batch as the kernels read it.
    pub(super) fn as_kernel(&self) -> attention::Batch {
        let source = |numbers: &Vec<i32>| Source::new(numbers.as_ptr());
        attention::Batch {
            query_starts: source(&self.query_starts),
            context_lens: source(&self.context_lens),
            block_tables: source(&self.block_tables),
            max_blocks: self.max_blocks,
            num_sequences: self.context_lens.len(),
            source_lens: self.source_lens.as_ref().map(source),
            ends: self.ends.as_ref().map(source),
        }
    }

    /// Fails unless its block ids are inside a cache of this many blocks.
    pub(super) fn expect_blocks(&self, num_blocks: usize) -> PyResult<()> {
        require(self.num_blocks <= num_blocks, || {
            format!("block_tables contains {}, the cache has {num_blocks} blocks", self.num_blocks - 1)
        })
    }
}

/// Paged attention of one shape.
#[pyclass(frozen)]
pub(super) struct PagedAttention {
    pub(super) pool: Pool,
    pub(super) attention: Arc<Attention>,
}

impl PagedAttention {
    pub(super) fn new(
        pool: Pool,
        shape: AttentionShape,
        fp8: Option<Float8>,
        amx: Option<Amx>,
    ) -> PyResult<PagedAttention> {
        let AttentionShape { num_heads, num_kv_heads, head_dim, output_dim, values_in_keys, scale, .. } = shape;
        let layout = Layout { num_heads, num_kv_heads, head_dim, value_dim: output_dim, values_in_keys, scale, fp8 };
        let AttentionShape { mask, soft_cap, alibi, has_relative_bias, .. } = shape;
        let attention = Attention { layout, mask, soft_cap, alibi, has_relative_bias, amx };
        let attention = attention.checked().map_err(PyValueError::new_err)?;
        Ok(PagedAttention { pool, attention: Arc::new(attention) })
    }

    /// The scales of a layer's cache; `None`: 1.
    pub(super) fn scales(&self, given: Option<KvScales>) -> PyResult<KvScales> {
        let scales = given.unwrap_or_default();
        require(self.attention.layout.fp8.is_some() || scales == KvScales::default(), || {
            format!("scales are {scales:?}, must be 1 for a cache that is not in fp8")
        })?;
        Ok(scales)
    }
}

/// The address and the number of blocks of an attention's cache.
pub(super) fn cache_of(attention: &Attention, cache: &Rows<'_>) -> PyResult<(Target<u8>, usize)> {
    let layout = &attention.layout;
    let dtype = if layout.fp8.is_some() { i8::DTYPE } else { Element::DTYPE };
    cache.expect("cache", [cache.num_rows, layout.offset(1, 0)], dtype)?;
    Ok((cache.target("cache")?, cache.num_rows))
}

#[pymethods]
impl PagedAttention {
    /// Stores keys [tokens, kv_heads, head_dim] and values [tokens, kv_heads, output_dim] (None if they are in the keys) at their slots
    /// [tokens], which are distinct. scales: what keys and values are divided by, for a cache in fp8; None: 1.
    #[pyo3(signature = (cache, keys, values, slots, scales=None))]
    fn write(
        &self,
        cache: Rows<'_>,
        keys: View<'_, Element, 3>,
        values: Option<View<'_, Element, 3>>,
        slots: View<'_, i64, 1>,
        scales: Option<KvScales>,
    ) -> PyResult<()> {
        let Layout { num_kv_heads, head_dim, value_dim, values_in_keys, .. } = self.attention.layout;
        let (cache, num_blocks) = cache_of(&self.attention, &cache)?;
        let [num_tokens, ..] = keys.shape();
        let keys = keys.expect("keys", [num_tokens, num_kv_heads, head_dim])?.rows("keys")?;
        let values = match &values {
            Some(values) => values.expect("values", [num_tokens, num_kv_heads, value_dim])?.rows("values")?,
            None if values_in_keys => keys,
            None => return Err(PyValueError::new_err("values is None, must be a tensor")),
        };
        let tokens = NewTokens {
            keys: keys.0,
            keys_stride: keys.1,
            values: values.0,
            values_stride: values.1,
            slots: slots.expect("slots", [num_tokens])?.indices("slots", num_blocks * BLOCK, "slots")?,
            num_tokens,
            scales: self.scales(scales)?,
        };
        // SAFETY: the views have the sizes of the layout, and every slot is inside the cache.
        unsafe { self.attention.layout.write(&self.pool, cache, tokens) };
        Ok(())
    }

    /// Attention of queries [tokens, heads, head_dim] into output [tokens, heads, output_dim]. sinks [heads] or None; bias
    /// [heads, 2 * reach + 1] where the shape has one. scales: those of `write`.
    #[pyo3(signature = (queries, cache, batch, output, sinks=None, bias=None, scales=None))]
    #[expect(clippy::too_many_arguments, reason = "the operands of attention, each a tensor")]
    fn attend(
        &self,
        py: Python<'_>,
        queries: View<'_, Element, 3>,
        cache: Rows<'_>,
        batch: PyRef<'_, Batch>,
        output: View<'_, Element, 3>,
        sinks: Option<View<'_, Element, 1>>,
        bias: Option<View<'_, f32, 2>>,
        scales: Option<KvScales>,
    ) -> PyResult<()> {
        let Layout { num_heads, head_dim, value_dim, .. } = self.attention.layout;
        let num_tokens = batch.num_tokens;
        let (cache, num_blocks) = cache_of(&self.attention, &cache)?;
        batch.expect_blocks(num_blocks)?;
        let (queries, stride) = queries.expect("queries", [num_tokens, num_heads, head_dim])?.rows("queries")?;
        require(bias.is_some() == self.attention.has_relative_bias, || {
            "bias must be given if the shape has a relative bias, and only then".to_owned()
        })?;
        let sinks = match &sinks {
            Some(sinks) => Some(sinks.expect("sinks", [num_heads])?.source("sinks")?),
            None => None,
        };
        let bias = match &bias {
            Some(bias) => {
                let reach = bias.shape()[1] / 2;
                let table = bias.expect("bias", [num_heads, 2 * reach + 1])?.source("bias")?;
                Some(DistanceBias { table, reach })
            }
            None => None,
        };
        let output = output.expect("output", [num_tokens, num_heads, value_dim])?.target("output")?;
        let scales = self.scales(scales)?;
        let operands = Operands { queries, stride, cache: cache.source(), output, sinks, bias, scales };
        let span =
            self.attention.mask.max_span().map_or(batch.max_context_tokens, |span| span.min(batch.max_context_tokens));
        let work = num_tokens * span * num_heads * head_dim;
        let batch = batch.as_kernel();
        // SAFETY: the views have the sizes of the layout and of the batch, whose block ids are inside the cache; `room` has the size that
        // the plan asks for. The references to tensors and batch live until the call ends.
        maybe_detached(py, work, || unsafe {
            let executor = if work < SERIAL_BELOW { Pool::single() } else { self.pool };
            let plan = self.attention.plan(&batch, executor.num_threads());
            let mut room = vec![0.0; plan.room_floats()];
            self.attention.attend(&executor, &plan, &batch, &operands, Target::new(room.as_mut_ptr()));
        });
        Ok(())
    }

    /// Numbers of a block.
    #[getter]
    fn block_numbers(&self) -> usize {
        self.attention.layout.offset(1, 0)
    }
}

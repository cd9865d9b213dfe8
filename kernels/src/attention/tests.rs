use super::*;
use crate::cpu::Amx;
use crate::element::GROUP;
use crate::pool::Pool;
use crate::simd::{F32, Float8, LANES};
use crate::testing::{Random, assert_close, on_both_paths, spawning_pool, tolerance};

mod shapes;

on_both_paths!(
    attention_is_right_for_all_shapes,
    a_row_has_the_same_bits_alone_chunked_and_split,
    nan_reaches_exactly_the_rows_that_see_it,
);

/// Sequences with all keys, values and queries, stored in shuffled blocks of one cache. The last block belongs to none of them and is
/// filled with NaN. Keys and values are as a cache stores them.
struct World {
    attention: Attention,
    layout: Layout,
    sinks: Option<Vec<Element>>,
    bias: Option<Vec<f32>>,
    source_lens: Vec<i32>,
    /// Tokens that see all of each other, in every sequence that is long enough.
    spans: Vec<std::ops::Range<usize>>,
    tables: Vec<Vec<i32>>,
    cache: Vec<u32>,
    queries: Vec<Vec<Element>>,
    keys: Vec<Vec<Element>>,
    values: Vec<Vec<Element>>,
}

/// (sequence, computed tokens, tokens of this step)
type Step = (usize, usize, usize);

impl World {
    fn new(layout: Layout, amx: Option<Amx>, lengths: &[usize], poison: bool) -> World {
        World::of(Attention::plain(layout, amx).checked().unwrap(), lengths, poison)
    }

    fn of(attention: Attention, lengths: &[usize], poison: bool) -> World {
        let layout = attention.layout;
        let mut random = Random::new(layout.head_dim as u64);
        let num_blocks: usize = lengths.iter().map(|length| length.div_ceil(BLOCK)).sum();
        let mut free: Vec<i32> = (0..num_blocks as i32).collect();
        let mut tables = Vec::new();
        for &length in lengths {
            let pick = |_| free.swap_remove(random.next() as usize % free.len());
            tables.push((0..length.div_ceil(BLOCK)).map(pick).collect());
        }
        let words = |num_blocks| layout.offset(num_blocks, 0) * layout.number_bytes() / size_of::<u32>();
        let mut cache = vec![if poison { NAN } else { 0 }; words(num_blocks)];
        cache.resize(words(num_blocks + 1), NAN);
        let draw = |random: &mut Random, numbers: usize| -> Vec<Vec<Element>> {
            lengths.iter().map(|&length| random.elements(length * numbers)).collect()
        };
        let queries = draw(&mut random, layout.num_heads * layout.head_dim);
        let mut keys = draw(&mut random, layout.num_kv_heads * layout.head_dim);
        let mut values = draw(&mut random, layout.num_kv_heads * layout.value_dim);
        if let Some(format) = layout.fp8 {
            keys.iter_mut().for_each(|keys| round(format, SCALES.keys, keys));
            values.iter_mut().for_each(|values| round(format, SCALES.values, values));
        }
        if layout.values_in_keys {
            let first = |key: &[Element]| key[..layout.value_dim].to_vec();
            values = keys.iter().map(|keys| keys.chunks(layout.head_dim).flat_map(first).collect()).collect();
        }
        let bias = attention.has_relative_bias.then(|| {
            (0..layout.num_heads * (2 * BIAS_REACH + 1)).map(|_| Element::to_f32(random.elements(1)[0]) * 3.0).collect()
        });
        let source_lens = lengths.iter().map(|length| (length / 2).min(100) as i32).collect();
        let mut world = World {
            attention,
            layout,
            sinks: None,
            bias,
            source_lens,
            spans: Vec::new(),
            tables,
            cache,
            queries,
            keys,
            values,
        };
        for sequence in 0..lengths.len() {
            world.write(sequence, lengths[sequence]);
        }
        world
    }

    fn write(&mut self, sequence: usize, num_tokens: usize) {
        let Layout { num_kv_heads, head_dim, value_dim, .. } = self.layout;
        let slots: Vec<i64> = (0..num_tokens)
            .map(|token| i64::from(self.tables[sequence][token / BLOCK]) * BLOCK as i64 + (token % BLOCK) as i64)
            .collect();
        let tokens = NewTokens {
            keys: Source::new(self.keys[sequence].as_ptr()),
            keys_stride: num_kv_heads * head_dim,
            values: Source::new(self.values[sequence].as_ptr()),
            values_stride: num_kv_heads * value_dim,
            slots: Source::new(slots.as_ptr()),
            num_tokens,
            scales: scales(&self.layout),
        };
        // SAFETY: all slots lie in the cache.
        unsafe { self.layout.write(&spawning_pool(2), Target::new(self.cache.as_mut_ptr().cast()), tokens) };
    }

    /// The interval that the query at this position sees.
    fn seen(&self, sequence: usize, position: usize) -> std::ops::Range<usize> {
        let source_len = self.source_lens[sequence] as usize;
        let length = self.queries[sequence].len() / (self.layout.num_heads * self.layout.head_dim);
        let span = self.spans.iter().find(|span| span.contains(&position) && span.end <= length);
        let end = span.map_or_else(|| self.attention.mask.end(position, source_len), |span| span.end);
        self.attention.mask.first(position, source_len)..end
    }

    /// Concatenated results of the steps' tokens. Blocks that a step's tokens do not see have been released.
    fn attend(&self, pool: &Pool, steps: &[Step]) -> Vec<Element> {
        let row = self.layout.num_heads * self.layout.head_dim;
        let (mut source_lens, mut ends) = (Vec::new(), Vec::new());
        let max_blocks = self.tables.iter().map(Vec::len).max().unwrap();
        let mut queries = Vec::new();
        let (mut starts, mut contexts, mut tables) = (vec![0], Vec::new(), Vec::new());
        for &(sequence, computed, count) in steps {
            queries.extend_from_slice(&self.queries[sequence][computed * row..(computed + count) * row]);
            starts.push(starts.last().unwrap() + count as i32);
            contexts.push((computed + count) as i32);
            let mut table = self.tables[sequence].clone();
            table.resize(max_blocks, 0);
            let block_bytes = self.layout.offset(1, 0) * self.layout.number_bytes();
            let others = (size_of_val(&self.cache[..]) / block_bytes - 1) as i32;
            let seen = self.seen(sequence, computed).start..self.seen(sequence, computed + count - 1).end;
            table[..seen.start / BLOCK].fill(others);
            table[seen.end.div_ceil(BLOCK)..].fill(others);
            source_lens.push(self.source_lens[sequence]);
            ends.extend((computed..computed + count).map(|position| self.seen(sequence, position).end as i32));
            tables.extend(table);
        }
        let mut output =
            vec![Element::from_f32(f32::NAN); queries.len() / self.layout.head_dim * self.layout.value_dim];
        let batch = Batch {
            query_starts: Source::new(starts.as_ptr()),
            context_lens: Source::new(contexts.as_ptr()),
            block_tables: Source::new(tables.as_ptr()),
            max_blocks,
            num_sequences: steps.len(),
            source_lens: (self.attention.mask.part != Part::Context).then(|| Source::new(source_lens.as_ptr())),
            ends: (!self.spans.is_empty()).then(|| Source::new(ends.as_ptr())),
        };
        let operands = Operands {
            queries: Source::new(queries.as_ptr()),
            stride: row,
            cache: Source::new(self.cache.as_ptr().cast()),
            output: Target::new(output.as_mut_ptr()),
            sinks: self.sinks.as_ref().map(|sinks| Source::new(sinks.as_ptr())),
            bias: self.bias.as_ref().map(|bias| DistanceBias { table: Source::new(bias.as_ptr()), reach: BIAS_REACH }),
            scales: scales(&self.layout),
        };
        // SAFETY: everything above is consistent, and all tokens were written.
        unsafe {
            let work = self.attention.plan(&batch, pool.num_threads());
            let mut room = vec![0.0; work.room_floats()];
            self.attention.attend(pool, &work, &batch, &operands, Target::new(room.as_mut_ptr()));
        }
        output
    }

    fn assert_right(&self, output: &[Element], steps: &[Step], what: &str) {
        let tokens = steps.iter().flat_map(|&(sequence, computed, count)| {
            (computed..computed + count).map(move |position| (sequence, position))
        });
        let heads = tokens.flat_map(|token| (0..self.layout.num_heads).map(move |head| (token, head)));
        for (result, ((sequence, position), head)) in output.chunks(self.layout.value_dim).zip(heads) {
            for (&actual, expected) in result.iter().zip(self.expected(sequence, position, head)) {
                assert_close(actual, expected, tolerance(3), what);
            }
        }
    }

    fn expected(&self, sequence: usize, position: usize, head: usize) -> Vec<f32> {
        let Layout { num_heads, num_kv_heads, head_dim, value_dim, .. } = self.layout;
        let kv_head = head / self.layout.group();
        let query = &self.queries[sequence][(position * num_heads + head) * head_dim..][..head_dim];
        let at = |rows: &[Element], dim: usize, token: usize, index: usize| {
            Element::to_f32(rows[(token * num_kv_heads + kv_head) * dim + index])
        };
        let product = |token: usize| -> f32 {
            let factors =
                |index: usize| Element::to_f32(query[index]) * at(&self.keys[sequence], head_dim, token, index);
            (0..head_dim).map(factors).sum::<f32>()
        };
        let seen = self.seen(sequence, position);
        if seen.is_empty() {
            return vec![0.0; value_dim];
        }
        let score = |token: usize| {
            let distance = (token as isize - position as isize).clamp(-(BIAS_REACH as isize), BIAS_REACH as isize);
            let place = head * (2 * BIAS_REACH + 1) + (distance + BIAS_REACH as isize) as usize;
            let bias = self.bias.as_ref().map_or(0.0, |bias| bias[place]);
            shapes::score(&self.attention, product(token), head, token) + bias
        };
        let scores: Vec<f32> = seen.clone().map(score).collect();
        let sink = self.sinks.as_ref().map(|sinks| Element::to_f32(sinks[head]));
        let maximum = scores.iter().copied().chain(sink).fold(f32::MIN, f32::max);
        let weights: Vec<f32> = scores.iter().map(|score| (score - maximum).exp()).collect();
        let total: f32 = weights.iter().sum::<f32>() + sink.map_or(0.0, |sink| (sink - maximum).exp());
        let value =
            |(token, weight): (usize, &f32), index| weight * at(&self.values[sequence], value_dim, token, index);
        (0..value_dim)
            .map(|index| seen.clone().zip(&weights).map(|pair| value(pair, index)).sum::<f32>() / total)
            .collect()
    }
}

/// Not a number in every format.
const NAN: u32 = u32::MAX;

/// Scales of caches in fp8: powers of two, so that a stored number times its scale is exact as an element.
const SCALES: KvScales = KvScales { keys: 0.25, values: 2.0 };

fn scales(layout: &Layout) -> KvScales {
    if layout.fp8.is_some() { SCALES } else { KvScales::default() }
}

/// Rounds numbers as a cache stores them.
fn round(format: Float8, scale: f64, numbers: &mut [Element]) {
    for numbers in numbers.chunks_mut(LANES) {
        let mut bytes = [0; LANES];
        // SAFETY: heads have a multiple of 16 elements.
        unsafe {
            format.store(Element::load(numbers.as_ptr()) * F32::splat(1.0 / scale as f32), bytes.as_mut_ptr());
            Element::store(format.load(bytes.as_ptr()) * F32::splat(scale as f32), numbers.as_mut_ptr());
        }
    }
}

/// Distances with distinct learned biases.
const BIAS_REACH: usize = 40;

fn layout(num_heads: usize, num_kv_heads: usize, head_dim: usize) -> Layout {
    let scale = 1.0 / (head_dim as f32).sqrt();
    Layout { num_heads, num_kv_heads, head_dim, value_dim: head_dim, values_in_keys: false, scale, fp8: None }
}

/// Layouts whose values are narrower than their keys, stored separately or inside the keys.
fn uneven_layouts() -> Vec<Layout> {
    let of = |heads, kv_heads, dim, value_dim, values_in_keys| Layout {
        value_dim,
        values_in_keys,
        ..layout(heads, kv_heads, dim)
    };
    vec![of(4, 2, 48, 32, false), of(2, 2, 32, 80, false), of(16, 1, 64, 48, true), of(3, 1, 576, 512, true)]
}

/// Layouts of caches in fp8.
fn narrow_layouts() -> [Layout; 2] {
    let uneven = uneven_layouts();
    [(uneven[0], Float8::E4m3fn), (uneven[2], Float8::E5m2)]
        .map(|(layout, format)| Layout { fp8: Some(format), ..layout })
}

fn attention_is_right_for_all_shapes(amx: Option<Amx>) {
    let even = [(3, 1, 64), (9, 3, 64), (4, 4, 16), (8, 1, 80), (2, 1, 128), (14, 2, 256)];
    let even = even.map(|(heads, kv_heads, dim)| layout(heads, kv_heads, dim));
    for layout in even.into_iter().chain(uneven_layouts()).chain(narrow_layouts()) {
        let world = World::new(layout, amx, &[1, 70, 16, 300], true);
        let steps = [(0, 0, 1), (1, 33, 37), (2, 15, 1), (3, 250, 50), (3, 299, 1), (3, 0, 20)];
        for pool in [Pool::single(), spawning_pool(2), spawning_pool(50)] {
            world.assert_right(&world.attend(&pool, &steps), &steps, &format!("{layout:?}"));
        }
    }
}

fn a_row_has_the_same_bits_alone_chunked_and_split(amx: Option<Amx>) {
    let even = [(9, 3, 64), (4, 4, 32), (8, 1, 96)].map(|(heads, kv_heads, dim)| layout(heads, kv_heads, dim));
    for layout in even.into_iter().chain(uneven_layouts()).chain(narrow_layouts()) {
        let world = World::new(layout, amx, &[700, 45], true);
        let row = layout.num_heads * layout.value_dim;
        let whole = world.attend(&Pool::single(), &[(0, 0, 700), (1, 0, 45)]);
        for chunk in [1, 7, 64, 100] {
            for pool in [Pool::single(), spawning_pool(2), spawning_pool(64)] {
                let positions = if chunk == 1 {
                    vec![0, 1, 15, 16, 63, 64, 255, 256, 300, 699]
                } else {
                    (0..700).step_by(chunk).collect()
                };
                for computed in positions {
                    let count = chunk.min(700 - computed);
                    let part = world.attend(&pool, &[(0, computed, count)]);
                    assert_eq!(part, whole[computed * row..(computed + count) * row], "{count} from {computed}");
                }
            }
        }
        let mixed = world.attend(&spawning_pool(2), &[(1, 44, 1), (0, 500, 33), (1, 0, 45)]);
        assert_eq!(mixed[..row], whole[744 * row..]);
        assert_eq!(mixed[row..34 * row], whole[500 * row..533 * row]);
        assert_eq!(mixed[34 * row..], whole[700 * row..]);
    }
}

fn nan_reaches_exactly_the_rows_that_see_it(amx: Option<Amx>) {
    let of = |fp8| Layout { fp8, ..layout(4, 2, 32) };
    for (first, end, layout) in [(300, 301, of(None)), (256, 512, of(None)), (300, 301, of(Some(Float8::E4m3fn)))] {
        let mut world = World::new(layout, amx, &[600, 40], false);
        let before = world.attend(&Pool::single(), &[(0, 0, 600), (1, 0, 40)]);
        world.keys[0][first * 64..end * 64].fill(Element::from_f32(f32::NAN));
        world.write(0, 600);
        let after = world.attend(&Pool::single(), &[(0, 0, 600), (1, 0, 40)]);
        let sees_it = |index: usize| (first..600).contains(&(index / 128));
        for index in 0..after.len() {
            assert_eq!(Element::to_f32(after[index]).is_nan(), sees_it(index), "{index}");
            assert!(sees_it(index) || after[index] == before[index]);
        }
        let split = world.attend(&spawning_pool(64), &[(0, 599, 1)]);
        assert!(split.iter().all(|&number| Element::to_f32(number).is_nan()));
    }
}

#[test]
fn tokens_are_written_to_their_slots_only() {
    let mut random = Random::new(4);
    let slots: Vec<i64> = [5, 6, 7, 31, 32, 20].to_vec();
    let (keys, values) = (random.elements(6 * 64), random.elements(6 * 64));
    for fp8 in [None, Some(Float8::E4m3fn), Some(Float8::E5m2)] {
        let layout = Layout { fp8, ..layout(2, 2, 32) };
        let number_bytes = layout.number_bytes();
        let mut cache = vec![NAN; layout.offset(3, 0) * number_bytes / size_of::<u32>()];
        let tokens = NewTokens {
            keys: Source::new(keys.as_ptr()),
            keys_stride: 64,
            values: Source::new(values.as_ptr()),
            values_stride: 64,
            slots: Source::new(slots.as_ptr()),
            num_tokens: 6,
            scales: scales(&layout),
        };
        // SAFETY: all slots lie in the cache.
        unsafe { layout.write(&spawning_pool(2), Target::new(cache.as_mut_ptr().cast()), tokens) };
        let cache: Vec<u8> = cache.into_iter().flat_map(u32::to_ne_bytes).collect();
        let mut written = 0;
        for (token, &slot) in slots.iter().enumerate() {
            let (block, place) = (slot as usize / BLOCK, slot as usize % BLOCK);
            for head in 0..2 {
                let base = layout.offset(block, head);
                for dim in 0..32 {
                    let key = base + (dim / GROUP * BLOCK + place) * GROUP + dim % GROUP;
                    let value = base + BLOCK * 32 + (place / GROUP * 32 + dim) * GROUP + place % GROUP;
                    let number = |place: usize| &cache[place * number_bytes..][..number_bytes];
                    let at = token * 64 + head * 32 + dim;
                    assert_eq!(number(key), stored(&layout, SCALES.keys, keys[at]));
                    assert_eq!(number(value), stored(&layout, SCALES.values, values[at]));
                    written += 2 * number_bytes;
                }
            }
        }
        let is_nan = |bytes: &&[u8]| bytes.iter().all(|&byte| byte == u8::MAX);
        let num_unwritten = cache.chunks(number_bytes).filter(is_nan).count() * number_bytes;
        assert_eq!(written + num_unwritten, cache.len());
    }
}

/// The bytes of a stored number.
fn stored(layout: &Layout, scale: f64, number: Element) -> Vec<u8> {
    let Some(format) = layout.fp8 else { return number.bits().to_ne_bytes().to_vec() };
    let mut bytes = [0; LANES];
    // SAFETY: the array has 16 bytes.
    unsafe { format.store(F32::splat(number.to_f32() / scale as f32), bytes.as_mut_ptr()) };
    bytes[..1].to_vec()
}

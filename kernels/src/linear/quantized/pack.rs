//! The packed form of a quantized weight: panels of 32 output columns. A panel has, for each unit of 32 input features, the codes in
//! planes of bits, so that one vector load brings 4 features of 16 columns; then, by group, its scales and its mins.

use super::format::{Format, Number, SUPER_GROUP};
use super::{InputBits, PANEL, UNIT};
use crate::cpu::Amx;
use crate::element::Element;
use crate::linear::bias_of;
use crate::memory::{Arena, Piece};
use crate::pool::{Executor, Source, Target};
use crate::product::LINE;
use crate::simd::{self, F32, I32, LANES};
use std::io;
#[cfg(target_feature = "avx512bf16")]
use std::ops::Range;

/// How far ahead of its use a panel's memory is prefetched. PERF: a unit is soon multiplied, and the hardware does not look so far ahead.
/// 2 to 12 KiB are equally fast (Zen 5, 2 threads); half of a small first-level cache is left.
const AHEAD_BYTES: usize = 4 << 10;
/// The same distance for AMX: it prefetches into the second-level cache, which has room for more.
#[cfg(target_feature = "avx512bf16")]
const AMX_AHEAD_BYTES: usize = 16 << 10;
/// The kind of codes that stand for bytes of a table.
pub(super) const TABLE: usize = 0;

/// Consecutive rows of a weight in one format.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segment {
    pub(crate) num_rows: usize,
    pub(crate) format: Format,
}

/// Some rows of a weight: codes [rows, in_features], scales and mins or zero points [rows, groups], the factors of scales and mins
/// [rows, super-groups]. What the format lacks is not read.
#[derive(Clone, Copy)]
pub(crate) struct QuantizedRows {
    pub(crate) codes: Source<u8>,
    /// Scales, and mins or zero points.
    pub(crate) numbers: [Source<f32>; 2],
    /// The factors of scales, and of mins.
    pub(crate) factors: [Source<f32>; 2],
    pub(crate) num_rows: usize,
}

/// The addresses of scales, or of mins or zero points, of a panel by group, and of their factors by super-group; null: there are none.
#[derive(Clone, Copy)]
pub(super) struct Numbers {
    pub(super) number: Number,
    pub(super) numbers: *const u8,
    pub(super) factors: *const u16,
}

/// Up to 32 rows of the weight, which are the columns of a panel, and its addresses. PERF: they are computed once; to compute them for each
/// product took a twentieth of a step of one row.
pub(super) struct Panel {
    pub(super) codes: *const u8,
    pub(super) scales: Numbers,
    pub(super) mins: Numbers,
    pub(super) bias: *const f32,
    pub(super) format: Format,
    /// The table of the format, if it has one.
    pub(super) table: [u8; 16],
    pub(super) first_column: usize,
    pub(super) num_columns: usize,
    lines_per_unit: usize,
}

/// A quantized weight in panels.
pub(crate) struct QuantizedLinear {
    /// What the panels point to.
    _memory: Piece,
    panels: Vec<Panel>,
    /// Bias by column of the panels, padded; empty without a bias.
    _bias: Vec<f32>,
    out_features: usize,
    in_features: usize,
    gated: bool,
    input_bits: InputBits,
    #[cfg_attr(not(target_feature = "avx512bf16"), expect(dead_code, reason = "no tiles in this build"))]
    amx: Option<Amx>,
}

// SAFETY: only `fill` writes what the panels point to, and its callers guarantee that nothing reads it meanwhile.
unsafe impl Send for QuantizedLinear {}
// SAFETY: as above.
unsafe impl Sync for QuantizedLinear {}

impl QuantizedLinear {
    /// Allocates a weight of zeros for `fill`; many rows at a time are multiplied with AMX if it is given. The error says which segments cannot be packed.
    ///
    /// # Safety
    /// The bias must be null or point to as many elements as the segments have rows.
    pub(crate) unsafe fn new(
        arena: &Arena,
        segments: &[Segment],
        in_features: usize,
        bias: *const Element,
        gated: bool,
        input_bits: InputBits,
        amx: Option<Amx>,
    ) -> io::Result<QuantizedLinear> {
        let mut places = Vec::new();
        let mut row = 0;
        // Gate and what it gates have panels of their own, also in one segment.
        let middle = segments.iter().map(|segment| segment.num_rows).sum::<usize>() / 2;
        for segment in segments {
            let end = row + segment.num_rows;
            while row < end {
                let end = if gated && row < middle { end.min(middle) } else { end };
                let num_rows = PANEL.min(end - row);
                places.push(Place { offset: 0, first_row: row, num_rows, format: segment.format });
                row += num_rows;
            }
        }
        let half = places.len() / 2;
        let is_paired = places.len() % 2 == 0
            && (0..half).all(|unit| {
                let (gate, up) = (&places[unit], &places[half + unit]);
                gate.num_rows == up.num_rows && gate.first_row + row / 2 == up.first_row
            });
        let is_wrong = |what: &'static str| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        if gated && !is_paired {
            return is_wrong("the segments of gate and up differ in their rows");
        }
        if segments.windows(2).any(|pair| pair[0].format.float.is_some() != pair[1].format.float.is_some()) {
            return is_wrong("some segments have integers and others floating-point numbers");
        }
        // In the order of use, so that memory is read from the first byte to the last.
        let mut offset = 0;
        for index in 0..places.len() {
            let index = if gated { index % 2 * half + index / 2 } else { index };
            places[index].offset = offset;
            offset += places[index].format.offsets(in_features).end;
        }
        let memory = arena.allocate(offset)?;
        // SAFETY: the caller vouches for the bias.
        let numbers = unsafe { bias_of(bias, row) };
        let mut padded = vec![0.0; if numbers.is_empty() { 0 } else { places.len() * PANEL }];
        for (panel, place) in places.iter().enumerate().filter(|_| !numbers.is_empty()) {
            let columns = place.first_row..place.first_row + place.num_rows;
            padded[panel * PANEL..][..place.num_rows].copy_from_slice(&numbers[columns]);
        }
        let panels = places.iter().enumerate().map(|(index, place)| {
            let bias =
                padded.get(index * PANEL..).filter(|bias| !bias.is_empty()).map_or(std::ptr::null(), <[f32]>::as_ptr);
            Panel::new(place, memory.as_ptr(), bias, in_features)
        });
        let panels = panels.collect();
        Ok(QuantizedLinear {
            _memory: memory,
            panels,
            _bias: padded,
            out_features: row,
            in_features,
            gated,
            input_bits,
            amx,
        })
    }

    /// Fills rows of the weight from row `first` on.
    ///
    /// # Safety
    /// `rows` must hold its rows, the weight must have them, and nothing may use the layer meanwhile.
    pub(crate) unsafe fn fill(&self, executor: &impl Executor, rows: QuantizedRows, first: usize) {
        if rows.num_rows == 0 {
            return;
        }
        let end = first + rows.num_rows;
        let panels = self.panel_of(first)..self.panel_of(end - 1) + 1;
        // A panel is one thread's: in a plane of single bits, a byte has bits of several rows.
        executor.for_each(panels.len(), |index| {
            let panel = &self.panels[panels.start + index];
            for row in panel.first_column.max(first)..(panel.first_column + panel.num_columns).min(end) {
                // SAFETY: the caller vouches for the rows.
                unsafe { self.fill_row(rows, row - first, panel, row - panel.first_column) };
            }
        });
    }

    /// The number of the panel that has a row.
    fn panel_of(&self, row: usize) -> usize {
        self.panels.partition_point(|panel| panel.first_column + panel.num_columns <= row)
    }

    unsafe fn fill_row(&self, rows: QuantizedRows, from: usize, panel: &Panel, column: usize) {
        let format = panel.format;
        let num_groups = format.num_groups(self.in_features);
        let num_super_groups = format.num_super_groups(self.in_features);
        let offsets = format.offsets(self.in_features);
        // SAFETY: the panel lies in the memory.
        unsafe {
            let base = panel.codes.cast_mut();
            for feature in 0..self.in_features {
                let code = rows.codes.at(from * self.in_features + feature).read();
                write_code(base, format, feature, column, code);
            }
            for kind in 0..format.num_kinds() {
                for group in 0..num_groups {
                    let number = rows.numbers[kind].at(from * num_groups + group).read();
                    format.number(kind).write(base.add(offsets.numbers[kind]), group, column, number);
                }
                for group in 0..num_super_groups {
                    let factor = rows.factors[kind].at(from * num_super_groups + group).read();
                    Number::F16.write(base.add(offsets.factors[kind]), group, column, factor);
                }
            }
        }
    }

    /// Copies rows of the weight as bf16: an embedding whose table is also the head. Not for gated weights.
    ///
    /// # Safety
    /// As for `PackedLinear::copy_rows`.
    pub(crate) unsafe fn copy_rows(
        &self,
        executor: &impl Executor,
        rows: Source<i64>,
        num_rows: usize,
        output: Target<Element>,
    ) {
        debug_assert!(!self.gated);
        executor.for_each(num_rows, |index| {
            // SAFETY: the caller vouches for `rows` and `output`; a row below `out_features` is a column of a panel.
            unsafe {
                let row = rows.at(index).read() as usize;
                let panel = &self.panels[self.panel_of(row)];
                let column = row - panel.first_column;
                let target = output.at(index * self.in_features);
                for feature in 0..self.in_features {
                    target.add(feature).write(Element::from_f32(panel.weight(feature, column)));
                }
            }
        });
    }

    pub(crate) fn out_features(&self) -> usize {
        self.out_features
    }

    pub(crate) fn in_features(&self) -> usize {
        self.in_features
    }

    /// Columns of the output: half of the weight's rows when gated.
    pub(crate) fn output_columns(&self) -> usize {
        if self.gated { self.out_features / 2 } else { self.out_features }
    }

    pub(crate) fn is_gated(&self) -> bool {
        self.gated
    }

    /// The format of this row.
    pub(crate) fn format_of(&self, row: usize) -> Format {
        self.panels[self.panel_of(row)].format
    }

    /// Whether codes are floating-point numbers: then inputs are not quantized.
    pub(super) fn is_float(&self) -> bool {
        self.panels.first().is_some_and(|panel| panel.format.float.is_some())
    }

    pub(super) fn input_bits(&self) -> InputBits {
        self.input_bits
    }

    #[cfg(target_feature = "avx512bf16")]
    pub(super) fn amx(&self) -> Option<Amx> {
        self.amx
    }

    pub(super) fn num_units(&self) -> usize {
        if self.gated { self.panels.len() / 2 } else { self.panels.len() }
    }

    /// A panel of outputs, or a gate panel and the panel that it gates.
    pub(super) fn unit(&self, index: usize) -> (&Panel, Option<&Panel>) {
        (&self.panels[index], self.gated.then(|| &self.panels[self.panels.len() / 2 + index]))
    }
}

/// Offset of a panel in the memory, and the rows of the weight that are its columns.
struct Place {
    offset: usize,
    first_row: usize,
    num_rows: usize,
    format: Format,
}

impl Panel {
    fn new(place: &Place, memory: *mut u8, bias: *const f32, in_features: usize) -> Panel {
        let (format, offsets) = (place.format, place.format.offsets(in_features));
        let address = memory.wrapping_add(place.offset).cast_const();
        let numbers_at = |kind: usize| Numbers {
            number: format.number(kind),
            numbers: address.wrapping_add(offsets.numbers[kind]),
            factors: if format.has_factors() {
                address.wrapping_add(offsets.factors[kind]).cast()
            } else {
                std::ptr::null()
            },
        };
        Panel {
            codes: address,
            scales: numbers_at(0),
            mins: numbers_at(1),
            bias,
            format,
            table: format.table.unwrap_or_default(),
            first_column: place.first_row,
            num_columns: place.num_rows,
            lines_per_unit: offsets.end.div_ceil(in_features.div_ceil(UNIT) * LINE),
        }
    }

    /// Starts to load a unit's share of the panel, and of the next one, which begins where this one ends. PERF: it is read once
    /// (docs/adr/kernels.md).
    #[inline(always)]
    pub(super) fn prefetch(&self, unit: usize) {
        for line in 0..self.lines_per_unit {
            simd::prefetch_once(self.line(unit, line).wrapping_add(AHEAD_BYTES));
        }
    }

    /// Starts to load some lines of a unit's share for AMX.
    #[cfg(target_feature = "avx512bf16")]
    #[inline(always)]
    pub(super) fn prefetch_lines(&self, unit: usize, lines: Range<usize>) {
        for line in lines {
            simd::prefetch(self.line(unit, line).wrapping_add(AMX_AHEAD_BYTES));
        }
    }

    /// A line of a unit's share.
    fn line(&self, unit: usize, line: usize) -> *const u8 {
        self.codes.wrapping_add((unit * self.lines_per_unit + line) * LINE)
    }

    /// The lines of a unit's share that part `part` of `num_parts` loads.
    #[cfg(target_feature = "avx512bf16")]
    pub(super) fn lines(&self, part: usize, num_parts: usize) -> Range<usize> {
        self.lines_per_unit * part / num_parts..self.lines_per_unit * (part + 1) / num_parts
    }

    /// Number that a product subtracts from every code; 0 with mins, which contain it.
    #[cfg(target_feature = "avx512bf16")]
    pub(super) fn offset(&self) -> i32 {
        if self.format.has_mins { 0 } else { self.format.offset }
    }

    /// Bits of a code, or `TABLE`.
    pub(super) fn kind(&self) -> usize {
        if self.format.table.is_some() { TABLE } else { self.format.bits }
    }

    /// Bits of a code, or of the bytes that it stands for.
    #[cfg(target_feature = "avx512bf16")]
    pub(super) fn byte_bits(&self) -> usize {
        if self.format.table.is_some() { 8 } else { self.format.bits }
    }

    /// One weight.
    ///
    /// # Safety
    /// The feature must be below `in_features`, the column below `num_columns`.
    unsafe fn weight(&self, feature: usize, column: usize) -> f32 {
        // SAFETY: the caller vouches for both.
        unsafe {
            let code = read_code(self.codes, self.format, feature, column);
            if let Some(float) = self.format.float {
                let [number, ..] = F32::from_float8::<0>(I32::splat(code.into()), float).to_array();
                return number / float.shrinkage() * self.scales.read(self.format, feature, column);
            }
            let code = i32::from(self.format.table.map_or(code, |table| table[usize::from(code)]));
            let scale = self.scales.read(self.format, feature, column);
            if self.format.has_mins {
                let min = self.mins.read(self.format, feature, column);
                return code as f32 * scale + self.format.min_of(F32::splat(min), F32::splat(scale)).to_array()[0];
            }
            (code - self.format.offset) as f32 * scale
        }
    }
}

impl Numbers {
    /// The number of one weight, times its factor.
    ///
    /// # Safety
    /// As for `Panel::weight`.
    unsafe fn read(self, format: Format, feature: usize, column: usize) -> f32 {
        // SAFETY: the caller vouches for the feature and the column.
        unsafe {
            let number = self.number.read(self.numbers, feature / format.group, column);
            if self.factors.is_null() {
                return number;
            }
            number * Number::F16.read(self.factors.cast(), feature / SUPER_GROUP, column)
        }
    }
}

/// Place of a code's bits in a plane: the byte inside the unit, and the lowest bit.
fn place_in_plane(bits: usize, feature: usize, column: usize) -> (usize, usize) {
    let (half, quad, within) = (feature % UNIT / 16, feature % 16 / 4, feature % 4);
    let lane = column % LANES * 4 + within; // byte of a vector
    let vector = column / LANES;
    match bits {
        // [quad of both halves][vector][lane]
        8 => (((half * 4 + quad) * 2 + vector) * 64 + lane, 0),
        // [quad][vector][lane], the second half of the unit in the high bits
        4 => ((quad * 2 + vector) * 64 + lane, half * 4),
        // [half][vector][lane], the quads in ascending bits
        2 => ((half * 2 + vector) * 64 + lane, quad * 2),
        // [quad of both halves][vector] as 64-bit masks over lanes
        _ => (((half * 4 + quad) * 2 + vector) * 8 + lane / 8, lane % 8),
    }
}

unsafe fn write_code(base: *mut u8, format: Format, feature: usize, column: usize, code: u8) {
    let unit = feature / UNIT * format.unit_bytes();
    let mut code = usize::from(code);
    for (bits, offset) in format.planes() {
        let (byte, bit) = place_in_plane(bits, feature, column);
        // SAFETY: the caller vouches for the place.
        unsafe { *base.add(unit + offset + byte) |= ((code & ((1 << bits) - 1)) << bit) as u8 };
        code >>= bits;
    }
}

unsafe fn read_code(base: *const u8, format: Format, feature: usize, column: usize) -> u8 {
    let unit = feature / UNIT * format.unit_bytes();
    let (mut code, mut shift) = (0, 0);
    for (bits, offset) in format.planes() {
        let (byte, bit) = place_in_plane(bits, feature, column);
        // SAFETY: the caller vouches for the place.
        let found = unsafe { usize::from(base.add(unit + offset + byte).read()) } >> bit & ((1 << bits) - 1);
        code |= found << shift;
        shift += bits;
    }
    code as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::linear::quantized::format::Number;
    use std::sync::Mutex;

    /// Runs parts one after the other, and notes which bytes each of them changes.
    struct Watched<'a> {
        weight: &'a QuantizedLinear,
        num_bytes: usize,
        changed: Mutex<Vec<Vec<usize>>>,
    }

    impl Watched<'_> {
        fn bytes(&self) -> Vec<u8> {
            // SAFETY: the memory has the bytes, and nothing else uses it.
            unsafe { std::slice::from_raw_parts(self.weight.panels[0].codes, self.num_bytes) }.to_vec()
        }
    }

    impl Executor for Watched<'_> {
        fn num_threads(&self) -> usize {
            2
        }

        fn for_each_init<S>(&self, num_parts: usize, init: impl Fn() -> S + Sync, work: impl Fn(&S, usize) + Sync) {
            for part in 0..num_parts {
                let before = self.bytes();
                work(&init(), part);
                let changes =
                    before.iter().zip(self.bytes()).enumerate().filter(|(_, (before, after))| *before != after);
                self.changed.lock().unwrap().push(changes.map(|(index, _)| index).collect());
            }
        }
    }

    #[test]
    fn no_byte_is_written_by_two_threads() {
        let (num_rows, in_features) = (4 * PANEL + 72, 2 * UNIT);
        for bits in [2, 3, 4, 5, 6, 8] {
            let format = Format {
                bits,
                group: 32,
                offset: 0,
                table: None,
                float: None,
                has_mins: false,
                number: Number::F16,
                zeros: None,
            };
            let segments = [Segment { num_rows, format }];
            let arena = Arena::default();
            // SAFETY: there is no bias.
            let weight = unsafe {
                QuantizedLinear::new(&arena, &segments, in_features, std::ptr::null(), false, InputBits::Eight, None)
            };
            let weight = weight.unwrap();
            let last = weight.panels.last().unwrap();
            let num_bytes = last.codes.addr() - weight.panels[0].codes.addr() + last.format.offsets(in_features).end;
            let watched = Watched { weight: &weight, num_bytes, changed: Mutex::default() };
            let codes = vec![u8::MAX >> (8 - bits); num_rows * in_features];
            let numbers = vec![1.0f32; num_rows * in_features / 32];
            for (first, end) in [(0, 40), (40, num_rows)] {
                let rows = QuantizedRows {
                    codes: Source::new(codes.as_ptr()),
                    numbers: [Source::new(numbers.as_ptr()); 2],
                    factors: [Source::new(numbers.as_ptr()); 2],
                    num_rows: end - first,
                };
                // SAFETY: the vectors have the rows.
                unsafe { weight.fill(&watched, rows, first) };
                let mut changed = std::mem::take(&mut *watched.changed.lock().unwrap()).concat();
                let num_changes = changed.len();
                changed.sort_unstable();
                changed.dedup();
                assert!(num_changes > 0 && changed.len() == num_changes, "{bits} bits, rows {first} to {end}");
            }
        }
    }
}

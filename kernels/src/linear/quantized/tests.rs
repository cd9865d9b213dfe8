use super::*;
use crate::cpu::Amx;
use crate::element::Element;
use crate::linear::QuantizedRows;
use crate::memory::Arena;
use crate::pool::{Pool, Source};
use crate::simd::{F32, from_bf16, from_f16, to_bf16, to_f16};
use crate::testing::{Random, spawning_pool};

mod float;

struct Part {
    format: Format,
    num_rows: usize,
    codes: Vec<u8>,
    /// Scales, and mins or zero points, as they are stored, and the factors of scales and mins.
    numbers: [Vec<f32>; 2],
    factors: [Vec<f32>; 2],
}

impl Part {
    fn random(random: &mut Random, format: Format, num_rows: usize, in_features: usize) -> Part {
        let (num_groups, num_super_groups) = (in_features.div_ceil(format.group), in_features.div_ceil(SUPER_GROUP));
        let mut numbers = |most: f32, count: usize| -> Vec<f32> {
            (0..num_rows * count).map(|_| from_f16(to_f16(random.uniform() * most))).collect()
        };
        let factors = [0.01, 0.1].map(|most| numbers(most, num_super_groups));
        let mut numbers = [0.1, 1.0].map(|most| numbers(most, num_groups));
        for (kind, numbers) in numbers.iter_mut().enumerate() {
            for number in numbers {
                let size = number.abs();
                *number = match if kind == 1 { format.zeros.unwrap_or(format.number) } else { format.number } {
                    Number::F16 | Number::F32 => *number,
                    Number::Bf16 => from_bf16(to_bf16(*number)),
                    Number::I8 => (*number * 63.0).round() + 0.0,
                    Number::U4 => (size * 150.0).round() % 16.0,
                    Number::U8 => (size * 300.0).round() % 256.0,
                    Number::Power => (*number * 200.0).round().exp2(),
                };
            }
        }
        // 8-bit floats are finite, and small.
        let mask = if format.float.is_some() { 0xbf } else { 0xff };
        let codes =
            (0..num_rows * in_features).map(|_| ((random.next() >> 20) as u8 >> (8 - format.bits)) & mask).collect();
        Part { format, num_rows, codes, numbers, factors }
    }

    /// The number that the kernels multiply for a code.
    fn byte(&self, code: u8) -> i32 {
        i32::from(self.format.table.map_or(code, |table| table[usize::from(code)]))
    }

    /// The scale (0) or min (1) of a weight.
    fn number(&self, kind: usize, row: usize, feature: usize, in_features: usize) -> f32 {
        let number = self.numbers[kind][row * in_features.div_ceil(self.format.group) + feature / self.format.group];
        let factor = self.factors[kind][row * in_features.div_ceil(SUPER_GROUP) + feature / SUPER_GROUP];
        let number = if matches!(self.format.number, Number::I8 | Number::U4) { number * factor } else { number };
        match (kind, self.format.zeros) {
            (0, _) => number,
            (_, Some(_)) => -(number * self.number(0, row, feature, in_features)),
            (_, None) if self.format.offset == 0 => number,
            (_, None) => number - self.format.offset as f32 * self.number(0, row, feature, in_features),
        }
    }
}

struct Case {
    parts: Vec<Part>,
    bias: Vec<Element>,
    packed: QuantizedLinear,
}

fn format(bits: usize, group: usize, has_mins: bool, number: Number) -> Format {
    let offset = if has_mins { 0 } else { 1 << (bits - 1) };
    Format { bits, group, offset, has_mins, number, zeros: None, table: None, float: None }
}

fn format_with_zeros(bits: usize, group: usize, number: Number, zeros: Number) -> Format {
    Format { zeros: Some(zeros), ..format(bits, group, true, number) }
}

/// Codes of 4 bits that stand for some signed bytes.
fn table_format(group: usize, number: Number) -> Format {
    let table = std::array::from_fn(|code| (code * code) as u8 + code as u8);
    Format { offset: 128, table: Some(table), ..format(4, group, false, number) }
}

fn pack(formats: &[(Format, usize)], in_features: usize, gated: bool) -> Case {
    pack_for(formats, in_features, gated, InputBits::Sixteen, None)
}

fn pack_for(formats: &[(Format, usize)], in_features: usize, gated: bool, bits: InputBits, amx: Option<Amx>) -> Case {
    let mut random = Random::new((formats.len() * 31 + in_features) as u64);
    let parts: Vec<Part> =
        formats.iter().map(|&(format, rows)| Part::random(&mut random, format, rows, in_features)).collect();
    let segments: Vec<Segment> =
        parts.iter().map(|part| Segment { num_rows: part.num_rows, format: part.format }).collect();
    let bias = random.elements(segments.iter().map(|segment| segment.num_rows).sum());
    // SAFETY: the bias has an element for each row.
    let packed =
        unsafe { QuantizedLinear::new(&Arena::default(), &segments, in_features, bias.as_ptr(), gated, bits, amx) }
            .unwrap();
    let mut first = 0;
    for part in &parts {
        let rows = QuantizedRows {
            codes: Source::new(part.codes.as_ptr()),
            numbers: [0, 1].map(|kind| Source::new(part.numbers[kind].as_ptr())),
            factors: [0, 1].map(|kind| Source::new(part.factors[kind].as_ptr())),
            num_rows: part.num_rows,
        };
        // SAFETY: the vectors have the sizes of the part.
        unsafe { packed.fill(&spawning_pool(2), rows, first) };
        first += part.num_rows;
    }
    Case { parts, bias, packed }
}

fn apply(packed: &QuantizedLinear, pool: &Pool, x: &[Element], stride: usize, num_rows: usize) -> Vec<Element> {
    let columns = packed.output_columns();
    let mut y = vec![Element::from_f32(f32::NAN); num_rows * columns];
    let mut scratch = vec![0; packed.scratch_bytes(num_rows)];
    let rows = Rows { address: Source::new(x.as_ptr()), stride, num_rows };
    let output = Output::store(Target::new(y.as_mut_ptr()), columns);
    // SAFETY: x has `num_rows` rows, y room for their results.
    unsafe { packed.apply(pool, rows, output, Target::new(scratch.as_mut_ptr())) };
    y
}

/// `F32::mul_add` for single numbers.
fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    F32::splat(a).mul_add(F32::splat(b), F32::splat(c)).to_array()[0]
}

/// The result by the chain that the module's invariant states, one number at a time.
fn expected(case: &Case, x: &[Element], mut row: usize) -> f32 {
    let bias = Element::to_f32(case.bias[row]);
    let part = case.parts.iter().find(|part| {
        let is_here = row < part.num_rows;
        row -= if is_here { 0 } else { part.num_rows };
        is_here
    });
    let part = part.unwrap();
    let (format, codes) = (part.format, &part.codes[row * x.len()..][..x.len()]);
    let mut sum = 0.0f32;
    for (unit, features) in x.chunks(UNIT).enumerate() {
        let greatest = features.iter().map(|&feature| Element::to_f32(feature).abs()).fold(0.0, f32::max);
        let most = if case.packed.input_bits() == InputBits::Eight { 127.0 } else { 127.0 * 256.0 };
        let inverse = if greatest > 0.0 { most / greatest } else { 0.0 };
        let scale = greatest / most;
        let inputs: Vec<i32> =
            features.iter().map(|&feature| (Element::to_f32(feature) * inverse).round_ties_even() as i32).collect();
        for (start, inputs) in inputs.chunks(format.group.min(UNIT)).enumerate() {
            let first = unit * UNIT + start * format.group.min(UNIT);
            let offset = if format.has_mins { 0 } else { format.offset };
            let total: i32 = inputs.iter().sum();
            let product: i32 =
                inputs.iter().zip(&codes[first..]).map(|(input, &code)| input * (part.byte(code) - offset)).sum();
            sum = mul_add(product as f32, part.number(0, row, first, x.len()) * scale, sum);
            if format.has_mins {
                sum = mul_add(part.number(1, row, first, x.len()), scale * total as f32, sum);
            }
        }
    }
    sum + bias
}

fn formats() -> Vec<Format> {
    let plain = [
        (4, 32, false, Number::F16),
        (4, 32, true, Number::F16),
        (5, 32, true, Number::F16),
        (8, 32, false, Number::F16),
        (2, 16, true, Number::I8),
        (3, 16, false, Number::I8),
        (4, 32, true, Number::I8),
        (6, 16, false, Number::I8),
        (4, 128, true, Number::F32),
        (3, 64, false, Number::F16),
        (8, 4096, false, Number::F32),
        (8, 16, true, Number::F32),
        (2, 32, true, Number::F16),
        (5, 16, false, Number::F16),
        (4, 32, false, Number::Bf16),
        (2, 16, true, Number::U4),
    ];
    let with_zeros = [
        (4, 128, Number::F16, Number::U4),
        (4, 32, Number::Bf16, Number::U8),
        (3, 16, Number::F16, Number::U4),
        (8, 64, Number::F32, Number::F16),
        (2, 32, Number::Bf16, Number::Bf16),
        (6, 16, Number::F16, Number::F32),
    ];
    let with_zeros = with_zeros.map(|(bits, group, number, zeros)| format_with_zeros(bits, group, number, zeros));
    let with_offset = Format { offset: 8, ..format(4, 64, true, Number::Bf16) };
    let with_tables = [(32, Number::F16), (32, Number::I8), (32, Number::Power), (64, Number::F32), (16, Number::F16)];
    let plain = plain.map(|(bits, group, has_mins, number)| format(bits, group, has_mins, number));
    let with_tables = with_tables.map(|(group, number)| table_format(group, number));
    plain.into_iter().chain(with_zeros).chain([with_offset]).chain(with_tables).collect()
}

#[test]
fn products_have_the_bits_of_the_stated_chain() {
    for format in formats() {
        for (out_features, in_features) in [(1, 1), (31, 33), (200, 33), (32, 64), (65, 128), (100, 320)] {
            let input_bits = if out_features % 2 == 0 { InputBits::Eight } else { InputBits::Sixteen };
            let case = pack_for(&[(format, out_features)], in_features, false, input_bits, None);
            for num_rows in [1, 2, 7, 16, 17, 65, 130] {
                let x = Random::new(num_rows as u64).elements(num_rows * in_features);
                let y = apply(&case.packed, &spawning_pool(2), &x, in_features, num_rows);
                for (row, result) in x.chunks(in_features).zip(y.chunks(out_features)).step_by(1 + num_rows / 10) {
                    for column in 0..out_features {
                        let wanted = expected(&case, row, column);
                        assert_eq!(result[column], Element::from_f32(wanted), "{format:?}: {wanted}");
                    }
                }
            }
        }
    }
}

#[test]
fn a_panel_has_the_bits_of_its_codes_scales_and_zero_points() {
    for (format, bits) in [
        (format(4, 32, false, Number::Bf16), 4.5),
        (format(2, 16, true, Number::U4), 2.0 + 8.0 / 16.0 + 32.0 / 256.0),
        (format_with_zeros(4, 128, Number::F16, Number::U4), 4.0 + 20.0 / 128.0),
        (format_with_zeros(4, 64, Number::F16, Number::F16), 4.5),
        (format_with_zeros(8, 32, Number::Bf16, Number::U8), 8.0 + 24.0 / 32.0),
    ] {
        assert_eq!((format.offsets(4096).end * 8) as f64 / (4096 * PANEL) as f64, bits, "{format:?}");
    }
}

#[test]
fn segments_of_several_formats_are_one_layer() {
    let formats = [
        (format(4, 32, true, Number::F16), 40),
        (format(6, 16, false, Number::I8), 24),
        (format(8, 32, false, Number::F16), 33),
    ];
    let case = pack(&formats, 96, false);
    let x = Random::new(1).elements(3 * 96);
    let y = apply(&case.packed, &spawning_pool(2), &x, 96, 3);
    for (row, result) in x.chunks(96).zip(y.chunks(97)) {
        for column in 0..97 {
            assert_eq!(result[column], Element::from_f32(expected(&case, row, column)), "column {column}");
        }
    }
}

#[test]
fn a_gated_layer_is_silu_of_the_gate_times_up() {
    let with_mins = format(4, 32, true, Number::F16);
    for segments in [vec![(with_mins, 40), (format(5, 32, false, Number::F16), 40)], vec![(with_mins, 80)]] {
        let case = pack(&segments, 64, true);
        let x = Random::new(2).elements(64);
        let round = |number: f32| Element::to_f32(Element::from_f32(number));
        for (column, &result) in apply(&case.packed, &spawning_pool(2), &x, 64, 1).iter().enumerate() {
            let (gate, up) = (round(expected(&case, &x, column)), round(expected(&case, &x, 40 + column)));
            let wanted = round(gate / (1.0 + (-gate).exp())) * up;
            assert!((Element::to_f32(result) - wanted).abs() <= 0.01 * (1.0 + wanted.abs()), "{column}");
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    for format in formats() {
        for gated in [false, true] {
            let segments = if gated { vec![(format, 35); 2] } else { vec![(format, 70)] };
            let packed = pack(&segments, 160, gated).packed;
            let (columns, num_rows) = (packed.output_columns(), 140);
            let x = Random::new(3).elements(num_rows * 160);
            let together = apply(&packed, &spawning_pool(2), &x, 160, num_rows);
            for row in [0, 1, 15, 16, 77, 139] {
                let alone = apply(&packed, &Pool::single(), &x[row * 160..], 160, 1);
                assert_eq!(alone, together[row * columns..][..columns], "row {row}, {format:?}");
            }
        }
    }
}

#[test]
fn rows_are_copied_as_the_weights_they_stand_for() {
    for format in formats() {
        let case = pack(&[(format, 45)], 96, false);
        let part = &case.parts[0];
        let ids = [44i64, 0, 31, 32];
        let mut output = vec![Element::default(); ids.len() * 96];
        // SAFETY: the ids are rows of the weight, and the output has room for them.
        unsafe {
            case.packed.copy_rows(
                &spawning_pool(2),
                Source::new(ids.as_ptr()),
                ids.len(),
                Target::new(output.as_mut_ptr()),
            );
        }
        for (&row, copied) in ids.iter().zip(output.chunks(96)) {
            for (feature, &copied_number) in copied.iter().enumerate() {
                let code = part.byte(part.codes[row as usize * 96 + feature]);
                let of_kind = |kind| part.number(kind, row as usize, feature, 96);
                let wanted = if format.has_mins {
                    code as f32 * of_kind(0) + of_kind(1)
                } else {
                    (code - part.format.offset) as f32 * of_kind(0)
                };
                assert_eq!(copied_number, Element::from_f32(wanted));
            }
        }
    }
}

#[test]
fn what_is_not_finite_spoils_its_own_row_only() {
    let case = pack(&[(format(4, 32, true, Number::F16), 33)], 64, false);
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = Random::new(4).elements(3 * 64);
        x[64 + 40] = Element::from_f32(bad);
        let y = apply(&case.packed, &spawning_pool(2), &x, 64, 3);
        for (row, results) in y.chunks(33).enumerate() {
            assert!(results.iter().all(|&result| Element::to_f32(result).is_nan() == (row == 1)), "row {row}, {bad}");
        }
    }
}

#[test]
fn a_gate_must_have_the_rows_of_what_it_gates() {
    let format = format(4, 32, false, Number::F16);
    let segments = [40, 24].map(|num_rows| Segment { num_rows, format });
    // SAFETY: there is no bias.
    let packed = unsafe {
        QuantizedLinear::new(&Arena::default(), &segments, 32, std::ptr::null(), true, InputBits::Eight, None)
    };
    assert!(packed.is_err());
}

#[test]
#[cfg(target_feature = "avx512bf16")]
#[cfg_attr(not(amx_bf16), ignore = "needs AMX")]
fn amx_gives_the_bits_of_vectors() {
    let amx = Some(Amx::request().unwrap());
    for format in formats() {
        for (columns, in_features, gated) in [(1, 1, false), (33, 47, true), (64, 544, false), (37, 1030, true)] {
            for input_bits in [InputBits::Eight, InputBits::Sixteen] {
                let segments = vec![(format, columns); if gated { 2 } else { 1 }];
                let [vectors, tiles] =
                    [None, amx].map(|amx| pack_for(&segments, in_features, gated, input_bits, amx).packed);
                for num_rows in (60..=82).chain([128, 129, 300]) {
                    let x = Random::new(num_rows as u64).elements(num_rows * in_features);
                    let pool = spawning_pool(2);
                    // Bits, because NaN is not equal to itself.
                    let [with, without] = [&tiles, &vectors].map(|packed| {
                        let outputs = apply(packed, &pool, &x, in_features, num_rows);
                        outputs.into_iter().map(|output| output.to_f32().to_bits()).collect::<Vec<_>>()
                    });
                    assert_eq!(
                        with, without,
                        "{format:?}, {input_bits:?}, {num_rows} rows, {columns} columns, {in_features} features"
                    );
                }
            }
        }
    }
}

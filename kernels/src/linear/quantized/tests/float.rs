//! Weights in 8-bit floating point against a dense layer of the weights that they stand for.

use super::*;
use crate::linear::{PackedLinear, Weight};
use crate::simd::{Float8, I32};

fn float_format(float: Float8, group: usize) -> Format {
    Format { offset: 0, float: Some(float), ..format(8, group, false, Number::F32) }
}

/// A layer of finite numbers, its dequantized weight, and the dense layer of that.
fn pack_both(formats: &[(Format, usize)], in_features: usize, gated: bool) -> (Case, Vec<Element>, PackedLinear) {
    let case = pack(formats, in_features, gated);
    let weight_of = |part: &Part, row: usize, feature: usize| {
        let code = i32::from(part.codes[row * in_features + feature]);
        let float = part.format.float.unwrap();
        let [number, ..] = F32::from_float8::<0>(I32::splat(code), float).to_array();
        Element::from_f32(number / float.shrinkage() * part.number(0, row, feature, in_features))
    };
    let weights: Vec<Element> = case
        .parts
        .iter()
        .flat_map(|part| (0..part.num_rows * in_features).map(move |index| (part, index)))
        .map(|(part, index)| weight_of(part, index / in_features, index % in_features))
        .collect();
    let out_features = case.packed.out_features();
    let weight = Weight { bias: case.bias.as_ptr(), out_features, in_features, gated };
    // SAFETY: bias and weights have the rows of the layer.
    let dense = unsafe {
        let dense = PackedLinear::new(&Arena::default(), weight, None).unwrap();
        dense.fill(&spawning_pool(2), Source::new(weights.as_ptr()), 0, out_features);
        dense
    };
    (case, weights, dense)
}

#[test]
fn floats_have_the_bits_of_the_dequantized_weight() {
    let in_blocks = [(float_format(Float8::E4m3fn, 32), 40), (float_format(Float8::E4m3fn, 128), 40)];
    let of_rows = [(float_format(Float8::E4m3fn, 4096), 20), (float_format(Float8::E5m2, 16), 15)];
    for (formats, gated) in [(&in_blocks[..], true), (&of_rows, false), (&of_rows[..1], false), (&in_blocks, false)] {
        for in_features in [1, 16, 33, 64, 200, 320] {
            let (case, weights, dense) = pack_both(formats, in_features, gated);
            let columns = case.packed.output_columns();
            for num_rows in [0, 1, 2, 5, 8, 9, 130] {
                let x = Random::new(num_rows as u64).elements(num_rows * in_features);
                let found = apply(&case.packed, &spawning_pool(2), &x, in_features, num_rows);
                let mut expected = vec![Element::default(); num_rows * columns];
                let rows = Rows { address: Source::new(x.as_ptr()), stride: in_features, num_rows };
                let output = Output::store(Target::new(expected.as_mut_ptr()), columns);
                // SAFETY: x has the rows, `expected` room for their results.
                unsafe { dense.apply(&spawning_pool(2), rows, output) };
                assert!(found == expected, "{formats:?}, {num_rows} rows of {in_features} features, gated: {gated}");
            }
            if gated {
                continue;
            }
            let ids: Vec<i64> = (0..columns as i64).rev().collect();
            let mut copied = vec![Element::default(); columns * in_features];
            let target = Target::new(copied.as_mut_ptr());
            // SAFETY: the ids are rows of the weight, and `copied` has room for them.
            unsafe { case.packed.copy_rows(&spawning_pool(2), Source::new(ids.as_ptr()), columns, target) };
            let rows = weights.chunks(in_features).rev().flatten();
            assert!(copied.iter().eq(rows));
        }
    }
}

#[test]
fn integers_and_floats_are_not_one_layer() {
    let segments = [float_format(Float8::E5m2, 32), format(4, 32, false, Number::F16)]
        .map(|format| Segment { num_rows: 32, format });
    // SAFETY: there is no bias.
    let packed = unsafe {
        QuantizedLinear::new(&Arena::default(), &segments, 32, std::ptr::null(), false, InputBits::Eight, None)
    };
    assert!(packed.is_err());
}

use super::*;
use crate::memory::Arena;
use crate::pool::Pool;
use crate::testing::{Random, assert_close, spawning_pool, to_bf16, to_f32};

struct Case {
    weight: Vec<u16>,
    bias: Vec<u16>,
    packed: PackedLinear,
}

fn pack(out_features: usize, in_features: usize, with_bias: bool, gated: bool) -> Case {
    let mut random = Random::new((out_features * 31 + in_features) as u64);
    let weight = random.bf16s(out_features * in_features);
    let bias = random.bf16s(out_features);
    let shape =
        Weight { bias: if with_bias { bias.as_ptr() } else { std::ptr::null() }, out_features, in_features, gated };
    // SAFETY: the vectors have the sizes said.
    let packed = unsafe { PackedLinear::new(&Arena::default(), shape) }.unwrap();
    // In pieces of all sizes, so that some begin or end within a panel, within 16 rows, or across the halves of a gated one.
    let mut first = 0;
    while first < out_features {
        let num_rows = (random.next() as usize % (out_features + 1)).clamp(1, out_features - first);
        // SAFETY: as above.
        unsafe {
            packed.fill(&spawning_pool(2), Source::new(weight[first * in_features..].as_ptr()), first, num_rows);
        }
        first += num_rows;
    }
    Case { weight, bias: if with_bias { bias } else { vec![0; out_features] }, packed }
}

fn apply(packed: &PackedLinear, pool: &Pool, x: &[u16], stride: usize, num_rows: usize) -> Vec<u16> {
    let mut y = vec![0x7fc0; num_rows * packed.output_columns()];
    // SAFETY: x has `num_rows` rows, y room for their results.
    unsafe {
        packed.apply(
            pool,
            Rows { address: Source::new(x.as_ptr()), stride, num_rows },
            Output::Store(Target::new(y.as_mut_ptr())),
        )
    };
    y
}

fn expected(case: &Case, row: &[u16], column: usize) -> f32 {
    let weights = &case.weight[column * row.len()..][..row.len()];
    let sum: f64 = row.iter().zip(weights).map(|(&a, &b)| f64::from(to_f32(a)) * f64::from(to_f32(b))).sum();
    sum as f32 + to_f32(case.bias[column])
}

const SHAPES: [(usize, usize); 8] = [(1, 1), (16, 2), (47, 33), (48, 64), (49, 7), (96, 128), (200, 96), (576, 100)];

#[test]
#[cfg_attr(not(avx512_bf16), ignore = "needs AVX-512 BF16")]
fn products_are_right_for_all_edge_sizes() {
    for (out_features, in_features) in SHAPES {
        for with_bias in [false, true] {
            let case = pack(out_features, in_features, with_bias, false);
            for num_rows in [1, 2, 3, 5, 8, 9, 17, 130, 300] {
                let x = Random::new(num_rows as u64).bf16s(num_rows * in_features);
                let y = apply(&case.packed, &spawning_pool(2), &x, in_features, num_rows);
                for (row, result) in x.chunks(in_features).zip(y.chunks(out_features)).step_by(1 + num_rows / 10) {
                    for column in 0..out_features {
                        assert_close(result[column], expected(&case, row, column), 0.01, "product");
                    }
                }
            }
        }
    }
}

#[test]
#[cfg_attr(not(avx512_bf16), ignore = "needs AVX-512 BF16")]
fn a_row_has_the_same_bits_alone_and_among_others() {
    for (out_features, in_features) in SHAPES {
        for gated in [false, true] {
            let out_features = if gated { out_features * 2 } else { out_features };
            let packed = pack(out_features, in_features, true, gated).packed;
            let columns = packed.output_columns();
            let x = Random::new(5).bf16s(150 * in_features);
            let alone: Vec<Vec<u16>> =
                x.chunks(in_features).map(|row| apply(&packed, &Pool::single(), row, in_features, 1)).collect();
            for num_rows in [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 15, 16, 23, 64, 150] {
                let y = apply(&packed, &spawning_pool(3), &x, in_features, num_rows);
                for row in 0..num_rows {
                    assert_eq!(y[row * columns..][..columns], alone[row], "row {row} of {num_rows}");
                }
            }
        }
    }
}

#[test]
#[cfg_attr(not(avx512_bf16), ignore = "needs AVX-512 BF16")]
fn strided_rows_are_read_where_they_are() {
    let packed = pack(50, 20, false, false).packed;
    let x = Random::new(9).bf16s(30 * 3);
    let strided = apply(&packed, &Pool::single(), &x, 30, 3);
    let dense: Vec<u16> = x.chunks(30).flat_map(|row| row[..20].to_vec()).collect();
    assert_eq!(strided, apply(&packed, &Pool::single(), &dense, 20, 3));
}

#[test]
#[cfg_attr(not(avx512_bf16), ignore = "needs AVX-512 BF16")]
fn adding_to_a_residual_rounds_like_two_operators() {
    for num_rows in [1, 9] {
        let packed = pack(70, 40, true, false).packed;
        let x = Random::new(1).bf16s(num_rows * 40);
        let residual = Random::new(2).bf16s(num_rows * 70);
        let plain = apply(&packed, &Pool::single(), &x, 40, num_rows);
        let mut sum = residual.clone();
        // SAFETY: sizes as packed.
        unsafe {
            let rows = Rows { address: Source::new(x.as_ptr()), stride: 40, num_rows };
            packed.apply(&Pool::single(), rows, Output::Add(Target::new(sum.as_mut_ptr())));
        }
        for index in 0..sum.len() {
            assert_eq!(sum[index], to_bf16(to_f32(residual[index]) + to_f32(plain[index])));
        }
    }
}

#[test]
#[cfg_attr(not(avx512_bf16), ignore = "needs AVX-512 BF16")]
fn gated_layers_multiply_silu_of_the_gate_with_the_rest() {
    for (columns, num_rows) in [(5, 1), (48, 3), (100, 20)] {
        let case = pack(columns * 2, 64, true, true);
        let x = Random::new(3).bf16s(num_rows * 64);
        let y = apply(&case.packed, &spawning_pool(2), &x, 64, num_rows);
        for (row, result) in x.chunks(64).zip(y.chunks(columns)) {
            for column in 0..columns {
                let gate = expected(&case, row, column);
                let up = expected(&case, row, columns + column);
                assert_close(result[column], gate / (1.0 + (-gate).exp()) * up, 0.02, "gated");
            }
        }
    }
}

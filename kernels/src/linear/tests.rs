use super::*;
use crate::activation::{Activation, Function};
use crate::cpu::Amx;
use crate::memory::Arena;
use crate::pool::Pool;
use crate::testing::{Random, assert_close, on_both_paths, spawning_pool, tolerance};

#[cfg(all(target_feature = "avx512bf16", not(any(element = "f16", element = "f32"))))]
mod amx;

on_both_paths!(
    products_are_right_for_all_edge_sizes,
    a_row_has_the_same_bits_alone_and_among_others,
    what_is_not_finite_spoils_its_own_row_only,
    strided_rows_are_read_where_they_are,
    nothing_is_read_after_the_last_row,
    adding_to_a_residual_rounds_like_two_operators,
    gated_layers_multiply_silu_of_the_gate_with_the_rest,
    gates_and_ups_apart_give_the_bits_of_the_gated_layer,
    rows_are_copied_as_they_were_packed,
);

struct Case {
    weight: Vec<Element>,
    bias: Vec<Element>,
    packed: PackedLinear,
}

fn pack(amx: Option<Amx>, out_features: usize, in_features: usize, with_bias: bool, gated: bool) -> Case {
    let mut random = Random::new((out_features * 31 + in_features) as u64);
    let weight = random.elements(out_features * in_features);
    let bias = random.elements(out_features);
    let shape =
        Weight { bias: if with_bias { bias.as_ptr() } else { std::ptr::null() }, out_features, in_features, gated };
    // SAFETY: the vectors have the sizes said.
    let packed = unsafe { PackedLinear::new(&Arena::default(), shape, amx) }.unwrap();
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
    Case { weight, bias: if with_bias { bias } else { vec![Element::default(); out_features] }, packed }
}

fn apply(packed: &PackedLinear, pool: &Pool, x: &[Element], stride: usize, num_rows: usize) -> Vec<Element> {
    let columns = packed.output_columns();
    let mut y = vec![Element::from_f32(f32::NAN); num_rows * columns];
    // SAFETY: x has `num_rows` rows, y room for their results.
    unsafe {
        packed.apply(
            pool,
            Rows { address: Source::new(x.as_ptr()), stride, num_rows },
            Output::store(Target::new(y.as_mut_ptr()), columns),
        )
    };
    y
}

fn expected(case: &Case, row: &[Element], column: usize) -> f32 {
    let weights = &case.weight[column * row.len()..][..row.len()];
    let sum: f64 =
        row.iter().zip(weights).map(|(&a, &b)| f64::from(Element::to_f32(a)) * f64::from(Element::to_f32(b))).sum();
    sum as f32 + Element::to_f32(case.bias[column])
}

const SHAPES: [(usize, usize); 12] = [
    (1, 1),
    (16, 2),
    (47, 33),
    (48, 64),
    (49, 7),
    (96, 128),
    (200, 96),
    (576, 100),
    (48, 31),
    (1, 576),
    (200, 576),
    (49, 1536),
];

fn products_are_right_for_all_edge_sizes(amx: Option<Amx>) {
    for (out_features, in_features) in SHAPES {
        for with_bias in [false, true] {
            let case = pack(amx, out_features, in_features, with_bias, false);
            for num_rows in [1, 2, 3, 5, 8, 9, 17, 130, 300] {
                let x = Random::new(num_rows as u64).elements(num_rows * in_features);
                let y = apply(&case.packed, &spawning_pool(2), &x, in_features, num_rows);
                for (row, result) in x.chunks(in_features).zip(y.chunks(out_features)).step_by(1 + num_rows / 10) {
                    for column in 0..out_features {
                        assert_close(result[column], expected(&case, row, column), tolerance(1), "product");
                    }
                }
            }
        }
    }
}

fn a_row_has_the_same_bits_alone_and_among_others(amx: Option<Amx>) {
    for (out_features, in_features) in SHAPES {
        for gated in [false, true] {
            let out_features = if gated { out_features * 2 } else { out_features };
            let packed = pack(amx, out_features, in_features, true, gated).packed;
            let columns = packed.output_columns();
            let x = Random::new(5).elements(150 * in_features);
            let alone: Vec<Element> =
                x.chunks(in_features).flat_map(|row| apply(&packed, &Pool::single(), row, in_features, 1)).collect();
            for num_rows in (1..=70).chain([140, 150]) {
                // The last rows, so that a row has another place in every batch.
                let first = 150 - num_rows;
                for num_threads in if num_rows % 10 == 0 { 1..4 } else { 1..2 } {
                    let y =
                        apply(&packed, &spawning_pool(num_threads), &x[first * in_features..], in_features, num_rows);
                    assert!(y == alone[first * columns..], "{num_rows} rows of {out_features} x {in_features}");
                }
            }
        }
    }
}

fn what_is_not_finite_spoils_its_own_row_only(amx: Option<Amx>) {
    for (out_features, in_features) in SHAPES {
        let packed = pack(amx, out_features, in_features, true, false).packed;
        let x = Random::new(8).elements(40 * in_features);
        let clean = apply(&packed, &Pool::single(), &x, in_features, 40);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut spoiled = x.clone();
            for row in [0, 15, 16, 33, 39] {
                spoiled[row * in_features + row % in_features] = Element::from_f32(bad);
            }
            let y = apply(&packed, &Pool::single(), &spoiled, in_features, 40);
            for row in 0..40 {
                let (row_of, expected) = (&y[row * out_features..][..out_features], &clean[row * out_features..]);
                if [0, 15, 16, 33, 39].contains(&row) {
                    assert!(row_of.iter().all(|&result| !Element::to_f32(result).is_finite()), "row {row}");
                } else {
                    assert_eq!(row_of, &expected[..out_features], "row {row}");
                }
            }
        }
    }
}

fn strided_rows_are_read_where_they_are(amx: Option<Amx>) {
    let packed = pack(amx, 50, 20, false, false).packed;
    let x = Random::new(9).elements(30 * 3);
    let strided = apply(&packed, &Pool::single(), &x, 30, 3);
    let dense: Vec<Element> = x.chunks(30).flat_map(|row| row[..20].to_vec()).collect();
    assert_eq!(strided, apply(&packed, &Pool::single(), &dense, 20, 3));
}

/// Reading the page after the input ends the process.
fn nothing_is_read_after_the_last_row(amx: Option<Amx>) {
    const PAGE: usize = 4096;
    for (out_features, in_features) in SHAPES {
        let packed = pack(amx, out_features, in_features, false, false).packed;
        for num_rows in [1, 16, 17, 40] {
            let x = Random::new(6).elements(num_rows * in_features);
            let room = size_of_val(&x[..]).next_multiple_of(PAGE);
            // SAFETY: a new mapping, whose last page may not be touched; the input ends where that page begins.
            unsafe {
                let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                let map = libc::mmap(std::ptr::null_mut(), room + PAGE, access, flags, -1, 0);
                assert_ne!(map, libc::MAP_FAILED);
                assert_eq!(libc::mprotect(map.byte_add(room), PAGE, libc::PROT_NONE), 0);
                let last = std::slice::from_raw_parts_mut(map.byte_add(room - size_of_val(&x[..])).cast(), x.len());
                last.copy_from_slice(&x);
                let y = apply(&packed, &Pool::single(), last, in_features, num_rows);
                assert_eq!(y, apply(&packed, &Pool::single(), &x, in_features, num_rows));
                libc::munmap(map, room + PAGE);
            }
        }
    }
}

fn rows_are_copied_as_they_were_packed(amx: Option<Amx>) {
    for (out_features, in_features) in SHAPES {
        let case = pack(amx, out_features, in_features, false, false);
        let rows: Vec<i64> = (0..out_features as i64).rev().collect();
        let mut copied = vec![Element::default(); case.weight.len()];
        // SAFETY: the rows are those of the weight, and there is room for them.
        unsafe {
            let target = Target::new(copied.as_mut_ptr());
            case.packed.copy_rows(&spawning_pool(2), Source::new(rows.as_ptr()), rows.len(), target);
        }
        assert!(copied.chunks(in_features).eq(case.weight.chunks(in_features).rev()));
    }
}

fn adding_to_a_residual_rounds_like_two_operators(amx: Option<Amx>) {
    for num_rows in [1, 9, 33, 70] {
        let packed = pack(amx, 70, 40, true, false).packed;
        let x = Random::new(1).elements(num_rows * 40);
        let residual = Random::new(2).elements(num_rows * 70);
        let plain = apply(&packed, &Pool::single(), &x, 40, num_rows);
        let mut sum = residual.clone();
        // SAFETY: sizes as packed.
        unsafe {
            let rows = Rows { address: Source::new(x.as_ptr()), stride: 40, num_rows };
            let output = Output { address: Target::new(sum.as_mut_ptr()), stride: 70, combine: Combine::Add };
            packed.apply(&Pool::single(), rows, output);
        }
        for index in 0..sum.len() {
            assert_eq!(sum[index], Element::from_f32(Element::to_f32(residual[index]) + Element::to_f32(plain[index])));
        }
    }
}

fn gated_layers_multiply_silu_of_the_gate_with_the_rest(amx: Option<Amx>) {
    for (columns, num_rows) in [(5, 1), (48, 3), (100, 20), (49, 37)] {
        let case = pack(amx, columns * 2, 64, true, true);
        let x = Random::new(3).elements(num_rows * 64);
        let y = apply(&case.packed, &spawning_pool(2), &x, 64, num_rows);
        for (row, result) in x.chunks(64).zip(y.chunks(columns)) {
            for column in 0..columns {
                let gate = expected(&case, row, column);
                let up = expected(&case, row, columns + column);
                assert_close(result[column], gate / (1.0 + (-gate).exp()) * up, tolerance(6), "gated");
            }
        }
    }
}

fn gates_and_ups_apart_give_the_bits_of_the_gated_layer(amx: Option<Amx>) {
    let silu = Activation { function: Function::Silu, is_gate: true };
    for (columns, num_rows) in [(5, 1), (48, 3), (100, 20), (49, 37)] {
        let case = pack(amx, columns * 2, 64, true, true);
        let x = Random::new(3).elements(num_rows * 64);
        let mut inner = vec![Element::from_f32(f32::NAN); num_rows * columns * 2];
        let mut y = vec![Element::default(); num_rows * columns];
        let rows = Rows { address: Source::new(x.as_ptr()), stride: 64, num_rows };
        // SAFETY: the vectors have these rows.
        unsafe {
            let address = Target::new(inner.as_mut_ptr());
            let output = Output { address, stride: 2 * columns, combine: Combine::Apart };
            case.packed.apply(&spawning_pool(2), rows, output);
            let source = (Source::new(inner.as_ptr()), 2 * columns);
            silu.apply(&Pool::single(), source, Target::new(y.as_mut_ptr()), 2 * columns, num_rows);
        }
        assert_eq!(y, apply(&case.packed, &Pool::single(), &x, 64, num_rows));
    }
}

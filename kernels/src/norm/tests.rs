use super::*;
use crate::testing::{Random, assert_close, spawning_pool};

const EPS: f32 = 1e-5;

/// A group's norm in scalar arithmetic, before the last rounding.
fn expected(kind: Kind, x: &[Element], weight: &[f32], bias: &[f32]) -> Vec<f32> {
    let dim = x.len() as f32;
    let mean = if kind == Kind::Layer { x.iter().map(|&x| Element::to_f32(x)).sum::<f32>() / dim } else { 0.0 };
    let variance = x.iter().map(|&x| (Element::to_f32(x) - mean).powi(2)).sum::<f32>() / dim;
    let normed = x.iter().map(|&x| (Element::to_f32(x) - mean) / (variance + EPS).sqrt());
    let rounded =
        normed.map(|normed| if kind == Kind::Rms { Element::to_f32(Element::from_f32(normed)) } else { normed });
    let biases = bias.iter().copied().chain(std::iter::repeat(0.0));
    rounded.zip(weight).zip(biases).map(|((normed, weight), bias)| normed * weight + bias).collect()
}

fn floats(random: &mut Random, count: usize) -> Vec<f32> {
    (0..count).map(|_| 1.0 + random.uniform()).collect()
}

fn groups(x: &[Element], stride: usize, num_groups: usize, num_rows: usize) -> Groups {
    Groups { address: Source::new(x.as_ptr()), stride, num_groups, num_rows }
}

#[test]
fn norms_of_every_kind_are_right() {
    for kind in [Kind::Rms, Kind::WideRms, Kind::Layer] {
        for (num_rows, num_groups, dim, has_bias, has_own_weights) in [
            (1, 1, 1, false, false),
            (3, 1, 17, true, false),
            (200, 1, 576, false, false),
            (2, 3, 64, false, false),
            (40, 6, 40, true, true),
        ] {
            let mut random = Random::new(dim as u64);
            let stride = num_groups * dim + 5;
            let x = random.elements(num_rows * stride);
            let count = if has_own_weights { num_groups * dim } else { dim };
            let weight = floats(&mut random, count);
            let bias = if has_bias { floats(&mut random, count) } else { Vec::new() };
            let norm = Norm::new(kind, EPS, dim, weight.clone(), bias.clone()).unwrap();
            let mut output = vec![Element::default(); num_rows * num_groups * dim];
            // SAFETY: all have `num_rows` rows.
            unsafe {
                let output = Target::new(output.as_mut_ptr());
                norm.apply(&spawning_pool(2), groups(&x, stride, num_groups, num_rows), output);
            }
            for (index, result) in output.chunks(dim).enumerate() {
                let (row, group) = (index / num_groups, index % num_groups);
                let of_group = if has_own_weights { group * dim } else { 0 };
                let bias = if has_bias { &bias[of_group..][..dim] } else { &[] };
                let x = &x[row * stride + group * dim..][..dim];
                for (&actual, expected) in result.iter().zip(expected(kind, x, &weight[of_group..][..dim], bias)) {
                    assert_close(actual, expected, 0.01, &format!("{kind:?} of {dim}"));
                }
            }
        }
    }
}

#[test]
fn a_norm_after_an_addition_is_the_norm_of_the_rounded_sum() {
    for kind in [Kind::Rms, Kind::WideRms, Kind::Layer] {
        for (num_rows, dim) in [(1, 1), (3, 17), (200, 576)] {
            let mut random = Random::new(dim as u64);
            let (x, mut residual) = (random.elements(num_rows * dim), random.elements(num_rows * dim));
            let norm = Norm::new(kind, EPS, dim, floats(&mut random, dim), Vec::new()).unwrap();
            let sum: Vec<Element> = x
                .iter()
                .zip(&residual)
                .map(|(&x, &y)| Element::from_f32(Element::to_f32(x) + Element::to_f32(y)))
                .collect();
            let (mut fused, mut apart) =
                (vec![Element::default(); num_rows * dim], vec![Element::default(); num_rows * dim]);
            // SAFETY: all have `num_rows` rows.
            unsafe {
                let (pool, residual) = (spawning_pool(2), Target::new(residual.as_mut_ptr()));
                norm.add_apply(&pool, groups(&x, dim, 1, num_rows), residual, Target::new(fused.as_mut_ptr()));
                norm.apply(&pool, groups(&sum, dim, 1, num_rows), Target::new(apart.as_mut_ptr()));
            }
            assert_eq!((residual, fused), (sum, apart));
        }
    }
}

#[test]
fn a_norm_refuses_weights_of_other_sizes() {
    assert!(Norm::new(Kind::Rms, EPS, 8, vec![1.0; 12], Vec::new()).is_err());
    assert!(Norm::new(Kind::Rms, EPS, 0, Vec::new(), Vec::new()).is_err());
    assert!(Norm::new(Kind::Layer, EPS, 8, vec![1.0; 8], vec![1.0; 4]).is_err());
    let heads = Norm::new(Kind::Layer, EPS, 8, vec![1.0; 24], Vec::new()).unwrap();
    assert!(heads.fits(3) && !heads.fits(2));
}

//! Activation functions: of every number of a row, or of a gate that multiplies the other half of the row. All lanes compute alike, so
//! a result depends on its argument only, not on its place in a row or in the batch.

use crate::element::Element;
use crate::pool::{Executor, Source, Target};
use crate::simd::{F32, LANES};

/// Elements from which a parallel section pays off.
const PART_NUMBERS: usize = 1 << 14;

/// A function of one number, computed in float32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Function {
    /// x / (1 + e^-x)
    Silu,
    /// x · Φ(x), where Φ is the normal distribution
    Gelu,
    /// The approximation of GELU with tanh
    TanhGelu,
    /// x / (1 + e^(-1.702 x))
    QuickGelu,
    Relu,
    /// max(x, 0)²
    SquaredRelu,
    Tanh,
    Sigmoid,
    Identity,
    /// cap · tanh(x / cap)
    SoftCap {
        cap: f32,
    },
    /// The activation of gpt-oss, for gated layers only: g / (1 + e^(-alpha g)) · (u + 1). g is min(gate, limit), u the
    /// second half clamped to ± limit.
    ClampedSwiglu {
        alpha: f32,
        limit: f32,
    },
    /// xIELU with β = 0.5 (<https://arxiv.org/abs/2411.13010>)
    Xielu {
        above: f32,
        below: f32,
    },
}

impl Function {
    /// The function of this name. The error says what is wrong.
    pub(crate) fn named(name: &str, parameters: &[f32]) -> Result<Function, String> {
        Ok(match (name, parameters) {
            ("silu", []) => Function::Silu,
            ("gelu", []) => Function::Gelu,
            ("tanh gelu", []) => Function::TanhGelu,
            ("quick gelu", []) => Function::QuickGelu,
            ("relu", []) => Function::Relu,
            ("squared relu", []) => Function::SquaredRelu,
            ("tanh", []) => Function::Tanh,
            ("sigmoid", []) => Function::Sigmoid,
            ("identity", []) => Function::Identity,
            ("soft cap", &[cap]) => Function::SoftCap { cap },
            ("clamped swiglu", &[alpha, limit]) => Function::ClampedSwiglu { alpha, limit },
            ("xielu", &[above, below]) => Function::Xielu { above, below },
            _ => return Err(format!("there is no function {name:?} with {} parameters", parameters.len())),
        })
    }
}

/// A function, and what its arguments are.
#[derive(Clone, Copy)]
pub(crate) struct Activation {
    pub(crate) function: Function,
    /// Whether a row is a gate, the function's arguments, and as many numbers that the results are multiplied with.
    pub(crate) is_gate: bool,
}

impl Activation {
    /// Elements of the result of a row of `width` elements, which must be even for a gate.
    pub(crate) fn output_columns(&self, width: usize) -> usize {
        if self.is_gate { width / 2 } else { width }
    }

    /// Applies the function to rows of `width` elements; rows of x are `stride` elements apart, those of output contiguous.
    ///
    /// # Safety
    /// The pointers must be valid for `num_rows` rows and must not overlap.
    pub(crate) unsafe fn apply(
        &self,
        executor: &impl Executor,
        (x, stride): (Source<Element>, usize),
        output: Target<Element>,
        width: usize,
        num_rows: usize,
    ) {
        executor.for_ranges(num_rows, PART_NUMBERS / width.max(1), |range| {
            for row in range {
                // SAFETY: guaranteed by the caller.
                unsafe { self.apply_row(x.at(row * stride), output.at(row * self.output_columns(width)), width) };
            }
        });
    }

    /// Applies the function to one row.
    ///
    /// # Safety
    /// As for `apply`.
    pub(crate) unsafe fn apply_row(&self, x: *const Element, output: *mut Element, width: usize) {
        // A loop for each function, so that none is chosen inside.
        macro_rules! loop_over {
            ($($function:expr),*) => {
                // SAFETY: guaranteed by the caller.
                unsafe { self.each(x, output, width, $($function),*) }
            };
        }
        let zero = F32::splat(0.0);
        match self.function {
            // SAFETY: guaranteed by the caller.
            Function::ClampedSwiglu { alpha, limit } => unsafe { clamped_swiglu(x, output, width / 2, alpha, limit) },
            Function::Silu => loop_over!(F32::silu),
            Function::Gelu => loop_over!(F32::gelu),
            Function::TanhGelu => loop_over!(F32::tanh_gelu),
            Function::QuickGelu => loop_over!(|x| x * (x * F32::splat(1.702)).sigmoid()),
            // The second operand is returned when one is NaN.
            Function::Relu => loop_over!(|x| zero.max(x)),
            Function::SquaredRelu => loop_over!(|x| zero.max(x) * zero.max(x)),
            Function::Tanh => loop_over!(F32::tanh),
            Function::Sigmoid => loop_over!(F32::sigmoid),
            Function::Identity => loop_over!(|x| x),
            Function::SoftCap { cap } => loop_over!(|x| (x / F32::splat(cap)).tanh() * F32::splat(cap)),
            Function::Xielu { above, below } => loop_over!(|x| xielu(x, above, below)),
        }
    }

    #[inline(always)]
    unsafe fn each(&self, x: *const Element, output: *mut Element, width: usize, function: impl Fn(F32) -> F32) {
        let dim = self.output_columns(width);
        for first in (0..dim).step_by(LANES) {
            let count = dim - first;
            // SAFETY: the caller of `apply` vouches for the row.
            unsafe {
                let mut result = function(Element::load_first(x.add(first), count));
                if self.is_gate {
                    result = Element::round(result) * Element::load_first(x.add(dim + first), count);
                }
                Element::store_first(result, output.add(first), count);
            }
        }
    }
}

/// `Function::ClampedSwiglu` of a row, rounded once.
///
/// # Safety
/// As for `Activation::apply`.
unsafe fn clamped_swiglu(x: *const Element, output: *mut Element, dim: usize, alpha: f32, limit: f32) {
    let (one, high, low) = (F32::splat(1.0), F32::splat(limit), F32::splat(-limit));
    for first in (0..dim).step_by(LANES) {
        // SAFETY: the caller vouches for the row.
        unsafe {
            let [gate, up] = [0, dim].map(|half| Element::load_first(x.add(half + first), dim - first));
            // The second operand is returned when one is NaN.
            let (gate, up) = (high.min(gate), low.max(high.min(up)));
            Element::store_first(
                gate * (gate * F32::splat(alpha)).sigmoid() * (up + one),
                output.add(first),
                dim - first,
            );
        }
    }
}

#[inline(always)]
fn xielu(x: F32, above: f32, below: f32) -> F32 {
    let (zero, beta) = (F32::splat(0.0), F32::splat(0.5));
    // Near zero, the difference would consist of rounding errors.
    let negative = (F32::splat(-1e-6).min(x).exp() - F32::splat(1.0) - x) * F32::splat(below);
    beta.mul_add(x, (F32::splat(above) * x * x).select(x.greater(zero), negative))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, assert_close, epsilon, spawning_pool};

    const FUNCTIONS: [Function; 11] = [
        Function::Silu,
        Function::Gelu,
        Function::TanhGelu,
        Function::QuickGelu,
        Function::Relu,
        Function::SquaredRelu,
        Function::Tanh,
        Function::Sigmoid,
        Function::Identity,
        Function::SoftCap { cap: 3.0 },
        Function::Xielu { above: 0.8, below: 1.3 },
    ];

    /// Φ(x) by the series of its integral, to more bits than float32 has.
    fn normal_distribution(x: f64) -> f64 {
        if x.abs() > 6.0 {
            return if x > 0.0 { 1.0 } else { 0.0 };
        }
        let mut term = x;
        let mut sum = x;
        for n in 1..400 {
            term *= x * x / f64::from(2 * n + 1);
            sum += term;
        }
        0.5 + sum * (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt()
    }

    fn expected(function: Function, x: f64) -> f64 {
        match function {
            Function::Silu => x / (1.0 + (-x).exp()),
            Function::Gelu => x * normal_distribution(x),
            Function::TanhGelu => {
                0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
            }
            Function::QuickGelu => x / (1.0 + (-1.702 * x).exp()),
            Function::Relu => x.max(0.0),
            Function::SquaredRelu => x.max(0.0).powi(2),
            Function::Tanh => x.tanh(),
            Function::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Function::Identity => x,
            Function::ClampedSwiglu { .. } => unreachable!("it is a gate"),
            Function::SoftCap { cap } => (x / f64::from(cap)).tanh() * f64::from(cap),
            Function::Xielu { above, below } => {
                let negative = (x.min(-1e-6).exp_m1() - x) * f64::from(below);
                0.5 * x + if x > 0.0 { f64::from(above) * x * x } else { negative }
            }
        }
    }

    fn apply(activation: Activation, x: &[Element], stride: usize, width: usize, num_rows: usize) -> Vec<Element> {
        let mut output = vec![Element::default(); num_rows * activation.output_columns(width)];
        let (rows, target) = ((Source::new(x.as_ptr()), stride), Target::new(output.as_mut_ptr()));
        // SAFETY: sizes as made.
        unsafe { activation.apply(&spawning_pool(3), rows, target, width, num_rows) };
        output
    }

    #[test]
    fn functions_are_right_for_small_and_great_arguments() {
        let mut random = Random::new(6);
        let x: Vec<Element> = (0..4000)
            .map(|index| Element::from_f32(random.uniform() * 2f32.powi(index % 24 - 18)))
            .chain([0.0, -0.0, 60.0, -60.0].map(Element::from_f32))
            .collect();
        for function in FUNCTIONS {
            let results = apply(Activation { function, is_gate: false }, &x, x.len(), x.len(), 1);
            for (&x, &result) in x.iter().zip(&results) {
                let expected = expected(function, f64::from(x.to_f32())) as f32;
                let (error, limit) =
                    ((result.to_f32() - expected).abs(), (0.51 * epsilon() + 2e-6) * expected.abs() + 1e-7);
                assert!(error <= limit, "{function:?} of {x:?}: {result:?}, {expected}");
            }
        }
    }

    #[test]
    fn what_is_not_a_number_stays_so() {
        let x = [Element::from_f32(f32::NAN); 3];
        for function in FUNCTIONS {
            let results = apply(Activation { function, is_gate: false }, &x, 3, 3, 1);
            assert!(results.iter().all(|result| result.to_f32().is_nan()), "{function:?}");
        }
    }

    #[test]
    fn a_sigmoid_of_an_infinite_number_is_its_limit() {
        let x = [f32::NEG_INFINITY, f32::INFINITY, -3e38, 3e38].map(Element::from_f32);
        let results = apply(Activation { function: Function::Sigmoid, is_gate: false }, &x, 4, 4, 1);
        assert_eq!(results, [0.0, 1.0, 0.0, 1.0].map(Element::from_f32));
    }

    #[test]
    fn a_result_depends_on_its_argument_only() {
        for function in FUNCTIONS {
            let activation = Activation { function, is_gate: false };
            for (num_rows, dim, stride) in [(1, 1, 1), (3, 33, 40), (40, 700, 1400), (0, 8, 8)] {
                let x = Random::new(dim as u64).elements(num_rows * stride + 1);
                let together = apply(activation, &x, stride, dim, num_rows);
                let alone = |&x: &Element| apply(activation, &[x], 1, 1, 1)[0];
                for row in (0..num_rows).step_by(13) {
                    let expected: Vec<Element> = x[row * stride..][..dim].iter().map(alone).collect();
                    assert_eq!(together[row * dim..][..dim], expected, "{function:?}");
                }
            }
        }
    }

    #[test]
    fn results_of_a_gate_are_multiplied() {
        let activation = Activation { function: Function::Silu, is_gate: true };
        for (num_rows, dim, stride) in [(1, 1, 2), (3, 33, 70), (40, 700, 1400)] {
            let x = Random::new(dim as u64).elements(num_rows * stride);
            let results = apply(activation, &x, stride, 2 * dim, num_rows);
            for (row, results) in x.chunks(stride).zip(results.chunks(dim)) {
                let gates = apply(Activation { is_gate: false, ..activation }, row, dim, dim, 1);
                for (index, &result) in results.iter().enumerate() {
                    assert_close(result, gates[index].to_f32() * row[dim + index].to_f32(), 0.004, "gated");
                }
            }
        }
    }

    #[test]
    fn gate_and_up_of_a_clamped_swiglu_are_clamped() {
        let activation = Activation { function: Function::ClampedSwiglu { alpha: 1.702, limit: 7.0 }, is_gate: true };
        for (gate, up) in [(0.5, -0.25), (9.0, 9.0), (-9.0, -9.0), (6.5, 3.0)] {
            let x: Vec<Element> = [gate, up].into_iter().flat_map(|x| [Element::from_f32(x); 33]).collect();
            let (gate, up) = (gate.min(7.0), up.clamp(-7.0, 7.0));
            let expected = gate / (1.0 + (-1.702 * gate).exp()) * (up + 1.0);
            let results = apply(activation, &x, 66, 66, 1);
            assert!(results.iter().all(|&result| result == results[0]));
            assert_close(results[0], expected, 2.0 * epsilon() + 1e-6, "clamped swiglu");
        }
        let nan = Element::from_f32(f32::NAN);
        let one = Element::from_f32(1.0);
        assert!([[nan, one], [one, nan]].iter().all(|x| apply(activation, x, 2, 2, 1)[0].to_f32().is_nan()));
    }

    #[test]
    fn an_unknown_function_is_refused() {
        assert!(Function::named("softplus", &[]).is_err());
        assert!(Function::named("silu", &[1.0]).is_err());
        assert_eq!(Function::named("soft cap", &[2.0]), Ok(Function::SoftCap { cap: 2.0 }));
    }
}

//! Shared by the unit tests: a pool of real threads, pseudo-random bf16 numbers, and scalar conversions for the references.

use crate::element::Element;
use crate::pool::Pool;

use std::ffi::{c_uint, c_void};

struct Shared(*mut c_void);
// SAFETY: the pointer refers to a job that is `Sync` and outlives the section.
unsafe impl Sync for Shared {}
impl Shared {
    fn get(&self) -> *mut c_void {
        self.0
    }
}

/// A `GOMP_parallel` for the tests that starts new threads for each section.
unsafe extern "C" fn spawn_parallel(
    enter: extern "C" fn(*mut c_void),
    data: *mut c_void,
    num_threads: c_uint,
    _flags: c_uint,
) {
    let shared = Shared(data);
    std::thread::scope(|scope| {
        for _ in 0..num_threads {
            scope.spawn(|| enter(shared.get()));
        }
    });
}

pub(crate) fn spawning_pool(num_threads: usize) -> Pool {
    Pool::new(num_threads, spawn_parallel)
}

/// A small generator (xorshift); the same seed gives the same numbers.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Uniform in [-1, 1).
    pub(crate) fn uniform(&mut self) -> f32 {
        ((self.next() >> 40) as f32) / ((1u64 << 23) as f32) - 1.0
    }

    pub(crate) fn elements(&mut self, count: usize) -> Vec<Element> {
        (0..count).map(|_| Element::from_f32(self.uniform())).collect()
    }
}

/// The tolerance of `assert_close` for sums in float32 of some thousand products that are rounded to elements this many times.
pub(crate) fn tolerance(num_roundings: u32) -> f32 {
    let mantissa_bits = if cfg!(element = "f32") {
        24
    } else if cfg!(element = "f16") {
        11
    } else {
        8
    };
    1e-4 + num_roundings as f32 * (-mantissa_bits as f32).exp2()
}

/// Fails unless the difference is within `tolerance` of 1 or of `expected`, whichever is greater.
pub(crate) fn assert_close(actual: Element, expected: f32, tolerance: f32, what: &str) {
    let actual = Element::to_f32(actual);
    assert!((actual - expected).abs() <= tolerance * (1.0 + expected.abs()), "{what}: {actual} is not {expected}");
}

/// The distance from 1 to the next element.
pub(crate) fn epsilon() -> f32 {
    let mut steps = (1..24).map(|power| 2f32.powi(-power));
    steps.rfind(|step| Element::from_f32(1.0 + step).to_f32() > 1.0).unwrap_or(1.0)
}

/// Makes tests of functions that take the path: `on_vectors::name`, and `on_amx::name`, ignored where the instructions are missing.
macro_rules! on_both_paths {
    ($($name:ident),* $(,)?) => {
        mod on_vectors {
            $(
                #[test]
                fn $name() {
                    super::$name(None);
                }
            )*
        }
        #[cfg(all(target_feature = "avx512bf16", not(any(element = "f16", element = "f32"))))]
        mod on_amx {
            $(
                #[test]
                #[cfg_attr(not(amx_bf16), ignore = "needs AMX")]
                fn $name() {
                    super::$name(Some(crate::cpu::Amx::request().unwrap()));
                }
            )*
        }
    };
}
pub(crate) use on_both_paths;

//! What only the path with AMX promises.

use super::*;
use crate::element::Element;
use std::arch::asm;

/// The chain of `tdpbf16ps` as Intel documents it, for a row and a column.
fn stated_chain(row: &[Element], column: &[Element]) -> f32 {
    row.chunks(32).zip(column.chunks(32)).fold(0.0, |sum, (row, column)| {
        let half = |parity: usize| {
            let pairs = row.iter().zip(column).skip(parity).step_by(2);
            pairs.fold(0.0, |sum: f32, (&a, &b)| Element::to_f32(a).mul_add(Element::to_f32(b), sum))
        };
        sum + (half(0) + half(1))
    })
}

#[test]
#[cfg_attr(not(amx_bf16), ignore = "needs AMX")]
fn products_have_the_bits_of_the_stated_chain() {
    for (out_features, in_features) in SHAPES {
        let case = pack(Amx::request(), out_features, in_features, false, false);
        for num_rows in [1, 16, 21, 32] {
            let x = Random::new(4).elements(num_rows * in_features);
            let y = apply(&case.packed, &Pool::single(), &x, in_features, num_rows);
            for (row, results) in x.chunks(in_features).zip(y.chunks(out_features)) {
                for (column, &result) in case.weight.chunks(in_features).zip(results) {
                    assert_eq!(result, Element::from_f32(stated_chain(row, column)));
                }
            }
        }
    }
}

/// Other libraries in the process configure the registers of the same threads.
#[test]
#[cfg_attr(not(amx_bf16), ignore = "needs AMX")]
fn registers_may_be_in_use_before_and_are_free_afterwards() {
    let packed = pack(Amx::request(), 100, 70, false, false).packed;
    let x = Random::new(7).elements(40 * 70);
    let expected = apply(&packed, &Pool::single(), &x, 70, 40);
    #[repr(align(64))]
    struct Configuration([u8; 64]);
    let mut configuration = Configuration([0; 64]);
    configuration.0[0] = 1;
    configuration.0[16..32].copy_from_slice(&[4, 0].repeat(8));
    configuration.0[48..56].fill(3);
    // SAFETY: rows and bytes per row of eight registers, which is valid.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const configuration, options(nostack)) };
    assert_eq!(apply(&packed, &Pool::single(), &x, 70, 40), expected);
    // SAFETY: there is room for a configuration.
    unsafe { asm!("sttilecfg [{}]", in(reg) &raw mut configuration, options(nostack)) };
    assert_eq!(configuration.0, [0; 64]);
}

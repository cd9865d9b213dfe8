use super::*;
use crate::element::GROUP;
use crate::testing::{Random, assert_close, tolerance};

/// Chains of all lengths, over columns that are wider than a vector, with numbers after the last link that must not count.
#[test]
fn chains_end_with_their_last_link() {
    const WIDTH_OF_GROUP: usize = 2 * LANES;
    for length in 1..=9usize {
        let mut random = Random::new(length as u64);
        let mut columns_of = random.elements(length.next_multiple_of(GROUP) * WIDTH_OF_GROUP);
        let row = random.elements(length);
        let place = |link: usize, column: usize| (link / GROUP * WIDTH_OF_GROUP + column) * GROUP + link % GROUP;
        let expected: Vec<f32> = (0..LANES)
            .map(|column| {
                (0..length).map(|link| row[link].to_f32() * columns_of[place(link, LANES + column)].to_f32()).sum()
            })
            .collect();
        for column in 0..WIDTH_OF_GROUP {
            for link in length..length.next_multiple_of(GROUP) {
                columns_of[place(link, column)] = Element::from_f32(f32::NAN);
            }
        }
        let mut sums = [[F32::splat(0.0)]];
        // SAFETY: the columns are the second vector of each group, and the row has all links.
        unsafe {
            with_factors(row.as_ptr(), length, 1, length, |factors, _| {
                let first = columns_of.as_ptr().add(LANES * GROUP);
                let whole = length / STEP * STEP;
                for link in (0..whole).step_by(WIDTH) {
                    add(&mut sums, [columns(first, WIDTH_OF_GROUP, link)], |_| splat(factors.add(link)));
                }
                if length > whole {
                    add(&mut sums, [last_columns(first, WIDTH_OF_GROUP, whole)], |_| splat_last(factors.add(whole)));
                }
            });
        }
        for (sum, expected) in sums[0][0].to_array().into_iter().zip(expected) {
            assert_close(Element::from_f32(sum), expected, tolerance(1), "sum");
        }
    }
}

#[test]
fn rows_are_widened_where_they_are() {
    let elements = Random::new(1).elements(100);
    // SAFETY: 3 rows of 20 elements that are 35 apart.
    unsafe {
        with_factors(elements.as_ptr(), 35, 3, 20, |factors, stride| {
            for (row, index) in (0..3).flat_map(|row| (0..20).map(move |index| (row, index))) {
                let mut stored = [Factor::default(); LANES];
                store_factors(F32::splat(elements[row * 35 + index].to_f32()), stored.as_mut_ptr());
                assert!(*factors.add(row * stride + index) == stored[0]);
            }
        });
    }
}

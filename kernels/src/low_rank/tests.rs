use super::*;
use crate::pool::{Pool, Source};
use crate::testing::{Random, assert_close, spawning_pool, tolerance};
use std::ops::Range;

const OUT_COLUMNS: usize = 1100; // several parts of the work
const IN_FEATURES: [usize; 4] = [1, 16, 37, 128];
const SCALE: f32 = 0.5;

/// A part as it is given, and what it is expected to add.
struct Given {
    down: Vec<Element>,
    up: Vec<Element>,
    rank: usize,
    columns: Range<usize>,
}

impl Given {
    fn plain(&self) -> PlainPart<'_> {
        PlainPart::new(&self.down, &self.up, self.rank, self.columns.start, SCALE).unwrap()
    }
}

/// The parts of an adapter of one site, with these ranks and columns.
fn parts(random: &mut Random, in_features: usize, shapes: &[(usize, Range<usize>)]) -> Vec<Given> {
    let part = |&(rank, ref columns): &(usize, Range<usize>)| {
        let (down, up) = (random.elements(rank * in_features), random.elements(rank * columns.len()));
        Given { down, up, rank, columns: columns.clone() }
    };
    shapes.iter().map(part).collect()
}

fn packed(parts: &[Given]) -> Adapter {
    Adapter::new(&[parts.iter().map(Given::plain).collect()]).unwrap()
}

/// Two adapters of different ranks; the second one leaves columns out.
fn given(in_features: usize) -> [Vec<Given>; 2] {
    let mut random = Random::new(in_features as u64);
    [
        parts(&mut random, in_features, &[(9, 0..600), (3, 600..1050), (16, 1050..OUT_COLUMNS)]),
        parts(&mut random, in_features, &[(5, 7..520)]),
    ]
}

fn adapters(in_features: usize) -> [Adapter; 2] {
    given(in_features).map(|parts| packed(&parts))
}

fn apply(pool: &Pool, adapters: &[Adapter], of_rows: &[Option<usize>], x: &[Element], y: &mut [Element]) {
    let adapters: Vec<&Adapter> = adapters.iter().collect();
    let runs = runs(of_rows.iter().copied());
    let rows = Rows { address: Source::new(x.as_ptr()), stride: x.len() / of_rows.len(), num_rows: of_rows.len() };
    let product = Product { rows, y: Target::new(y.as_mut_ptr()), out_columns: OUT_COLUMNS };
    // SAFETY: the vectors have a row for each of `of_rows`, and the adapters were made for their widths.
    unsafe { super::apply(pool, &adapters, &runs, 0, product) };
}

fn expected(adapter: &[Given], x: &[Element], column: usize) -> f64 {
    let to_f64 = |element: &Element| f64::from(element.to_f32());
    let mut sum = 0.0;
    for part in adapter.iter().filter(|part| part.columns.contains(&column)) {
        for rank in 0..part.rank {
            let down = &part.down[rank * x.len()..][..x.len()];
            let inner: f64 = down.iter().zip(x).map(|(a, x)| to_f64(a) * to_f64(x)).sum();
            sum += inner * f64::from(SCALE) * to_f64(&part.up[rank * part.columns.len() + column - part.columns.start]);
        }
    }
    sum
}

#[test]
fn each_row_gets_the_product_of_its_adapter() {
    for in_features in IN_FEATURES {
        let (given, adapters) = (given(in_features), adapters(in_features));
        let of_rows = [Some(0), Some(0), None, Some(1), Some(0), Some(1), Some(1), Some(1), Some(1), Some(1), None];
        let mut random = Random::new(3);
        let x = random.elements(of_rows.len() * in_features);
        let before = random.elements(of_rows.len() * OUT_COLUMNS);
        let mut y = before.clone();
        apply(&spawning_pool(3), &adapters, &of_rows, &x, &mut y);
        for (row, adapter) in of_rows.iter().enumerate() {
            let row_x = &x[row * in_features..][..in_features];
            for column in 0..OUT_COLUMNS {
                let at = row * OUT_COLUMNS + column;
                let Some(adapter) = adapter else {
                    assert_eq!(y[at], before[at], "row {row} has no adapter");
                    continue;
                };
                let sum = f64::from(before[at].to_f32()) + expected(&given[*adapter], row_x, column);
                assert_close(y[at], sum as f32, tolerance(1), &format!("row {row}, column {column}"));
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    for in_features in IN_FEATURES {
        let adapters = adapters(in_features);
        // Runs of all lengths around a tile, and one that is longer than a run may be.
        let mut of_rows = Vec::new();
        for length in [1, 2, 3, 4, 5, 7, MAX_RUN_ROWS + 2] {
            of_rows.extend(vec![Some(length % 2); length]);
            of_rows.push(None);
        }
        let mut random = Random::new(5);
        let x = random.elements(of_rows.len() * in_features);
        let before = random.elements(of_rows.len() * OUT_COLUMNS);
        let mut together = before.clone();
        apply(&spawning_pool(2), &adapters, &of_rows, &x, &mut together);
        for (row, &adapter) in of_rows.iter().enumerate() {
            let (row_x, range) = (&x[row * in_features..][..in_features], row * OUT_COLUMNS..(row + 1) * OUT_COLUMNS);
            let mut alone = before[range.clone()].to_vec();
            apply(&Pool::single(), &adapters, &[adapter], row_x, &mut alone);
            assert_eq!(alone, together[range], "row {row}");
        }
    }
}

#[test]
fn columns_that_are_split_have_the_same_bits() {
    let (in_features, rank) = (40, 6);
    let mut random = Random::new(11);
    let (down, up) = (random.elements(rank * in_features), random.elements(rank * OUT_COLUMNS));
    let part = |columns: Range<usize>| {
        let up = (0..rank).flat_map(|rank| up[rank * OUT_COLUMNS..][columns.clone()].to_vec()).collect();
        Given { down: down.clone(), up, rank, columns }
    };
    let of = |ends: &[usize]| {
        let starts = std::iter::once(0).chain(ends.iter().copied());
        [packed(&starts.zip(ends).map(|(start, &end)| part(start..end)).collect::<Vec<_>>())]
    };
    let x = random.elements(in_features);
    let mut whole = vec![Element::default(); OUT_COLUMNS];
    let mut split = whole.clone();
    apply(&Pool::single(), &of(&[OUT_COLUMNS]), &[Some(0)], &x, &mut whole);
    apply(&Pool::single(), &of(&[333, OUT_COLUMNS]), &[Some(0)], &x, &mut split);
    assert_eq!(whole, split);
}

#[test]
fn runs_are_rows_with_one_adapter() {
    let run = |first, num_rows, adapter| Run { first, num_rows, adapter };
    assert_eq!(
        runs([None, Some(2), Some(2), Some(1), None, Some(1)].into_iter()),
        [run(1, 2, 2), run(3, 1, 1), run(5, 1, 1)]
    );
    assert_eq!(
        runs(std::iter::repeat_n(Some(0), MAX_RUN_ROWS + 1)),
        [run(0, MAX_RUN_ROWS, 0), run(MAX_RUN_ROWS, 1, 0)]
    );
}

#[test]
fn an_adapter_for_another_layer_is_refused() {
    let [adapter, _] = adapters(16);
    assert!(adapter.fits(&[(0, [16, OUT_COLUMNS])]));
    for sites in [[(0, [17, OUT_COLUMNS])], [(0, [16, OUT_COLUMNS - 1])], [(1, [16, OUT_COLUMNS])]] {
        assert!(!adapter.fits(&sites), "{sites:?}");
    }
    let numbers = [Element::default(); 6];
    assert!(PlainPart::new(&[], &[], 0, 0, 1.0).is_none());
    assert!(PlainPart::new(&numbers, &numbers[1..], 2, 0, 1.0).is_none());
    let [two, three] = [2, 3].map(|rank| PlainPart::new(&numbers, &numbers, rank, 0, 1.0).unwrap());
    assert!(Adapter::new(&[vec![two, three]]).is_err(), "three and two input features");
}

use super::*;
use crate::pool::{Pool, Source, Target};
use crate::recurrence::{CHUNK, Operands, Sequences};
use crate::testing::{Random, assert_close, spawning_pool, tolerance};

const ROWS: usize = 53;
/// Parts of the scan, the last of which is not a whole vector. The convolution has a part and a bit.
const CHANNELS: usize = PART + 21;
const SCAN_PART: usize = 5 * LANES;
const STATE_DIM: usize = 5;
const WIDTH: usize = 3;

fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.uniform()).collect()
}

fn convolution() -> MambaConv {
    MambaConv::new(&numbers(3, CHANNELS * WIDTH), &numbers(4, CHANNELS)).unwrap()
}

/// The rate of each element of each channel's state.
fn rates() -> Vec<f32> {
    numbers(5, STATE_DIM * CHANNELS).into_iter().map(|number| 0.1 + number.abs()).collect()
}

fn scan() -> MambaScan {
    MambaScan::new(SCAN_PART, &rates(), &numbers(6, CHANNELS), &numbers(7, CHANNELS)).unwrap()
}

/// Each input of a net.
fn inputs(net: &dyn Recurrence, seed: u64) -> Vec<Vec<Element>> {
    let seeds = seed..;
    net.input_widths().iter().zip(seeds).map(|(width, seed)| Random::new(seed).elements(ROWS * width)).collect()
}

/// Slots full of what must not be read.
fn slots(net: &dyn Recurrence, count: usize) -> Vec<f32> {
    vec![f32::NAN; count * net.slot_floats()]
}

/// Advances a sequence in a slot by the rows from one position to another.
fn advance(
    net: &dyn Recurrence,
    pool: &Pool,
    inputs: &[Vec<Element>],
    slots: &mut [f32],
    slot: i64,
    rows: [usize; 2],
) -> Vec<Element> {
    let [first, end] = rows;
    let mut output = vec![Element::default(); (end - first) * CHANNELS];
    let (starts, lens, slot) = ([0, (end - first) as i32], [end as i32], [slot]);
    let sequences = Sequences {
        query_starts: Source::new(starts.as_ptr()),
        context_lens: Source::new(lens.as_ptr()),
        slots: Source::new(slot.as_ptr()),
        num_sequences: 1,
    };
    let sources: Vec<Source<Element>> = inputs
        .iter()
        .zip(net.input_widths())
        .map(|(input, width)| Source::new(input[first * width..].as_ptr()))
        .collect();
    let operands =
        Operands { inputs: &sources, slots: Target::new(slots.as_mut_ptr()), output: Target::new(output.as_mut_ptr()) };
    // SAFETY: the vectors have the sizes said.
    unsafe { net.run(pool, &sequences, &operands) };
    output
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

#[test]
fn the_convolution_is_that_of_the_formula() {
    let net = convolution();
    let (inputs, weights, bias) = (inputs(&net, 8), numbers(3, CHANNELS * WIDTH), numbers(4, CHANNELS));
    let found = advance(&net, &spawning_pool(3), &inputs, &mut slots(&net, 1), 0, [0, ROWS]);
    for (index, found) in found.into_iter().enumerate() {
        let (row, channel) = (index / CHANNELS, index % CHANNELS);
        let read = (0..WIDTH.min(row + 1)).map(|back| {
            let input = inputs[0][(row - back) * 2 * CHANNELS + channel].to_f32();
            f64::from(input) * f64::from(weights[channel * WIDTH + WIDTH - 1 - back])
        });
        let expected = silu(read.sum::<f64>() + f64::from(bias[channel]));
        assert_close(found, expected as f32, tolerance(1), "output");
    }
}

#[test]
fn the_scan_is_that_of_the_formula() {
    let net = scan();
    let (inputs, rates) = (inputs(&net, 9), rates());
    let (bias, skip) = (numbers(6, CHANNELS), numbers(7, CHANNELS));
    let found = advance(&net, &spawning_pool(3), &inputs, &mut slots(&net, 1), 0, [0, ROWS]);
    let input = |which: usize, row: usize, column: usize| {
        f64::from(inputs[which][row * net.input_widths[which] + column].to_f32())
    };
    for channel in 0..CHANNELS {
        let mut state = [0.0; STATE_DIM];
        for row in 0..ROWS {
            let dt = (input(3, row, channel) + f64::from(bias[channel])).exp().ln_1p();
            let x = input(1, row, channel);
            let mut output = f64::from(skip[channel]) * x;
            for (element, number) in state.iter_mut().enumerate() {
                let decay = (-f64::from(rates[element * CHANNELS + channel]) * dt).exp();
                *number = *number * decay + dt * x * input(2, row, element);
                output += input(2, row, STATE_DIM + element) * *number;
            }
            let expected = output * silu(input(0, row, CHANNELS + channel));
            assert_close(found[row * CHANNELS + channel], expected as f32, tolerance(1), "output");
        }
    }
}

#[test]
fn bits_do_not_depend_on_steps_or_on_what_was_computed_again() {
    let (convolution, scan) = (convolution(), scan());
    for net in [&convolution as &dyn Recurrence, &scan] {
        let inputs = inputs(net, 10);
        let whole = advance(net, &Pool::single(), &inputs, &mut slots(net, 1), 0, [0, ROWS]);
        for size in [1, 2, 7, 16, 17] {
            let mut slots = slots(net, 3);
            for first in (0..ROWS).step_by(size) {
                let end = ROWS.min(first + size);
                let found = advance(net, &Pool::single(), &inputs, &mut slots, 1, [first, end]);
                assert_eq!(found, whole[first * CHANNELS..end * CHANNELS], "{size} rows at a time");
            }
            let others = slots.len() / 3;
            assert!(slots[..others].iter().all(|number| number.is_nan()), "other slots are not written");
        }
        // Drafts that were wrong: other rows, as far as a chunk, and then the right ones.
        let wrong: Vec<Vec<Element>> =
            inputs.iter().map(|input| input.iter().rev().copied().collect::<Vec<Element>>()).collect();
        for first in 0..ROWS - CHUNK {
            for count in [1, CHUNK - 1, CHUNK] {
                let mut slots = slots(net, 1);
                advance(net, &Pool::single(), &inputs, &mut slots, 0, [0, first]);
                advance(net, &Pool::single(), &wrong, &mut slots, 0, [first, first + count]);
                let found = advance(net, &Pool::single(), &inputs, &mut slots, 0, [first, ROWS]);
                assert_eq!(found, whole[first * CHANNELS..], "back to {first} from {count} rows behind it");
            }
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let ones = vec![1.0; 8192];
    let refused = |conv: usize, bias: usize| MambaConv::new(&ones[..conv], &ones[..bias]).is_err();
    assert!(!refused(3 * 21, 21));
    assert!(refused(3 * 21 + 1, 21), "a part of a row");
    assert!(refused(0, 21), "no convolution");
    assert!(refused(17 * 21, 21), "wider than a chunk");
    assert!(refused(3 * 21, 0), "no channels");
    let refused = |part: usize, decay: usize, bias: usize, skip: usize| {
        MambaScan::new(part, &ones[..decay], &ones[..bias], &ones[..skip]).is_err()
    };
    assert!(!refused(LANES, 256 * 21, 21, 21));
    assert!(refused(LANES + 1, 3 * 21, 21, 21), "a part of a vector");
    assert!(refused(0, 3 * 21, 21, 21), "no part");
    assert!(refused(LANES, 3 * 21 + 1, 21, 21), "a part of a state");
    assert!(refused(LANES, 257 * 21, 21, 21), "a large state");
    assert!(refused(LANES, 0, 21, 21), "no state");
    assert!(refused(LANES, 3 * 21, 20, 21), "biases of steps");
    assert!(refused(LANES, 0, 0, 0), "no channels");
}

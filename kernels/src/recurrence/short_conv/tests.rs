use super::*;
use crate::pool::{Pool, Source, Target};
use crate::recurrence::{CHUNK, Operands, Sequences};
use crate::testing::{Random, assert_close, spawning_pool, tolerance};

const ROWS: usize = 53;
/// A part and a bit, which is not a whole vector.
const CHANNELS: usize = PART + 21;
const WIDTH: usize = 3;

struct Weights {
    conv: Vec<f32>,
    bias: Vec<f32>,
}

fn weights() -> Weights {
    let mut random = Random::new(3);
    let mut numbers = |count: usize| (0..count).map(|_| random.uniform()).collect::<Vec<f32>>();
    Weights { conv: numbers(CHANNELS * WIDTH), bias: numbers(CHANNELS) }
}

fn net() -> ShortConv {
    let weights = weights();
    ShortConv::new(&weights.conv, &weights.bias).unwrap()
}

fn inputs(seed: u64) -> Vec<Element> {
    Random::new(seed).elements(ROWS * 3 * CHANNELS)
}

/// Slots full of what must not be read.
fn slots(net: &ShortConv, count: usize) -> Vec<f32> {
    let net: &dyn Recurrence = net;
    vec![f32::NAN; count * net.slot_floats()]
}

/// Advances a sequence in a slot by the rows from one position to another.
fn advance(
    net: &ShortConv,
    pool: &Pool,
    inputs: &[Element],
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
    let operands = Operands {
        inputs: &[Source::new(inputs[first * 3 * CHANNELS..].as_ptr())],
        slots: Target::new(slots.as_mut_ptr()),
        output: Target::new(output.as_mut_ptr()),
    };
    let net: &dyn Recurrence = net;
    // SAFETY: the vectors have the sizes said.
    unsafe { net.run(pool, &sequences, &operands) };
    output
}

#[test]
fn outputs_are_those_of_the_formula() {
    let (inputs, weights) = (inputs(5), weights());
    let found = advance(&net(), &spawning_pool(3), &inputs, &mut slots(&net(), 1), 0, [0, ROWS]);
    let input =
        |row: usize, part: usize, channel: usize| f64::from(inputs[(row * 3 + part) * CHANNELS + channel].to_f32());
    for (index, found) in found.into_iter().enumerate() {
        let (row, channel) = (index / CHANNELS, index % CHANNELS);
        let read = (0..WIDTH.min(row + 1)).map(|back| {
            let kept = input(row - back, 0, channel) * input(row - back, 2, channel);
            kept * f64::from(weights.conv[channel * WIDTH + WIDTH - 1 - back])
        });
        let expected = input(row, 1, channel) * (read.sum::<f64>() + f64::from(weights.bias[channel]));
        assert_close(found, expected as f32, tolerance(1), "output");
    }
}

#[test]
fn bits_do_not_depend_on_steps_or_on_what_was_computed_again() {
    let net = net();
    let inputs = inputs(6);
    let whole = advance(&net, &Pool::single(), &inputs, &mut slots(&net, 1), 0, [0, ROWS]);
    for size in [1, 2, 7, 16, 17] {
        let mut slots = slots(&net, 3);
        for first in (0..ROWS).step_by(size) {
            let end = ROWS.min(first + size);
            let found = advance(&net, &Pool::single(), &inputs, &mut slots, 1, [first, end]);
            assert_eq!(found, whole[first * CHANNELS..end * CHANNELS], "{size} rows at a time");
        }
        let others = slots.len() / 3;
        assert!(slots[..others].iter().all(|number| number.is_nan()), "other slots are not written");
    }
    // Drafts that were wrong: other rows, as far as a chunk, and then the right ones.
    let wrong: Vec<Element> = inputs.iter().rev().copied().collect();
    for first in 0..ROWS - CHUNK {
        let mut slots = slots(&net, 1);
        advance(&net, &Pool::single(), &inputs, &mut slots, 0, [0, first]);
        advance(&net, &Pool::single(), &wrong, &mut slots, 0, [first, first + CHUNK]);
        let found = advance(&net, &Pool::single(), &inputs, &mut slots, 0, [first, ROWS]);
        assert_eq!(found, whole[first * CHANNELS..], "back to {first}");
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let ones = vec![1.0; 1024];
    let refused = |conv: usize, bias: usize| ShortConv::new(&ones[..conv], &ones[..bias]).is_err();
    assert!(!refused(3 * 21, 21));
    assert!(refused(3 * 21 + 1, 21), "a part of a row");
    assert!(refused(0, 21), "no convolution");
    assert!(refused(17 * 21, 21), "wider than a chunk");
    assert!(refused(3 * 21, 0), "no channels");
}

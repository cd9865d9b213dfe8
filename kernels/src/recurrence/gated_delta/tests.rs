use super::*;
use crate::pool::{Pool, Source, Target};
use crate::recurrence::{Operands, Sequences};
use crate::testing::{Random, assert_close, spawning_pool, tolerance};

const KEY_HEADS: usize = 2;
const HEADS: usize = 4;
const KEYS_OF_HEADS: [i64; HEADS] = [0, 1, 1, 0];
const KEY_DIM: usize = 16;
const VALUE_DIM: usize = 48;
const WIDTH: usize = 4;
const ROWS: usize = 53;
const STRENGTH: f32 = 2.0;

/// With a decay for each head, or for each element of its keys, which may have a limit, and be inputs of their own.
fn nets() -> [GatedDelta; 4] {
    [net(1, None, false), net(1, Some(-5.0), true), net(KEY_DIM, None, true), net(KEY_DIM, Some(-5.0), false)]
}

fn net(decay_dim: usize, decay_floor: Option<f32>, is_apart: bool) -> GatedDelta {
    let mut random = Random::new(3);
    let mut numbers = |count: usize| (0..count).map(|_| random.uniform()).collect::<Vec<f32>>();
    let channels = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM;
    let (conv, bias, norm) = (numbers(channels * WIDTH), numbers(HEADS * decay_dim), numbers(VALUE_DIM));
    let decay: Vec<f32> = numbers(HEADS).iter().map(|number| 0.2 + number.abs()).collect();
    let [num_key_heads, key_dim] = [KEY_HEADS, KEY_DIM];
    GatedDelta::new(&GatedDeltaParts {
        num_key_heads,
        key_dim,
        // One key head serves heads that follow each other, the other one the rest.
        key_heads: &KEYS_OF_HEADS,
        conv: &conv,
        decay: &decay,
        decay_bias: &bias,
        norm: &norm,
        eps: 1e-6,
        strength: STRENGTH,
        decay_floor,
        has_sigmoid_gates: is_apart,
        is_apart,
    })
    .unwrap()
}

/// Rows of each input.
type Inputs = Vec<Vec<Element>>;

fn inputs(net: &GatedDelta, seed: u64) -> Inputs {
    let mut random = Random::new(seed);
    net.input_widths.iter().map(|width| random.elements(ROWS * width)).collect()
}

fn slot_floats(net: &GatedDelta) -> usize {
    let net: &dyn Recurrence = net;
    net.slot_floats()
}

/// Slots full of what must not be read.
fn slots(net: &GatedDelta, count: usize) -> Vec<f32> {
    vec![f32::NAN; count * slot_floats(net)]
}

/// Advances a sequence in a slot by the rows from one position to another.
fn advance(
    net: &GatedDelta,
    pool: &Pool,
    inputs: &Inputs,
    slots: &mut [f32],
    slot: i64,
    rows: [usize; 2],
) -> Vec<Element> {
    let [first, end] = rows;
    let mut output = vec![Element::default(); (end - first) * net.value_width()];
    let (starts, lens, slot) = ([0, (end - first) as i32], [end as i32], [slot]);
    let sequences = Sequences {
        query_starts: Source::new(starts.as_ptr()),
        context_lens: Source::new(lens.as_ptr()),
        slots: Source::new(slot.as_ptr()),
        num_sequences: 1,
    };
    let rows = inputs.iter().zip(&net.input_widths).map(|(input, width)| Source::new(input[first * width..].as_ptr()));
    let rows: Vec<_> = rows.collect();
    let operands =
        Operands { inputs: &rows, slots: Target::new(slots.as_mut_ptr()), output: Target::new(output.as_mut_ptr()) };
    let net: &dyn Recurrence = net;
    // SAFETY: the vectors have the sizes said.
    unsafe { net.run(pool, &sequences, &operands) };
    output
}

/// The recurrence as it is written in the paper, one row after the other in float64.
fn expected(net: &GatedDelta, inputs: &Inputs) -> Vec<f32> {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let keys = KEY_HEADS * KEY_DIM;
    let number = |(input, first): (usize, usize), row: usize, column: usize| {
        f64::from(inputs[input][row * net.input_widths[input] + first + column].to_f32())
    };
    let input = |row: usize, column: usize| number((0, 0), row, column);
    let mixed = |row: usize, channel: usize| {
        let sum = (0..WIDTH.min(row + 1))
            .map(|back| input(row - back, channel) * f64::from(net.conv.weight(WIDTH - 1 - back, channel)));
        silu(sum.sum())
    };
    let unit = |row: usize, first: usize| {
        let vector: Vec<f64> = (0..KEY_DIM).map(|element| mixed(row, first + element)).collect();
        let length = (vector.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
        vector.into_iter().map(move |x| x / length).collect::<Vec<f64>>()
    };
    let mut outputs = vec![0.0; ROWS * HEADS * VALUE_DIM];
    for head in 0..HEADS {
        let key_head = KEYS_OF_HEADS[head] as usize;
        let mut state = vec![[0.0; VALUE_DIM]; KEY_DIM];
        for row in 0..ROWS {
            let (query, key) = (unit(row, key_head * KEY_DIM), unit(row, keys + key_head * KEY_DIM));
            let strength = f64::from(STRENGTH) / (1.0 + (-number((1, 0), row, head)).exp());
            for (element, numbers) in state.iter_mut().enumerate() {
                let index = head * net.decay_dim + element % net.decay_dim;
                let rate = number(net.of_decays, row, index) + f64::from(net.decay_bias[index]);
                let decay = f64::from(net.decay[head]);
                let exponent = match net.decay_floor {
                    None => -decay * rate.exp().ln_1p(),
                    Some(floor) => f64::from(floor) / (1.0 + (-decay * rate).exp()),
                };
                numbers.iter_mut().for_each(|number| *number *= exponent.exp());
            }
            let mut output = [0.0; VALUE_DIM];
            for (column, output) in output.iter_mut().enumerate() {
                let known: f64 = (0..KEY_DIM).map(|element| key[element] * state[element][column]).sum();
                let change = strength * (mixed(row, 2 * keys + head * VALUE_DIM + column) - known);
                for element in 0..KEY_DIM {
                    state[element][column] += key[element] * change;
                    *output += query[element] * state[element][column] / (KEY_DIM as f64).sqrt();
                }
            }
            let square = output.iter().map(|x| x * x).sum::<f64>() / VALUE_DIM as f64;
            for (column, output) in output.into_iter().enumerate() {
                let normed = output / (square + 1e-6).sqrt() * f64::from(net.norm[column]);
                let gate = number(net.of_gates, row, head * VALUE_DIM + column);
                let gate = if net.has_sigmoid_gates { 1.0 / (1.0 + (-gate).exp()) } else { silu(gate) };
                outputs[(row * HEADS + head) * VALUE_DIM + column] = (normed * gate) as f32;
            }
        }
    }
    outputs
}

#[test]
fn outputs_are_those_of_the_recurrence() {
    for net in nets() {
        let inputs = inputs(&net, 5);
        let found = advance(&net, &spawning_pool(3), &inputs, &mut slots(&net, 1), 0, [0, ROWS]);
        for (found, expected) in found.into_iter().zip(expected(&net, &inputs)) {
            assert_close(found, expected, tolerance(1), "output");
        }
    }
}

#[test]
fn bits_do_not_depend_on_steps_or_on_what_was_computed_again() {
    for net in nets() {
        let inputs = inputs(&net, 6);
        let whole = advance(&net, &Pool::single(), &inputs, &mut slots(&net, 1), 0, [0, ROWS]);
        for size in [1, 2, 7, 16, 17] {
            let mut slots = slots(&net, 3);
            let mut first = 0;
            while first < ROWS {
                let end = ROWS.min(first + size);
                let found = advance(&net, &Pool::single(), &inputs, &mut slots, 1, [first, end]);
                assert_eq!(found, whole[first * net.value_width()..end * net.value_width()], "{size} rows at a time");
                first = end;
            }
            assert!(slots[..slot_floats(&net)].iter().all(|number| number.is_nan()), "other slots are not written");
        }
        // Drafts that were wrong: other rows, as far as a chunk, and then the right ones.
        let mut wrong = inputs.clone();
        wrong[0].reverse();
        for first in 0..ROWS - CHUNK {
            let mut slots = slots(&net, 1);
            advance(&net, &Pool::single(), &inputs, &mut slots, 0, [0, first]);
            advance(&net, &Pool::single(), &wrong, &mut slots, 0, [first, first + CHUNK]);
            let found = advance(&net, &Pool::single(), &inputs, &mut slots, 0, [first, ROWS]);
            assert_eq!(found, whole[first * net.value_width()..], "back to {first}");
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let ones = vec![1.0; 1024];
    let refused = |key_dim, conv: usize, key_heads: &[i64], heads: usize, bias: usize, dim: usize| {
        let parts = GatedDeltaParts {
            num_key_heads: 1,
            key_dim,
            key_heads,
            conv: &ones[..conv],
            decay: &ones[..heads],
            decay_bias: &ones[..bias],
            norm: &ones[..dim],
            eps: 1e-6,
            strength: STRENGTH,
            decay_floor: None,
            has_sigmoid_gates: false,
            is_apart: false,
        };
        GatedDelta::new(&parts).is_err()
    };
    assert!(!refused(16, 4 * 64, &[0, 0], 2, 2, 16));
    assert!(refused(17, 4 * 66, &[0, 0], 2, 2, 16), "key_dim");
    assert!(refused(16, 4 * 62, &[0, 0], 2, 2, 15), "value_dim");
    assert!(refused(16, 4 * 64, &[0], 2, 2, 16), "a head without a key head");
    assert!(refused(16, 4 * 64, &[0, 1], 2, 2, 16), "a key head that is not there");
    assert!(refused(16, 4 * 64, &[0, -1], 2, 2, 16), "a negative key head");
    assert!(refused(16, 4 * 64 + 1, &[0, 0], 2, 2, 16), "a part of a row");
    assert!(refused(16, 0, &[0, 0], 2, 2, 16), "no convolution");
    assert!(!refused(16, 4 * 64, &[0, 0], 2, 32, 16), "a bias for each element");
    for bias in [0, 1, 3, 16, 33] {
        assert!(refused(16, 4 * 64, &[0, 0], 2, bias, 16), "{bias} biases");
    }
}

use super::*;
use crate::pool::{Pool, Source, Target};
use crate::recurrence::{Operands, Sequences};
use crate::testing::{Random, assert_close, spawning_pool, tolerance};

const GROUPS: usize = 2;
const HEADS: usize = 10;
/// Two in each group, of three heads and of two.
const BLOCK: usize = 3;
const BLOCKS: usize = 2;
const STATE_DIM: usize = 32;
const HEAD_DIM: usize = 80;
const WIDTH: usize = 4;
const ROWS: usize = 53;
const VALUES: usize = HEADS * HEAD_DIM;
const KEYS: usize = GROUPS * STATE_DIM;

/// With all that there may be, and without convolution, gates and dt.
fn nets() -> [Mamba2; 2] {
    [net(true), net(false)]
}

fn net(is_whole: bool) -> Mamba2 {
    let mut random = Random::new(3);
    let mut numbers = |count: usize| (0..count).map(|_| random.uniform()).collect::<Vec<f32>>();
    let channels = VALUES + 2 * KEYS;
    let (conv, conv_bias) = (numbers(channels * WIDTH), numbers(channels));
    let decay: Vec<f32> = numbers(HEADS).iter().map(|number| 0.2 + number.abs()).collect();
    // Each block has the weights of its group.
    let of_blocks = (VALUES..channels).step_by(STATE_DIM).flat_map(|first| [first; BLOCKS]);
    let columns: Vec<usize> = (0..VALUES).chain(of_blocks.flat_map(|first| first..first + STATE_DIM)).collect();
    let conv: Vec<f32> = columns.iter().flat_map(|column| conv[column * WIDTH..][..WIDTH].to_vec()).collect();
    let conv_bias: Vec<f32> = columns.iter().map(|column| conv_bias[*column]).collect();
    Mamba2::new(&Mamba2Parts {
        num_groups: GROUPS,
        block_heads: BLOCK,
        state_dim: STATE_DIM,
        head_dim: HEAD_DIM,
        conv: if is_whole { &conv } else { &[] },
        conv_bias: if is_whole { &conv_bias } else { &[] },
        decay: &decay,
        dt_bias: &numbers(HEADS),
        skip: &numbers(HEADS),
        dt_limits: (0.3, 1.2),
        gate_factor: 0.7,
        dt_factor: 1.5,
        has_gates: is_whole,
        has_dt: is_whole,
    })
    .unwrap()
}

fn inputs(net: &Mamba2, seed: u64) -> Vec<Element> {
    Random::new(seed).elements(ROWS * net.input_widths[0])
}

fn slot_floats(net: &Mamba2) -> usize {
    let net: &dyn Recurrence = net;
    net.slot_floats()
}

/// Slots full of what must not be read.
fn slots(net: &Mamba2, count: usize) -> Vec<f32> {
    vec![f32::NAN; count * slot_floats(net)]
}

/// Advances a sequence in a slot by the rows from one position to another.
fn advance(
    net: &Mamba2,
    pool: &Pool,
    inputs: &[Element],
    slots: &mut [f32],
    slot: i64,
    rows: [usize; 2],
) -> Vec<Element> {
    let [first, end] = rows;
    let mut output = vec![Element::default(); (end - first) * VALUES];
    let (starts, lens, slot) = ([0, (end - first) as i32], [end as i32], [slot]);
    let sequences = Sequences {
        query_starts: Source::new(starts.as_ptr()),
        context_lens: Source::new(lens.as_ptr()),
        slots: Source::new(slot.as_ptr()),
        num_sequences: 1,
    };
    let operands = Operands {
        inputs: &[Source::new(inputs[first * net.input_widths[0]..].as_ptr())],
        slots: Target::new(slots.as_mut_ptr()),
        output: Target::new(output.as_mut_ptr()),
    };
    let net: &dyn Recurrence = net;
    // SAFETY: the vectors have the sizes said.
    unsafe { net.run(pool, &sequences, &operands) };
    output
}

/// The recurrence as it is written in the paper, one row after the other in float64.
fn expected(net: &Mamba2, inputs: &[Element]) -> Vec<f32> {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let input = |row: usize, column: usize| f64::from(inputs[row * net.input_widths[0] + column].to_f32());
    // channel: of the convolution, whose input is a column of "mixed".
    let mixed = |row: usize, channel: usize, column: usize| {
        let Some(conv) = &net.conv else { return silu(input(row, column)) };
        let sum = (0..WIDTH.min(row + 1))
            .map(|back| input(row - back, column) * f64::from(conv.weight(WIDTH - 1 - back, channel)));
        silu(f64::from(net.conv_bias[channel]) + sum.sum::<f64>())
    };
    let mut outputs = vec![0.0; ROWS * VALUES];
    for head in 0..HEADS {
        let group = head / (HEADS / GROUPS);
        // The first block of its group.
        let key = |row: usize, element: usize, is_c: usize| {
            let channel = VALUES + is_c * BLOCKS * KEYS + group * BLOCKS * STATE_DIM + element;
            mixed(row, channel, VALUES + is_c * KEYS + group * STATE_DIM + element)
        };
        let mut state = vec![[0.0; HEAD_DIM]; STATE_DIM];
        for row in 0..ROWS {
            let gates = VALUES + 2 * KEYS;
            let dt = if net.has_dt {
                let rate = input(row, gates + VALUES + head) * 1.5 + f64::from(net.dt_bias[head]);
                rate.exp().ln_1p().clamp(0.3, 1.2)
            } else {
                1.0
            };
            let decay = (-f64::from(net.decay[head]) * dt).exp();
            let x: Vec<f64> =
                (0..HEAD_DIM).map(|column| mixed(row, head * HEAD_DIM + column, head * HEAD_DIM + column)).collect();
            let mut output: Vec<f64> = x.iter().map(|x| x * f64::from(net.skip[head])).collect();
            for (element, state) in state.iter_mut().enumerate() {
                let (b, c) = (key(row, element, 0), key(row, element, 1));
                for (column, number) in state.iter_mut().enumerate() {
                    *number = *number * decay + b * dt * x[column];
                    output[column] += c * *number;
                }
            }
            for (column, output) in output.into_iter().enumerate() {
                let gate = if net.has_gates { silu(input(row, gates + head * HEAD_DIM + column) * 0.7) } else { 1.0 };
                outputs[row * VALUES + head * HEAD_DIM + column] = (output * gate) as f32;
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
                assert_eq!(found, whole[first * VALUES..end * VALUES], "{size} rows at a time");
                first = end;
            }
            assert!(slots[..slot_floats(&net)].iter().all(|number| number.is_nan()), "other slots are not written");
        }
        // Drafts that were wrong: other rows, as far as a chunk, and then the right ones.
        let wrong: Vec<Element> = inputs.iter().rev().copied().collect();
        for first in 0..ROWS - CHUNK {
            let mut slots = slots(&net, 1);
            advance(&net, &Pool::single(), &inputs, &mut slots, 0, [0, first]);
            advance(&net, &Pool::single(), &wrong, &mut slots, 0, [first, first + CHUNK]);
            let found = advance(&net, &Pool::single(), &inputs, &mut slots, 0, [first, ROWS]);
            assert_eq!(found, whole[first * VALUES..], "back to {first}");
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let ones = vec![1.0; 1024];
    // Two heads, in blocks of two.
    let refused = |num_groups, dims: [usize; 2], conv: [usize; 2], heads: [usize; 3]| {
        let parts = Mamba2Parts {
            num_groups,
            block_heads: 2,
            state_dim: dims[0],
            head_dim: dims[1],
            conv: &ones[..conv[0]],
            conv_bias: &ones[..conv[1]],
            decay: &ones[..heads[0]],
            dt_bias: &ones[..heads[1]],
            skip: &ones[..heads[2]],
            dt_limits: (0.0, 1.0),
            gate_factor: 1.0,
            dt_factor: 1.0,
            has_gates: true,
            has_dt: true,
        };
        Mamba2::new(&parts).is_err()
    };
    assert!(!refused(1, [16, 16], [4 * 64, 64], [2; 3]));
    assert!(!refused(1, [16, 16], [4 * 112, 112], [3; 3]), "two blocks");
    assert!(refused(1, [17, 16], [4 * 66, 66], [2; 3]), "state_dim");
    assert!(refused(1, [16, 15], [4 * 62, 62], [2; 3]), "head_dim");
    assert!(refused(2, [16, 16], [4 * 112, 112], [3; 3]), "heads");
    assert!(refused(0, [16, 16], [4 * 32, 32], [2; 3]), "no groups");
    assert!(refused(1, [16, 16], [4 * 64 + 1, 64], [2; 3]), "a part of a row");
    assert!(refused(1, [16, 16], [0, 64], [2; 3]), "biases without a convolution");
    assert!(!refused(1, [16, 16], [0, 0], [2; 3]), "no convolution");
    assert!(refused(1, [16, 16], [4 * 64, 63], [2; 3]), "biases of the convolution");
    assert!(refused(1, [16, 16], [4 * 64, 64], [2, 1, 2]), "biases of dt");
    assert!(refused(1, [16, 16], [4 * 64, 64], [2, 2, 1]), "factors of the skip");
}

use super::*;
use crate::activation::{Activation, Function};
use crate::linear::{Linear, PackedLinear, Weight};
use crate::low_rank::PlainPart;
use crate::memory::Arena;
use crate::norm::{Kind, Norm};
use crate::routing::Routing;
use crate::testing::Random;
use std::ffi::{c_uint, c_void};

const HIDDEN: usize = 32;
const NUM_ROWS: usize = 3;
const NUM_EXPERTS: usize = 5;
const NUM_LAYERS: usize = 8;

/// A `GOMP_parallel` whose threads run one after the other: the first one does all work, the last one is late for everything.
unsafe extern "C" fn one_after_the_other(
    enter: extern "C" fn(*mut c_void),
    data: *mut c_void,
    num_threads: c_uint,
    _flags: c_uint,
) {
    (0..num_threads).for_each(|_| enter(data));
}

fn linear(random: &mut Random, out_features: usize, in_features: usize, gated: bool) -> Arc<Linear> {
    let weight = random.elements(out_features * in_features);
    let shape = Weight { bias: std::ptr::null(), out_features, in_features, gated };
    // SAFETY: there is no bias, and the vector has the size said.
    unsafe {
        let packed = PackedLinear::new(&Arena::default(), shape, None).unwrap();
        packed.fill(&Pool::single(), Source::new(weight.as_ptr()), 0, out_features);
        Arc::new(Linear::Dense(packed))
    }
}

/// Layers of experts that send the rows elsewhere each time. `adapts`: with sites of adapters.
fn layers_of_experts(adapts: bool) -> Stack {
    let mut random = Random::new(1);
    let mut program = Program::new(HIDDEN);
    let norm = Arc::new(Norm::new(Kind::Rms, 1e-6, HIDDEN, vec![1.0; HIDDEN], Vec::new()).unwrap());
    for layer in 0..NUM_LAYERS {
        program.norm(Arc::clone(&norm), Register::Residual, Register::Normed).unwrap();
        let router = linear(&mut random, NUM_EXPERTS, HIDDEN, false);
        program.linear(router, Register::Normed, Register::Logits, Combine::Store).unwrap();
        let expert = |_| Expert {
            gate_up: linear(&mut random, 2 * HIDDEN, HIDDEN, true),
            down: linear(&mut random, HIDDEN, HIDDEN, false),
        };
        let experts = Experts {
            routing: Routing::plain(NUM_EXPERTS, 2),
            router: None,
            experts: (0..NUM_EXPERTS).map(expert).collect(),
            exchange: None,
            activation: adapts.then_some(Activation { function: Function::Silu, is_gate: true }),
            first_site: adapts.then_some(layer * 2 * NUM_EXPERTS),
            shared: Shared::Nothing,
            first_end: 0,
            from: Register::Normed,
            to: Register::Projected,
        };
        program.experts(experts).unwrap();
        program.add(Register::Projected, Register::Residual).unwrap();
    }
    program.select(&[Register::Residual]).unwrap();
    program.norm(norm, Register::Residual, Register::Output).unwrap();
    program.finish().unwrap()
}

fn run(stack: &Stack, pool: &Pool) -> Vec<f32> {
    run_adapted(stack, pool, &[], &[None; NUM_ROWS])
}

fn run_adapted(stack: &Stack, pool: &Pool, adapters: &[&Adapter], of_rows: &[Option<usize>]) -> Vec<f32> {
    let mut residual = Random::new(2).elements(NUM_ROWS * HIDDEN);
    let mut output = vec![Element::default(); NUM_ROWS * HIDDEN];
    let (indices, ends) = ([0i64, 1, 2], [0i32, NUM_ROWS as i32]);
    let step = Step {
        residual: Target::new(residual.as_mut_ptr()),
        num_tokens: NUM_ROWS,
        positions: Source::new(indices.as_ptr()),
        slots: Source::new(indices.as_ptr()),
        batch: Batch {
            query_starts: Source::new(ends.as_ptr()),
            context_lens: Source::new(ends[1..].as_ptr()),
            block_tables: Source::new(ends.as_ptr()),
            max_blocks: 1,
            source_lens: None,
            ends: None,
            num_sequences: 1,
        },
        caches: &[],
        state_slots: Source::new(std::ptr::null()),
        sample_rows: Source::new(indices.as_ptr()),
        num_samples: NUM_ROWS,
        output: Target::new(output.as_mut_ptr()),
        adapters: StepAdapters {
            adapters,
            runs: low_rank::runs(of_rows.iter().copied()),
            sampled_runs: low_rank::runs(of_rows.iter().copied()),
        },
    };
    // SAFETY: the vectors have the sizes said, and the stack has no attention.
    unsafe { stack.run(pool, &step) }.unwrap();
    output.into_iter().map(Element::to_f32).collect()
}

/// The routing of a layer decides which kernels run. A late thread must find the routing of its own layer, or it waits
/// for kernels that no other thread runs.
#[test]
fn a_thread_that_is_late_for_everything_runs_the_same_kernels() {
    let stack = layers_of_experts(false);
    let expected = run(&stack, &Pool::single());
    assert!(expected.iter().all(|number| number.is_finite()));
    for num_threads in [2, 3] {
        assert_eq!(run(&stack, &Pool::new(num_threads, one_after_the_other)), expected);
    }
}

#[test]
fn experts_with_adapters_change_the_rows_that_have_one() {
    const RANK: usize = 3;
    let mut random = Random::new(5);
    let of_site = |index: usize| [HIDDEN, if index.is_multiple_of(2) { 2 * HIDDEN } else { HIDDEN }];
    let numbers: Vec<[Vec<Element>; 2]> =
        (0..2 * NUM_EXPERTS * NUM_LAYERS).map(|site| of_site(site).map(|size| random.elements(RANK * size))).collect();
    let parts = numbers.iter().map(|[down, up]| vec![PlainPart::new(down, up, RANK, 0, 0.5).unwrap()]);
    let adapter = Adapter::new(&parts.collect::<Vec<_>>()).unwrap();
    let nothing = Adapter::new(&numbers.iter().map(|_| Vec::new()).collect::<Vec<_>>()).unwrap();
    let (plain, stack) = (layers_of_experts(false), layers_of_experts(true));
    assert!(stack.takes(&adapter));
    let expected = run(&plain, &Pool::single());
    let adapters = [&nothing, &adapter];
    let of_all = run_adapted(&stack, &Pool::single(), &adapters, &[Some(1); NUM_ROWS]);
    for num_threads in [1, 2, 3] {
        let pool = Pool::new(num_threads, one_after_the_other);
        assert_eq!(run_adapted(&stack, &pool, &adapters, &[None; NUM_ROWS]), expected, "no row has an adapter");
        let found = run_adapted(&stack, &pool, &adapters, &[None, Some(1), Some(0)]);
        let rows = |numbers: &[f32], row: usize| numbers[row * HIDDEN..][..HIDDEN].to_vec();
        for (row, of) in [&expected, &of_all, &expected].into_iter().enumerate() {
            assert_eq!(rows(&found, row), rows(of, row), "row {row} on {num_threads} threads");
        }
        assert_ne!(rows(&found, 1), rows(&expected, 1));
    }
}

#[test]
fn columns_are_reordered() {
    let twice: Arc<[u32]> = (0..2 * HIDDEN as u32).map(|column| column / 2).collect();
    let order: Arc<[u32]> = (0..HIDDEN as u32).rev().map(|column| 2 * column).collect();
    let norm = Arc::new(Norm::new(Kind::Rms, 1e-6, HIDDEN, vec![1.0; HIDDEN], Vec::new()).unwrap());
    let mut program = Program::new(HIDDEN);
    let beyond: Arc<[u32]> = (1..=HIDDEN as u32).collect();
    assert!(program.reorder(beyond, Register::Residual, Register::Ordered).is_err());
    assert!(program.reorder(Arc::clone(&twice), Register::Residual, Register::Residual).is_err());
    program.reorder(twice, Register::Residual, Register::Ordered).unwrap();
    program.reorder(order, Register::Ordered, Register::Queries).unwrap();
    program.add(Register::Queries, Register::Residual).unwrap();
    program.select(&[Register::Residual]).unwrap();
    program.norm(norm, Register::Residual, Register::Output).unwrap();
    let stack = program.finish().unwrap();
    // What is added to its own mirror image is symmetric; nothing else here makes it so.
    let inputs = Random::new(2).elements(NUM_ROWS * HIDDEN);
    for num_threads in [1, 2] {
        let found = run(&stack, &Pool::new(num_threads, one_after_the_other));
        for (row, input) in found.chunks(HIDDEN).zip(inputs.chunks(HIDDEN)) {
            let sums: Vec<_> =
                input.iter().zip(input.iter().rev()).map(|(one, other)| one.to_f32() + other.to_f32()).collect();
            let length = (sums.iter().map(|sum| sum * sum).sum::<f32>() / HIDDEN as f32).sqrt();
            for (number, sum) in row.iter().zip(&sums) {
                assert!((number - sum / length).abs() < 0.03, "{number}, not {}", sum / length);
            }
        }
    }
}

#[test]
fn heads_are_padded_with_zeros() {
    const WIDTH: usize = 4;
    let heads = HIDDEN / WIDTH;
    let norm = Arc::new(Norm::new(Kind::Rms, 1e-6, HIDDEN, vec![1.0; HIDDEN], Vec::new()).unwrap());
    let stack = |pads: bool| {
        let mut program = Program::new(HIDDEN);
        if pads {
            assert!(program.pad(Register::Residual, Register::Queries, heads + 1, WIDTH, 16).is_err());
            assert!(program.pad(Register::Residual, Register::Queries, heads, WIDTH, WIDTH - 1).is_err());
            assert!(program.pad(Register::Residual, Register::Queries, 3, usize::MAX, 16).is_err());
            program.pad(Register::Residual, Register::Queries, heads, WIDTH, 16).unwrap();
            // Twice the input, by way of the padded heads, plus the padding of each head.
            for first in [0, WIDTH] {
                program.reserve(Register::Sum, HIDDEN).unwrap();
                program.copy((Register::Queries, first, 16), (Register::Sum, 0, WIDTH), heads, WIDTH).unwrap();
                program.add(Register::Sum, Register::Residual).unwrap();
            }
        } else {
            program.scale(Register::Residual, 2.0).unwrap();
        }
        program.select(&[Register::Residual]).unwrap();
        program.norm(Arc::clone(&norm), Register::Residual, Register::Output).unwrap();
        program.finish().unwrap()
    };
    let expected = run(&stack(false), &Pool::single());
    for num_threads in [1, 2] {
        let pool = Pool::new(num_threads, one_after_the_other);
        assert_eq!(run(&stack(true), &pool), expected);
        assert_eq!(run(&stack(true), &pool), expected, "of buffers with the numbers of a step before");
    }
}

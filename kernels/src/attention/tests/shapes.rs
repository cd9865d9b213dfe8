//! Every attention feature beyond plain causal attention.

use super::*;
use crate::cpu::Amx;
use crate::element::Element;
use crate::simd::{from_bf16, to_bf16};
use crate::testing::on_both_paths;

on_both_paths!(
    every_shape_matches_its_formula,
    a_row_of_every_shape_has_the_same_bits_alone_chunked_and_split,
    tokens_of_a_span_see_all_of_it_with_the_same_bits_in_every_chunk,
    a_window_over_everything_changes_no_bit,
);

/// One score by its formula.
pub(crate) fn score(attention: &Attention, product: f32, head: usize, position: usize) -> f32 {
    let scale = attention.layout.scale;
    let mut score = product * scale;
    if let Some(cap) = attention.soft_cap {
        score = cap * (score / cap).tanh();
    }
    let Some(alibi) = &attention.alibi else { return score };
    let round = |x: f32| if alibi.is_bfloat16 { from_bf16(to_bf16(x)) } else { x };
    let bias = round(round(alibi.slopes[head]) * round(position as f32));
    score + if alibi.is_scaled { bias * scale } else { bias }
}

/// Length of the longest sequence: three segments, so that some are outside of a window.
const LENGTH: usize = 560;

fn window(tokens: usize) -> AttentionMask {
    AttentionMask { window: Some(tokens), ..AttentionMask::default() }
}

fn chunk(tokens: usize) -> AttentionMask {
    AttentionMask { chunk: Some(tokens), ..AttentionMask::default() }
}

fn part(part: Part) -> AttentionMask {
    AttentionMask { part, ..AttentionMask::default() }
}

impl World {
    /// The first query position in the longest sequence.
    fn begin(&self) -> usize {
        if self.attention.mask.part == Part::Answer { self.source_lens[2] as usize } else { 0 }
    }
}

/// Every feature alone, and some combinations.
fn shapes(layout: Layout, amx: Option<Amx>) -> Vec<(String, World)> {
    let masks = [1, 16, 65, 100, 300, 5000].map(window);
    let chunks = [16, 23, 256, 300].map(chunk);
    let more = [
        AttentionMask { chunk: Some(90), ..window(40) },
        AttentionMask { part: Part::Answer, ..window(40) },
        part(Part::Source),
        part(Part::Answer),
    ];
    let mut shapes: Vec<_> =
        [&masks[..], &chunks, &more].concat().into_iter().map(|mask| (mask, None, None, false)).collect();
    let alibi = |is_scaled, is_bfloat16| {
        let slopes = (0..layout.num_heads).map(|head| 0.9 / (1 << head) as f32).collect();
        Some(Alibi { slopes, is_scaled, is_bfloat16 })
    };
    for mask in [AttentionMask::default(), window(70)] {
        shapes.push((mask, Some(0.6), None, false));
        shapes.push((mask, None, None, true));
        shapes.push((mask, Some(3.0), alibi(false, false), true));
        for (is_scaled, is_bfloat16) in [(false, false), (true, false), (false, true), (true, true)] {
            shapes.push((mask, None, alibi(is_scaled, is_bfloat16), false));
        }
    }
    let mut shapes: Vec<_> =
        shapes.into_iter().map(|(mask, cap, alibi, sinks)| (mask, cap, alibi, sinks, false)).collect();
    shapes.extend([Part::Context, Part::Source, Part::Answer].map(|of| (part(of), None, None, false, true)));
    let world = |(mask, soft_cap, alibi, has_sinks, has_relative_bias): (_, _, _, bool, bool)| {
        let name = format!("{layout:?} {mask:?} cap {soft_cap:?} {alibi:?} sinks {has_sinks} bias {has_relative_bias}");
        let attention = Attention { layout, mask, soft_cap, alibi, has_relative_bias, amx }.checked().unwrap();
        let mut world = World::of(attention, &[1, 70, LENGTH], true);
        let sinks = (0..layout.num_heads).map(|head| Element::from_f32(head as f32 * 2.0 - 1.0)).collect();
        world.sinks = has_sinks.then_some(sinks);
        (name, world)
    };
    shapes.into_iter().map(world).collect()
}

#[test]
fn visible_positions_are_an_interval() {
    let firsts = |mask: AttentionMask| (0..8).map(|position| mask.first(position, 2)).collect::<Vec<_>>();
    let ends = |mask: AttentionMask| (0..8).map(|position| mask.end(position, 2)).collect::<Vec<_>>();
    assert_eq!(firsts(AttentionMask::default()), [0; 8]);
    assert_eq!(firsts(window(3)), [0, 0, 0, 1, 2, 3, 4, 5]);
    assert_eq!(firsts(chunk(3)), [0, 0, 0, 3, 3, 3, 6, 6]);
    assert_eq!(firsts(AttentionMask { chunk: Some(3), ..window(2) }), [0, 0, 1, 3, 3, 4, 6, 6]);
    assert_eq!(ends(AttentionMask { chunk: Some(3), ..window(2) }), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!((firsts(part(Part::Source)), ends(part(Part::Source))), (vec![0; 8], vec![2; 8]));
    assert_eq!(firsts(AttentionMask { part: Part::Answer, ..window(3) })[2..], [2, 2, 2, 3, 4, 5]);
}

fn every_shape_matches_its_formula(amx: Option<Amx>) {
    for layout in [layout(3, 1, 16), layout(4, 2, 80)] {
        for (name, world) in shapes(layout, amx) {
            let steps = [(0, 0, 1), (1, 35, 35), (2, LENGTH - 1, 1), (2, 490, 50), (2, world.begin(), 20)];
            for pool in [Pool::single(), spawning_pool(50)] {
                world.assert_right(&world.attend(&pool, &steps), &steps, &name);
            }
        }
    }
}

fn a_row_of_every_shape_has_the_same_bits_alone_chunked_and_split(amx: Option<Amx>) {
    for layout in [layout(3, 1, 16), layout(2, 2, 32)] {
        let row = layout.num_heads * layout.head_dim;
        for (name, world) in shapes(layout, amx) {
            let begin = world.begin();
            let whole = world.attend(&Pool::single(), &[(2, begin, LENGTH - begin)]);
            let whole = |first: usize, count: usize| &whole[(first - begin) * row..][..count * row];
            for (count, pool) in [(37, Pool::single()), (100, spawning_pool(3)), (100, spawning_pool(64))] {
                for computed in (begin..LENGTH).step_by(count) {
                    let count = count.min(LENGTH - computed);
                    let part = world.attend(&pool, &[(2, computed, count)]);
                    assert_eq!(part, whole(computed, count), "{name}: {count} from {computed}");
                }
            }
            for position in [0, 15, 16, 63, 64, 255, 256, LENGTH - 1].into_iter().filter(|&place| place >= begin) {
                let mixed = world.attend(&spawning_pool(8), &[(1, 60, 10), (2, position, 1)]);
                assert_eq!(&mixed[10 * row..], whole(position, 1), "{name}: at {position}");
            }
        }
    }
}

fn tokens_of_a_span_see_all_of_it_with_the_same_bits_in_every_chunk(amx: Option<Amx>) {
    for layout in [layout(3, 1, 16), layout(4, 2, 80)] {
        let row = layout.num_heads * layout.head_dim;
        for mask in [AttentionMask::default(), window(40), window(300)] {
            let mut world = World::of(Attention { mask, ..Attention::plain(layout, amx) }, &[1, 70, LENGTH], true);
            world.spans = vec![5..60, 64..66, 200..520];
            let steps = [(0, 0, 1), (1, 0, 70), (2, 0, LENGTH)];
            let whole = world.attend(&Pool::single(), &steps);
            world.assert_right(&whole, &steps, &format!("{mask:?}"));
            for (count, pool) in [(1, Pool::single()), (37, spawning_pool(3)), (256, spawning_pool(64))] {
                for computed in (0..LENGTH).step_by(count) {
                    let count = count.min(LENGTH - computed);
                    let part = world.attend(&pool, &[(2, computed, count)]);
                    assert_eq!(
                        part,
                        whole[(71 + computed) * row..][..count * row],
                        "{mask:?}: {count} from {computed}"
                    );
                }
            }
        }
    }
}

fn a_window_over_everything_changes_no_bit(amx: Option<Amx>) {
    let steps = [(0, 0, 300), (0, 299, 1), (1, 3, 60)];
    let plain = World::new(layout(6, 2, 48), amx, &[300, 63], true);
    for mask in [window(300), chunk(300)] {
        let world = World::of(Attention { mask, ..plain.attention.clone() }, &[300, 63], true);
        assert_eq!(world.attend(&spawning_pool(2), &steps), plain.attend(&spawning_pool(2), &steps));
    }
}

#[test]
fn invalid_shapes_are_refused() {
    let (good, plain) = (layout(4, 2, 64), |layout| Attention::plain(layout, None));
    let slopes = Alibi { slopes: vec![1.0; 3], is_scaled: false, is_bfloat16: false };
    let wide = Layout { value_dim: 80, values_in_keys: true, ..good };
    for (attention, message) in [
        (plain(layout(4, 3, 64)), "4 heads do not divide among 3 kv heads"),
        (plain(layout(4, 2, 20)), "head_dim is 20, must be a multiple of 16 up to 1024"),
        (plain(Layout { value_dim: 0, ..good }), "value_dim is 0, must be a multiple of 16 up to 1024"),
        (plain(wide), "value_dim is 80, must be at most head_dim, 64, when values are in keys"),
        (Attention { mask: window(0), ..plain(good) }, "window or chunk is 0, must be at least 1"),
        (Attention { soft_cap: Some(0.0), ..plain(good) }, "soft_cap is 0, must be more than 0"),
        (Attention { alibi: Some(slopes), ..plain(good) }, "3 slopes for 4 heads"),
    ] {
        assert_eq!(attention.checked().unwrap_err(), message);
    }
}

//! How much prefill a step with decodes takes, and which prompt goes first.

use proptest::prelude::*;

use super::*;
use crate::{Advance, Forecast, Transfer};

/// So long that what decodes take decides the default target.
const TICK: Duration = Duration::from_millis(100);

/// Limits with blocks of 4 tokens that hardly restrict a step.
fn wide(max_inter_token: Option<Duration>, max_overtaking: u32) -> Limits {
    Limits {
        max_step_tokens: 64,
        max_step_sequences: 32,
        max_sequence_tokens: 2000,
        max_inter_token,
        max_overtaking,
        ..limits(2000, 1)
    }
}

/// Duration of a step on a machine that takes a tick for the step, one for each decode, and one for every two prompt
/// tokens.
fn true_duration(plan: &Plan, decodes: &[u64]) -> Duration {
    let halves = |advance: &Advance| if decodes.contains(&advance.id.0) { 2 } else { advance.num_tokens };
    TICK + TICK * plan.advances.iter().map(halves).sum::<u32>() / 2
}

/// Runs a step in which `decodes` decode, and observes its duration.
fn timed_step(scheduler: &mut Scheduler, decodes: &[u64]) -> (Plan, Forecast) {
    let plan = plan(scheduler);
    let forecast =
        scheduler.observe(plan.step, true_duration(&plan, decodes), Drafted::default()).expect("it is in flight");
    scheduler.apply(&answer(&plan, TOKEN)).unwrap();
    (plan, forecast)
}

/// A scheduler whose first sequence decodes, and that has observed prompts alone and together with decodes.
fn trained(limits: Limits) -> Scheduler {
    let mut scheduler = scheduler(limits, &[(1, 4, 1000)]);
    for step in 0..40 {
        timed_step(&mut scheduler, if step == 0 { &[] } else { &[1] });
        if step % 4 == 0 {
            submit(&mut scheduler, submission(100 + step, 40, 1));
        }
    }
    while scheduler.stats().num_running > 1 {
        timed_step(&mut scheduler, &[1]);
    }
    scheduler
}

fn submit_at(scheduler: &mut Scheduler, submission: Submission, second: u64) {
    scheduler.submit(submission, Duration::from_secs(second)).unwrap();
}

fn num_tokens_of(plan: &Plan, id: u64) -> u32 {
    advances(plan).iter().filter(|advance| advance.0 == id).map(|advance| advance.1).sum()
}

#[test]
fn a_prompt_gets_the_time_that_decodes_leave_in_whole_blocks() {
    let mut scheduler = trained(wide(Some(10 * TICK), 0));
    submit(&mut scheduler, submission(2, 200, 9));
    // The step and the decode take 2 ticks; 16 prompt tokens take the other 8.
    let chunks: Vec<_> = (0..4).map(|_| num_tokens_of(&timed_step(&mut scheduler, &[1]).0, 2)).collect();
    assert!(chunks.iter().all(|chunk| (12..=16).contains(chunk) && chunk % 4 == 0), "{chunks:?}");
}

#[test]
fn without_a_target_a_step_takes_less_than_twice_the_time_of_its_decodes() {
    let mut scheduler = trained(wide(None, 0));
    let ids: Vec<_> = (1..9).collect();
    for id in &ids[1..] {
        submit(&mut scheduler, submission(*id, 1, 900));
    }
    for _ in 0..100 {
        timed_step(&mut scheduler, &ids);
    }
    submit(&mut scheduler, submission(50, 200, 1));
    for _ in 0..10 {
        let (plan, forecast) = timed_step(&mut scheduler, &ids);
        let took = true_duration(&plan, &ids);
        assert!(num_tokens_of(&plan, 50) > 4, "more than the minimum of a block");
        assert!(took <= 18 * TICK && took > 12 * TICK, "{took:?}, the decodes take 9 ticks");
        assert!(forecast.target.unwrap() < 17 * TICK);
        assert!(forecast.duration.unwrap().abs_diff(took) < 2 * TICK, "{forecast:?}, {took:?}");
    }
}

#[test]
fn a_short_step_without_a_target_takes_prompts_for_40_ms() {
    let mut scheduler = trained(wide(None, 0));
    let fast = |plan: &Plan| true_duration(plan, &[1]) / 50;
    submit(&mut scheduler, submission(2, 1900, 1));
    let chunks: Vec<_> = (0..40)
        .map(|_| {
            let plan = plan(&mut scheduler);
            let forecast = scheduler.observe(plan.step, fast(&plan), Drafted::default()).expect("it is in flight");
            scheduler.apply(&answer(&plan, TOKEN)).unwrap();
            (num_tokens_of(&plan, 2), forecast.target.unwrap())
        })
        .collect();
    // The step and the decode take 4 ms, so 36 tokens take the rest: 36 ms at 1 ms each.
    let (last, target) = chunks[39];
    assert!((28..=36).contains(&last), "{chunks:?}");
    assert_eq!(target, Duration::from_millis(40));
}

#[test]
fn a_target_may_be_shorter_than_the_default() {
    let mut scheduler = trained(wide(Some(Duration::from_millis(10)), 0));
    assert_eq!(timed_step(&mut scheduler, &[1]).1.target, Some(Duration::from_millis(10)));
}

#[test]
fn without_a_target_concurrent_prompts_get_the_time_of_the_decodes_that_they_become() {
    let mut scheduler = trained(wide(None, 0));
    for id in 2..18 {
        submit(&mut scheduler, submission(id, 40, 100));
    }
    let (plan, forecast) = timed_step(&mut scheduler, &[1]);
    // A tick, and one for each of 16 decodes: one is running, and 15 prompts besides the first are about to join it.
    let target = forecast.target.unwrap();
    assert!(target.abs_diff(17 * TICK.mul_f64(1.75)) < 4 * TICK, "{target:?}");
    let num_tokens: u32 = advances(&plan).iter().map(|advance| advance.1).sum();
    assert!(num_tokens > 40, "{num_tokens}, the time of one decode allows one block");
}

/// Two stages, so that three steps are in flight, of which one decodes the single stream.
fn staged(max_inter_token: Option<Duration>) -> Limits {
    Limits { num_stages: 2, max_steps_in_flight: 2, ..wide(max_inter_token, 0) }
}

#[test]
fn with_stages_the_steps_from_one_token_to_the_next_share_the_target() {
    let mut scheduler = trained(staged(Some(30 * TICK)));
    submit(&mut scheduler, submission(2, 200, 9));
    let plans: Vec<_> = (0..3).map(|_| plan(&mut scheduler)).collect();
    let chunks: Vec<_> = plans.iter().map(|plan| num_tokens_of(plan, 2)).collect();
    assert!(chunks.iter().all(|chunk| (12..=20).contains(chunk)), "{chunks:?}, 10 ticks a step");
    let gap: Duration = plans.iter().map(|plan| true_duration(plan, &[1])).sum();
    assert!(gap <= 32 * TICK, "{gap:?}");
    assert!(nothing_to_plan(&mut scheduler));
    scheduler.apply(&answer(&plans[0], TOKEN)).unwrap();
    assert_eq!(num_tokens_of(&plan(&mut scheduler), 1), 1, "two steps lie between the two decodes");
}

#[test]
fn with_stages_the_default_leaves_less_than_twice_the_time_of_the_decodes() {
    let mut scheduler = trained(staged(None));
    submit(&mut scheduler, submission(2, 400, 9));
    let plans: Vec<_> = (0..3).map(|_| plan(&mut scheduler)).collect();
    // Alone, a decode takes 2 stages of at most 2 ticks; a step takes at least a block, which is 2 ticks.
    let gap: Duration = plans.iter().map(|plan| true_duration(plan, &[1])).sum();
    assert!(gap <= 10 * TICK, "{gap:?}");
}

/// Sequence 1 decodes. The step in flight has its decode if there is one stage.
fn with_transfers(num_stages: u32) -> (Scheduler, Plan) {
    let limits = Limits { num_blocks: 30, num_memory_slots: 30, prefix_caching: true, num_stages, ..wide(None, 0) };
    let mut scheduler = scheduler(Limits { max_step_tokens: 16, ..limits }, &[(1, 4, 60)]);
    let prompt = |id, token| Submission { prompt_token_ids: vec![token; 48], ..submission(id, 48, 1) };
    for (id, token) in [(2, 7), (3, 8), (4, 9)] {
        submit(&mut scheduler, prompt(id, token));
        while scheduler.stats().num_running + scheduler.stats().num_queued > 1 {
            timed_step(&mut scheduler, &[1]);
        }
    }
    assert!(scheduler.stats().num_full_memory_slots > 4);
    let waiting = (num_stages > 1).then(|| plan(&mut scheduler));
    submit(&mut scheduler, prompt(5, 7));
    let plan = plan(&mut scheduler);
    if let Some(waiting) = waiting {
        assert_eq!(num_tokens_of(&waiting, 1), 1);
        scheduler.apply(&answer(&waiting, TOKEN)).unwrap();
    }
    (scheduler, plan)
}

#[test]
fn while_a_stream_decodes_a_step_restores_no_more_blocks_than_it_may_compute() {
    for num_stages in [1, 2] {
        let (_, plan) = with_transfers(num_stages);
        let is_load = |transfer: &&Transfer| matches!(transfer, Transfer::Load { .. });
        assert_eq!(plan.transfers.iter().filter(is_load).count(), 4, "{num_stages} stages: {:?}", plan.transfers);
    }
}

#[test]
fn the_time_of_transfers_is_not_charged_to_tokens() {
    let (mut scheduler, plan) = with_transfers(1);
    let observe = |scheduler: &mut Scheduler| scheduler.observe(plan.step, 100 * TICK, Drafted::default());
    let seconds = |scheduler: &Scheduler| {
        scheduler.cost.seconds(&scheduler.in_flight.get(plan.step).expect("it is in flight").estimate.work)
    };
    let before = seconds(&scheduler);
    for _ in 0..8 {
        observe(&mut scheduler);
    }
    assert_eq!(seconds(&scheduler), before);
}

#[test]
fn prompts_that_have_no_place_in_a_step_get_no_time() {
    let mut scheduler = trained(Limits { max_step_sequences: 2, ..wide(None, 0) });
    for id in 2..18 {
        submit(&mut scheduler, submission(id, 40, 100));
    }
    let target = timed_step(&mut scheduler, &[1]).1.target.unwrap();
    assert!(target < 4 * TICK, "{target:?}, one sequence decodes and one more has a place");
}

#[test]
fn a_prompt_without_decodes_takes_the_whole_token_budget() {
    let mut scheduler = trained(wide(Some(10 * TICK), 0));
    scheduler.abort(SequenceId(1));
    submit(&mut scheduler, submission(2, 200, 9));
    assert_eq!(advances(&timed_step(&mut scheduler, &[]).0), [(2, 64)]);
}

#[test]
fn one_prompt_advances_by_a_block_in_every_step_even_if_the_decodes_exceed_the_target() {
    let mut scheduler = trained(wide(Some(TICK), 4));
    submit(&mut scheduler, submission(2, 18, 9));
    submit(&mut scheduler, submission(3, 60, 9));
    let plans: Vec<_> = (0..5).map(|_| advances(&timed_step(&mut scheduler, &[1]).0)).collect();
    assert_eq!(plans[..4], [(1, 1), (2, 4)].map(|one| one).repeat(4).chunks(2).map(<[_]>::to_vec).collect::<Vec<_>>());
    assert_eq!(plans[4], [(1, 1), (2, 2)]);
}

#[test]
fn without_observations_only_the_token_budget_limits_a_step() {
    let mut scheduler = scheduler(wide(Some(TICK), 0), &[(1, 4, 50)]);
    step(&mut scheduler);
    submit(&mut scheduler, submission(2, 200, 9));
    assert_eq!(advances(&step(&mut scheduler).0), [(1, 1), (2, 63)]);
}

#[test]
fn a_prompt_that_costs_nothing_takes_the_whole_token_budget() {
    let mut scheduler = scheduler(wide(Some(3 * TICK), 0), &[(1, 4, 500)]);
    submit(&mut scheduler, submission(2, 1900, 9));
    let mut last = 0;
    for _ in 0..20 {
        let plan = plan(&mut scheduler);
        scheduler.observe(plan.step, 2 * TICK, Drafted::default());
        scheduler.apply(&answer(&plan, TOKEN)).unwrap();
        last = num_tokens_of(&plan, 2);
    }
    assert_eq!(last, 63);
}

#[test]
fn observing_a_step_that_is_not_in_flight_has_no_effect() {
    let mut scheduler = scheduler(wide(None, 0), &[(1, 4, 50)]);
    assert_eq!(scheduler.observe(1, TICK, Drafted::default()), None);
    let first = plan(&mut scheduler);
    assert_eq!(
        scheduler.observe(first.step, TICK, Drafted::default()),
        Some(Forecast { duration: None, target: None })
    );
    assert_eq!(scheduler.observe(7, TICK, Drafted::default()), None);
}

#[test]
fn a_short_prompt_overtakes_a_long_running_one_and_a_long_queued_one() {
    let mut scheduler = trained(wide(Some(10 * TICK), 4));
    submit(&mut scheduler, submission(2, 1000, 9));
    timed_step(&mut scheduler, &[1]);
    submit(&mut scheduler, submission(3, 900, 9));
    submit(&mut scheduler, submission(4, 8, 9));
    let (plan, _) = timed_step(&mut scheduler, &[1]);
    assert_eq!((new_ids(&plan)[0], advances(&plan)[1]), (4, (4, 8)));
    assert!(!new_ids(&plan).contains(&2));
}

#[test]
fn without_overtaking_prompts_are_computed_in_order_of_precedence() {
    let mut scheduler = scheduler(wide(None, 0), &[(1, 200, 9), (2, 8, 9)]);
    let first_two: Vec<_> = (0..2).map(|_| advances(&step(&mut scheduler).0)).collect();
    assert_eq!(first_two, [[(1, 64)], [(1, 64)]]);
}

#[test]
fn overtaking_leaves_the_first_queued_sequence_its_blocks() {
    // The long prompt needs 10 of 16 blocks, the short ones 3 each, and one block stays free for each running sequence.
    let mut scheduler = scheduler(Limits { max_overtaking: 4, ..limits(16, 1) }, &[(1, 40, 4)]);
    for id in 2..5 {
        submit(&mut scheduler, submission(id, 12, 30));
    }
    let (plan, _) = step(&mut scheduler);
    assert_eq!(new_ids(&plan), [2, 1], "a second short prompt would take blocks that the long one needs");
    assert_eq!(advances(&plan), [(2, 12), (1, 4)]);
}

#[test]
fn a_prompt_of_higher_priority_goes_first_however_long_it_is() {
    let mut scheduler = scheduler(wide(None, 4), &[(1, 8, 9)]);
    submit(&mut scheduler, Submission { priority: 1, ..submission(2, 200, 9) });
    assert_eq!(advances(&step(&mut scheduler).0), [(2, 64)]);
}

#[test]
fn ageing_lets_a_prompt_advance_despite_a_stream_of_higher_priorities() {
    for (priority_ageing, is_served) in [(Duration::from_secs(10), true), (Duration::MAX, false)] {
        let mut scheduler = scheduler(Limits { priority_ageing, ..wide(None, 4) }, &[(1, 200, 9)]);
        let mut steps = 0..21;
        let has_advanced = steps.any(|second| {
            submit_at(&mut scheduler, Submission { priority: 1, ..submission(10 + second, 64, 1) }, second);
            let plan = scheduler.plan(Duration::from_secs(second)).unwrap();
            scheduler.apply(&answer(&plan, TOKEN)).unwrap();
            num_tokens_of(&plan, 1) > 0
        });
        assert_eq!(has_advanced, is_served, "{priority_ageing:?}");
    }
}

#[test]
fn a_stream_that_is_recomputed_goes_before_every_prompt() {
    let mut scheduler = scheduler(wide(None, 4), &[(1, 400, 20)]);
    for _ in 0..8 {
        step(&mut scheduler);
    }
    scheduler.restart();
    submit(&mut scheduler, submission(2, 8, 9));
    assert_eq!(advances(&step(&mut scheduler).0), [(1, 64)]);
}

#[test]
fn the_producer_of_a_prefix_inherits_the_urgency_of_its_waiters() {
    let limits = Limits { prefix_caching: true, max_step_tokens: 16, ..wide(None, 4) };
    let mut scheduler = Scheduler::new(limits);
    let common = 1000..1064;
    let with_prompt = |id, rest: std::ops::Range<TokenId>| Submission {
        prompt_token_ids: common.clone().chain(rest).collect(),
        ..submission(id, 1, 1)
    };
    submit(&mut scheduler, with_prompt(1, 2000..2900));
    step(&mut scheduler);
    submit(&mut scheduler, with_prompt(2, 3000..3004));
    submit(&mut scheduler, submission(3, 80, 1));
    let shares: Vec<_> = (0..5).map(|_| advances(&step(&mut scheduler).0)).collect();
    let urgent = [vec![(1, 16)], vec![(1, 16)], vec![(1, 16)]];
    assert_eq!(shares[..3], urgent, "the common prefix, on behalf of the second");
    assert_eq!(shares[3..], [vec![(2, 4), (3, 12)], vec![(3, 16)]], "then the long prompt is overtaken again");
}

#[derive(Clone, Debug)]
struct Traffic {
    limits: Limits,
    /// Step of arrival, prompt tokens, tokens to generate, source tokens.
    arrivals: Vec<(usize, usize, u32, u32)>,
    /// Durations of the steps, regardless of what they compute.
    durations_ms: Vec<u64>,
}

fn traffic() -> impl Strategy<Value = Traffic> {
    let source = prop_oneof![3 => Just(0), 1 => 1..128u32];
    let arrivals = proptest::collection::vec((0..60usize, 1..300usize, 1..30u32, source), 1..24);
    let limits = (1..6u32, 40..128u32, 0..4u32, proptest::option::of(0..30u64), 1..4u32);
    let durations_ms = proptest::collection::vec(0..60u64, 1..20);
    (limits, arrivals, durations_ms).prop_map(|(limits, mut arrivals, durations_ms)| {
        let (block_tokens, max_step_tokens, max_overtaking, target_ms, max_steps_in_flight) = limits;
        arrivals.sort_unstable();
        let wide = wide(target_ms.map(Duration::from_millis), max_overtaking);
        let pool = Limits { num_blocks: 20_000, max_step_sequences: 40, ..wide };
        Traffic {
            limits: Limits { block_tokens, max_step_tokens, max_steps_in_flight, ..pool },
            arrivals,
            durations_ms,
        }
    })
}

/// Progress of a prompt, and how many tokens of later prompts were computed before it.
struct Prompt {
    num_tokens: u64,
    num_left: u64,
    num_overtaken: u64,
    num_source_tokens: u32,
}

/// Runs the traffic until all sequences have ended, and checks every step.
fn check_every_step(traffic: Traffic) {
    let Traffic { limits, arrivals, durations_ms } = traffic;
    let mut scheduler = Scheduler::new(limits);
    let mut prompts: Vec<Prompt> = Vec::new();
    let mut in_flight = std::collections::VecDeque::new();
    let mut arrivals = arrivals.into_iter().zip(0..).peekable();
    for step in 0.. {
        assert!(step < 20_000, "the traffic does not end");
        while let Some((arrival, id)) = arrivals.next_if(|((due, ..), _)| *due <= step) {
            let (_, num_tokens, max_new_tokens, source) = arrival;
            let num_source_tokens = source.min(num_tokens as u32).min(limits.max_step_tokens);
            submit(&mut scheduler, Submission { num_source_tokens, ..submission(id, num_tokens, max_new_tokens) });
            let num_tokens = num_tokens as u64;
            prompts.push(Prompt { num_tokens, num_left: num_tokens, num_overtaken: 0, num_source_tokens });
        }
        let decodes: Vec<_> =
            scheduler.residents.running().filter(|id| scheduler.sequence(*id).is_decoding()).collect();
        if let Some(plan) = scheduler.plan(Duration::from_millis(step as u64)) {
            scheduler.audit();
            let first: Vec<_> = plan.advances.iter().map(|advance| advance.id).take(decodes.len()).collect();
            assert_eq!(first, decodes, "every decode advances, before the prompts");
            check_prompts(&scheduler, &prompts, &plan.advances[decodes.len()..]);
            for id in decodes {
                // This includes prompts with a single token left.
                prompts[id.0 as usize].num_left = 0;
            }
            check_overtaking(&limits, &mut prompts, &plan.advances[first.len()..]);
            in_flight.push_back(plan);
        } else if in_flight.is_empty() && arrivals.peek().is_none() {
            break;
        }
        if in_flight.len() == limits.max_steps_in_flight as usize || step % 3 == 0 {
            let Some(plan) = in_flight.pop_front() else { continue };
            let duration_ms = durations_ms[plan.step as usize % durations_ms.len()];
            scheduler
                .observe(plan.step, Duration::from_millis(duration_ms), Drafted::default())
                .expect("it is in flight");
            scheduler.apply(&answer(&plan, TOKEN)).unwrap();
        }
    }
    assert_eq!(scheduler.stats().num_running + scheduler.stats().num_queued, 0);
}

/// A step keeps its target duration as far as the cost model knows, unless it has no more than the minimum. No source
/// is split.
fn check_prompts(scheduler: &Scheduler, prompts: &[Prompt], prefills: &[Advance]) {
    let least = |advance: &Advance| {
        let prompt = &prompts[advance.id.0 as usize];
        if prompt.num_left == prompt.num_tokens { prompt.num_source_tokens } else { 0 }
    };
    assert!(prefills.iter().all(|advance| advance.num_tokens >= least(advance)));
    let estimate = &scheduler.in_flight.get(scheduler.in_flight.next_step() - 1).expect("just planned").estimate;
    let num_tokens: u32 = prefills.iter().map(|advance| advance.num_tokens).sum();
    let Some(bound) = estimate.target_seconds else { return };
    let least = prefills.iter().map(least).fold(scheduler.limits.block_tokens, u32::max);
    let is_least = prefills.len() <= 1 && num_tokens <= least;
    assert!(estimate.seconds <= bound * 1.000_001 || is_least, "{estimate:?} with {prefills:?}");
}

fn check_overtaking(limits: &Limits, prompts: &mut [Prompt], prefills: &[Advance]) {
    for (index, advance) in prefills.iter().enumerate() {
        let id = advance.id.0 as usize;
        let not_before: Vec<_> = prefills[..index].iter().map(|advance| advance.id.0 as usize).collect();
        for (other, earlier) in prompts[..id].iter_mut().enumerate() {
            if earlier.num_left > 0 && !not_before.contains(&other) {
                earlier.num_overtaken += u64::from(advance.num_tokens);
                let most = earlier.num_tokens * u64::from(limits.max_overtaking) + u64::from(limits.max_step_tokens);
                assert!(
                    earlier.num_overtaken <= most,
                    "prompt {other} was overtaken by {} tokens",
                    earlier.num_overtaken
                );
            }
        }
    }
    for advance in prefills {
        prompts[advance.id.0 as usize].num_left -= u64::from(advance.num_tokens);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Durations are random: a wrong cost model costs time but breaks no guarantee.
    #[test]
    fn every_step_keeps_its_target_and_no_prompt_starves(traffic in traffic()) {
        check_every_step(traffic);
    }
}

//! Routing in virtual time: conversations of Zipf-distributed users, in bursts, on replicas with a bounded prefix cache.
//!
//! `bench/routing_simulation.py` runs the long ones, which print a line of JSON for each policy, and keeps their results.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque};
use std::time::Duration;

use penstock_scheduler::SequenceId;
use tokio::time::Instant;

use super::prefix::PrefixIndex;
use super::routing::tests::plain_request;
use super::routing::{CacheShape, Routing};
use crate::engine::SpeedMeter;
use crate::sequence::SequenceRequest;

const BLOCK_TOKENS: usize = 16;
const STEP_TOKENS: usize = 2048;
const NEW_TOKENS: usize = 40;
/// Length of the eight system prompts; every prompt begins with one of them.
const SYSTEM_TOKENS: usize = 500;
/// A conversation that is this long begins anew.
const MAX_TOKENS: usize = 4000;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Policy {
    /// What replicas do.
    Prefix,
    /// The same without knowledge of prefixes.
    Work,
    RoundRobin,
}

#[derive(Clone, Copy)]
struct Setting {
    num_replicas: usize,
    num_requests: usize,
    num_users: usize,
    /// Blocks of a replica's cache.
    num_blocks: usize,
    requests_per_s: f64,
    /// How many times slower the first replica is.
    slowness: f64,
}

#[derive(Debug)]
struct Outcome {
    hit_rate: f64,
    /// With one cache as large as those of all replicas, which evicts what is needed last.
    hit_rate_optimum: f64,
    ttft_p50_s: f64,
    ttft_p99_s: f64,
    /// Most computed tokens of a replica over the mean.
    imbalance: f64,
    /// Sequences of the first replica over the mean.
    share_of_first: f64,
    num_remembered_blocks: usize,
}

/// Sequences with their first token and when they arrived, and those that ended.
type StepResult = (Vec<(u64, f64)>, Vec<u64>);

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 to 1.
    fn uniform(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Below `n`, with a probability of about 1 / (rank + 1).
    fn zipf(&mut self, n: usize) -> usize {
        (((n as f64 + 1.0).powf(self.uniform()) - 1.0) as usize).min(n - 1)
    }
}

struct Waiting {
    id: u64,
    arrived_s: f64,
    blocks: Vec<u64>,
    num_tokens: usize,
    /// Set when its first step begins.
    num_missing: Option<usize>,
}

/// Least recently used blocks go first.
#[derive(Default)]
struct Cache {
    used_at: HashMap<u64, u64>,
    by_use: BTreeMap<u64, u64>,
    clock: u64,
}

impl Cache {
    fn num_found(&self, blocks: &[u64]) -> usize {
        blocks.iter().take_while(|block| self.used_at.contains_key(block)).count()
    }

    fn insert(&mut self, blocks: &[u64], max_blocks: usize) {
        // The end of a prompt is evicted before its begin.
        for block in blocks.iter().rev() {
            self.clock += 1;
            if let Some(before) = self.used_at.insert(*block, self.clock) {
                self.by_use.remove(&before);
            }
            self.by_use.insert(self.clock, *block);
        }
        while self.used_at.len() > max_blocks {
            let (_, oldest) = self.by_use.pop_first().unwrap();
            self.used_at.remove(&oldest);
        }
    }
}

struct Replica {
    queue: VecDeque<Waiting>,
    /// Sequences with the tokens that they still get.
    decoding: Vec<(u64, usize)>,
    cache: Cache,
    is_stepping: bool,
    num_sequences: usize,
    num_computed: usize,
    num_queried: usize,
    num_hit: usize,
    speed: SpeedMeter,
}

impl Replica {
    fn new(start: Instant) -> Self {
        Self {
            queue: VecDeque::new(),
            decoding: Vec::new(),
            cache: Cache::default(),
            is_stepping: false,
            num_sequences: 0,
            num_computed: 0,
            num_queried: 0,
            num_hit: 0,
            speed: SpeedMeter::new(start),
        }
    }

    /// Takes a step. Returns its duration, the sequences that got their first token, and those that ended.
    fn step(&mut self, setting: &Setting, slowness: f64) -> (f64, Vec<(u64, f64)>, Vec<u64>) {
        let (mut budget, mut started) = (STEP_TOKENS, Vec::new());
        while let Some(waiting) = self.queue.front_mut().filter(|_| budget > 0) {
            let missing = waiting.num_missing.get_or_insert_with(|| {
                let num_hit = self.cache.num_found(&waiting.blocks) * BLOCK_TOKENS;
                self.num_queried += waiting.num_tokens;
                self.num_hit += num_hit.min(waiting.num_tokens - 1);
                self.cache.insert(&waiting.blocks, setting.num_blocks);
                waiting.num_tokens - num_hit.min(waiting.num_tokens - 1)
            });
            let num_tokens = budget.min(*missing);
            *missing -= num_tokens;
            budget -= num_tokens;
            if *missing > 0 {
                break;
            }
            started.push((waiting.id, waiting.arrived_s));
            self.queue.pop_front();
        }
        let (num_prompt, num_decoding) = (STEP_TOKENS - budget, self.decoding.len());
        let seconds = slowness * (0.008 + 50e-6 * num_prompt as f64 + 100e-6 * num_decoding as f64);
        self.num_computed += num_prompt + num_decoding;
        self.decoding.iter_mut().for_each(|(_, num_left)| *num_left -= 1);
        let ended = self.decoding.iter().filter(|(_, num_left)| *num_left == 0).map(|(id, _)| *id).collect();
        self.decoding.retain(|(_, num_left)| *num_left > 0);
        self.decoding.extend(started.iter().map(|(id, _)| (*id, NEW_TOKENS - 1)));
        (seconds, started, ended)
    }

    /// The replica's step ended, in which `num_next` sequences got a token that is not their first.
    fn measure(&mut self, now: Instant, num_next: usize) {
        self.speed.advance(now);
        self.speed.step(num_next, self.decoding.len());
    }

    fn seconds_per_token(&mut self, now: Instant) -> Option<f64> {
        self.speed.advance(now);
        self.speed.seconds_per_token()
    }
}

/// A turn of a conversation. It has the one before it, its answer and 100 new tokens.
#[derive(Clone, Copy)]
struct Turn {
    arrives_s: f64,
    user: usize,
    conversation: u32,
    num_tokens: usize,
}

impl Turn {
    fn prompt(&self) -> Vec<u32> {
        let system = |index: usize| (self.user % 8 * 1000 + index) as u32;
        let seed = (self.user as u32 * 31 + self.conversation).wrapping_mul(7919);
        let token = |index: usize| if index < SYSTEM_TOKENS { system(index) } else { seed.wrapping_add(index as u32) };
        (0..self.num_tokens).map(token).collect()
    }
}

/// All turns by their arrival. Ten of sixty seconds have three times the rate of the others.
fn turns(setting: &Setting) -> Vec<Turn> {
    let (mut random, mut users, mut arrives_s) = (Random(7), HashMap::new(), 0.0);
    let next = |_| {
        let user = random.zipf(setting.num_users);
        let (conversation, num_tokens) = users.entry(user).or_insert((0, SYSTEM_TOKENS + 100));
        if *num_tokens > MAX_TOKENS {
            (*conversation, *num_tokens) = (*conversation + 1, SYSTEM_TOKENS + 100);
        }
        let turn = Turn { arrives_s, user, conversation: *conversation, num_tokens: *num_tokens };
        *num_tokens += NEW_TOKENS + 100;
        let rate = setting.requests_per_s * if arrives_s % 60.0 < 10.0 { 2.25 } else { 0.75 };
        arrives_s += -(1.0 - random.uniform()).ln() / rate;
        turn
    };
    (0..setting.num_requests).map(next).collect()
}

/// The part of the prompts that one cache of `max_blocks` blocks would find if it knew the future: no placement finds more.
fn optimal_hit_rate(turns: &[Turn], max_blocks: usize) -> f64 {
    let key = |turn: &Turn| (turn.user, turn.conversation);
    let mut next_turns = vec![None; turns.len()];
    let mut later = HashMap::new();
    for (index, turn) in turns.iter().enumerate().rev() {
        next_turns[index] = later.insert(key(turn), index);
    }
    let num_system = SYSTEM_TOKENS / BLOCK_TOKENS;
    // Blocks of conversations, by the turn that needs them next.
    let (mut held, mut num_held) = (BTreeMap::new(), 0);
    let (mut seen, mut num_hit) = (HashSet::new(), 0);
    for (index, turn) in turns.iter().enumerate() {
        let num_found = held.remove(&index).unwrap_or(0);
        num_held -= num_found;
        num_hit += num_found + if seen.insert(turn.user % 8) { 0 } else { num_system };
        let Some(next) = next_turns[index] else { continue };
        let num_own = turn.num_tokens / BLOCK_TOKENS - num_system;
        held.insert(next, num_own);
        num_held += num_own;
        while num_held + 8 * num_system > max_blocks {
            let mut last = held.last_entry().unwrap();
            let num_evicted = (*last.get()).min(num_held + 8 * num_system - max_blocks);
            *last.get_mut() -= num_evicted;
            num_held -= num_evicted;
            if *last.get() == 0 {
                last.remove();
            }
        }
    }
    (num_hit * BLOCK_TOKENS) as f64 / turns.iter().map(|turn| turn.num_tokens).sum::<usize>() as f64
}

fn simulate(policy: Policy, setting: &Setting) -> Outcome {
    let turns = turns(setting);
    let start = Instant::now();
    let at = |now: f64| start + Duration::from_secs_f64(now);
    let cache = CacheShape {
        block_tokens: BLOCK_TOKENS,
        num_blocks: setting.num_blocks,
        prefix_caching: policy != Policy::Work,
    };
    let mut routing = Routing::new(cache);
    let hashes = PrefixIndex::new(BLOCK_TOKENS);
    let mut replicas: Vec<_> = (0..setting.num_replicas).map(|_| Replica::new(start)).collect();
    (0..setting.num_replicas).for_each(|number| routing.add_engine(number));
    let all: Vec<_> = (0..setting.num_replicas).collect();
    let mut ttfts = Vec::with_capacity(setting.num_requests);
    let mut arrivals = turns.iter().enumerate().peekable();
    // Virtual nanoseconds at which a replica's step ends, and what the step did.
    let mut steps: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut results: HashMap<usize, StepResult> = HashMap::new();
    loop {
        let step_ends = steps.peek().map(|Reverse((ends, _))| *ends as f64 * 1e-9);
        let is_next = |turn: &(usize, &Turn)| step_ends.is_none_or(|ends| turn.1.arrives_s <= ends);
        let (number, now) = if let Some((index, turn)) = arrivals.next_if(is_next) {
            let (id, now, num_tokens) = (index as u64, turn.arrives_s, turn.num_tokens);
            let prompt = turn.prompt();
            let blocks = hashes.blocks(&prompt, None, &[]);
            let number = match policy {
                Policy::RoundRobin => index % setting.num_replicas,
                _ => {
                    let speed = |(number, replica): (usize, &mut Replica)| (number, replica.seconds_per_token(at(now)));
                    routing.observe_speed(&replicas.iter_mut().enumerate().map(speed).collect::<Vec<_>>());
                    let request = SequenceRequest { max_new_tokens: NEW_TOKENS as u32, ..plain_request(prompt) };
                    routing.place(SequenceId(id), &request, &all)
                }
            };
            replicas[number].num_sequences += 1;
            replicas[number].queue.push_back(Waiting { id, arrived_s: now, blocks, num_tokens, num_missing: None });
            (number, now)
        } else if let Some(Reverse((ends, number))) = steps.pop() {
            let now = ends as f64 * 1e-9;
            replicas[number].is_stepping = false;
            let (started, ended) = results.remove(&number).unwrap();
            let num_next = replicas[number].decoding.len() + ended.len() - started.len();
            replicas[number].measure(at(now), num_next);
            for (id, arrived_s) in started {
                ttfts.push(now - arrived_s);
                routing.prompt_computed(SequenceId(id));
            }
            ended.into_iter().for_each(|id| routing.end(SequenceId(id), Some(NEW_TOKENS as u64)));
            (number, now)
        } else {
            break;
        };
        let replica = &mut replicas[number];
        let has_work = !replica.queue.is_empty() || !replica.decoding.is_empty();
        if has_work && !replica.is_stepping {
            let (seconds, started, ended) = replica.step(setting, if number == 0 { setting.slowness } else { 1.0 });
            replica.is_stepping = true;
            results.insert(number, (started, ended));
            steps.push(Reverse((((now + seconds) * 1e9) as u64, number)));
        }
    }
    assert_eq!(ttfts.len(), setting.num_requests);
    ttfts.sort_by(f64::total_cmp);
    let sum = |value: fn(&Replica) -> usize| replicas.iter().map(value).sum::<usize>() as f64;
    let most = replicas.iter().map(|replica| replica.num_computed).max().unwrap() as f64;
    let num_replicas = setting.num_replicas as f64;
    Outcome {
        hit_rate: sum(|replica| replica.num_hit) / sum(|replica| replica.num_queried),
        hit_rate_optimum: optimal_hit_rate(&turns, setting.num_replicas * setting.num_blocks),
        ttft_p50_s: ttfts[ttfts.len() / 2],
        ttft_p99_s: ttfts[ttfts.len() * 99 / 100],
        imbalance: most / (sum(|replica| replica.num_computed) / num_replicas),
        share_of_first: replicas[0].num_sequences as f64 * num_replicas / setting.num_requests as f64,
        num_remembered_blocks: routing.num_remembered_blocks(),
    }
}

const SMALL: Setting = Setting {
    num_replicas: 8,
    num_requests: 4000,
    num_users: 400,
    num_blocks: 8192,
    requests_per_s: 60.0,
    slowness: 1.0,
};

#[test]
fn prefixes_are_found_and_no_replica_is_a_hot_spot() {
    // With short queues, nothing is gained from balance.
    let loaded = Setting { requests_per_s: 120.0, ..SMALL };
    let outcome = simulate(Policy::Prefix, &loaded);
    let others = [simulate(Policy::Work, &loaded), simulate(Policy::RoundRobin, &loaded)];
    assert!(outcome.hit_rate > 0.98 * outcome.hit_rate_optimum, "{outcome:?}");
    assert!(outcome.imbalance < 1.2, "{outcome:?}");
    assert!(others.iter().all(|other| outcome.ttft_p99_s < other.ttft_p99_s), "{outcome:?} {others:?}");
    assert!(outcome.num_remembered_blocks <= 2 * 8 * SMALL.num_blocks);
}

#[test]
fn a_slow_replica_gets_less_and_the_slowest_requests_do_not_wait_for_it() {
    let slow = Setting { slowness: 4.0, requests_per_s: 45.0, ..SMALL };
    let (outcome, blind) = (simulate(Policy::Prefix, &slow), simulate(Policy::RoundRobin, &slow));
    assert!(outcome.share_of_first < 0.6, "{outcome:?}");
    assert!(outcome.ttft_p99_s < 0.5 * blind.ttft_p99_s, "{outcome:?} {blind:?}");
}

/// A million requests; the share of users and requests of each replica is always the same.
fn large(num_replicas: usize) -> Setting {
    Setting {
        num_replicas,
        num_requests: 1_000_000,
        num_users: 20_000 * num_replicas / 64,
        num_blocks: 16_384,
        requests_per_s: 7.5 * num_replicas as f64,
        slowness: 1.0,
    }
}

fn print_outcomes(setting: &Setting, policies: &[Policy]) {
    for policy in policies {
        let Setting { num_replicas, slowness, .. } = setting;
        let Outcome {
            hit_rate,
            hit_rate_optimum,
            ttft_p50_s,
            ttft_p99_s,
            imbalance,
            share_of_first,
            num_remembered_blocks,
        } = simulate(*policy, setting);
        let index_share = num_remembered_blocks as f64 / (num_replicas * setting.num_blocks) as f64;
        assert!(index_share <= 2.0, "{index_share}");
        println!(
            "{{\"policy\": \"{policy:?}\", \"replicas\": {num_replicas}, \"slowness\": {slowness}, \
             \"hit_rate\": {hit_rate:.4}, \"hit_rate_optimum\": {hit_rate_optimum:.4}, \
             \"ttft_p50_s\": {ttft_p50_s:.4}, \"ttft_p99_s\": {ttft_p99_s:.4}, \"imbalance\": {imbalance:.3}, \
             \"share_of_first\": {share_of_first:.3}, \"index_share\": {index_share:.3}}}"
        );
    }
}

#[test]
#[ignore = "slow"]
fn a_million_requests() {
    for slowness in [1.0, 4.0] {
        let setting = Setting { slowness, ..large(64) };
        print_outcomes(&setting, &[Policy::Prefix, Policy::Work, Policy::RoundRobin]);
    }
}

#[test]
#[ignore = "slow"]
fn a_million_requests_on_a_thousand_replicas() {
    print_outcomes(&large(1000), &[Policy::Prefix, Policy::RoundRobin]);
}

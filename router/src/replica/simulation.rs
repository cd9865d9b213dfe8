//! Routing in virtual time: conversations of Zipf-distributed users, in bursts, on replicas with a bounded prefix cache.
//!
//! `cargo test --release -p penstock-router --lib simulation -- --ignored --nocapture` prints a line of JSON for each policy.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet, VecDeque};

use penstock_scheduler::SequenceId;

use super::prefix::PrefixIndex;
use super::routing::tests::plain_request;
use super::routing::{CacheShape, Routing};
use crate::sequence::SequenceRequest;

const BLOCK_TOKENS: usize = 16;
const STEP_TOKENS: usize = 2048;
const NEW_TOKENS: usize = 40;
/// A conversation that is this long begins anew.
const MAX_TOKENS: usize = 4000;
const HALF_LIFE_S: f64 = 10.0;

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
    /// With one cache for all replicas that forgets nothing.
    hit_rate_bound: f64,
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

#[derive(Default)]
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
    measured: (f64, f64),
}

impl Replica {
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
        let kept = (-seconds / HALF_LIFE_S).exp2();
        self.measured.0 = self.measured.0 * kept + seconds * num_decoding as f64;
        self.measured.1 = self.measured.1 * kept + num_decoding as f64;
        self.num_computed += num_prompt + num_decoding;
        self.decoding.iter_mut().for_each(|(_, num_left)| *num_left -= 1);
        let ended = self.decoding.iter().filter(|(_, num_left)| *num_left == 0).map(|(id, _)| *id).collect();
        self.decoding.retain(|(_, num_left)| *num_left > 0);
        self.decoding.extend(started.iter().map(|(id, _)| (*id, NEW_TOKENS - 1)));
        (seconds, started, ended)
    }

    fn seconds_per_token(&self) -> Option<f64> {
        (self.measured.1 >= 16.0).then(|| self.measured.0 / self.measured.1)
    }
}

/// The prompts of all users. A turn has the one before it, its answer and 100 new tokens.
struct Users {
    turns: HashMap<usize, (u32, usize)>,
}

impl Users {
    fn next_prompt(&mut self, user: usize) -> Vec<u32> {
        let (conversation, num_tokens) = self.turns.entry(user).or_insert((0, 600));
        if *num_tokens > MAX_TOKENS {
            (*conversation, *num_tokens) = (*conversation + 1, 600);
        }
        // The first 500 tokens are one of eight system prompts.
        let system = |index: usize| (user % 8 * 1000 + index) as u32;
        let own = |index: usize| (user as u32 * 31 + *conversation).wrapping_mul(7919).wrapping_add(index as u32);
        let prompt = (0..*num_tokens).map(|index| if index < 500 { system(index) } else { own(index) }).collect();
        *num_tokens += NEW_TOKENS + 100;
        prompt
    }
}

fn simulate(policy: Policy, setting: &Setting) -> Outcome {
    let mut random = Random(7);
    let mut users = Users { turns: HashMap::new() };
    let cache = CacheShape {
        block_tokens: BLOCK_TOKENS,
        num_blocks: setting.num_blocks,
        prefix_caching: policy != Policy::Work,
    };
    let mut routing = Routing::new(cache);
    let hashes = PrefixIndex::new(BLOCK_TOKENS);
    let mut replicas: Vec<_> = (0..setting.num_replicas).map(|_| Replica::default()).collect();
    (0..setting.num_replicas).for_each(|number| routing.add_engine(number));
    let all: Vec<_> = (0..setting.num_replicas).collect();
    let (mut seen, mut num_seen, mut num_queried) = (HashSet::new(), 0, 0);
    let mut ttfts = Vec::with_capacity(setting.num_requests);
    let (mut next_arrival, mut num_arrived) = (0.0, 0);
    // Virtual nanoseconds at which a replica's step ends, and what the step did.
    let mut steps: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut results: HashMap<usize, StepResult> = HashMap::new();
    loop {
        let step_ends = steps.peek().map(|Reverse((ends, _))| *ends as f64 * 1e-9);
        let arrives = num_arrived < setting.num_requests && step_ends.is_none_or(|ends| next_arrival <= ends);
        let (number, now) = if arrives {
            let now = next_arrival;
            // Ten of sixty seconds have three times the rate.
            let rate = setting.requests_per_s * if now % 60.0 < 10.0 { 2.25 } else { 0.75 };
            next_arrival += -(1.0 - random.uniform()).ln() / rate;
            let prompt = users.next_prompt(random.zipf(setting.num_users));
            let (id, num_tokens) = (num_arrived as u64, prompt.len());
            let blocks = hashes.blocks(&prompt, None, &[]);
            num_queried += num_tokens;
            num_seen += blocks.iter().take_while(|block| seen.contains(*block)).count() * BLOCK_TOKENS;
            seen.extend(blocks.iter().copied());
            let number = match policy {
                Policy::RoundRobin => num_arrived % setting.num_replicas,
                _ => {
                    let speeds: Vec<_> =
                        all.iter().map(|number| (*number, replicas[*number].seconds_per_token())).collect();
                    routing.observe_speed(&speeds);
                    let request = SequenceRequest { max_new_tokens: NEW_TOKENS as u32, ..plain_request(prompt) };
                    routing.place(SequenceId(id), &request, &all)
                }
            };
            num_arrived += 1;
            replicas[number].num_sequences += 1;
            replicas[number].queue.push_back(Waiting { id, arrived_s: now, blocks, num_tokens, num_missing: None });
            (number, now)
        } else if let Some(Reverse((ends, number))) = steps.pop() {
            let now = ends as f64 * 1e-9;
            replicas[number].is_stepping = false;
            let (started, ended) = results.remove(&number).unwrap();
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
        hit_rate_bound: num_seen as f64 / num_queried as f64,
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
    let outcome = simulate(Policy::Prefix, &SMALL);
    let others = [simulate(Policy::Work, &SMALL), simulate(Policy::RoundRobin, &SMALL)];
    assert!(outcome.hit_rate > 0.9 * outcome.hit_rate_bound, "{outcome:?}");
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

#[test]
#[ignore = "slow"]
fn a_million_requests() {
    let large = Setting {
        num_replicas: 64,
        num_requests: 1_000_000,
        num_users: 20_000,
        num_blocks: 16_384,
        requests_per_s: 480.0,
        slowness: 1.0,
    };
    for slowness in [1.0, 4.0] {
        for policy in [Policy::Prefix, Policy::Work, Policy::RoundRobin] {
            let Outcome {
                hit_rate,
                hit_rate_bound,
                ttft_p50_s,
                ttft_p99_s,
                imbalance,
                share_of_first,
                num_remembered_blocks,
            } = simulate(policy, &Setting { slowness, ..large });
            println!(
                "{{\"policy\": \"{policy:?}\", \"slowness\": {slowness}, \"hit_rate\": {hit_rate:.4}, \
                 \"hit_rate_bound\": {hit_rate_bound:.4}, \"ttft_p50_s\": {ttft_p50_s:.4}, \"ttft_p99_s\": {ttft_p99_s:.4}, \
                 \"imbalance\": {imbalance:.3}, \"share_of_first\": {share_of_first:.3}, \
                 \"num_remembered_blocks\": {num_remembered_blocks}}}"
            );
        }
    }
}

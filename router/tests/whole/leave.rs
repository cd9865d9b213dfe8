//! A client disconnects in any state of its request: its KV blocks are free within two steps, and so is its permit.
//!
//! A witness generates meanwhile, so that steps go on; no step is answered before the test allows it.

use penstock_router::generator::{Generator, SequenceStream};
use penstock_router::sequence::SequenceRequest;
use penstock_scheduler::Stats;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::fake_worker::fleet::Fleet;
use crate::fake_worker::sequences::{Advance, unpack};
use crate::fake_worker::setting::request;
use crate::fake_worker::{FakeWorker, Script, Seen};
use crate::server::{LIMITS, Server, TIMEOUT};

const ROUTES: [&str; 2] = ["/generate", "/generate_stream"];
/// Prompt length that needs several steps.
const LONG_PROMPT_TOKENS: u32 = 40;
/// Steps that may be answered after the disconnect.
const STEPS_TO_FREE: u64 = 2;

/// The state of a request at the disconnect.
struct State {
    name: &'static str,
    num_witnesses: u64,
    num_prompt_tokens: u32,
    max_new_tokens: u32,
    /// Whether the request's plans show this state.
    is_reached: fn(&[Advance]) -> bool,
}

/// A request with a short prompt, alongside one witness.
const SHORT: State =
    State { name: "", num_witnesses: 1, num_prompt_tokens: 5, max_new_tokens: 50, is_reached: <[Advance]>::is_empty };
const LONG: State = State { num_prompt_tokens: LONG_PROMPT_TOKENS, ..SHORT };

/// The advances of the plans; the last plan is in flight.
const STATES: [State; 6] = [
    State { name: "queued", num_witnesses: 2, ..SHORT },
    State { name: "prefilling", is_reached: |advances| matches!(advances, [first] if !first.sample), ..LONG },
    State {
        name: "in the middle of its chunks",
        is_reached: |advances| matches!(advances, [_, .., last] if !last.sample),
        ..LONG
    },
    State { name: "at the end of its prompt", is_reached: |advances| num_samples(advances) == 1, ..LONG },
    State { name: "generating", is_reached: |advances| num_samples(advances) >= 3, ..SHORT },
    State { name: "finishing", max_new_tokens: 2, is_reached: |advances| num_samples(advances) == 2, ..SHORT },
];

fn num_samples(advances: &[Advance]) -> usize {
    advances.iter().filter(|advance| advance.sample).count()
}

fn body(num_prompt_tokens: u32, max_new_tokens: u32) -> Value {
    // One token for each byte.
    let inputs = "x".repeat(num_prompt_tokens as usize);
    json!({"inputs": inputs, "parameters": {"max_new_tokens": max_new_tokens, "ignore_eos": true}})
}

fn witness(server: &Server) -> SequenceStream {
    server.engine().submit(SequenceRequest { priority: 1, ..request(&[7], 400) })
}

fn advances(seen: &Seen, sequence_id: u64) -> Vec<Advance> {
    let all = seen.plans.iter().flat_map(unpack);
    all.filter(|advance| advance.sequence_id == sequence_id).collect()
}

/// Allows steps until all witnesses run. No further step is planned before the next answer.
async fn run_all(server: &Server, num_witnesses: usize, worker: &FakeWorker, gate: &watch::Sender<u64>) {
    server.wait_until("taken in", |stats| stats.num_queued + stats.num_running == num_witnesses).await;
    worker.wait_until(|seen| seen.plans.len() == 2).await;
    while server.engine().stats().num_running < num_witnesses {
        answer_next(worker, gate).await;
    }
}

/// Allows the oldest step in flight and waits for the next plan.
async fn answer_next(worker: &FakeWorker, gate: &watch::Sender<u64>) {
    let last = *gate.borrow() + 1;
    gate.send_replace(last);
    worker.wait_until(|seen| seen.plans.len() as u64 >= last + 2).await;
}

/// Allows step after step until the victim is in the wanted state; returns the number of the last allowed step.
async fn reach(server: &Server, state: &State, worker: &FakeWorker, gate: &watch::Sender<u64>) -> u64 {
    let victim = state.num_witnesses + 1;
    server.wait_until("taken in", |stats| stats.num_queued + stats.num_running == victim as usize).await;
    loop {
        if worker.look(|seen| (state.is_reached)(&advances(seen, victim))) {
            return *gate.borrow();
        }
        assert!(*gate.borrow() < 12, "{} was never reached", state.name);
        answer_next(worker, gate).await;
    }
}

/// Checks that the only permit is free.
async fn has_room(server: &Server) -> bool {
    let until_accepted = async {
        loop {
            match server.status("/generate", &body(2, 1)).await.as_str() {
                "200" => return,
                "429" => tokio::task::yield_now().await,
                status => panic!("{status}"),
            }
        }
    };
    tokio::time::timeout(TIMEOUT, until_accepted).await.is_ok()
}

#[tokio::test]
async fn blocks_are_free_within_two_steps_of_a_disconnect() {
    for state in &STATES {
        for path in ROUTES {
            let (gate, may_answer) = watch::channel(0);
            let fleet = Fleet::new([vec![Script { gate: Some(may_answer), ..Script::default() }]]);
            let server = Server::start(&fleet).await;
            let group = fleet.started(1).await;
            let worker = &group.ranks[0];
            let witnesses: Vec<_> = (0..state.num_witnesses).map(|_| witness(&server)).collect();
            run_all(&server, witnesses.len(), worker, &gate).await;
            let client = server.send(path, &body(state.num_prompt_tokens, state.max_new_tokens)).await;
            let last = reach(&server, state, worker, &gate).await;

            drop(client);
            let num_witnesses = witnesses.len();
            let remain = |stats: &Stats| stats.num_queued == 0 && stats.num_running == num_witnesses;
            server.wait_until("aborted", remain).await;
            gate.send_replace(last + STEPS_TO_FREE);
            // The witnesses have one block each.
            let free_blocks = LIMITS.num_blocks as usize - num_witnesses;
            let what = format!("free after {STEPS_TO_FREE} steps, {}, {path}", state.name);
            server.wait_until(&what, |stats| stats.num_allocatable_blocks == free_blocks).await;

            gate.send_replace(u64::MAX);
            worker.wait_until(|seen| !seen.sequences.contains(&(state.num_witnesses + 1))).await;
            drop(witnesses);
            assert!(has_room(&server).await, "{}, {path}", state.name);
        }
    }
}

#[tokio::test]
async fn a_disconnect_during_grammar_compilation_is_never_planned() {
    for path in ROUTES {
        let fleet = Fleet::new([vec![Script::default()]]);
        let server = Server::start(&fleet).await;
        let group = fleet.started(1).await;
        let mut body = body(5, 50);
        body["parameters"] = json!({"grammar": {"type": "regex", "value": "endless"}});
        let client = server.send(path, &body).await;
        group.ranks[0].wait_until(|seen| !seen.grammars.is_empty()).await;
        drop(client);
        assert!(has_room(&server).await, "{path}");
        let num_started = |seen: &Seen| seen.plans.iter().map(|plan| plan.new_sequences.len()).sum::<usize>();
        assert_eq!(group.ranks[0].look(num_started), 1, "only the one that found room");
    }
}

#[tokio::test]
async fn a_disconnect_during_tokenization_leaves_nothing() {
    for path in ROUTES {
        let fleet = Fleet::new([vec![Script::default()]]);
        let server = Server::start(&fleet).await;
        let inputs = "word ".repeat(100_000);
        let body = json!({"inputs": inputs, "parameters": {"truncate": 9, "max_new_tokens": 400, "ignore_eos": true}});
        drop(server.send(path, &body).await);
        assert!(has_room(&server).await, "{path}");
        let idle = |stats: &Stats| stats.num_allocatable_blocks == LIMITS.num_blocks as usize;
        server.wait_until("free", idle).await;
    }
}

#[tokio::test]
async fn a_disconnect_during_a_restart_is_not_replayed() {
    for path in ROUTES {
        let fleet = Fleet::new([vec![Script::default()], vec![Script::default()]]);
        fleet.allow(0);
        let server = Server::start(&fleet).await;
        fleet.started(1).await.ranks[0].kill();
        fleet.wait_until_asked(1).await;
        let client = server.send(path, &body(5, 50)).await;
        server.wait_until("queued", |stats| stats.num_queued == 1).await;
        drop(client);
        server.wait_until("forgotten", |stats| stats.num_queued == 0).await;
        fleet.allow(1);
        assert!(has_room(&server).await, "{path}");
        let second = fleet.started(2).await;
        let started = |seen: &Seen| seen.plans.iter().flat_map(|plan| plan.new_sequences.clone()).collect::<Vec<_>>();
        let started = second.ranks[0].look(started);
        assert!(
            started.iter().all(|new| new.token_ids.len() == 2),
            "only sequences that were admitted later: {started:?}"
        );
    }
}

//! The stream of steps of all ranks as one: a plan goes to every rank, a report comes when every rank has done it.
//!
//! INVARIANT: reports come in the order of the plans, and each is rank 0's; the others' results are acknowledgements.

use std::future::poll_fn;
use std::task::{Context, Poll};
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use penstock_proto as proto;
use penstock_scheduler::{Plan, SequenceId};
use tokio::sync::mpsc::UnboundedSender;

use super::{WorkerError, convert};
use crate::sequence::{Sampling, Token};

type Results = BoxStream<'static, Result<proto::StepResult, WorkerError>>;

/// The open stream of steps. Dropping it closes it.
pub struct Steps {
    ranks: Vec<RankSteps>,
    last_reported: u64,
}

struct RankSteps {
    plans: UnboundedSender<proto::Plan>,
    results: Results,
    /// This rank's answer to step `last_reported + 1`, when it is there before the others'.
    answer: Option<proto::StepResult>,
}

/// What all ranks together answered to one plan.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepReport {
    pub step: u64,
    pub outputs: Vec<Output>,
    pub timing: WorkerTiming,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Output {
    pub id: SequenceId,
    /// `Err`: the worker could not go on with this sequence.
    pub tokens: Result<Vec<Token>, OutputError>,
    pub prompt_tokens: Vec<Token>,
}

/// Why a sequence is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OutputError {
    pub reason: String,
    pub fault: Fault,
}

/// Whose fault an error is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Server,
    /// What the request asked for cannot go on.
    Request,
}

/// Rank 0's own account of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerTiming {
    /// Plan → tensors.
    pub prepare: Duration,
    /// The model.
    pub forward: Duration,
    /// Logits → tokens.
    pub sample: Duration,
    /// Waiting for this plan since the step before it ended.
    pub idle: Duration,
}

impl Steps {
    pub(super) fn new(ranks: impl Iterator<Item = (UnboundedSender<proto::Plan>, Results)>) -> Self {
        let ranks = ranks.map(|(plans, results)| RankSteps { plans, results, answer: None }).collect();
        Self { ranks, last_reported: 0 }
    }

    /// Sends a plan to every rank; `sampling` tells how the sequences that it starts are sampled. A rank that is gone is
    /// reported by `next`, which knows why.
    pub(crate) fn send<'a>(&self, plan: Plan, sampling: impl Fn(SequenceId) -> &'a Sampling) {
        let plan = convert::plan(plan, sampling);
        if let Some((last, others)) = self.ranks.split_last() {
            for rank in others {
                let _ = rank.plans.send(plan.clone());
            }
            let _ = last.plans.send(plan);
        }
    }

    /// The next step's report. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<StepReport, WorkerError> {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<StepReport, WorkerError>> {
        let expected = self.last_reported + 1;
        let mut complete = true;
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            if rank.answer.is_some() {
                continue;
            }
            match rank.results.poll_next_unpin(context) {
                Poll::Ready(Some(Ok(answer))) if answer.step == expected => rank.answer = Some(answer),
                Poll::Ready(Some(Ok(answer))) => {
                    let reason = format!("step {} where step {expected} was due", answer.step);
                    return Poll::Ready(Err(WorkerError::Garbled { rank: index, reason }));
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Err(error)),
                Poll::Ready(None) => {
                    let reason = "it closed its stream of steps".to_owned();
                    return Poll::Ready(Err(WorkerError::Lost { rank: index, reason }));
                }
                Poll::Pending => complete = false,
            }
        }
        if !complete {
            return Poll::Pending;
        }
        self.last_reported = expected;
        let mut answers = self.ranks.iter_mut().map(|rank| rank.answer.take());
        let first = answers.next().flatten();
        answers.for_each(drop);
        let first = first.expect("invariant: a group has at least one rank, and all have answered");
        Poll::Ready(convert::report(first))
    }
}

//! The steps streams of all ranks as one: a plan goes to every rank, and its report is complete when every rank has answered.
//!
//! INVARIANT: reports arrive in the order of the plans. A report is rank 0's result; those of the other ranks only acknowledge.

use std::future::poll_fn;
use std::task::{Context, Poll};

use futures::StreamExt;
use futures::stream::BoxStream;
use penstock_proto as proto;
use penstock_scheduler::{Plan, SequenceId};
use tokio::sync::mpsc::UnboundedSender;

use super::report::StepReport;
use super::{WorkerError, convert};
use crate::sequence::Constants;

type Results = BoxStream<'static, Result<proto::StepResult, WorkerError>>;

/// The open stream of steps. Dropping it closes it.
pub(crate) struct Steps {
    ranks: Vec<RankSteps>,
    last_reported: u64,
}

struct RankSteps {
    plans: UnboundedSender<proto::Plan>,
    results: Results,
    /// This rank's result of step `last_reported + 1`, while other ranks have not sent theirs.
    result: Option<proto::StepResult>,
}

impl Steps {
    pub(super) fn new(ranks: impl Iterator<Item = (UnboundedSender<proto::Plan>, Results)>) -> Self {
        let ranks = ranks.map(|(plans, results)| RankSteps { plans, results, result: None }).collect();
        Self { ranks, last_reported: 0 }
    }

    /// Sends a plan to every rank, with the constants of each sequence that it starts. When a rank is gone, `next` returns
    /// the error.
    pub(crate) fn send<'a>(&self, plan: Plan, constants: impl Fn(SequenceId) -> &'a Constants) {
        let plan = convert::plan(plan, constants);
        if let Some((last, others)) = self.ranks.split_last() {
            for rank in others {
                let _ = rank.plans.send(plan.clone());
            }
            let _ = last.plans.send(plan);
        }
    }

    /// The report of the next step. Cancel safe.
    pub(crate) async fn next(&mut self) -> Result<StepReport, WorkerError> {
        poll_fn(|context| self.poll_next(context)).await
    }

    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Result<StepReport, WorkerError>> {
        let expected = self.last_reported + 1;
        let mut complete = true;
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            if rank.result.is_some() {
                continue;
            }
            match rank.results.poll_next_unpin(context) {
                Poll::Ready(Some(Ok(result))) if result.step == expected => rank.result = Some(result),
                Poll::Ready(Some(Ok(result))) => {
                    let reason = format!("a result for step {}, expected step {expected}", result.step);
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
        let mut results = self.ranks.iter_mut().map(|rank| rank.result.take());
        let first = results.next().flatten();
        results.for_each(drop);
        let first = first.expect("invariant: a group has at least one rank, and all have answered");
        Poll::Ready(convert::report(first))
    }
}

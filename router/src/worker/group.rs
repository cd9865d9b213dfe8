//! All ranks of one model copy. Every call goes to all ranks at the same time, because they wait for each other inside it.

use std::path::Path;
use std::time::Duration;

use futures::future::{join_all, try_join_all};

use super::adapter::{self, AdapterLoader};
use super::description::Description;
use super::endpoint::Endpoint;
use super::grammar::GrammarCompiler;
use super::image::ImageEncoder;
use super::options::{LoadOptions, Pool, WarmUpOptions};
use super::progress::RankProgress;
use super::rank::Rank;
use super::step::Steps;
use super::{WorkerError, convert};

/// The connections to all ranks of one model copy.
#[derive(Debug)]
pub struct Group {
    /// Not empty.
    ranks: Vec<Rank>,
}
impl Group {
    /// Waits until every rank listens and answers, for at most `timeout`. Dropping the future cancels it.
    pub async fn connect(endpoints: &[Endpoint], timeout: Duration) -> Result<Self, WorkerError> {
        let connect = endpoints.iter().enumerate().map(|(index, endpoint)| Rank::connect(index, endpoint, timeout));
        Ok(Self { ranks: try_join_all(connect).await? })
    }

    /// Opens new connections to the same ranks, which the current runtime drives.
    pub(crate) async fn reconnect(&self) -> Result<Self, WorkerError> {
        Ok(Self { ranks: try_join_all(self.ranks.iter().map(Rank::reconnect)).await? })
    }

    /// Loads the model on all ranks. Without a deadline, because reading a large model can take arbitrarily long.
    pub async fn load(&mut self, options: &LoadOptions) -> Result<Description, WorkerError> {
        let request = options.request();
        let answers = try_join_all(self.ranks.iter_mut().map(|rank| rank.load(request.clone()))).await?;
        agree("the vocabulary size", answers.iter().map(|answer| answer.vocab_size))?;
        agree("the tokens per KV block", answers.iter().map(|answer| answer.block_tokens))?;
        agree("the data type", answers.iter().map(|answer| &answer.dtype))?;
        agree("the decoder's prefix", answers.iter().map(|answer| &answer.decoder_prefix))?;
        let weight_bytes = answers.iter().map(|answer| answer.weight_bytes).sum();
        let kv_bytes_per_block = answers.iter().map(|answer| answer.kv_bytes_per_block).sum();
        let state_bytes_per_sequence = answers.iter().map(|answer| answer.state_bytes_per_sequence).sum();
        let snapshot_bytes = answers.iter().map(|answer| answer.snapshot_bytes).sum();
        // A stage may have no layer with states.
        let snapshot_reach_tokens = answers.iter().map(|answer| answer.snapshot_reach_tokens).max().unwrap_or(0);
        let first = first_rank(answers);
        if first.block_tokens == 0 {
            return Err(WorkerError::Garbled { rank: 0, reason: "KV blocks of 0 tokens".to_owned() });
        }
        Ok(Description {
            weight_bytes,
            kv_bytes_per_block,
            state_bytes_per_sequence,
            snapshot_bytes,
            snapshot_reach_tokens,
            ..convert::description(first)
        })
    }

    /// Runs the largest steps within the limits on all ranks, and allocates the KV pool.
    pub async fn warm_up(&mut self, options: &WarmUpOptions) -> Result<Pool, WorkerError> {
        let request = options.request();
        let answers = try_join_all(self.ranks.iter_mut().map(|rank| rank.warm_up(request.clone()))).await?;
        agree("the number of KV blocks", answers.iter().map(|answer| answer.num_blocks))?;
        agree("the number of state slots", answers.iter().map(|answer| answer.num_state_slots))?;
        agree("the number of snapshots", answers.iter().map(|answer| answer.num_snapshots))?;
        let worst_step_seconds = answers.iter().map(|answer| answer.worst_step_seconds).fold(0.0, f64::max);
        let worst_step = Duration::try_from_secs_f64(worst_step_seconds).unwrap_or_default();
        let standby_room_bytes = answers.iter().filter_map(|answer| answer.standby_room_bytes).min();
        let first = first_rank(answers);
        let num_blocks = u32::try_from(first.num_blocks).map_err(|_| WorkerError::Garbled {
            rank: 0,
            reason: format!("{} KV blocks, at most {} are supported", first.num_blocks, u32::MAX),
        })?;
        let (num_state_slots, num_snapshots) = (first.num_state_slots, first.num_snapshots);
        let phases = convert::phases(first.phases);
        Ok(Pool { num_blocks, num_state_slots, num_snapshots, worst_step, phases, standby_room_bytes })
    }

    /// Health checks, which the ranks answer while steps are running.
    pub fn probe(&self) -> HealthProbe {
        HealthProbe { ranks: self.ranks.clone() }
    }

    /// Compiles grammars on rank 0, which makes the masks of all ranks.
    pub(crate) fn grammars(&self) -> GrammarCompiler {
        GrammarCompiler::new(self.ranks.first().expect("invariant: a group has at least one rank").clone())
    }

    /// Whether the adapter in `folder` can be used with this model, by its configuration and the shapes of its tensors. The
    /// inner error says why not, for people.
    pub async fn check_adapter(&self, folder: &Path) -> Result<Result<(), String>, WorkerError> {
        adapter::check(self.ranks.first().expect("invariant: a group has at least one rank").clone(), folder).await
    }

    /// Loads adapters on all ranks.
    pub(crate) fn adapters(&self) -> AdapterLoader {
        AdapterLoader::new(self.ranks.clone())
    }

    /// Encodes images on all ranks.
    pub(crate) fn images(&self) -> ImageEncoder {
        ImageEncoder::new(self.ranks.clone())
    }

    /// Opens the stream of steps on all ranks. They forget every sequence of an earlier stream.
    pub(crate) fn steps(&self) -> Steps {
        Steps::new(self.ranks.iter().map(Rank::steps))
    }
}

/// Sends health checks to every rank of a group.
#[derive(Clone, Debug)]
pub struct HealthProbe {
    ranks: Vec<Rank>,
}

impl HealthProbe {
    /// Each rank's progress, by rank; `None`: it did not answer within `timeout`.
    pub async fn progress(&mut self, timeout: Duration) -> Vec<Option<RankProgress>> {
        let ask = |rank| async move { tokio::time::timeout(timeout, Rank::health(rank)).await.ok()?.ok() };
        join_all(self.ranks.iter_mut().map(ask)).await
    }
}

fn first_rank<T>(answers: Vec<T>) -> T {
    answers.into_iter().next().expect("invariant: a group has at least one rank")
}

fn agree<T: PartialEq + std::fmt::Debug>(
    what: &'static str,
    values: impl Iterator<Item = T>,
) -> Result<(), WorkerError> {
    let values: Vec<T> = values.collect();
    if values.windows(2).all(|pair| pair[0] == pair[1]) {
        return Ok(());
    }
    Err(WorkerError::Disagreement { what, values: format!("{values:?}") })
}

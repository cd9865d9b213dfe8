//! The first group's warm-up, which measures what the memory allows all groups.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use penstock_router::engine::EngineOptions;
use penstock_router::worker::{Description, Group, Pool, WarmUpOptions};
use penstock_scheduler::Limits;

use super::StartError;
use crate::flag::standby::Standby;
use crate::phase::Phases;
use crate::process::memory::Size;
use crate::resolve::{Choice, ResolveError, SequenceLimits, Settings};
use crate::setup::Setup;
use crate::worker::group::GroupError;

/// Waiting this long raises a request's rank by one priority, so that no request starves while urgent ones still go first.
const PRIORITY_AGEING: Duration = Duration::from_secs(10);
/// Shorter prompts overtake a long one until they have computed this many times its own tokens. That keeps the long one out
/// of their way and still bounds its wait.
const MAX_OVERTAKING: u32 = 4;
/// Draft tokens of a sequence without `--speculate`, which a grammar forces: as many as the longest usual keys of a schema.
const MAX_FORCED_TOKENS: u32 = 8;

/// Limits that the first group's memory allows, for all groups.
pub(super) struct Measured {
    pub(super) pool: Pool,
    pub(super) limits: SequenceLimits,
    pub(super) options: EngineOptions,
    warm_up: WarmUpOptions,
}

impl Measured {
    /// Warms up the first group.
    pub(super) async fn take(
        setup: Setup<'_>,
        group: &mut Group,
        model: &Description,
        phases: &mut Phases,
    ) -> Result<Self, StartError> {
        let start = Instant::now();
        let warm_up = warm_up_options(setup, model)?;
        if !setup.args().cuda_graphs.is_empty() && model.device.starts_with("cpu") {
            tracing::info!("--cuda-graphs has no effect: the model runs on a CPU");
        }
        let pool = group.warm_up(&warm_up).await.map_err(GroupError::from)?;
        phases.add_since("warm up", start);
        phases.add_parts("warm up", &pool.phases);
        let (num_blocks, block_tokens) = (u64::from(pool.num_blocks), u64::from(model.block_tokens));
        let (num_tokens, size) = (num_blocks * block_tokens, Size(num_blocks * model.kv_bytes_per_block));
        tracing::info!("the KV cache holds {num_tokens} tokens in {num_blocks} blocks ({size})");
        log_states(model, &pool);
        let (args, step_tokens) = (setup.args(), warm_up.max_step_tokens);
        let limits = SequenceLimits::resolve(args, setup.settings, model, step_tokens, pool.num_blocks)?;
        limits.choices.iter().for_each(Choice::log);
        let given = args.step_timeout.map(Duration::from_secs);
        let options = EngineOptions {
            limits: scheduler_limits(setup, model, &pool, &warm_up, limits.max_total_tokens),
            step_deadline: given.unwrap_or_else(|| EngineOptions::step_deadline(pool.worst_step)),
            max_failures: EngineOptions::DEFAULT_MAX_FAILURES,
        };
        Ok(Self { pool, limits, options, warm_up })
    }

    /// Options of the warm-up of every later group: as many blocks, state slots and snapshots as the first one has.
    pub(super) fn warm_up(&self) -> WarmUpOptions {
        let num_blocks = Some(u64::from(self.pool.num_blocks));
        let (num_state_slots, num_snapshots) = (Some(self.pool.num_state_slots), Some(self.pool.num_snapshots));
        WarmUpOptions { num_blocks, num_state_slots, num_snapshots, proven: true, ..self.warm_up.clone() }
    }
}

fn log_states(model: &Description, pool: &Pool) {
    let Pool { num_state_slots, num_snapshots, .. } = *pool;
    if num_state_slots > 0 {
        let states = Size(u64::from(num_state_slots) * model.state_bytes_per_sequence);
        let snapshots = Size(u64::from(num_snapshots) * model.snapshot_bytes);
        tracing::info!(
            "the states of {num_state_slots} sequences ({states}) and {num_snapshots} snapshots of states ({snapshots}) \
             are kept"
        );
    }
}

fn warm_up_options(setup: Setup<'_>, model: &Description) -> Result<WarmUpOptions, StartError> {
    let (args, settings) = (setup.args(), setup.settings);
    let (max_step_tokens, choice) = settings.step_tokens(args, model);
    choice.iter().for_each(Choice::log);
    if let Some(given) = args.max_total_tokens.filter(|given| *given > model.max_total_tokens()) {
        return Err(ResolveError::BeyondModel { given, allowed: model.max_total_tokens() }.into());
    }
    let ([num_memory_slots, num_disk_slots], choice) = Settings::num_slots(args, model);
    choice.iter().for_each(Choice::log);
    let absolute = |folder: &PathBuf| std::path::absolute(folder).unwrap_or_else(|_| folder.clone());
    Ok(WarmUpOptions {
        max_step_tokens,
        max_step_sequences: settings.max_step_sequences,
        max_sequence_tokens: args
            .max_total_tokens
            .map(|tokens| tokens + model.num_prefix_tokens() - model.num_uncomputed_tokens()),
        num_blocks: Settings::num_blocks(args, model).map(u64::from),
        memory_fraction: settings.memory_fraction,
        proven: false,
        graph_sizes: args.cuda_graphs.clone(),
        reserves_standby: settings.standby == Standby::Reserve,
        num_memory_slots,
        num_disk_slots,
        offload_folder: args.kv_offload_folder.as_ref().map(absolute),
        num_groups: u32::try_from(args.replicas).unwrap_or(u32::MAX),
        num_state_slots: None,
        num_snapshots: args.state_snapshots,
    })
}

/// Limits of each replica's scheduler.
fn scheduler_limits(
    setup: Setup<'_>,
    model: &Description,
    pool: &Pool,
    warm_up: &WarmUpOptions,
    max_total_tokens: u32,
) -> Limits {
    let (args, settings) = (setup.args(), setup.settings);
    let (prefix_caching, choice) = Settings::prefix_caching(args, model);
    choice.iter().for_each(Choice::log);
    let mut limits = Limits {
        max_step_tokens: warm_up.max_step_tokens,
        max_step_sequences: settings.max_step_sequences,
        max_sequence_tokens: max_total_tokens + model.num_prefix_tokens(),
        num_blocks: pool.num_blocks,
        num_memory_slots: warm_up.num_memory_slots,
        num_disk_slots: warm_up.num_disk_slots,
        block_tokens: model.block_tokens,
        max_steps_in_flight: args.max_steps_in_flight,
        prefix_caching,
        priority_ageing: PRIORITY_AGEING,
        max_inter_token: settings.max_inter_token,
        max_overtaking: MAX_OVERTAKING,
        window_tokens: model.window_tokens,
        whole_prompts: model.is_prompt_whole(),
        max_draft_tokens: if args.speculate > 0 { args.speculate } else { MAX_FORCED_TOKENS },
        drafts_with_model: model.drafts_with_model,
        drafts_extend_lookup: model.drafts_extend_lookup,
        drafts_only_forced: args.speculate == 0,
        max_image_bytes: model.max_image_bytes(),
        num_state_slots: pool.num_state_slots,
        num_snapshots: pool.num_snapshots,
        snapshot_reach_tokens: model.snapshot_reach_tokens,
        num_stages: args.pipeline_parallel_size,
    };
    let (max_draft_tokens, choice) = Settings::speculation(model, &limits);
    choice.iter().for_each(Choice::log);
    limits.max_draft_tokens = max_draft_tokens;
    limits
}

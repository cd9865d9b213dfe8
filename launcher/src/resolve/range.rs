//! Checks of flags that need neither the machine nor the model.

use super::ResolveError;
use crate::flag::args::{Args, RopeScaling};

/// A day, like the limit of a request's own timeout.
const MAX_QUEUE_TIMEOUT_S: u64 = 86_400;
/// Replicas of one server.
const MAX_REPLICAS: usize = 64;

/// Refuses values that no model and no machine allows.
pub(super) fn check(args: &Args) -> Result<(), ResolveError> {
    let positive = [
        ("max-concurrent-requests", Some(args.max_concurrent_requests)),
        ("max-queued-tokens", args.max_queued_tokens.map(|tokens| usize::try_from(tokens).unwrap_or(usize::MAX))),
        ("max-best-of", Some(args.max_best_of)),
        ("max-client-batch-size", Some(args.max_client_batch_size)),
        ("validation-workers", Some(args.validation_workers)),
        ("payload-limit", Some(args.payload_limit)),
        ("max-image-fetch-size", Some(args.max_image_fetch_size)),
        ("num-shard", args.num_shard),
        ("replicas", Some(args.replicas)),
        ("max-input-tokens", args.max_input_tokens.map(|tokens| tokens as usize)),
        ("max-input-length", args.max_input_length.map(|tokens| tokens as usize)),
        ("max-batch-prefill-tokens", args.max_batch_prefill_tokens.map(|tokens| tokens as usize)),
        ("max-batch-total-tokens", args.max_batch_total_tokens.map(|tokens| tokens as usize)),
        ("max-batch-size", args.max_batch_size.map(|size| size as usize)),
        ("max-inter-token-ms", args.max_inter_token_ms.map(|ms| ms as usize)),
        ("step-timeout", args.step_timeout.map(|seconds| usize::try_from(seconds).unwrap_or(usize::MAX))),
    ];
    for (name, value) in positive {
        if value == Some(0) {
            return Err(ResolveError::OutOfRange { name, value: "0".to_owned(), allowed: "at least 1" });
        }
    }
    if let Some(tokens @ 0..2) = args.max_total_tokens {
        let allowed = "at least 2: one prompt token and one generated token";
        return Err(ResolveError::OutOfRange { name: "max-total-tokens", value: tokens.to_string(), allowed });
    }
    in_range("replicas", args.replicas, args.replicas <= MAX_REPLICAS, "at most 64")?;
    if let (Some(given), 0) = (&args.speculative_model, args.speculate) {
        let value = format!("0 with --speculative-model {given}");
        let allowed = "at least 1: the number of draft tokens that a step may verify for a sequence";
        return Err(ResolveError::OutOfRange { name: "speculate", value, allowed });
    }
    let recent = args.speculate_recent_tokens;
    in_range("speculate-recent-tokens", recent, recent == 0 || args.speculate > 0, "0 without --speculate")?;
    let is_one_stage = args.pipeline_parallel_size == 1;
    in_range("speculate", args.speculate, is_one_stage || args.speculate == 0, "0 with --pipeline-parallel-size")?;
    let seconds = args.queue_timeout.unwrap_or(1);
    in_range("queue-timeout", seconds, (1..=MAX_QUEUE_TIMEOUT_S).contains(&seconds), "from 1 to 86400")?;
    let fraction = args.cuda_memory_fraction;
    in_range("cuda-memory-fraction", fraction, fraction > 0.0 && fraction <= 1.0, "above 0 and at most 1")?;
    for (name, gib) in [("kv-offload-gib", args.kv_offload_gib), ("kv-offload-disk-gib", args.kv_offload_disk_gib)] {
        in_range(name, gib, gib >= 0.0 && gib.is_finite(), "at least 0")?;
    }
    let (disk_gib, has_folder) = (args.kv_offload_disk_gib, args.kv_offload_folder.is_some());
    let allowed = "above 0 with --kv-offload-folder: the size of the file in it, while --kv-offload-gib is host memory";
    in_range("kv-offload-disk-gib", disk_gib, disk_gib > 0.0 || !has_folder, allowed)?;
    in_range("kv-offload-disk-gib", disk_gib, disk_gib == 0.0 || has_folder, "0 without --kv-offload-folder")?;
    let gamma = args.watermark_gamma.unwrap_or(0.5);
    in_range("watermark-gamma", gamma, gamma > 0.0 && gamma < 1.0, "between 0 and 1, exclusive")?;
    let delta = args.watermark_delta.unwrap_or(2.0);
    in_range("watermark-delta", delta, delta > 0.0 && delta.is_finite(), "above 0")?;
    let factor = args.rope_factor.unwrap_or(1.0);
    in_range("rope-factor", factor, factor >= 1.0 && factor.is_finite(), "at least 1")?;
    let is_whole = args.rope_scaling != Some(RopeScaling::Yarn) || args.rope_factor.is_some();
    in_range("rope-scaling", "yarn", is_whole, "with --rope-factor, or linear or dynamic without it")?;
    let original = args.rope_original_max_tokens;
    let scales = args.rope_factor.is_some() || args.rope_scaling.is_some();
    let allowed = "with --rope-factor: it is the length that the factor multiplies";
    in_range("rope-original-max-tokens", original.unwrap_or(0), original.is_none() || scales, allowed)
}

fn in_range(name: &'static str, value: impl ToString, holds: bool, allowed: &'static str) -> Result<(), ResolveError> {
    if holds { Ok(()) } else { Err(ResolveError::OutOfRange { name, value: value.to_string(), allowed }) }
}

/// Refuses limits that no model and no machine can satisfy.
pub(super) fn check_order(
    args: &Args,
    max_input_tokens: Option<u32>,
    max_step_sequences: u32,
) -> Result<(), ResolveError> {
    let below = |small: (&'static str, Option<u32>), or_equal: bool, large: (&'static str, Option<u32>)| {
        let ((small, Some(small_value)), (large, Some(large_value))) = (small, large) else { return Ok(()) };
        if small_value < large_value || (or_equal && small_value == large_value) {
            return Ok(());
        }
        let relation = if or_equal { "at most" } else { "less than" };
        Err(ResolveError::Contradiction { small, small_value, relation, large, large_value })
    };
    let total = ("max-total-tokens", args.max_total_tokens);
    let prefill = ("max-batch-prefill-tokens", args.max_batch_prefill_tokens);
    let pool = ("max-batch-total-tokens", args.max_batch_total_tokens);
    below(("max-input-tokens", max_input_tokens), false, total)?;
    below(total, true, pool)?;
    below(prefill, true, pool)?;
    // Every running sequence advances in every step, so each needs its token.
    below(("max-batch-size", Some(max_step_sequences)), true, prefill)
}

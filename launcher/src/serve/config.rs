//! The router's configuration, from the flags and the started model.

use penstock_router::config::ApiKeys;
use penstock_router::limits::{ConnectionLimits, QueueLimits, RequestLimits};
use penstock_router::{Config, SamplingDefaults};

use super::Started;
use crate::model::file::FileError;
use crate::model::generation_config;
use crate::setup::Setup;

pub(super) fn config(setup: Setup<'_>, started: &Started, api_keys: ApiKeys) -> Result<Config, FileError> {
    let (args, settings) = (setup.args(), setup.settings);
    let Started { model, limits, .. } = started;
    let (prepared, folder) = (&started.local.prepared, &started.local.folder);
    let sampling_defaults = match &model.pooling {
        None => generation_config::defaults(&folder.path, args)?,
        Some(_) => SamplingDefaults::NONE,
    };
    let request_limits = request_limits(setup, started);
    Ok(Config {
        served_model_names: match &args.served_model_name[..] {
            [] => vec![prepared.model_id.clone()],
            names => names.to_vec(),
        },
        check_model_names: args.check_model_name,
        adapters: setup.adapters.config(&prepared.adapters),
        trusts_request_chat_templates: args.trust_request_chat_template,
        strict_requests: args.strict_requests,
        reasoning_budget: args.reasoning_budget,
        priority_order: args.priority_order.into(),
        model_id: prepared.model_id.clone(),
        model_sha: prepared.sha.clone(),
        pipeline_tag: prepared.pipeline_tag.clone().or_else(|| model.pipeline_tag().map(str::to_owned)),
        model_folder: folder.path.clone(),
        sampling_defaults,
        limits: request_limits,
        decoder_prefix: model.decoder_prefix.clone(),
        pooling: model.pooling.clone(),
        image_input: model.image_input.clone(),
        image_urls: args.image_urls(),
        queue: QueueLimits { max_tokens: limits.max_queued_tokens, timeout: settings.queue_timeout },
        validation_workers: args.validation_workers,
        payload_limit_bytes: args.payload_limit,
        cors_allow_origins: args.cors_allow_origin.clone(),
        api_keys,
        compute_type: compute_type(settings.num_ranks, &model.device),
        grammar_support: !args.disable_grammar_support,
        prefill_logprobs: args.enable_prefill_logprobs,
        max_stored_responses: args.max_stored_responses,
        playground: !args.disable_playground,
        vertex_routes: setup.parsed.vertex_routes.clone(),
        connections: ConnectionLimits::new(&request_limits),
        graceful_termination_timeout: settings.graceful_termination_timeout,
        traces: settings.traces.clone(),
    })
}

fn request_limits(setup: Setup<'_>, started: &Started) -> RequestLimits {
    let (args, limits) = (setup.args(), &started.limits);
    RequestLimits {
        max_concurrent_requests: args.max_concurrent_requests,
        max_best_of: args.max_best_of,
        max_stop_sequences: args.max_stop_sequences,
        max_top_n_tokens: args.max_top_n_tokens,
        max_input_tokens: limits.max_input_tokens as usize,
        max_total_tokens: limits.max_total_tokens as usize,
        max_new_tokens: limits.max_new_tokens,
        max_client_batch_size: args.max_client_batch_size,
    }
}

/// The value of the header `x-compute-type`. COMPAT: `COMPUTE_TYPE` overrides it.
fn compute_type(num_ranks: usize, device: &str) -> String {
    let device = device.split(':').next().unwrap_or(device);
    std::env::var("COMPUTE_TYPE").unwrap_or_else(|_| format!("{num_ranks}-{device}"))
}

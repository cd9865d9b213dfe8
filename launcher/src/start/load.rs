//! The load request of the workers, and the adapters that are checked once they have.

use std::collections::HashSet;

use penstock_router::config::{AdapterConfig, AdapterSource};
use penstock_router::worker::{Group, LoadOptions};

use super::StartError;
use crate::flag::quantize::Quantize;
use crate::model::local::LocalModel;
use crate::setup::Setup;
use crate::worker::group::GroupError;

/// Options of a load that flags and model decide. Each group has a rendezvous and a token of its own.
pub(super) fn options(setup: Setup<'_>, local: &LocalModel) -> LoadOptions {
    let (args, settings) = (setup.args(), setup.settings);
    LoadOptions {
        model_folder: local.folder.path.clone(),
        dtype: args.dtype.map(|dtype| dtype.name().to_owned()),
        kv_cache_dtype: args.kv_cache_dtype.name().map(str::to_owned),
        block_tokens: None,
        rendezvous: String::new(),
        token: String::new(),
        trust_remote_code: args.trust_remote_code,
        // A node divides its own cores.
        num_threads: u32::try_from(settings.num_threads).ok().filter(|_| settings.ranks_on.is_empty()),
        watermark_gamma: args.watermark_gamma,
        dequantize: args.dequantize,
        quantize: args.quantize.map(Quantize::name),
        activation_bits: args.activation_bits,
        deterministic: args.deterministic,
        background: false,
        max_adapters: u32::try_from(setup.adapters.max_loaded).unwrap_or(u32::MAX),
        max_adapter_rank: args.max_lora_rank,
        speculative_model: local.prepared.speculative_model.clone(),
        drafts_with_mtp: args.drafts_with_mtp(),
        recent_answer_tokens: args.speculate_recent_tokens,
        num_stages: args.pipeline_parallel_size,
        watermark_delta: args.watermark_delta,
        attention: args.attention.name().map(str::to_owned),
        cpu_isa: args.cpu_isa.name().map(str::to_owned),
    }
}

/// Refuses adapters that requests could never use. Only at the start: a server that serves restarts its workers without those
/// whose files have gone meanwhile.
pub(super) async fn check_adapters(group: &Group, adapters: &AdapterConfig) -> Result<(), StartError> {
    let mut checked = HashSet::new();
    for AdapterSource { name, path } in &adapters.sources {
        if checked.insert(path) {
            let usable = group.check_adapter(path).await.map_err(GroupError::from)?;
            usable.map_err(|reason| StartError::Adapter { name: name.clone(), reason })?;
        }
    }
    Ok(())
}

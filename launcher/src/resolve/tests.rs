//! Resolved settings and limits, and what they refuse.

use clap::Parser;
use penstock_router::sequence::{ImageInput, Matryoshka, Pooling, Task};

use super::*;
use machine::{listed_devices, visible_devices};

const MACHINE: Machine = Machine { num_cores: 8, num_visible_devices: None };

fn args(flags: &str) -> Args {
    Args::try_parse_from(std::iter::once("penstock").chain(flags.split_whitespace())).unwrap()
}

fn settings(flags: &str) -> Result<Settings, ResolveError> {
    Settings::resolve(&args(flags), MACHINE)
}

fn refusal(flags: &str) -> String {
    settings(flags).unwrap_err().to_string()
}

pub(crate) fn model(device: &str) -> Description {
    Description {
        architecture: "llama".to_owned(),
        dtype: "bfloat16".to_owned(),
        device: device.to_owned(),
        device_name: String::new(),
        libraries: "torch 2.9.1".to_owned(),
        attention: "reference".to_owned(),
        vocab_size: 128_256,
        block_tokens: 16,
        max_position_tokens: 8192,
        default_position_tokens: None,
        window_tokens: None,
        decoder_prefix: [].into(),
        pooling: None,
        image_input: None,
        max_source_tokens: 0,
        can_draft: true,
        drafts_with_model: false,
        drafts_extend_lookup: false,
        weight_bytes: 0,
        kv_bytes_per_block: 0,
        state_bytes_per_sequence: 0,
        snapshot_bytes: 0,
        snapshot_reach_tokens: 0,
        phases: Vec::new(),
    }
}

#[test]
fn a_source_of_drafts_without_drafts_is_refused() {
    for given in ["/heads", "ngram"] {
        let reason = format!(
            "--speculate is 0 with --speculative-model {given}, must be at least 1: the number of draft tokens that a step \
             may verify for a sequence"
        );
        assert_eq!(refusal(&format!("--speculative-model {given}")), reason);
        assert!(settings(&format!("--speculative-model {given} --speculate 2")).is_ok());
    }
}

#[test]
fn the_checkpoint_s_layer_drafts_unless_heads_or_ngrams_are_named() {
    for (flags, model, drafts_with_mtp) in [
        ("", None, false),
        ("--speculate 2", None, true),
        ("--speculate 2 --speculative-model ngram", None, false),
        ("--speculate 2 --speculative-model /heads", Some("/heads"), false),
    ] {
        let args = args(flags);
        assert_eq!((args.drafting_model(), args.drafts_with_mtp()), (model, drafts_with_mtp), "{flags}");
    }
}

#[test]
fn replicas_share_the_cores_and_devices_and_stand_by_for_each_other() {
    let on =
        |devices, flags: &str| Settings::resolve(&args(flags), Machine { num_visible_devices: devices, ..MACHINE });
    let cpu = on(None, "--replicas 2 --num-shard 2").unwrap();
    assert_eq!((cpu.num_ranks, cpu.num_threads, cpu.num_devices, cpu.standby), (2, 2, 0, Standby::Off));
    let gpu = on(Some(8), "--replicas 4").unwrap();
    assert_eq!((gpu.num_ranks, gpu.num_devices), (2, 8));
    let refusal = |devices, flags| on(Some(devices), flags).unwrap_err().to_string();
    let reason = "--num-shard is 2 and --replicas is 4, but 6 device(s) are visible";
    assert!(refusal(6, "--replicas 4 --num-shard 2").starts_with(reason));
    assert!(
        refusal(2, "--replicas 3").starts_with("--num-shard is 1 and --replicas is 3, but 2 device(s) are visible")
    );
    assert_eq!(on(None, "--standby reserve").unwrap().standby, Standby::Reserve);
}

#[test]
fn each_pipeline_stage_has_ranks_of_its_own() {
    let on =
        |devices, flags: &str| Settings::resolve(&args(flags), Machine { num_visible_devices: devices, ..MACHINE });
    let cpu = on(None, "--pipeline-parallel-size 2 --num-shard 2").unwrap();
    assert_eq!((cpu.num_ranks, cpu.num_threads), (4, 2));
    assert!(!cpu.preloads());
    assert_eq!(on(Some(8), "--pipeline-parallel-size 2 --replicas 2").unwrap().num_ranks, 4);
    assert_eq!(on(Some(2), "--pipeline-parallel-size 2").unwrap().num_ranks, 2);
    let reason = "--num-shard is 2 and --pipeline-parallel-size is 2, but 3 device(s) are visible";
    let too_few = on(Some(3), "--pipeline-parallel-size 2 --num-shard 2").unwrap_err().to_string();
    assert!(too_few.starts_with(reason), "{too_few}");
    let reason = "--speculate is 2, must be 0 with --pipeline-parallel-size";
    assert_eq!(refusal("--pipeline-parallel-size 2 --speculate 2"), reason);
}

#[test]
fn a_model_without_keys_and_values_offloads_nothing() {
    let flags = args("--kv-offload-gib 1");
    let (num_slots, choice) = Settings::num_slots(&flags, &model("cpu"));
    assert_eq!(num_slots, [0, 0]);
    assert!(choice.unwrap().reason.contains("keeps no keys and values"));
    let attending = Description { kv_bytes_per_block: 1 << 20, ..model("cpu") };
    assert!(matches!(Settings::num_slots(&flags, &attending), ([1024, 0], None)));
}

fn limits(flags: &str, num_blocks: u32) -> Result<SequenceLimits, ResolveError> {
    limits_of(&model("cpu"), flags, num_blocks)
}

fn limits_of(model: &Description, flags: &str, num_blocks: u32) -> Result<SequenceLimits, ResolveError> {
    let (args, settings) = (args(flags), settings(flags).unwrap());
    SequenceLimits::resolve(&args, &settings, model, settings.step_tokens(&args, model).0, num_blocks)
}

/// Sources of up to 600 tokens, and answers of up to 99 after one decoder start token.
fn encoder_decoder() -> Description {
    Description { max_position_tokens: 700, decoder_prefix: [0].into(), max_source_tokens: 600, ..model("cpu") }
}

#[test]
fn contradictions_are_refused_naming_both_settings() {
    for (flags, words) in [
        ("--max-input-tokens 100 --max-total-tokens 100", "max-input-tokens must be less than max-total-tokens"),
        ("--max-input-length 101 --max-total-tokens 100", "--max-input-tokens is 101"),
        (
            "--max-total-tokens 200 --max-batch-total-tokens 199",
            "max-total-tokens must be at most max-batch-total-tokens",
        ),
        ("--max-batch-prefill-tokens 64 --max-batch-total-tokens 32", "must be at most max-batch-total-tokens"),
        ("--max-batch-size 65 --max-batch-prefill-tokens 64", "max-batch-size must be at most"),
        ("--max-batch-size 0", "--max-batch-size is 0, must be at least 1"),
        ("--validation-workers 0", "--validation-workers is 0"),
        ("--num-shard 0", "--num-shard is 0"),
        ("--cuda-memory-fraction 1.5", "--cuda-memory-fraction is 1.5, must be above 0 and at most 1"),
        ("--cuda-memory-fraction NaN", "--cuda-memory-fraction is NaN"),
        ("--watermark-gamma 1", "--watermark-gamma is 1, must be between 0 and 1, exclusive"),
        ("--watermark-delta 0", "--watermark-delta is 0, must be above 0"),
        ("--rope-factor 0.5", "--rope-factor is 0.5, must be at least 1"),
        ("--rope-scaling yarn", "--rope-scaling is yarn, must be with --rope-factor"),
        ("--rope-original-max-tokens 64", "--rope-original-max-tokens is 64, must be with --rope-factor"),
        ("--max-total-tokens 1", "--max-total-tokens is 1, must be at least 2"),
        ("--sharded true", "more than one device, 0 are visible"),
        ("--sharded true --num-shard 1", "--num-shard is 1"),
        ("--sharded false --num-shard 2", "--num-shard is 2, must be 1 with --sharded false"),
    ] {
        assert!(refusal(flags).contains(words), "{flags}: {}", refusal(flags));
    }
}

#[test]
fn a_prompt_may_be_longer_than_a_step() {
    assert!(settings("--max-input-tokens 4000 --max-batch-prefill-tokens 512").is_ok());
}

#[test]
fn there_is_one_rank_per_visible_device_by_default() {
    let ranks = |flags: &str, num_visible_devices| {
        Settings::resolve(&args(flags), Machine { num_visible_devices, ..MACHINE }).unwrap().num_ranks
    };
    assert_eq!(ranks("", None), 1);
    assert_eq!(ranks("", Some(0)), 1);
    assert_eq!(ranks("", Some(4)), 4);
    assert_eq!(ranks("--num-shard 2", Some(4)), 2);
    assert_eq!(ranks("--sharded true", Some(4)), 4);
    assert_eq!(ranks("--sharded false", Some(4)), 1);
}

#[test]
fn cores_are_divided_among_the_ranks() {
    assert_eq!(settings("").unwrap().num_threads, 8);
    assert_eq!(settings("--num-shard 3").unwrap().num_threads, 2);
    assert_eq!(settings("--num-shard 100").unwrap().num_threads, 1);
}

#[test]
fn the_default_step_size_covers_the_batch() {
    assert_eq!(settings("").unwrap().max_step_sequences, 128);
    assert_eq!(settings("--max-concurrent-requests 5000").unwrap().max_step_sequences, 256);
    assert_eq!(settings("--max-batch-prefill-tokens 64").unwrap().max_step_sequences, 64);
    let tokens = |flags: &str, device: &str| settings(flags).unwrap().step_tokens(&args(flags), &model(device)).0;
    assert_eq!(tokens("", "cpu"), 512);
    assert_eq!(tokens("", "cuda:0"), 4096);
    assert_eq!(tokens("--max-batch-prefill-tokens 300", "cuda:0"), 300);
    assert_eq!(tokens("--max-batch-size 1000", "cpu"), 1000);
}

#[test]
fn the_default_maximum_length_fits_model_and_memory() {
    let pair = |limits: SequenceLimits| (limits.max_input_tokens, limits.max_total_tokens);
    assert_eq!(pair(limits("", 10_000).unwrap()), (8191, 8192));
    assert_eq!(pair(limits("", 10).unwrap()), (159, 160));
    assert_eq!(pair(limits("--max-input-tokens 7 --max-total-tokens 20", 10).unwrap()), (7, 20));
    let reason = &limits("", 10).unwrap().choices[0].reason;
    assert_eq!(reason, "the KV cache's capacity; the model's limit is 8192");
}

#[test]
fn with_a_sliding_window_a_sequence_may_exceed_the_kv_cache() {
    let windowed = Description { window_tokens: Some(100), ..model("cpu") };
    let total = |flags: &str, num_blocks| limits_of(&windowed, flags, num_blocks).map(|limits| limits.max_total_tokens);
    // 100 tokens occupy at most eight blocks of 16.
    assert_eq!(total("", 8), Ok(8192));
    assert_eq!(total("--max-total-tokens 5000", 8), Ok(5000));
    assert_eq!(total("", 7), Ok(7 * 16));
    let refusal = total("--max-total-tokens 113", 7).unwrap_err().to_string();
    assert!(refusal.contains("a KV cache of only 112 tokens"), "{refusal}");
}

#[test]
fn drafts_are_off_where_they_cannot_be_verified_or_the_pool_is_too_small_for_them() {
    let reason = |model: &Description, num_blocks| {
        let (max_draft_tokens, choice) = Settings::speculation(model, &drafting(model, num_blocks));
        assert_eq!(max_draft_tokens, if choice.is_some() { 0 } else { 4 });
        choice.map(|choice| choice.reason)
    };
    let windowed = Description { window_tokens: Some(96), ..model("cpu") };
    assert_eq!((reason(&model("cpu"), 1), reason(&windowed, 8)), (None, None));
    let pool = "the KV pool of 112 tokens does not hold a sliding window and the drafts of 2 steps in flight; raise \
                --max-batch-total-tokens, or lower --speculate";
    assert_eq!(reason(&windowed, 7).as_deref(), Some(pool));
    let no_kernels = Description { can_draft: false, ..model("cpu") };
    let without = "native kernels verify drafts on this device, and llama has reference attention, or is run by transformers; \
                   leave out --attention, or else --speculate";
    assert_eq!(reason(&no_kernels, 8).as_deref(), Some(without));
    let pooling = Pooling {
        task: Task::Embed,
        num_dimensions: 8,
        is_normalized: false,
        reads_all_outputs: false,
        is_encoder: false,
        matryoshka: Matryoshka::No,
        has_token_types: false,
    };
    let pooler = Description { pooling: Some(pooling), ..no_kernels.clone() };
    assert!(reason(&pooler, 8).is_some_and(|reason| reason.starts_with("the model makes vectors or scores")));
    // Forced tokens have no flag, so the log does not report that there are none.
    let forced = |model: &Description, num_blocks| {
        let limits = Limits { drafts_only_forced: true, ..drafting(model, num_blocks) };
        let (max_draft_tokens, choice) = Settings::speculation(model, &limits);
        assert!(choice.is_none());
        max_draft_tokens
    };
    assert_eq!((forced(&model("cpu"), 1), forced(&windowed, 7), forced(&no_kernels, 8)), (4, 0, 0));
}

#[test]
fn recent_answers_need_speculation() {
    assert!(settings("--speculate-recent-tokens 100 --speculate 1").is_ok());
    let refused = settings("--speculate-recent-tokens 100").unwrap_err().to_string();
    assert!(refused.contains("speculate-recent-tokens is 100, must be 0 without --speculate"), "{refused}");
}

/// Limits of a scheduler with `--speculate 4`.
fn drafting(model: &Description, num_blocks: u32) -> Limits {
    Limits {
        max_step_tokens: 64,
        max_step_sequences: 8,
        max_sequence_tokens: 8192,
        num_blocks,
        block_tokens: model.block_tokens,
        max_steps_in_flight: 2,
        priority_ageing: Duration::ZERO,
        window_tokens: model.window_tokens,
        max_draft_tokens: 4,
        ..Limits::PLAIN
    }
}

#[test]
fn a_whole_prompt_fits_into_one_step() {
    let input = ImageInput {
        placeholder_id: 1,
        placeholder: String::new(),
        template_text: String::new(),
        is_whole: false,
        is_prompt_whole: true,
        text_prefix: String::new(),
        text_suffix: String::new(),
        max_bytes: 100,
        has_adapter: false,
    };
    let model = Description { image_input: Some(input), ..model("cpu") };
    for (flags, step_tokens, input_tokens) in [
        ("", 2048 + 128, 2048),
        ("--max-input-tokens 3000", 3000 + 128, 3000),
        ("--max-batch-prefill-tokens 1000", 1000, 872),
        ("--max-total-tokens 100", 512, 99),
    ] {
        let limits = limits_of(&model, flags, 10_000).unwrap();
        assert_eq!(settings(flags).unwrap().step_tokens(&args(flags), &model).0, step_tokens, "{flags}");
        assert_eq!(limits.max_input_tokens, input_tokens, "{flags}");
    }
    let refused = limits_of(&model, "--max-input-tokens 2000 --max-batch-prefill-tokens 1000", 10_000).unwrap_err();
    assert!(refused.to_string().contains("this model reads an input in one step"), "{refused}");
}

#[test]
fn an_encoder_reads_its_source_in_one_step() {
    let model = encoder_decoder();
    let step_tokens = |flags: &str| settings(flags).unwrap().step_tokens(&args(flags), &model).0;
    assert_eq!(step_tokens(""), 600 + 128, "with one token for each other sequence");
    assert_eq!(step_tokens("--max-input-tokens 500"), 500 + 128);
    assert_eq!(step_tokens("--max-total-tokens 100"), 512);
    let long = Description { max_position_tokens: 16_384, max_source_tokens: 8192, ..encoder_decoder() };
    let pair = |flags: &str| {
        let limits = limits_of(&long, flags, 10_000).unwrap();
        (settings(flags).unwrap().step_tokens(&args(flags), &long).0, limits.max_input_tokens)
    };
    assert_eq!(pair(""), (1024 + 128, 1024));
    assert_eq!(pair("--max-input-tokens 8192"), (8192 + 128, 8192));
    let parts = |flags: &str, num_blocks| {
        let limits = limits_of(&model, flags, num_blocks).unwrap();
        (limits.max_input_tokens, limits.max_new_tokens, limits.max_total_tokens)
    };
    assert_eq!(parts("", 1000), (600, Some(99), 699));
    assert_eq!(parts("", 10), (158, Some(99), 159));
    assert_eq!(parts("--max-batch-prefill-tokens 300", 1000), (300 - 128, Some(99), 699));
    assert_eq!(parts("--max-batch-prefill-tokens 64", 1000), (32, Some(99), 699));
    assert_eq!(parts("--max-batch-prefill-tokens 300 --max-input-tokens 300", 1000), (300, Some(99), 699));
    assert_eq!(parts("--max-input-tokens 20 --max-total-tokens 30", 1000), (20, Some(99), 30));
    let refusal = |flags: &str| limits_of(&model, flags, 1000).unwrap_err().to_string();
    assert_eq!(
        refusal("--max-input-tokens 601"),
        "--max-input-tokens is 601, but this model's inputs can have at most 600 tokens (the model's maximum length of an input)"
    );
    assert!(
        refusal("--max-input-tokens 301 --max-batch-prefill-tokens 300")
            .contains("at most 300 tokens (max-batch-prefill-tokens: this model reads an input in one step)")
    );
    assert!(refusal("--max-total-tokens 700").contains("sequences of at most 699 tokens"));
}

#[test]
fn encoder_decoders_have_no_prefix_cache() {
    let shares = |flags: &str, model: &Description| {
        let (shares, choice) = Settings::prefix_caching(&args(flags), model);
        (shares, choice.is_some())
    };
    assert_eq!(shares("", &model("cpu")), (true, false));
    assert_eq!(shares("", &encoder_decoder()), (false, true));
    assert_eq!(shares("--prefix-caching false", &encoder_decoder()), (false, false));
}

#[test]
fn the_default_queue_limit_is_the_larger_of_sequences_and_kv_cache() {
    let queued = |flags: &str, num_blocks| limits(flags, num_blocks).unwrap().max_queued_tokens;
    assert_eq!(queued("", 512), 128 * 8192);
    assert_eq!(queued("--max-total-tokens 20", 512), 16 * 8192);
    assert_eq!(queued("--max-queued-tokens 7", 512), 7);
    assert!(refusal("--max-queued-tokens 0").contains("--max-queued-tokens is 0, must be at least 1"));
    assert!(refusal("--queue-timeout 0").contains("--queue-timeout is 0, must be from 1 to 86400"));
    assert_eq!(settings("").unwrap().queue_timeout, None);
}

#[test]
fn limits_beyond_the_model_or_the_memory_are_refused() {
    let refusal = |flags: &str| limits(flags, 10).unwrap_err().to_string();
    assert!(refusal("--max-total-tokens 8193").contains("sequences of at most 8192 tokens"));
    assert!(refusal("--max-total-tokens 161").contains("a KV cache of only 160 tokens"));
    assert!(refusal("--max-input-tokens 160").contains("at most 160 tokens (the KV cache's capacity"));
}

#[test]
fn a_cache_size_in_tokens_is_rounded_up_to_blocks() {
    let num_blocks = |flags: &str| Settings::num_blocks(&args(flags), &model("cpu"));
    assert_eq!(num_blocks("--max-batch-total-tokens 33"), Some(3));
    assert_eq!(num_blocks(""), None);
}

#[test]
fn a_hostname_that_is_not_an_address_means_all_addresses_with_a_warning() {
    let container = settings("--hostname 3f2a9c").unwrap();
    assert_eq!(container.place, Place::Port("0.0.0.0:3000".parse().unwrap()));
    assert!(container.warnings[0].contains("3f2a9c"));
    for (hostname, address) in [("127.0.0.1", "127.0.0.1:80"), ("localhost", "127.0.0.1:80"), ("::1", "[::1]:80")] {
        let settings = settings(&format!("--hostname {hostname} --port 80")).unwrap();
        assert_eq!((settings.place, settings.warnings.len()), (Place::Port(address.parse().unwrap()), 0));
    }
}

#[test]
fn visible_devices_are_counted_as_tgi_did() {
    let count = |variables: &[(&str, &str)]| {
        let get = |name: &str| variables.iter().find(|pair| pair.0 == name).map(|pair| pair.1.to_owned());
        visible_devices(get, || Some(8))
    };
    assert_eq!(count(&[]), None);
    assert_eq!(count(&[("CUDA_VISIBLE_DEVICES", "0,3")]), Some(2));
    assert_eq!(count(&[("CUDA_VISIBLE_DEVICES", "")]), Some(0));
    assert_eq!(count(&[("NVIDIA_VISIBLE_DEVICES", "all")]), Some(8));
    assert_eq!(count(&[("NVIDIA_VISIBLE_DEVICES", "void")]), Some(0));
    assert_eq!(count(&[("CUDA_VISIBLE_DEVICES", "1"), ("NVIDIA_VISIBLE_DEVICES", "all")]), Some(1));
    assert_eq!(count(&[("ZE_AFFINITY_MASK", "0,1")]), Some(2));
    assert_eq!(count(&[("CUDA_VISIBLE_DEVICES", "-1")]), Some(0));
    assert_eq!(count(&[("CUDA_VISIBLE_DEVICES", "1, -1, 2")]), Some(1));
}

#[test]
fn a_process_sees_one_mig_instance() {
    let get = |name: &str| (name == "CUDA_VISIBLE_DEVICES").then(|| "MIG-3f7a,MIG-91c0".to_owned());
    assert_eq!(visible_devices(get, || None), Some(1));
    let gpu = "GPU 0: NVIDIA H200 (UUID: GPU-5d1e)";
    assert_eq!(listed_devices(&format!("{gpu}\nGPU 1: NVIDIA H200 (UUID: GPU-77aa)")), 2);
    let instance = "  MIG 1g.18gb     Device  0: (UUID: MIG-3f7a)";
    assert_eq!(listed_devices(&format!("{gpu}\n{instance}\n{instance}")), 1);
}

#[test]
fn more_ranks_than_visible_devices_are_refused() {
    let resolve = |flags: &str, num_visible_devices| {
        Settings::resolve(&args(flags), Machine { num_visible_devices, ..MACHINE }).map(|settings| settings.num_ranks)
    };
    let refusal = resolve("--num-shard 4", Some(2)).unwrap_err().to_string();
    assert!(refusal.starts_with("--num-shard is 4, but 2 device(s) are visible, and each rank needs one"), "{refusal}");
    assert!(resolve("--sharded true --num-shard 4", Some(2)).is_err());
    assert_eq!(resolve("--num-shard 2", Some(2)), Ok(2));
    // On a CPU any number of ranks can share the machine.
    assert_eq!(resolve("--num-shard 4", Some(0)), Ok(4));
    assert_eq!(resolve("--num-shard 4", None), Ok(4));
}

#[test]
fn trust_remote_code_logs_a_warning() {
    assert!(settings("--trust-remote-code").unwrap().warnings[0].contains("trust-remote-code"));
}

#[test]
fn a_library_of_tgi_means_an_automatic_choice_with_a_warning() {
    for library in ["flashinfer", "flashdecoding", "paged"] {
        let flags = format!("--attention {library}");
        assert_eq!(args(&flags).attention.name(), None);
        assert!(settings(&flags).unwrap().warnings[0].contains("attention: "));
    }
    assert_eq!((args("").attention.name(), args("--attention triton").attention.name()), (None, Some("triton")));
    assert!(settings("--attention auto").unwrap().warnings.is_empty());
}

#[test]
fn each_node_has_equally_many_ranks_and_nothing_of_this_machine_counts() {
    let machine = Machine { num_visible_devices: Some(1), ..MACHINE };
    let on = |flags: &str| Settings::resolve(&args(flags), machine);
    let nodes = "--ranks-on node://a:1,node://b:1";
    let settings = on(nodes).unwrap();
    assert_eq!((settings.num_ranks, settings.num_devices, settings.standby), (2, 0, Standby::Off));
    assert_eq!(on(&format!("{nodes} --num-shard 4")).unwrap().num_ranks, 4);
    for (stages, num_ranks) in [(2, 2), (3, 6), (4, 4)] {
        assert_eq!(on(&format!("{nodes} --pipeline-parallel-size {stages}")).unwrap().num_ranks, num_ranks);
    }
    assert_eq!(on(&format!("{nodes} --pipeline-parallel-size 3 --num-shard 2")).unwrap().num_ranks, 6);
    assert!(!on("--ranks-on node://a:1").unwrap().preloads());
    assert_eq!(on("--ranks-on ray://a:1 --num-shard 3").unwrap().num_ranks, 3);
    assert!(on("--ranks-on node://a:1 --engine-listen 127.0.0.1:0 --cpu-isa avx2").is_ok());
    assert!(on("--ranks-on node://a:1 --engine-listen 127.0.0.1:0 --unencrypted-gpus").is_ok());
    for (flags, reason) in [
        ("--ranks-on node://a:1,node://b:1 --num-shard 3", "a multiple of the number of nodes"),
        (
            "--ranks-on node://a:1,node://b:1 --num-shard 1 --pipeline-parallel-size 3",
            "--num-shard is 1, must be such that it, times --pipeline-parallel-size, is a multiple of the number of nodes",
        ),
        ("--ranks-on node://a:1,node://a:1", "each node once"),
        ("--ranks-on ray://a:1,node://a:1", "one ray://HOST:PORT, or nodes only"),
        ("--ranks-on ray://a:1", "--num-shard is unset, must be the number of ranks of a stage"),
        ("--ranks-on ray://a:1 --num-shard 2 --node-secret-file f", "unset with ray://: each server makes a secret"),
        ("--ranks-on node://a:1 --replicas 2", "1 with --ranks-on"),
        ("--ranks-on node://a:1 --engine-listen 127.0.0.1:0", "--cpu-isa is auto, must be an instruction set that all"),
    ] {
        let refusal = on(flags).unwrap_err().to_string();
        assert!(refusal.contains(reason), "{refusal}");
    }
}

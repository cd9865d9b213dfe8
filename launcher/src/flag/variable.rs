//! Environment variables that do not belong to a flag: those of TGI, the platforms and libraries. A variable of TGI that has
//! no effect is reported in the log.

/// Effect of a variable.
pub(crate) enum Effect {
    /// Describes the effect.
    Honoured(&'static str),
    /// Why it has no effect.
    Neutral(&'static str),
}

use Effect::{Honoured, Neutral};

const NO_SUCH_KERNELS: &str = "it selects kernels for quantized weights, which this server lacks";
const NO_SUCH_DEVICE: &str = "it is for devices that this server does not support";

/// Each variable's name and effect.
pub(crate) const VARIABLES: &[(&str, Effect)] = &[
    ("ENGINE_SECRET", Honoured("the secret of --engine-listen and --replica; --engine-secret-file overrides it")),
    ("HF_TOKEN", Honoured("access token for the Hub; never logged")),
    ("HUGGING_FACE_HUB_TOKEN", Honoured("former name of HF_TOKEN")),
    ("HF_API_TOKEN", Honoured("used as HF_TOKEN if that is not set")),
    ("HF_HOME", Honoured("folder for all files of the Hub's library; models are under hub/")),
    ("HF_HUB_CACHE", Honoured("folder that holds Hub models; --huggingface-hub-cache overrides it")),
    ("HF_HUB_OFFLINE", Honoured("1: use cached models only")),
    (
        "PENSTOCK_HUB_RETRIES",
        Honoured(
            "how often in a row the Hub is asked again after 429, 5xx or a lost connection, from 0 on [default: 5]",
        ),
    ),
    ("HF_HUB_USER_AGENT_ORIGIN", Honoured("sent to the Hub by its library; this server sends nothing else")),
    ("HF_HUB_ENABLE_HF_TRANSFER", Neutral("the Hub's library has a fast download of its own")),
    ("LOG_LEVEL", Honoured("trace, debug, info, warn, error, off, or a filter such as `hyper=debug`")),
    ("LOG_COLORIZE", Neutral("colours are used if stdout is a terminal")),
    ("COMPUTE_TYPE", Honoured("value of the response header x-compute-type")),
    ("PENSTOCK_PYTHON", Honoured("Python interpreter that has penstock_server [default: the one next to the binary]")),
    ("VIRTUAL_ENV", Honoured("where to look for the interpreter if there is none next to the binary")),
    ("CUDA_VISIBLE_DEVICES", Honoured("visible devices; without --num-shard, each gets one rank")),
    ("NVIDIA_VISIBLE_DEVICES", Honoured("visible devices if CUDA_VISIBLE_DEVICES is not set")),
    ("ZE_AFFINITY_MASK", Honoured("number of visible devices if neither of the above is set")),
    (
        "OMP_NUM_THREADS",
        Honoured("threads of a rank's libraries, on nodes all its threads [default: cores divided by ranks]"),
    ),
    ("GLOO_SOCKET_IFNAME", Honoured("network interface between ranks on CPUs [default: lo, the loopback interface]")),
    ("NCCL_SOCKET_IFNAME", Honoured("network interface between ranks on GPUs [default: lo, the loopback interface]")),
    ("ATTENTION", Honoured("--attention; TGI's values flashinfer, flashdecoding and paged mean auto, with a warning")),
    ("USE_FLASH_ATTENTION", Neutral("--attention chooses the implementation")),
    ("PREFILL_CHUNKING", Neutral("prefill is always chunked; --max-batch-prefill-tokens limits a chunk")),
    ("TGI_WIGGLE_ROOM", Neutral("memory is measured during warm-up; --cuda-memory-fraction sets the total")),
    ("REQUEST_LOGPROBS", Neutral("TGI set it for its own workers; use --enable-prefill-logprobs")),
    ("DISABLE_EXLLAMA", Neutral(NO_SUCH_KERNELS)),
    ("EXLLAMA_VERSION", Neutral(NO_SUCH_KERNELS)),
    ("EXLLAMA_NO_FLASH_ATTN", Neutral(NO_SUCH_KERNELS)),
    ("USE_CUTLASS_W8A8", Neutral(NO_SUCH_KERNELS)),
    ("XPU_MEMORY_FRACTION", Neutral(NO_SUCH_DEVICE)),
    ("ROCM_USE_FLASH_ATTN_V2_TRITON", Neutral(NO_SUCH_DEVICE)),
    ("ROCM_USE_CUSTOM_PAGED_ATTN", Neutral(NO_SUCH_DEVICE)),
    ("ROCM_USE_SKINNY_GEMM", Neutral(NO_SUCH_DEVICE)),
    ("PYTORCH_TUNABLEOP_ENABLED", Neutral(NO_SUCH_DEVICE)),
    ("PYTORCH_TUNABLEOP_TUNING", Neutral(NO_SUCH_DEVICE)),
    ("PYTORCH_TUNABLEOP_SEQLENS", Neutral(NO_SUCH_DEVICE)),
    ("PYTORCH_TUNABLEOP_TUNING_AFTER_WARMUP", Neutral(NO_SUCH_DEVICE)),
    ("DEBUG", Neutral("in TGI it made one worker simulate several ranks")),
    ("DOCKER_LABEL", Neutral("TGI read it at build time; this build reports its own version")),
    ("GIT_SHA", Neutral("TGI read it at build time; this build reports its own version")),
    (
        "OTEL_EXPORTER_OTLP_HEADERS",
        Honoured("headers for the trace collector, such as `authorization=Bearer KEY`; never logged"),
    ),
    ("OTEL_RESOURCE_ATTRIBUTES", Honoured("attributes of the server in its traces, such as `k8s.pod.name=a,zone=b`")),
    ("HF_MODEL_ID", Honoured("SageMaker's MODEL_ID")),
    ("HF_MODEL_REVISION", Honoured("SageMaker's REVISION")),
    ("SM_NUM_GPUS", Honoured("SageMaker's NUM_SHARD; on SageMaker the port is 8080, whatever PORT says")),
    ("HF_MODEL_QUANTIZE", Honoured("SageMaker's QUANTIZE")),
    ("HF_MODEL_TRUST_REMOTE_CODE", Honoured("SageMaker's TRUST_REMOTE_CODE")),
    ("SAGEMAKER_BIND_TO_PORT", Honoured("port on SageMaker")),
    ("AIP_HTTP_PORT", Honoured("port on Vertex AI; overrides PORT")),
    (
        "AIP_PREDICT_ROUTE",
        Honoured(
            "path of the prediction route on Vertex AI (same as /vertex); requires an API key if the server has one",
        ),
    ),
    ("AIP_HEALTH_ROUTE", Honoured("path of the health route on Vertex AI (same as /health)")),
];

/// A note for each variable that is set but has no effect.
pub(crate) fn check(get_env: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let note = |(name, effect): &(&str, Effect)| match effect {
        Neutral(why) if get_env(name).is_some_and(|value| !value.is_empty()) => {
            Some(format!("environment variable {name} has no effect: {why}"))
        }
        _ => None,
    };
    VARIABLES.iter().filter_map(note).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_without_effect_is_reported_only_if_it_is_set() {
        assert!(check(|_| None).is_empty());
        let notes = check(|name| (name == "USE_FLASH_ATTENTION").then(|| "0".to_owned()));
        assert!(notes[0].starts_with("environment variable USE_FLASH_ATTENTION has no effect: "), "{notes:?}");
        assert!(check(|name| (name == "USE_FLASH_ATTENTION").then(String::new)).is_empty());
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = VARIABLES.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), VARIABLES.len());
    }
}

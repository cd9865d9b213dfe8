//! Environment variables that are no flag's: TGI's and the platforms', and what becomes of each. None is ignored silently.

pub struct Variable {
    pub name: &'static str,
    pub effect: Effect,
}

pub enum Effect {
    /// What it does.
    Honoured(&'static str),
    /// Why it makes no difference.
    Neutral(&'static str),
}

use Effect::{Honoured, Neutral};

const fn variable(name: &'static str, effect: Effect) -> Variable {
    Variable { name, effect }
}

const SAME_EVERYWHERE: &str = "one attention path serves every model; nothing chooses between libraries";
const NO_SUCH_KERNELS: &str = "it chooses kernels for quantized weights that this server does not have";
const NO_SUCH_DEVICE: &str = "it is for devices that this server does not run on";

pub const VARIABLES: &[Variable] = &[
    variable("HF_TOKEN", Honoured("the hub's token; never logged")),
    variable("HUGGING_FACE_HUB_TOKEN", Honoured("older name of HF_TOKEN")),
    variable("HF_API_TOKEN", Honoured("becomes HF_TOKEN where that is not set")),
    variable("HF_HOME", Honoured("where the hub's library keeps everything; models under hub/")),
    variable("HF_HUB_CACHE", Honoured("where hub models are kept; --huggingface-hub-cache goes before it")),
    variable("HF_HUB_OFFLINE", Honoured("1: models come from the cache only")),
    variable(
        "HF_HUB_USER_AGENT_ORIGIN",
        Honoured("passed on to the hub by its library; this server sends nothing else"),
    ),
    variable("HF_HUB_ENABLE_HF_TRANSFER", Neutral("the hub's library downloads fast without it")),
    variable("LOG_LEVEL", Honoured("trace, debug, info, warn, error, off, or a filter such as `hyper=debug`")),
    variable("LOG_COLORIZE", Neutral("colours are used on a terminal and nowhere else")),
    variable("COMPUTE_TYPE", Honoured("the value of the header x-compute-type")),
    variable(
        "PENSTOCK_PYTHON",
        Honoured("the interpreter that has penstock_server [default: found beside the binary]"),
    ),
    variable("VIRTUAL_ENV", Honoured("where the interpreter is looked for when it is not beside the binary")),
    variable("CUDA_VISIBLE_DEVICES", Honoured("the devices; without --num-shard, one rank on each")),
    variable("NVIDIA_VISIBLE_DEVICES", Honoured("the devices, where CUDA_VISIBLE_DEVICES is not set")),
    variable("ZE_AFFINITY_MASK", Honoured("counts devices where neither of the above is set")),
    variable("OMP_NUM_THREADS", Honoured("threads of a rank's libraries [default: the cores divided by the ranks]")),
    variable("ATTENTION", Neutral(SAME_EVERYWHERE)),
    variable("USE_FLASH_ATTENTION", Neutral(SAME_EVERYWHERE)),
    variable(
        "PREFILL_CHUNKING",
        Neutral("long prompts are always computed in pieces; --max-batch-prefill-tokens bounds them"),
    ),
    variable(
        "TGI_WIGGLE_ROOM",
        Neutral("memory is measured after warm-up; --cuda-memory-fraction is what may be used in all"),
    ),
    variable("REQUEST_LOGPROBS", Neutral("TGI set it for its own workers; give --enable-prefill-logprobs")),
    variable("MAX_IMAGE_FETCH_SIZE", Neutral("images are refused, so none is fetched")),
    variable("DISABLE_EXLLAMA", Neutral(NO_SUCH_KERNELS)),
    variable("EXLLAMA_VERSION", Neutral(NO_SUCH_KERNELS)),
    variable("EXLLAMA_NO_FLASH_ATTN", Neutral(NO_SUCH_KERNELS)),
    variable("USE_CUTLASS_W8A8", Neutral(NO_SUCH_KERNELS)),
    variable("XPU_MEMORY_FRACTION", Neutral(NO_SUCH_DEVICE)),
    variable("ROCM_USE_FLASH_ATTN_V2_TRITON", Neutral(NO_SUCH_DEVICE)),
    variable("ROCM_USE_CUSTOM_PAGED_ATTN", Neutral(NO_SUCH_DEVICE)),
    variable("ROCM_USE_SKINNY_GEMM", Neutral(NO_SUCH_DEVICE)),
    variable("PYTORCH_TUNABLEOP_ENABLED", Neutral(NO_SUCH_DEVICE)),
    variable("PYTORCH_TUNABLEOP_TUNING", Neutral(NO_SUCH_DEVICE)),
    variable("PYTORCH_TUNABLEOP_SEQLENS", Neutral(NO_SUCH_DEVICE)),
    variable("PYTORCH_TUNABLEOP_TUNING_AFTER_WARMUP", Neutral(NO_SUCH_DEVICE)),
    variable("DEBUG", Neutral("ranks are always real; TGI's workers then pretended to be several")),
    variable("DOCKER_LABEL", Neutral("read when TGI was built; this build says its own version")),
    variable("GIT_SHA", Neutral("read when TGI was built; this build says its own version")),
    variable("HF_MODEL_ID", Honoured("SageMaker's MODEL_ID")),
    variable("HF_MODEL_REVISION", Honoured("SageMaker's REVISION")),
    variable("SM_NUM_GPUS", Honoured("SageMaker's NUM_SHARD; on SageMaker the port is 8080, whatever PORT says")),
    variable("HF_MODEL_QUANTIZE", Honoured("SageMaker's QUANTIZE, with the same answer")),
    variable("HF_MODEL_TRUST_REMOTE_CODE", Honoured("SageMaker's TRUST_REMOTE_CODE")),
    variable("SAGEMAKER_BIND_TO_PORT", Honoured("the port, on SageMaker")),
    variable("AIP_HTTP_PORT", Honoured("the port, on Vertex AI; goes before PORT")),
    variable(
        "AIP_PREDICT_ROUTE",
        Honoured("a path for what /vertex answers, on Vertex AI; needs a key where keys are set"),
    ),
    variable("AIP_HEALTH_ROUTE", Honoured("a path for what /health answers, on Vertex AI")),
];

/// Notes on what was set and makes no difference.
pub fn check(get_env: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let note = |Variable { name, effect }: &Variable| match effect {
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
    fn what_makes_no_difference_is_said_only_when_it_is_set() {
        assert!(check(|_| None).is_empty());
        let notes = check(|name| (name == "ATTENTION").then(|| "paged".to_owned()));
        assert!(notes[0].starts_with("environment variable ATTENTION has no effect: "), "{notes:?}");
        assert!(check(|name| (name == "ATTENTION").then(String::new)).is_empty());
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = VARIABLES.iter().map(|variable| variable.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), VARIABLES.len());
    }
}

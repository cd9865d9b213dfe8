//! Data types that `--dtype` and `--kv-cache-dtype` accept.

use clap::ValueEnum;

/// Data type of weights and computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Dtype {
    Float16,
    Bfloat16,
    Float32,
}

impl Dtype {
    /// Its name in torch, which is also its name in the worker protocol.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Float32 => "float32",
        }
    }
}

/// Data type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvCacheDtype {
    Auto,
    #[value(name = "fp8_e4m3fn")]
    Fp8E4m3fn,
    #[value(name = "fp8_e5m2")]
    Fp8E5m2,
}

impl KvCacheDtype {
    /// Its name in the worker protocol; `None`: the data type of the computation.
    pub(crate) fn name(self) -> Option<&'static str> {
        match self {
            Self::Auto => None,
            Self::Fp8E4m3fn => Some("fp8_e4m3fn"),
            Self::Fp8E5m2 => Some("fp8_e5m2"),
        }
    }
}

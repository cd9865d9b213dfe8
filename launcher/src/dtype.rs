//! Data types that `--dtype` accepts.

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

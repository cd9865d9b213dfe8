//! Instruction sets of the native CPU kernels.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Instruction sets that the kernels may use, from the least to the most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize, Serialize)]
pub(crate) enum CpuIsa {
    /// The fastest that the CPU has. Also an empty variable CPU_ISA.
    #[value(alias = "")]
    #[default]
    Auto,
    Portable,
    Avx2,
    Avx512,
    Avx512Vnni,
    Avx512Bf16,
    Amx,
}

impl CpuIsa {
    /// Its name in the worker protocol; `None`: the worker chooses.
    pub(crate) fn name(self) -> Option<&'static str> {
        match self {
            Self::Auto => None,
            Self::Portable => Some("portable"),
            Self::Avx2 => Some("avx2"),
            Self::Avx512 => Some("avx512"),
            Self::Avx512Vnni => Some("avx512-vnni"),
            Self::Avx512Bf16 => Some("avx512-bf16"),
            Self::Amx => Some("amx"),
        }
    }

    /// The value of `ATEN_CPU_CAPABILITY` with which torch uses the same instruction set: the sampler's softmax and logarithm are
    /// torch's, and their last bits depend on it. `None`: torch chooses, as the kernels do.
    pub(crate) fn torch_capability(self) -> Option<&'static str> {
        match self {
            Self::Auto => None,
            Self::Portable => Some("default"),
            Self::Avx2 => Some("avx2"),
            Self::Avx512 | Self::Avx512Vnni | Self::Avx512Bf16 | Self::Amx => Some("avx512"),
        }
    }
}

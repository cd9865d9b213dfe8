//! Instruction sets of the native CPU kernels.

use clap::ValueEnum;

/// What the kernels may use, from the least to the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CpuIsa {
    /// The fastest that the CPU has. Also an empty variable CPU_ISA.
    #[value(alias = "")]
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
}

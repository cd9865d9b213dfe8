//! Attention implementations that `--attention` accepts.

use clap::ValueEnum;

/// The attention of every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Attention {
    /// The worker chooses the fastest for each layer. Also an empty variable ATTENTION.
    #[value(alias = "")]
    Auto,
    Native,
    Flash,
    Triton,
    Reference,
    /// COMPAT: a library that TGI chooses by the variable ATTENTION. Here it means `Auto`, with a warning.
    #[value(hide = true, name = "flashinfer", aliases = ["flashdecoding", "flashdecoding-ipex", "paged"])]
    Tgi,
}

impl Attention {
    /// Its name in the worker protocol; `None`: the worker chooses.
    pub(crate) fn name(self) -> Option<&'static str> {
        match self {
            Self::Auto | Self::Tgi => None,
            Self::Native => Some("native"),
            Self::Flash => Some("flash"),
            Self::Triton => Some("triton"),
            Self::Reference => Some("reference"),
        }
    }
}

//! Methods of quantization that `--quantize` accepts.

use clap::ValueEnum;

/// TGI's values. The worker refuses those that it does not support, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Quantize {
    Awq,
    Bitsandbytes,
    BitsandbytesFp4,
    BitsandbytesNf4,
    CompressedTensors,
    Eetq,
    Exl2,
    Fp8,
    Gptq,
    Marlin,
    /// An empty variable QUANTIZE: as the checkpoint says.
    #[value(hide = true, name = "")]
    Checkpoint,
}

impl Quantize {
    /// Its name in the worker protocol.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

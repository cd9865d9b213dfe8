//! Values of `--standby`.

use clap::ValueEnum;

/// Conditions for a standby group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Standby {
    /// If memory that nothing else needs is left.
    Auto,
    /// The KV cache of a GPU leaves room for it. On a CPU, the same as `Auto`.
    Reserve,
    Off,
}

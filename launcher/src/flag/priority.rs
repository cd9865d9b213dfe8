//! The orders that `--priority-order` accepts.

use clap::ValueEnum;
use penstock_router::config;

/// The priorities that are served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PriorityOrder {
    HighestFirst,
    LowestFirst,
}

impl From<PriorityOrder> for config::PriorityOrder {
    fn from(order: PriorityOrder) -> Self {
        match order {
            PriorityOrder::HighestFirst => Self::HighestFirst,
            PriorityOrder::LowestFirst => Self::LowestFirst,
        }
    }
}

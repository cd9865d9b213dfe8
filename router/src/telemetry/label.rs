//! The values of metric labels.

use crate::generator::MAX_ENGINES;

/// A label's name, and the values that it can have.
pub(super) type Label = (&'static str, &'static [&'static str]);

/// Declares an enum whose variants are the values of a label.
macro_rules! label {
    ($(#[$attribute:meta])* $name:ident { $($(#[$variant_attribute:meta])* $variant:ident = $value:literal,)* }) => {
        $(#[$attribute])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum $name {
            $($(#[$variant_attribute])* $variant,)*
        }

        impl $name {
            /// The values of all variants.
            pub(super) const VALUES: &[&str] = &[$($value),*];

            /// The value of this variant.
            pub(crate) fn value(self) -> &'static str {
                Self::VALUES[self as usize]
            }
        }
    };
}

/// The position of a token in its draft. The values end at the most draft tokens that `--speculate` allows.
pub(super) const DRAFT_POSITIONS: &[&str] =
    &["0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15"];

/// A series is created when its replica joins.
pub(super) const REPLICA: Label = ("replica", REPLICAS);

/// Numbers of replicas, as many as there can be.
pub(super) const REPLICAS: &[&str] = &{
    let mut numbers = [""; MAX_ENGINES];
    let mut number = 0;
    while number < numbers.len() {
        let (_, digits) = DIGITS[number].split_at(match number {
            0..10 => 3,
            10..100 => 2,
            100..1000 => 1,
            _ => 0,
        });
        numbers[number] = match str::from_utf8(digits) {
            Ok(digits) => digits,
            Err(_) => panic!("invariant: digits are ASCII"),
        };
        number += 1;
    }
    numbers
};

const fn digit(number: usize, divisor: usize) -> u8 {
    b'0' + (number / divisor % 10) as u8
}

/// The four last decimal digits of each number of a replica.
const DIGITS: &[[u8; 4]; MAX_ENGINES] = &{
    let mut digits = [[0; 4]; MAX_ENGINES];
    let mut number = 0;
    while number < digits.len() {
        digits[number] = [digit(number, 1000), digit(number, 100), digit(number, 10), digit(number, 1)];
        number += 1;
    }
    digits
};

label! {
    /// Why a request was not answered in full.
    Failure {
        Overloaded = "overloaded",
        Validation = "validation",
        Template = "template",
        Generation = "generation",
        Incomplete = "incomplete",
        /// The client disconnected.
        Dropped = "dropped",
    }
}

label! {
    /// The limit for which a request was refused.
    RefusalReason {
        Requests = "requests",
        QueuedTokens = "queued_tokens",
        QueueTimeout = "queue_timeout",
        Images = "images",
        ShuttingDown = "shutting_down",
    }
}

label! {
    /// Why spans were not exported.
    SpanLoss {
        /// The queue of the exporter had no room.
        QueueFull = "queue_full",
        /// The collector did not take them, also after retries.
        ExportFailed = "export_failed",
    }
}

label! {
    /// How the fetch of an image ended.
    ImageFetch {
        Fetched = "fetched",
        /// Its host has no address that may be connected to.
        NotPublic = "not_public",
        Failed = "failed",
    }
}

label! {
    /// What a step computes: any prompt, or decodes only.
    Method {
        Prefill = "prefill",
        Decode = "decode",
    }
}

label! {
    /// A phase of the time without a worker group.
    RestartPhase {
        /// From the last sign of life until the loss was noticed.
        Notice = "notice",
        /// From there to the restart that succeeded.
        Backoff = "backoff",
        Stop = "stop",
        Spawn = "spawn",
        Connect = "connect",
        Load = "load",
        WarmUp = "warm_up",
        /// From the new group's start to its first token, which repeats the lost computation.
        FirstToken = "first_token",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_labels_of_replicas_are_their_numbers() {
        let numbers: Vec<_> = (0..MAX_ENGINES).map(|number| number.to_string()).collect();
        assert_eq!(REPLICAS, numbers);
    }
}

//! The values of metric labels.

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

/// Numbers of replicas, as many as there can be.
#[rustfmt::skip]
pub(super) const REPLICAS: &[&str] = &[
    "0", "1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11", "12", "13", "14", "15",
    "16", "17", "18", "19", "20", "21", "22", "23", "24", "25", "26", "27", "28", "29", "30", "31",
    "32", "33", "34", "35", "36", "37", "38", "39", "40", "41", "42", "43", "44", "45", "46", "47",
    "48", "49", "50", "51", "52", "53", "54", "55", "56", "57", "58", "59", "60", "61", "62", "63",
];

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

//! What a metric is, and how a value is recorded in it.

use metrics::{
    IntoF64, Label as Pair, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram,
};

use super::label::{Label, REPLICA};
use crate::limits::RequestLimits;

/// A metric, or, after `with`, its series of one label value.
#[derive(Clone, Copy)]
pub(super) struct Metric {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) label: Option<Label>,
    pub(super) help: &'static str,
    /// How it differs from TGI's metric of this name; empty: it does not.
    pub(super) difference: &'static str,
    value: Option<&'static str>,
}

#[derive(Clone, Copy)]
pub(super) enum Kind {
    Counter,
    Gauge,
    /// A gauge that tells something by the values of these labels, which may be any text.
    Info(&'static [&'static str]),
    Histogram(Buckets),
}

#[derive(Clone, Copy)]
pub(super) enum Buckets {
    Duration,
    InputTokens,
    TotalTokens,
    Sequences,
    Step,
    Latency,
    SkippedTokens,
}

impl Metric {
    const fn new(name: &'static str, kind: Kind, help: &'static str) -> Self {
        Self { name, kind, label: None, help, difference: "", value: None }
    }

    pub(super) const fn counter(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Kind::Counter, help)
    }

    pub(super) const fn gauge(name: &'static str, help: &'static str) -> Self {
        Self::new(name, Kind::Gauge, help)
    }

    pub(super) const fn info(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Self {
        Self::new(name, Kind::Info(labels), help)
    }

    pub(super) const fn histogram(name: &'static str, buckets: Buckets, help: &'static str) -> Self {
        Self::new(name, Kind::Histogram(buckets), help)
    }

    pub(super) const fn by(self, label: Label) -> Self {
        Self { label: Some(label), ..self }
    }

    pub(super) const fn unlike_tgi(self, difference: &'static str) -> Self {
        Self { difference, ..self }
    }

    /// The series with this value of the metric's label.
    pub(super) fn with(self, value: &'static str) -> Self {
        Self { value: Some(value), ..self }
    }

    /// Adds 1 to a counter.
    pub(super) fn increment(self) {
        self.add(1);
    }

    /// Adds `count` to a counter.
    pub(super) fn add(self, count: u64) {
        counter!(self.name, self.pairs()).increment(count);
    }

    /// Sets a counter that is counted elsewhere.
    pub(super) fn set_total(self, total: u64) {
        counter!(self.name, self.pairs()).absolute(total);
    }

    /// Sets a gauge.
    pub(super) fn set(self, value: impl IntoF64) {
        gauge!(self.name, self.pairs()).set(value);
    }

    /// Sets the series of an info whose labels have these values. Earlier series stay.
    pub(super) fn set_info<const N: usize>(self, values: [String; N], number: impl IntoF64) {
        let Kind::Info(labels) = self.kind else { return };
        let pairs = labels.iter().zip(values).map(|(label, value)| Pair::new(*label, value));
        gauge!(self.name, pairs.collect::<Vec<_>>()).set(number);
    }

    /// Adds a sample to a histogram.
    pub(super) fn record(self, sample: impl IntoF64) {
        histogram!(self.name, self.pairs()).record(sample);
    }

    /// Adds `count` equal samples to a histogram.
    pub(super) fn record_many(self, sample: impl IntoF64, count: usize) {
        histogram!(self.name, self.pairs()).record_many(sample, count);
    }

    /// Tells the recorder the help text, and begins the series of counters and histograms at 0: Prometheus does not see
    /// the first increase of a series that begins with it. A gauge has no value yet.
    pub(super) fn begin(&self) {
        match self.kind {
            Kind::Counter => describe_counter!(self.name, self.help),
            Kind::Gauge | Kind::Info(_) => describe_gauge!(self.name, self.help),
            Kind::Histogram(_) => describe_histogram!(self.name, self.help),
        }
        if self.label.is_some_and(|label| label == REPLICA) {
            return; // A series is created when its replica joins.
        }
        let values = self.label.map_or(vec![None], |(_, values)| values.iter().copied().map(Some).collect());
        for series in values.into_iter().map(|value| Self { value, ..*self }) {
            match self.kind {
                Kind::Counter => counter!(self.name, series.pairs()).absolute(0),
                Kind::Gauge | Kind::Info(_) => {}
                Kind::Histogram(_) => drop(histogram!(self.name, series.pairs())),
            }
        }
    }

    fn pairs(&self) -> Vec<Pair> {
        let pair = |((name, _), value): (Label, _)| Pair::from_static_parts(name, value);
        self.label.zip(self.value).map(pair).into_iter().collect()
    }
}

impl Kind {
    /// The kind, and the bounds of a histogram, for the documentation.
    pub(super) fn describe(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge | Self::Info(_) => "gauge",
            Self::Histogram(Buckets::Duration) => "histogram, 35 geometric bounds from 0.15 ms to 146 s",
            Self::Histogram(Buckets::InputTokens) => "histogram, 100 linear bounds up to max-input-tokens",
            Self::Histogram(Buckets::TotalTokens) => "histogram, 100 linear bounds up to max-total-tokens",
            Self::Histogram(Buckets::Sequences) => "histogram, every integer from 1 to 1024",
            Self::Histogram(Buckets::Step) => "histogram, 30 geometric bounds from 10 µs to 5 s",
            Self::Histogram(Buckets::Latency) => "histogram, 31 round bounds from 1 ms to 100 s",
            Self::Histogram(Buckets::SkippedTokens) => "histogram, every integer from 0 to 16",
        }
    }
}

impl Buckets {
    /// Upper bounds, in ascending order.
    pub(super) fn bounds(self, limits: &RequestLimits) -> Vec<f64> {
        let linear = |max: usize| (1..=100).map(|step| max as f64 * f64::from(step) / 100.0).collect();
        match self {
            Self::Duration => (1..=35).map(|exponent| 0.0001 * 1.5_f64.powi(exponent)).collect(),
            Self::Step => (0..30).map(|exponent| 0.00001 * 1.57_f64.powi(exponent)).collect(),
            Self::Latency => latency_bounds(),
            Self::InputTokens => linear(limits.max_input_tokens),
            Self::TotalTokens => linear(limits.max_total_tokens),
            Self::Sequences => (1..=1024).map(f64::from).collect(),
            Self::SkippedTokens => (0..=16).map(f64::from).collect(),
        }
    }
}

/// Round numbers, because the target of a latency must be one of its bounds.
fn latency_bounds() -> Vec<f64> {
    let decade = |exponent: i32| [10, 15, 20, 30, 50, 70].map(|mantissa| f64::from(mantissa) / 10_f64.powi(exponent));
    (0..5).rev().flat_map(decade).chain([100.0]).collect()
}

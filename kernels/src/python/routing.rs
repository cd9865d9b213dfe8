//! Routing of mixtures of experts.

use super::view::{Number, View};
use crate::element::Element;
use crate::pool::{Executor, Pool};
use crate::routing::{self, Groups, Scoring, WeightNorm};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The attributes of Python's `RoutingSpec` that the kernels know.
#[derive(FromPyObject)]
pub(super) struct RoutingSpec {
    num_experts: usize,
    top_k: usize,
    scoring: String,
    norm_power: Option<f64>,
    norm_epsilon: f64,
    scale: f64,
    num_groups: usize,
    top_groups: usize,
    group_score: String,
    jitter: f64,
    scales_inputs: bool,
}

impl RoutingSpec {
    /// Scores that are logits are neither corrected, grouped nor normalized.
    fn with_correction(self, correction: Vec<f32>) -> Result<routing::Routing, String> {
        let scoring = match &*self.scoring {
            "softmax" => Scoring::Softmax,
            "softmax-chosen" => Scoring::SoftmaxChosen,
            "sigmoid" => Scoring::Sigmoid,
            "sparsemixer" => Scoring::SparseMixer { jitter: self.jitter },
            other => {
                return Err(format!("scoring is {other:?}, must be softmax, softmax-chosen, sigmoid or sparsemixer"));
            }
        };
        let num_summed = match &*self.group_score {
            "best" => 1,
            "best-two" => 2,
            other => return Err(format!("group_score is {other:?}, must be best or best-two")),
        };
        let has_scores = matches!(scoring, Scoring::Softmax | Scoring::Sigmoid);
        let RoutingSpec { num_experts, top_k, num_groups, top_groups, scale, scales_inputs, .. } = self;
        let groups = Some(Groups { num_groups, top_groups, num_summed });
        let norm = self.norm_power.map(|power| WeightNorm { power, epsilon: self.norm_epsilon });
        routing::Routing {
            num_experts,
            top_k,
            scoring,
            correction: if has_scores { correction } else { Vec::new() },
            groups: groups.filter(|_| has_scores && num_groups != 1),
            norm: norm.filter(|_| has_scores),
            scale,
            scales_inputs,
        }
        .checked()
    }
}

/// How experts and their weights follow from logits.
#[pyclass(frozen)]
pub(super) struct Routing {
    pool: Pool,
    pub(super) routing: routing::Routing,
}

impl Routing {
    pub(super) fn new(pool: Pool, spec: RoutingSpec, correction: Option<&View<'_, f32, 1>>) -> PyResult<Routing> {
        let correction = correction.map_or(Ok(&[][..]), |correction| correction.elements("correction"))?;
        let routing = spec.with_correction(correction.to_vec()).map_err(PyValueError::new_err)?;
        Ok(Routing { pool, routing })
    }

    fn choose<T: Number>(
        &self,
        logits: &View<'_, T, 2>,
        to_f64: impl Fn(T) -> f64 + Sync,
        experts: &View<'_, i64, 2>,
        weights: &View<'_, f32, 2>,
    ) -> PyResult<()> {
        let ([num_rows, _], top_k) = (logits.shape(), self.routing.top_k);
        let num_experts = self.routing.num_experts;
        let logits = logits.expect("logits", [num_rows, num_experts])?.source("logits")?;
        let experts = experts.expect("experts", [num_rows, top_k])?.target("experts")?;
        let weights = weights.expect("weights", [num_rows, top_k])?.target("weights")?;
        self.pool.for_ranges(num_rows, 16, |range| {
            for row in range {
                // SAFETY: logits, experts and weights have the row, which is one thread's.
                unsafe {
                    let (experts, weights) = (experts.at(row * top_k), weights.at(row * top_k));
                    let logit = |expert: usize| to_f64(logits.at(row * num_experts + expert).read());
                    self.routing.apply_row(logit, experts, weights);
                }
            }
        });
        Ok(())
    }
}

#[pymethods]
impl Routing {
    /// Writes the experts of each row of logits [rows, experts] and their weights, both [rows, top_k].
    fn apply(
        &self,
        logits: View<'_, Element, 2>,
        experts: View<'_, i64, 2>,
        weights: View<'_, f32, 2>,
    ) -> PyResult<()> {
        self.choose(&logits, |logit| f64::from(logit.to_f32()), &experts, &weights)
    }

    /// The same of logits in float32.
    fn apply_wide(
        &self,
        logits: View<'_, f32, 2>,
        experts: View<'_, i64, 2>,
        weights: View<'_, f32, 2>,
    ) -> PyResult<()> {
        self.choose(&logits, f64::from, &experts, &weights)
    }
}

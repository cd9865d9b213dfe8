//! Routing of mixtures of experts.

use super::require;
use super::view::View;
use crate::element::Element;
use crate::pool::{Executor, Pool};
use crate::routing;
use pyo3::prelude::*;

/// How experts and their weights follow from logits.
#[pyclass(frozen)]
pub(super) struct Routing {
    pool: Pool,
    pub(super) routing: routing::Routing,
}

impl Routing {
    pub(super) fn new(pool: Pool, routing: routing::Routing) -> PyResult<Routing> {
        let routing::Routing { num_experts, top_k, .. } = routing;
        require((1..=num_experts).contains(&top_k), || format!("a row cannot go to {top_k} of {num_experts} experts"))?;
        Ok(Routing { pool, routing })
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
                    self.routing.apply_row(logits.at(row * num_experts), experts, weights);
                }
            }
        });
        Ok(())
    }
}

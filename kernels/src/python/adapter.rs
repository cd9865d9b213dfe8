//! Low-rank adapters.

use super::require;
use super::view::View;
use crate::element::Element;
use crate::low_rank::{self, LowRank, Part};
use pyo3::prelude::*;

/// What an adapter adds to some output columns of a layer: A [rank, in_features], B transposed [rank, columns], the first of these
/// columns, and the factor of their product.
type PartViews<'py> = (View<'py, Element, 2>, View<'py, Element, 2>, usize, f32);

/// What an adapter adds to each layer that adapters can change.
#[pyclass(frozen)]
pub(super) struct Adapter(pub(super) low_rank::Adapter);

#[pymethods]
impl Adapter {
    /// sites: the parts of each of these layers; none where the adapter changes nothing. They are copied.
    #[new]
    fn new(sites: Vec<Vec<PartViews<'_>>>) -> PyResult<Adapter> {
        let sites = sites.iter().map(|parts| {
            let parts = parts.iter().map(part).collect::<PyResult<_>>()?;
            Ok(LowRank { parts })
        });
        Ok(Adapter(low_rank::Adapter { sites: sites.collect::<PyResult<_>>()? }))
    }
}

fn part((down, up, first_column, scale): &PartViews<'_>) -> PyResult<Part> {
    let ([rank, in_features], [up_rank, columns]) = (down.shape(), up.shape());
    require(rank > 0 && in_features > 0 && up_rank == rank, || {
        format!("A has shape {:?} and B {:?} transposed, must have the same rank", down.shape(), up.shape())
    })?;
    let [down, up] = [down.elements("down")?.to_vec(), up.elements("up")?.to_vec()];
    let part = Part::new(down, up, rank, *first_column, *scale);
    part.ok_or_else(|| pyo3::exceptions::PyValueError::new_err(format!("{columns} columns from {first_column} on")))
}

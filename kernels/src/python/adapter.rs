//! Low-rank adapters.

use super::require;
use super::view::View;
use crate::element::Element;
use crate::low_rank::{self, PlainPart};
use pyo3::prelude::*;

/// What an adapter adds to some output columns of a layer: A [rank, in_features], B transposed [rank, columns], the first of these
/// columns, and the factor of their product.
type PartViews<'py> = (View<'py, Element, 2>, View<'py, Element, 2>, usize, f32);

/// What an adapter adds to each layer that adapters can change.
#[pyclass(frozen)]
pub(super) struct Adapter(pub(super) low_rank::Adapter);

#[pymethods]
impl Adapter {
    /// sites: the parts of each of these layers; none where the adapter changes nothing. They are copied. Raises OSError without memory.
    #[new]
    fn new(sites: Vec<Vec<PartViews<'_>>>) -> PyResult<Adapter> {
        let sites = sites.iter().map(|parts| parts.iter().map(part).collect());
        let sites: Vec<Vec<PlainPart<'_>>> = sites.collect::<PyResult<_>>()?;
        Ok(Adapter(low_rank::Adapter::new(&sites)?))
    }
}

fn part<'a>((down, up, first_column, scale): &'a PartViews<'_>) -> PyResult<PlainPart<'a>> {
    let ([rank, in_features], [up_rank, columns]) = (down.shape(), up.shape());
    require(rank > 0 && in_features > 0 && up_rank == rank, || {
        format!("A has shape {:?} and B {:?} transposed, must have the same rank", down.shape(), up.shape())
    })?;
    let part = PlainPart::new(down.elements("down")?, up.elements("up")?, rank, *first_column, *scale);
    part.ok_or_else(|| pyo3::exceptions::PyValueError::new_err(format!("{columns} columns from {first_column} on")))
}

//! Low-rank adapters.

use super::view::View;
use super::{maybe_detached, require};
use crate::element::Element;
use crate::linear::Rows;
use crate::low_rank::{self, PlainPart, Product};
use crate::pool::Pool;
use pyo3::prelude::*;

/// What an adapter adds to some output columns of a layer: A [rank, in_features], B transposed [rank, columns], the first of these
/// columns, and the factor of their product.
type PartViews<'py> = (View<'py, Element, 2>, View<'py, Element, 2>, usize, f32);

/// Adapters, and for each row [rows] the index of its adapter among them, or -1.
pub(super) type AdaptedRows<'py> = (Vec<PyRef<'py, Adapter>>, View<'py, i64, 1>);

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

/// The adapters, and the index of that of each of `num_rows` rows.
pub(super) fn adapters_of<'a>(
    (adapters, of_rows): &'a AdaptedRows<'_>,
    num_rows: usize,
) -> PyResult<(Vec<&'a low_rank::Adapter>, Vec<Option<usize>>)> {
    let indices = of_rows.expect("adapted", [num_rows])?.elements("adapted")?;
    let indices: Vec<_> = indices.iter().map(|&index| usize::try_from(index).ok()).collect();
    let unknown = indices.iter().flatten().find(|&&index| index >= adapters.len());
    require(unknown.is_none(), || format!("adapted contains {unknown:?}, there are {}", adapters.len()))?;
    Ok((adapters.iter().map(|adapter| &adapter.0).collect(), indices))
}

/// Adds to y what the rows' adapters add at this site, as of `Kernels.adapt`.
pub(super) fn adapt(
    py: Python<'_>,
    pool: &Pool,
    site: usize,
    x: &View<'_, Element, 2>,
    y: &View<'_, Element, 2>,
    adapted: &AdaptedRows<'_>,
) -> PyResult<()> {
    let ([num_rows, in_features], [_, out_columns]) = (x.shape(), y.shape());
    let (adapters, of_rows) = adapters_of(adapted, num_rows)?;
    let sizes = [(site, [in_features, out_columns])];
    require(adapters.iter().all(|adapter| adapter.fits(&sizes)), || {
        format!("an adapter does not have the site {site} from {in_features} to {out_columns} columns")
    })?;
    let (address, stride) = x.rows("x")?;
    let rows = Rows { address, stride, num_rows };
    let product = Product { rows, y: y.expect("y", [num_rows, out_columns])?.target("y")?, out_columns };
    let runs = low_rank::runs(of_rows.into_iter());
    let work = num_rows * (in_features + out_columns) * low_rank::max_rank(&adapters);
    // SAFETY: the adapters fit the views, which have these rows and live until the call ends.
    maybe_detached(py, work, || unsafe { low_rank::apply(pool, &adapters, &runs, site, product) });
    Ok(())
}

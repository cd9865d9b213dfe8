//! The packed form of an adapter: one piece of memory, in the order in which a step reads it. A of a site: groups of `GROUP_RANKS` ranks
//! of all parts, each [chunk of features][rank][CHUNK]. B of a part: panels of `PANEL` columns, each [rank][PANEL]. Ranks, features and
//! columns are padded with zeros.

use crate::element::Element;
use crate::memory::{Arena, Piece};
use crate::simd::{LANES, SUMS};
use std::io;
use std::ops::Range;

/// Vectors whose sums with some rows are in registers at a time.
pub(super) const TILE_VECTORS: usize = if SUMS >= 16 { 4 } else { 2 };
/// Ranks whose features are next to each other.
pub(super) const GROUP_RANKS: usize = TILE_VECTORS;
/// Features of a rank that are next to each other.
pub(super) const CHUNK: usize = 2 * LANES;
/// Columns of a panel.
pub(super) const PANEL: usize = TILE_VECTORS * LANES;

/// What an adapter adds to adjacent output columns of a layer, as to the keys of a layer that computes queries, keys and values: the
/// product of B, A and the scale.
#[derive(Clone, Copy)]
pub(crate) struct PlainPart<'a> {
    /// A, [rank, in_features].
    down: &'a [Element],
    /// B transposed, [rank, columns].
    up: &'a [Element],
    rank: usize,
    first_column: usize,
    scale: f32,
}

impl<'a> PlainPart<'a> {
    /// A part for the columns from `first_column` on. `None`: the sizes do not fit together.
    pub(crate) fn new(
        down: &'a [Element],
        up: &'a [Element],
        rank: usize,
        first_column: usize,
        scale: f32,
    ) -> Option<PlainPart<'a>> {
        let columns = up.len().checked_div(rank)?;
        let fits = up.len() == columns * rank && down.len().is_multiple_of(rank);
        first_column.checked_add(columns).filter(|_| fits)?;
        Some(PlainPart { down, up, rank, first_column, scale })
    }

    fn in_features(&self) -> usize {
        self.down.len() / self.rank
    }

    fn columns(&self) -> Range<usize> {
        self.first_column..self.first_column + self.up.len() / self.rank
    }
}

/// Adjacent output columns of a site.
pub(super) struct Part {
    pub(super) columns: Range<usize>,
    /// Ranks of this part among the ranks of the site.
    pub(super) ranks: Range<usize>,
    /// Offset of B, in elements.
    up: usize,
}

impl Part {
    fn num_panels(&self) -> usize {
        self.columns.len().div_ceil(PANEL)
    }
}

/// What an adapter adds to a layer: nothing, without parts.
#[derive(Default)]
pub(super) struct Site {
    pub(super) in_features: usize,
    pub(super) parts: Vec<Part>,
    /// Scale of each rank of all parts.
    pub(super) scales: Vec<f32>,
    /// Offset of A, in elements.
    down: usize,
}

impl Site {
    /// The layout of these parts from element `start` on, and its end. `None`: their layers have different inputs.
    fn plan(plain: &[PlainPart<'_>], start: usize) -> Option<(Site, usize)> {
        let in_features = plain.first().map_or(0, PlainPart::in_features);
        let mut site = Site { in_features, down: start, ..Site::default() };
        for part in plain {
            let first = site.scales.len();
            site.scales.resize(first + part.rank, part.scale);
            site.parts.push(Part { columns: part.columns(), ranks: first..site.scales.len(), up: 0 });
        }
        let mut end = start + site.num_groups() * site.group_elements();
        for part in &mut site.parts {
            part.up = end;
            end += part.num_panels() * part.ranks.len() * PANEL;
        }
        plain.iter().all(|part| part.in_features() == in_features).then_some((site, end))
    }

    pub(super) fn num_groups(&self) -> usize {
        self.scales.len().div_ceil(GROUP_RANKS)
    }

    pub(super) fn num_panels(&self) -> usize {
        self.parts.iter().map(Part::num_panels).sum()
    }

    /// The part that a panel belongs to, and the panel's number in it.
    pub(super) fn panel(&self, mut index: usize) -> Option<(&Part, usize)> {
        self.parts.iter().find_map(|part| match index.checked_sub(part.num_panels()) {
            Some(rest) => {
                index = rest;
                None
            }
            None => Some((part, index)),
        })
    }

    fn group_elements(&self) -> usize {
        self.in_features.next_multiple_of(CHUNK) * GROUP_RANKS
    }
}

/// An adapter: what it adds to each site, which is a layer that adapters can change.
pub(crate) struct Adapter {
    pub(super) sites: Vec<Site>,
    weights: Piece,
}

// SAFETY: the weights are written before the adapter is made.
unsafe impl Send for Adapter {}
// SAFETY: as above.
unsafe impl Sync for Adapter {}

impl Adapter {
    /// Packs the parts of each site. Fails without memory, or if parts of a site have different numbers of input features.
    pub(crate) fn new(plain: &[Vec<PlainPart<'_>>]) -> io::Result<Adapter> {
        let (mut sites, mut end) = (Vec::with_capacity(plain.len()), 0);
        for parts in plain {
            let differ =
                || io::Error::new(io::ErrorKind::InvalidInput, "parts of a site have different input features");
            let (site, next) = Site::plan(parts, end).ok_or_else(differ)?;
            sites.push(site);
            end = next;
        }
        let weights = Arena::default().allocate(end * size_of::<Element>())?;
        // SAFETY: the piece is zeroed, has room for all elements, and is not shared yet.
        let elements = unsafe { std::slice::from_raw_parts_mut(weights.as_ptr().cast::<Element>(), end) };
        for (site, parts) in sites.iter().zip(plain) {
            for (part, plain) in site.parts.iter().zip(parts) {
                fill(site, part, plain, elements);
            }
        }
        Ok(Adapter { sites, weights })
    }

    /// Whether it was made for sites of these input features and output columns. `sites`: their numbers, and the sizes.
    pub(crate) fn fits(&self, sites: &[(usize, [usize; 2])]) -> bool {
        sites.iter().all(|&(site, [in_features, out_columns])| {
            let fits = |site: &Site| {
                site.parts.is_empty()
                    || site.in_features == in_features && site.parts.iter().all(|part| part.columns.end <= out_columns)
            };
            self.sites.get(site).is_some_and(fits)
        })
    }

    /// A of a group of ranks of a site.
    pub(super) fn down(&self, site: &Site, group: usize) -> *const Element {
        self.at(site.down + group * site.group_elements())
    }

    /// B of a panel of a part.
    pub(super) fn up(&self, part: &Part, panel: usize) -> *const Element {
        self.at(part.up + panel * part.ranks.len() * PANEL)
    }

    fn at(&self, element: usize) -> *const Element {
        self.weights.as_ptr().cast::<Element>().wrapping_add(element).cast_const()
    }
}

fn fill(site: &Site, part: &Part, plain: &PlainPart<'_>, elements: &mut [Element]) {
    for (rank, features) in part.ranks.clone().zip(plain.down.chunks_exact(site.in_features)) {
        let group = &mut elements[site.down + rank / GROUP_RANKS * site.group_elements()..];
        for (chunk, features) in features.chunks(CHUNK).enumerate() {
            let first = (chunk * GROUP_RANKS + rank % GROUP_RANKS) * CHUNK;
            group[first..first + features.len()].copy_from_slice(features);
        }
    }
    let num_ranks = part.ranks.len();
    for (rank, columns) in plain.up.chunks_exact(part.columns.len().max(1)).enumerate() {
        for (panel, columns) in columns.chunks(PANEL).enumerate() {
            let first = part.up + (panel * num_ranks + rank) * PANEL;
            elements[first..first + columns.len()].copy_from_slice(columns);
        }
    }
}

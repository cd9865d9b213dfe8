//! The experts of a layer: the rows of each expert are put together, so that its weights are read once for all of them.

use super::register::{PerRegister, Register};
use super::{gather, has_failed};
use crate::activation::Activation;
use crate::collective::{Collective, Failure};
use crate::element::Element;
use crate::linear::{Combine, Linear, Output, Rows, WideLinear};
use crate::low_rank::{Adapted, MAX_RUN_ROWS, Product, Run};
use crate::pool::{Executor, Target, Walker};
use crate::routing::Routing;
use crate::row;
use crate::simd::{F32, LANES};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// An expert: the first product, of gate and up, and the second.
pub(crate) struct Expert {
    pub(crate) gate_up: Arc<Linear>,
    pub(crate) down: Arc<Linear>,
}

/// What a shared expert adds to a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shared {
    Nothing,
    /// `Shared`
    Plain,
    /// `Shared`, times the sigmoid of `Gate`.
    Gated,
}

/// The distribution of a layer's experts over several ranks.
pub(crate) struct Exchange {
    pub(crate) collective: Arc<Collective>,
    /// Experts of each rank, in the order of ranks: together all experts.
    pub(crate) experts: Vec<Range<usize>>,
}

/// All experts of a layer, of one shape.
pub(crate) struct Experts {
    pub(crate) routing: Routing,
    /// The router if its logits are float32; `None`: they are in `Logits`.
    pub(crate) router: Option<Arc<WideLinear>>,
    /// Experts of this rank.
    pub(crate) experts: Vec<Expert>,
    /// `None`: this rank has all experts.
    pub(crate) exchange: Option<Exchange>,
    /// Activation of the first products; `None`: their layers are gated.
    pub(crate) activation: Option<Activation>,
    /// The first site of adapters, of the first product of this rank's first expert. Its second product has the next one, and the other
    /// experts those after it. `None`: rows have no adapters.
    pub(crate) first_site: Option<usize>,
    pub(crate) shared: Shared,
    /// Index of its first entry in `Routes::ends`.
    pub(crate) first_end: usize,
    pub(crate) from: Register,
    pub(crate) to: Register,
}

/// Assignment of rows to experts. A pair is a row and one of its top-k experts.
#[derive(Default)]
pub(super) struct Routes {
    /// Logits of each row, for a router whose logits are float32.
    logits: Vec<f32>,
    /// Weight of each pair.
    weights: Vec<f32>,
    experts: Vec<i64>,
    /// Place of each pair in the order by expert.
    places: Vec<usize>,
    /// Adapter of the row at each place.
    adapters: Vec<Option<usize>>,
    /// End of each expert's pairs in that order. INVARIANT: the ends decide which kernels are called, so each operation
    /// of a section has its own: a thread may still read them while another thread, which did the work alone, is in a
    /// later operation.
    ends: Vec<usize>,
}

/// The addresses of `Routes`.
#[derive(Clone, Copy)]
pub(super) struct RoutePlaces {
    logits: Target<f32>,
    weights: Target<f32>,
    experts: Target<i64>,
    places: Target<usize>,
    adapters: Target<Option<usize>>,
    ends: Target<usize>,
}

impl Routes {
    /// Makes room for the logits in float32 and the pairs of an operation, and the experts of all.
    pub(super) fn reserve(&mut self, num_logits: usize, num_pairs: usize, num_ends: usize) -> RoutePlaces {
        self.logits.resize(num_logits.max(self.logits.len()), 0.0);
        self.weights.resize(num_pairs.max(self.weights.len()), 0.0);
        self.experts.resize(num_pairs.max(self.experts.len()), 0);
        self.places.resize(num_pairs.max(self.places.len()), 0);
        self.adapters.resize(num_pairs.max(self.adapters.len()), None);
        self.ends.resize(num_ends.max(self.ends.len()), 0);
        RoutePlaces {
            logits: Target::new(self.logits.as_mut_ptr()),
            weights: Target::new(self.weights.as_mut_ptr()),
            experts: Target::new(self.experts.as_mut_ptr()),
            places: Target::new(self.places.as_mut_ptr()),
            adapters: Target::new(self.adapters.as_mut_ptr()),
            ends: Target::new(self.ends.as_mut_ptr()),
        }
    }
}

impl Experts {
    /// Elements of an input and of a result.
    fn hidden(&self) -> usize {
        self.experts[0].down.out_features()
    }

    /// The experts of this rank.
    fn mine(&self) -> Range<usize> {
        let all = 0..self.routing.num_experts;
        self.exchange.as_ref().map_or(all, |exchange| exchange.experts[exchange.collective.rank()].clone())
    }

    pub(super) fn num_pairs(&self, num_rows: usize) -> usize {
        num_rows * self.routing.top_k
    }

    /// Most phases that it takes of a section.
    pub(super) fn max_phases(&self, num_rows: usize) -> usize {
        // Logits, routing, order, copies, exchange, sums, and what adapters add to both products; inputs of each product may be quantized
        // first, and an activation follows the first.
        8 + 5 * self.experts.len().min(self.num_pairs(num_rows))
    }

    pub(super) fn scratch_bytes(&self, num_rows: usize) -> usize {
        let of_expert =
            |expert: &Expert| expert.gate_up.scratch_bytes(num_rows).max(expert.down.scratch_bytes(num_rows));
        self.experts.iter().map(of_expert).max().unwrap_or(0)
    }

    /// Runs all experts on their rows, up to a failed exchange between ranks, which it reports in `failure`.
    ///
    /// # Safety
    /// The registers must have `num_rows` rows of the widths that `Program::experts` checks, `routes` and `scratch` room for them.
    /// `adapted` must have room for their pairs, and its adapters fit the sites.
    #[expect(clippy::too_many_arguments, reason = "all that a step has")]
    pub(super) unsafe fn run(
        &self,
        walker: &Walker<'_>,
        num_rows: usize,
        registers: &PerRegister<Target<Element>>,
        routes: &RoutePlaces,
        adapted: &Adapted<'_>,
        scratch: Target<u8>,
        failure: &OnceLock<Failure>,
    ) {
        let &Routing { top_k, scales_inputs, .. } = &self.routing;
        let (hidden, routed) = (self.hidden(), registers[Register::Routed as usize]);
        let inputs = registers[self.from as usize];
        // SAFETY: the caller vouches for registers and routes. In each phase, a row or pair is one thread's, and the next phase reads what
        // this one wrote.
        unsafe {
            self.route(walker, Rows { address: inputs.source(), stride: hidden, num_rows }, registers, routes);
            walker.for_each(1, |_| self.order(num_rows, routes));
            walker.for_ranges(num_rows, 4, |range| {
                let mine = self.places_of(self.mine(), routes);
                for pair in range.start * top_k..range.end * top_k {
                    let place = routes.places.at(pair).read();
                    if mine.contains(&place) {
                        if self.first_site.is_some() {
                            routes.adapters.at(place).write(adapted.of_row(pair / top_k));
                        }
                        let target = routed.at(place * hidden);
                        target.copy_from_nonoverlapping(inputs.at(pair / top_k * hidden), hidden);
                        if scales_inputs {
                            // The product of two elements, as torch computes it.
                            let weight = Element::from_f32(routes.weights.at(pair).read());
                            row::scale(target, weight.to_f32(), hidden);
                        }
                    }
                }
            });
            match self.first_site.zip(self.activation.as_ref()) {
                None => self.multiply(walker, registers, routes, scratch),
                Some((first, activation)) => {
                    self.multiply_adapted(walker, registers, routes, scratch, adapted, first, activation);
                }
            }
            if let Some(Exchange { collective, experts }) = &self.exchange {
                // One row: the places of the ranks one after the other.
                let bytes = |places: Range<usize>| places.len() * hidden * size_of::<Element>();
                let widths =
                    || experts.iter().map(|each| bytes(self.places_of(each.clone(), routes))).collect::<Vec<_>>();
                let first = self.places_of(self.mine(), routes).start;
                gather(walker, collective, widths, 1, Target::new(routed.at(first * hidden)), routed, failure);
                if has_failed(failure) {
                    return;
                }
            }
            walker.for_ranges(num_rows, 4, |range| range.for_each(|row| self.sum(row, registers, routes)));
        }
    }

    /// Chooses the experts of each row.
    unsafe fn route(
        &self,
        walker: &Walker<'_>,
        inputs: Rows,
        registers: &PerRegister<Target<Element>>,
        routes: &RoutePlaces,
    ) {
        let &Routing { num_experts, top_k, .. } = &self.routing;
        let (logits, wide_logits) = (registers[Register::Logits as usize], routes.logits);
        // SAFETY: as for `run`.
        unsafe {
            if let Some(router) = &self.router {
                router.apply(walker, inputs, wide_logits);
            }
            walker.for_ranges(inputs.num_rows, 4, |range| {
                for row in range {
                    let (experts, weights) = (routes.experts.at(row * top_k), routes.weights.at(row * top_k));
                    let at = |expert: usize| row * num_experts + expert;
                    if self.router.is_some() {
                        let logit = |expert: usize| f64::from(wide_logits.at(at(expert)).read());
                        self.routing.apply_row(logit, experts, weights);
                    } else {
                        let logit = |expert: usize| f64::from(logits.at(at(expert)).read().to_f32());
                        self.routing.apply_row(logit, experts, weights);
                    }
                }
            });
        }
    }

    /// Orders the pairs by expert, and those of an expert by row.
    unsafe fn order(&self, num_rows: usize, routes: &RoutePlaces) {
        let num_pairs = self.num_pairs(num_rows);
        // SAFETY: as for `run`.
        unsafe {
            let ends = std::slice::from_raw_parts_mut(routes.ends.at(self.first_end), self.routing.num_experts);
            let experts = std::slice::from_raw_parts(routes.experts.at(0), num_pairs);
            let places = std::slice::from_raw_parts_mut(routes.places.at(0), num_pairs);
            let mut counts = vec![0; ends.len()];
            experts.iter().for_each(|&expert| counts[expert as usize] += 1);
            // Starts at first; each pair moves its expert's on.
            let mut total = 0;
            for (end, count) in ends.iter_mut().zip(counts) {
                *end = total;
                total += count;
            }
            for (place, &expert) in places.iter_mut().zip(experts) {
                *place = ends[expert as usize];
                ends[expert as usize] += 1;
            }
        }
    }

    /// The places of the pairs of consecutive experts.
    unsafe fn places_of(&self, experts: Range<usize>, routes: &RoutePlaces) -> Range<usize> {
        let start = |expert: usize| match expert.checked_sub(1) {
            None => 0,
            // SAFETY: as for `run`; the ends are written once in a step.
            Some(before) => unsafe { routes.ends.at(self.first_end + before).read() },
        };
        start(experts.start)..start(experts.end)
    }

    /// Replaces the inputs in `Routed` by the outputs of this rank's experts.
    unsafe fn multiply(
        &self,
        walker: &Walker<'_>,
        registers: &PerRegister<Target<Element>>,
        routes: &RoutePlaces,
        scratch: Target<u8>,
    ) {
        let (hidden, routed) = (self.hidden(), registers[Register::Routed as usize]);
        let [inner, activated] = [Register::Inner, Register::Activated].map(|register| registers[register as usize]);
        for (Expert { gate_up, down }, expert) in self.experts.iter().zip(self.mine()) {
            // SAFETY: as for `run`; every thread reads the same ends, so all make the same calls.
            unsafe {
                let Range { start: first, end } = self.places_of(expert..expert + 1, routes);
                if first == end {
                    continue;
                }
                let (num_rows, rows) = (end - first, Target::new(routed.at(first * hidden)));
                let activated = Target::new(activated.at(first * down.in_features()));
                let input = Rows { address: rows.source(), stride: hidden, num_rows };
                if let Some(activation) = &self.activation {
                    let width = gate_up.output_columns();
                    let inner = Target::new(inner.at(first * width));
                    gate_up.apply(walker, input, Output::store(inner, width), scratch);
                    activation.apply(walker, (inner.source(), width), activated, width, num_rows);
                } else {
                    gate_up.apply(walker, input, Output::store(activated, down.in_features()), scratch);
                }
                let input = Rows { address: activated.source(), stride: down.in_features(), num_rows };
                down.apply(walker, input, Output::store(rows, hidden), scratch);
            }
        }
    }

    /// Like `multiply`, plus what the rows' adapters add to both products. PERF: one phase adds to a product of all
    /// experts, because the products of adapters are small.
    #[expect(clippy::too_many_arguments, reason = "all that a step has")]
    unsafe fn multiply_adapted(
        &self,
        walker: &Walker<'_>,
        registers: &PerRegister<Target<Element>>,
        routes: &RoutePlaces,
        scratch: Target<u8>,
        adapted: &Adapted<'_>,
        first_site: usize,
        activation: &Activation,
    ) {
        let hidden = self.hidden();
        let [routed, inner, activated] =
            [Register::Routed, Register::Inner, Register::Activated].map(|register| registers[register as usize]);
        let narrow = self.experts[0].down.in_features();
        let wide = self.experts[0].gate_up.out_features();
        // SAFETY: as for `run`. A place is one thread's in each phase; every thread reads the same ends, so all make the same calls.
        unsafe {
            let mine = self.places_of(self.mine(), routes);
            let rows_of = |from: Target<Element>, width: usize, places: &Range<usize>| Rows {
                address: Target::new(from.at(places.start * width)).source(),
                stride: width,
                num_rows: places.len(),
            };
            let each = || self.experts.iter().zip(self.mine().map(|expert| self.places_of(expert..expert + 1, routes)));
            for (Expert { gate_up, .. }, places) in each().filter(|(_, places)| !places.is_empty()) {
                let combine = if gate_up.is_gated() { Combine::Apart } else { Combine::Store };
                let output = Output { address: Target::new(inner.at(places.start * wide)), stride: wide, combine };
                gate_up.apply(walker, rows_of(routed, hidden, &places), output, scratch);
            }
            let all = mine.start..mine.end;
            walker.for_ranges(all.len(), 1, |range| {
                let range = mine.start + range.start..mine.start + range.end;
                let rows = Rows { address: routed.source(), stride: hidden, num_rows: range.end };
                let product = Product { rows, y: inner, out_columns: wide };
                self.adapt(range.clone(), routes, adapted, first_site, product);
                for place in range {
                    activation.apply_row(inner.at(place * wide), activated.at(place * narrow), wide);
                }
            });
            for (Expert { down, .. }, places) in each().filter(|(_, places)| !places.is_empty()) {
                let output = Output::store(Target::new(routed.at(places.start * hidden)), hidden);
                down.apply(walker, rows_of(activated, narrow, &places), output, scratch);
            }
            walker.for_ranges(all.len(), 1, |range| {
                let range = mine.start + range.start..mine.start + range.end;
                let rows = Rows { address: activated.source(), stride: narrow, num_rows: range.end };
                let product = Product { rows, y: routed, out_columns: hidden };
                self.adapt(range, routes, adapted, first_site + 1, product);
            });
        }
    }

    /// Adds to a product of some of this rank's places what their rows' adapters add, on the calling thread.
    /// `first_site`: the site of the first expert.
    unsafe fn adapt(
        &self,
        range: Range<usize>,
        routes: &RoutePlaces,
        adapted: &Adapted<'_>,
        first_site: usize,
        product: Product,
    ) {
        for (index, expert) in self.mine().enumerate() {
            // SAFETY: as for `run`.
            unsafe {
                let places = self.places_of(expert..expert + 1, routes);
                let (mut first, end) = (places.start.max(range.start), places.end.min(range.end));
                while first < end {
                    let adapter = routes.adapters.at(first).read();
                    let is_other = |&place: &usize| routes.adapters.at(place).read() != adapter;
                    let next = (first + 1..end.min(first + MAX_RUN_ROWS)).find(is_other);
                    let next = next.unwrap_or(end.min(first + MAX_RUN_ROWS));
                    if let Some(adapter) = adapter {
                        let run = Run { first, num_rows: next - first, adapter };
                        adapted.apply_run(run, first_site + 2 * index, product);
                    }
                    first = next;
                }
            }
        }
    }

    /// The weighted sum of a row's experts in float32, in the order of their weights, and the shared expert.
    unsafe fn sum(&self, row: usize, registers: &PerRegister<Target<Element>>, routes: &RoutePlaces) {
        let (hidden, &Routing { top_k, scales_inputs, .. }) = (self.hidden(), &self.routing);
        let at = |register: Register, index: usize| registers[register as usize].at(index);
        // SAFETY: as for `run`.
        unsafe {
            let factor = match self.shared {
                Shared::Gated => 1.0 / (1.0 + (-f64::from(at(Register::Gate, row).read().to_f32())).exp()),
                Shared::Plain | Shared::Nothing => 1.0,
            };
            for first in (0..hidden).step_by(LANES) {
                let count = hidden - first;
                let mut total = F32::splat(0.0);
                for pair in row * top_k..(row + 1) * top_k {
                    let result = at(Register::Routed, routes.places.at(pair).read() * hidden + first);
                    let weight = if scales_inputs { 1.0 } else { routes.weights.at(pair).read() };
                    total = total + Element::load_first(result, count) * F32::splat(weight);
                }
                if self.shared != Shared::Nothing {
                    let shared = Element::load_first(at(Register::Shared, row * hidden + first), count);
                    total = total + shared * F32::splat(factor as f32);
                }
                Element::store_first(total, at(self.to, row * hidden + first), count);
            }
        }
    }
}

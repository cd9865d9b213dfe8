//! Writes the operations of a stack, and checks that each finds what it needs: the widths of registers, and rows of the step.

use super::experts::{Exchange, Expert, Experts, Shared};
use super::operation::{Operation, Pieces, RowOperation, Tables};
use super::register::{PerRegister, Register};
use super::{Buffers, Cache, Stack};
use crate::activation::Activation;
use crate::attention::{Attention, KvScales, Layout};
use crate::collective::Collective;
use crate::element::Element;
use crate::linear::{Combine, Linear};
use crate::norm::Norm;
use crate::pool::Source;
use crate::recurrence::Recurrence;
use crate::rotate::Pairs;
use std::sync::{Arc, Mutex};

/// Rotary embedding: tables [num_positions, half].
#[derive(Clone, Copy)]
pub(crate) struct Rotation {
    pub(crate) cos: Source<f32>,
    pub(crate) sin: Source<f32>,
    pub(crate) num_positions: usize,
    pub(crate) half: usize,
    pub(crate) pairs: Pairs,
}

/// A stack that is being written. Each method appends an operation, or says why it does not fit.
pub(crate) struct Program {
    stack: Stack,
    /// Present elements per row of each register; `None`: it has not been written.
    widths: PerRegister<Option<usize>>,
    has_selected: bool,
}

impl Program {
    /// A stack without operations over residuals of `hidden` elements.
    pub(crate) fn new(hidden: usize) -> Program {
        let stack = Stack {
            operations: Vec::new(),
            widths: PerRegister::default(),
            attentions: Vec::new(),
            caches: Vec::new(),
            max_top_k: 0,
            max_wide_logits: 0,
            num_experts: 0,
            max_adapted_rows: 1,
            sites: Vec::new(),
            num_positions: usize::MAX,
            buffers: Mutex::<Buffers>::default(),
        };
        let mut program = Program { stack, widths: PerRegister::default(), has_selected: false };
        program.set_width(Register::Residual, hidden);
        program
    }

    /// to = linear(from), or to += linear(from), or the gates and ups of a gated layer.
    pub(crate) fn linear(
        &mut self,
        linear: Arc<Linear>,
        from: Register,
        to: Register,
        combine: Combine,
    ) -> Result<(), String> {
        self.expect(from, linear.in_features(), "a linear layer's input")?;
        expect_different(from, to)?;
        match combine {
            Combine::Add if linear.is_gated() => {
                return Err("the product of a gated layer cannot be added to a register".to_owned());
            }
            Combine::Apart if !linear.is_gated() => return Err("only a gated layer has gates and ups".to_owned()),
            Combine::Add => self.expect(to, linear.output_columns(), "a linear layer's output")?,
            Combine::Store => self.assign(to, linear.output_columns())?,
            Combine::Apart => self.assign(to, linear.out_features())?,
        }
        self.stack.operations.push(Operation::Linear { linear, from, to, combine });
        Ok(())
    }

    /// Adds to `to`, the product of a layer with `from`, what the rows' adapters add to that layer at site `site`.
    /// `heads`: number of heads, and the columns of each in `from` and in `to`; each head has a layer and a site.
    pub(crate) fn adapt(
        &mut self,
        site: usize,
        from: Register,
        to: Register,
        heads: Option<(usize, [usize; 2])>,
    ) -> Result<(), String> {
        let widths = [self.width(from)?, self.width(to)?];
        expect_different(from, to)?;
        let (num_heads, steps) = heads.unwrap_or((1, widths));
        let is_inside = |(step, width): (&usize, &usize)| num_heads.checked_mul(*step).is_some_and(|end| end <= *width);
        if !steps.iter().zip(&widths).all(is_inside) {
            return Err(format!("{num_heads} heads of {steps:?} columns in registers of {widths:?}"));
        }
        let sites = site..site.checked_add(num_heads).ok_or("too many sites")?;
        self.stack.sites.extend(sites.clone().map(|site| (site, steps)));
        self.stack.operations.push(Operation::Adapt { sites, from, to, steps, widths, then: Vec::new() });
        Ok(())
    }

    /// Gives a register a width, so that other operations write its columns.
    pub(crate) fn reserve(&mut self, register: Register, width: usize) -> Result<(), String> {
        self.assign(register, width)
    }

    /// Applies a dense layer to each head: the columns of a head in `from` follow each other, and its results begin `step` columns of `to`
    /// after those of the head before.
    pub(crate) fn heads(
        &mut self,
        linears: Vec<Arc<Linear>>,
        from: Register,
        to: Register,
        step: usize,
    ) -> Result<(), String> {
        expect_different(from, to)?;
        let widths = [self.width(from)?, self.width(to)?];
        let Some((count, first)) = linears.len().checked_sub(1).zip(linears.first()) else {
            return Err("there are no heads".to_owned());
        };
        let (inputs, outputs) = (first.in_features(), first.output_columns());
        let is_alike = |linear: &Arc<Linear>| {
            matches!(**linear, Linear::Dense(_))
                && (linear.in_features(), linear.output_columns()) == (inputs, outputs)
                && !linear.is_gated()
        };
        if !linears.iter().all(is_alike) {
            return Err(format!("heads do not all have a dense layer from {inputs} columns to {outputs}"));
        }
        let end = count.checked_mul(step).and_then(|start| start.checked_add(outputs));
        if linears.len() * inputs > widths[0] || end.is_none_or(|end| end > widths[1]) || step < outputs {
            let count = linears.len();
            return Err(format!(
                "{count} heads do not fit: {inputs} columns each to {outputs}, {step} apart: {widths:?}"
            ));
        }
        self.stack.operations.push(Operation::Heads { linears, from, to, step, widths });
        Ok(())
    }

    /// Copies `count` pieces of `width` columns, given the first one's column and the distance to the next one.
    pub(crate) fn copy(
        &mut self,
        from: (Register, usize, usize),
        to: (Register, usize, usize),
        count: usize,
        width: usize,
    ) -> Result<(), String> {
        expect_different(from.0, to.0)?;
        let pieces = |(register, first, step): (Register, usize, usize)| {
            let stride = self.width(register)?;
            let last = count.checked_sub(1).and_then(|before| before.checked_mul(step)?.checked_add(first));
            match last.and_then(|last| last.checked_add(width)) {
                Some(end) if end <= stride => Ok(Pieces { register, first, step, stride }),
                _ => Err(format!("{register:?} has {stride} columns, not {count} pieces of {width}, {step} apart")),
            }
        };
        let (from, to) = (pieces(from)?, pieces(to)?);
        self.push_row(RowOperation::Copy { from, to, count, width });
        Ok(())
    }

    /// Copies `count` heads of `width` columns, which follow each other, to heads of `step` columns, whose last columns become zero.
    pub(crate) fn pad(
        &mut self,
        from: Register,
        to: Register,
        count: usize,
        width: usize,
        step: usize,
    ) -> Result<(), String> {
        expect_different(from, to)?;
        let (Some(given), Some(padded)) = (count.checked_mul(width), count.checked_mul(step)) else {
            return Err(format!("{count} heads of {width} or {step} columns are too many"));
        };
        self.expect(from, given, "heads to be padded")?;
        if step < width {
            return Err(format!("heads of {width} columns cannot be padded to {step}"));
        }
        self.assign(to, padded)?;
        self.push_row(RowOperation::Pad { from, to, count, width, step });
        Ok(())
    }

    /// Column i of `to` becomes column `order[i]` of `from`, which may be there several times.
    pub(crate) fn reorder(&mut self, order: Arc<[u32]>, from: Register, to: Register) -> Result<(), String> {
        let width = self.width(from)?;
        expect_different(from, to)?;
        if let Some(column) = order.iter().find(|&&column| column as usize >= width) {
            return Err(format!("an order of columns has column {column}, but {from:?} has {width}"));
        }
        self.assign(to, order.len())?;
        self.push_row(RowOperation::Reorder { order, width, from, to });
        Ok(())
    }

    /// to = norm(from)
    pub(crate) fn norm(&mut self, norm: Arc<Norm>, from: Register, to: Register) -> Result<(), String> {
        let width = norm.dim();
        self.expect(from, width, "a norm")?;
        if !norm.fits(1) {
            return Err("a norm of rows has weights for several heads".to_owned());
        }
        self.assign(to, width)?;
        self.push_row(RowOperation::Norm { norm, from, to });
        Ok(())
    }

    /// Norms in place `num_groups` groups of columns, from column `first` on.
    pub(crate) fn norm_heads(
        &mut self,
        norm: Arc<Norm>,
        register: Register,
        first: usize,
        num_groups: usize,
    ) -> Result<(), String> {
        let stride = self.width(register)?;
        let end = num_groups.checked_mul(norm.dim()).and_then(|width| width.checked_add(first));
        if end.is_none_or(|end| end > stride) || !norm.fits(num_groups) {
            return Err(format!("a norm of {num_groups} groups of {} does not fit {stride} columns", norm.dim()));
        }
        self.push_row(RowOperation::NormHeads { norm, register, first, num_groups, stride });
        Ok(())
    }

    /// to = activation(from)
    pub(crate) fn activate(&mut self, activation: Activation, from: Register, to: Register) -> Result<(), String> {
        let width = self.width(from)?;
        expect_different(from, to)?;
        if activation.is_gate && !width.is_multiple_of(2) {
            return Err(format!("a gate and its factor have {width} columns, must be an even number"));
        }
        self.assign(to, activation.output_columns(width))?;
        self.push_row(RowOperation::Activate { activation, from, to, width });
        Ok(())
    }

    /// register *= factor
    pub(crate) fn scale(&mut self, register: Register, factor: f32) -> Result<(), String> {
        let width = self.width(register)?;
        self.push_row(RowOperation::Scale { register, factor, width });
        Ok(())
    }

    /// Clamps a register to ± `bound`.
    pub(crate) fn clamp(&mut self, register: Register, bound: f32) -> Result<(), String> {
        let width = self.width(register)?;
        self.push_row(RowOperation::Clamp { register, bound, width });
        Ok(())
    }

    /// to += from
    pub(crate) fn add(&mut self, from: Register, to: Register) -> Result<(), String> {
        let width = self.width(from)?;
        expect_different(from, to)?;
        self.expect(to, width, "a sum")?;
        self.push_row(RowOperation::Add { from, to, width });
        Ok(())
    }

    /// Rotates queries and keys of an attention in place; if keys contain values, the elements behind these.
    pub(crate) fn rotate(&mut self, attention: &Attention, rotation: Rotation) -> Result<(), String> {
        let Layout { num_heads, num_kv_heads, head_dim, value_dim, values_in_keys, .. } = attention.layout;
        let first = if values_in_keys { value_dim } else { 0 };
        let stride = self.expect_qkv(attention)?;
        let Rotation { cos, sin, num_positions, half, pairs } = rotation;
        if half > (head_dim - first) / 2 {
            let rotated = head_dim - first;
            return Err(format!("cos has {half} columns, must have at most half of the {rotated} of a head"));
        }
        let tables = Tables { cos, sin, half, pairs };
        self.stack.num_positions = self.stack.num_positions.min(num_positions);
        // The keys follow the queries.
        self.push_row(RowOperation::Rotate { tables, first, num_heads: num_heads + num_kv_heads, head_dim, stride });
        Ok(())
    }

    /// Scales the queries of an attention by their positions: a position's factor is `factors[(position + 1) / period]`.
    pub(crate) fn scale_queries(
        &mut self,
        attention: &Attention,
        factors: (Source<f32>, usize),
        period: usize,
    ) -> Result<(), String> {
        let Layout { num_heads, head_dim, .. } = attention.layout;
        let stride = self.expect_qkv(attention)?;
        let (factors, num_factors) = factors;
        let num_positions = num_factors.checked_mul(period).and_then(|end| end.checked_sub(1));
        let num_positions =
            num_positions.ok_or_else(|| format!("{num_factors} factors for {period} positions each"))?;
        self.stack.num_positions = self.stack.num_positions.min(num_positions);
        self.push_row(RowOperation::ScaleQueries { factors, period, width: num_heads * head_dim, stride });
        Ok(())
    }

    /// Stores keys and values in the next cache, which belongs to this attention.
    pub(crate) fn write(&mut self, attention: &Arc<Attention>, scales: KvScales) -> Result<(), String> {
        let layout = attention.layout;
        if (layout.value_dim != layout.head_dim && !layout.values_in_keys) || attention.has_relative_bias {
            return Err(
                "a stack's values are as wide as its keys or in them, and its scores have no learned bias".to_owned()
            );
        }
        let stride = self.expect_qkv(attention)?;
        let attentions = &mut self.stack.attentions;
        let index = attentions.iter().position(|known| Arc::ptr_eq(known, attention)).unwrap_or_else(|| {
            attentions.push(Arc::clone(attention));
            attentions.len() - 1
        });
        let cache = self.stack.caches.len();
        self.stack.caches.push(Cache::Kv { attention: index, scales });
        self.push_row(RowOperation::Write { layout, cache, stride, scales });
        Ok(())
    }

    /// Attention of the queries over the cache that was written last. `sinks`: as many as its heads.
    pub(crate) fn attend(&mut self, sinks: Option<(Source<Element>, usize)>) -> Result<(), String> {
        let Some((cache, &Cache::Kv { attention: index, scales })) = self.stack.caches.iter().enumerate().next_back()
        else {
            return Err("attention needs a cache that was written".to_owned());
        };
        let attention = Arc::clone(&self.stack.attentions[index]);
        let stride = self.expect_qkv(&attention)?;
        if let Some((_, given)) = sinks.filter(|&(_, given)| given != attention.layout.num_heads) {
            return Err(format!("there are {given} sinks for {} heads", attention.layout.num_heads));
        }
        let sinks = sinks.map(|(address, _)| address);
        self.assign(Register::Attended, attention.layout.num_heads * attention.layout.value_dim)?;
        self.stack.operations.push(Operation::Attend { cache, attention: index, scales, stride, sinks });
        Ok(())
    }

    /// Advances the states in the next cache by `from`, to `to`.
    pub(crate) fn advance_states(
        &mut self,
        net: Arc<dyn Recurrence>,
        from: Vec<Register>,
        to: Register,
    ) -> Result<(), String> {
        self.expect_tokens()?;
        if from.len() != net.input_widths().len() {
            return Err(format!("a layer with {} inputs got {}", net.input_widths().len(), from.len()));
        }
        for (register, width) in from.iter().zip(net.input_widths()) {
            expect_different(*register, to)?;
            self.expect(*register, *width, "an input of a layer that keeps a state")?;
        }
        self.assign(to, net.output_width())?;
        let cache = self.stack.caches.len();
        self.stack.caches.push(Cache::States(Arc::clone(&net)));
        self.stack.operations.push(Operation::AdvanceStates { net, cache, from, to });
        Ok(())
    }

    /// to *= activation(from), which overwrites `from`.
    pub(crate) fn gate(&mut self, activation: Activation, from: Register, to: Register) -> Result<(), String> {
        let width = self.width(from)?;
        expect_different(from, to)?;
        self.expect(to, width, "what is gated")?;
        if activation.is_gate {
            return Err("an activation with a gate of its own cannot be one".to_owned());
        }
        self.push_row(RowOperation::Gate { activation, from, to, width });
        Ok(())
    }

    /// to = the columns of `from` on all ranks side by side. `widths`: the columns of each rank.
    pub(crate) fn gather(
        &mut self,
        collective: Arc<Collective>,
        widths: &[usize],
        from: Register,
        to: Register,
    ) -> Result<(), String> {
        if widths.len() != collective.size() {
            return Err(format!("there are {} widths for {} ranks", widths.len(), collective.size()));
        }
        self.expect(from, widths[collective.rank()], "this rank's part of a gather")?;
        expect_different(from, to)?;
        let total = widths.iter().try_fold(0, |sum: u32, &width| sum.checked_add(u32::try_from(width).ok()?));
        let total = total.ok_or_else(|| format!("a gather has at most {} columns", u32::MAX))?;
        self.assign(to, total as usize)?;
        let widths = widths.iter().map(|width| width * size_of::<Element>()).collect();
        self.stack.operations.push(Operation::Gather { collective, widths, from, to });
        Ok(())
    }

    /// to = the weighted sum of the experts of each row of `from`, by the logits in `Logits`, and what the shared expert adds.
    pub(crate) fn experts(&mut self, experts: Experts) -> Result<(), String> {
        let Experts { routing, router, experts: each, exchange, activation, first_site, shared, from, to, .. } =
            &experts;
        let (num_experts, top_k) = (routing.num_experts, routing.top_k);
        let num_mine = match exchange {
            None => num_experts,
            Some(Exchange { collective, experts }) => {
                let are_consecutive = experts.windows(2).all(|pair| pair[0].end == pair[1].start);
                let are_all = experts.first().map(|all| all.start) == Some(0)
                    && experts.last().map(|all| all.end) == Some(num_experts);
                if experts.len() != collective.size() || !are_consecutive || !are_all {
                    return Err(format!("{experts:?} are not {num_experts} experts of {} ranks", collective.size()));
                }
                experts[collective.rank()].len()
            }
        };
        if each.is_empty() || each.len() != num_mine || !(1..=num_experts).contains(&top_k) {
            return Err(format!("a row goes to {top_k} of {num_experts} experts, and there are {}", each.len()));
        }
        let (hidden, inner) = (each[0].down.out_features(), each[0].down.in_features());
        let width = if activation.is_some_and(|activation| activation.is_gate) { 2 * inner } else { inner };
        // What adapters change is activated afterwards, so gated layers store their gates and ups.
        let stored =
            |gate_up: &Linear| if first_site.is_some() { gate_up.out_features() } else { gate_up.output_columns() };
        let is_alike = |Expert { gate_up, down }: &Expert| {
            (gate_up.is_gated() == activation.is_none() || (first_site.is_some() && activation.is_some()))
                && !down.is_gated()
                && (gate_up.in_features(), stored(gate_up)) == (hidden, width)
                && (down.in_features(), down.out_features()) == (inner, hidden)
        };
        if !each.iter().all(is_alike) {
            return Err(format!("experts are not all alike, from {hidden} columns to {inner} and back"));
        }
        self.expect(*from, hidden, "the experts' input")?;
        match router {
            None => self.expect(Register::Logits, num_experts, "the router's logits")?,
            Some(router) if (router.in_features(), router.out_features()) == (hidden, num_experts) => {}
            Some(_) => return Err(format!("the router is not from {hidden} columns to {num_experts} experts")),
        }
        if *shared != Shared::Nothing {
            self.expect(Register::Shared, hidden, "the shared expert's output")?;
        }
        if *shared == Shared::Gated {
            self.expect(Register::Gate, 1, "the shared expert's gate")?;
        }
        for register in [Register::Routed, Register::Inner, Register::Activated] {
            expect_different(*from, register)?;
            expect_different(*to, register)?;
        }
        self.assign(Register::Routed, top_k * hidden)?;
        if activation.is_some() {
            self.assign(Register::Inner, top_k * width)?;
        }
        self.assign(Register::Activated, top_k * inner)?;
        self.assign(*to, hidden)?;
        self.stack.max_top_k = self.stack.max_top_k.max(top_k);
        if router.is_some() {
            self.stack.max_wide_logits = self.stack.max_wide_logits.max(num_experts);
        }
        if let Some(first) = *first_site {
            let end = first.checked_add(2 * each.len()).ok_or("too many sites")?;
            let sizes = [[hidden, width], [inner, hidden]];
            self.stack.sites.extend((first..end).zip(sizes.into_iter().cycle()));
            self.stack.max_adapted_rows = self.stack.max_adapted_rows.max(top_k);
        }
        let first_end = self.stack.num_experts;
        self.stack.num_experts += num_experts;
        self.stack.operations.push(Operation::Experts(Experts { first_end, ..experts }));
        Ok(())
    }

    /// Keeps only the sampled rows, and only of these registers.
    pub(crate) fn select(&mut self, registers: &[Register]) -> Result<(), String> {
        self.expect_tokens()?;
        let kept = registers.iter().map(|&register| Ok((register, self.width(register)?)));
        let kept = kept.collect::<Result<Vec<_>, String>>()?;
        self.widths = PerRegister::default();
        for &(register, width) in &kept {
            self.widths[register as usize] = Some(width);
        }
        self.has_selected = true;
        self.stack.operations.push(Operation::Select(kept));
        Ok(())
    }

    /// The stack, once its output is written.
    pub(crate) fn finish(self) -> Result<Stack, String> {
        if self.widths[Register::Output as usize] != Some(self.stack.hidden()) {
            return Err(format!("a stack must output {} columns", self.stack.hidden()));
        }
        Ok(self.stack)
    }

    fn push_row(&mut self, operation: RowOperation) {
        match self.stack.operations.last_mut() {
            Some(Operation::Rows(of_row) | Operation::Adapt { then: of_row, .. }) => of_row.push(operation),
            _ => self.stack.operations.push(Operation::Rows(vec![operation])),
        }
    }

    fn width(&self, register: Register) -> Result<usize, String> {
        self.widths[register as usize].ok_or_else(|| format!("{register:?} is read before it is written"))
    }

    fn expect(&self, register: Register, width: usize, what: &str) -> Result<(), String> {
        match self.width(register)? {
            given if given == width => Ok(()),
            given => Err(format!("{register:?} has {given} columns, {what} must have {width}")),
        }
    }

    /// Checks that rows are the step's tokens, which have a position and a slot.
    fn expect_tokens(&self) -> Result<(), String> {
        if self.has_selected { Err("only the sampled rows are left".to_owned()) } else { Ok(()) }
    }

    /// Checks that `Qkv` has the heads of an attention, and returns its width. Values that are in keys are not stored apart.
    fn expect_qkv(&self, attention: &Attention) -> Result<usize, String> {
        let Layout { num_heads, num_kv_heads, head_dim, values_in_keys, .. } = attention.layout;
        let width = (num_heads + if values_in_keys { 1 } else { 2 } * num_kv_heads) * head_dim;
        self.expect_tokens()?;
        self.expect(Register::Qkv, width, "queries, keys and values")?;
        Ok(width)
    }

    /// A register is overwritten by rows of this width.
    fn assign(&mut self, register: Register, width: usize) -> Result<(), String> {
        let is_residual = register == Register::Residual;
        if is_residual && width != self.stack.hidden() {
            return Err(format!("the residual has {} columns, not {width}", self.stack.hidden()));
        }
        if register == Register::Output && !self.has_selected {
            return Err("the output has sampled rows only".to_owned());
        }
        self.set_width(register, width);
        Ok(())
    }

    fn set_width(&mut self, register: Register, width: usize) {
        let largest = &mut self.stack.widths[register as usize];
        *largest = width.max(*largest);
        self.widths[register as usize] = Some(width);
    }
}

fn expect_different(from: Register, to: Register) -> Result<(), String> {
    if from == to { Err(format!("{from:?} cannot be both input and output")) } else { Ok(()) }
}

"""Runs a program with the operators of a device, one operation after the other.

Before, it is rewritten for fewer launches: a norm joins the addition before it, and what is done to queries and keys
joins the write of an attention that can do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock_server.device.attention import interface
from penstock_server.device.attention.interface import LatentQueries, Rotation, Transform
from penstock_server.device.ops import Ops, PackedNorm, Summand
from penstock_server.device.reference.ops import TorchNorm
from penstock_server.layers import operation as op
from penstock_server.layers.operation import Operation, Program, Register
from penstock_server.layers.step import StepContext


@dataclass(frozen=True, slots=True)
class AddAndNorm(Operation):
    """An addition, and the norm of its sum."""

    add: op.Add
    norm: PackedNorm

    @property
    def reads(self) -> tuple[Register, ...]:
        return self.add.reads


@dataclass(frozen=True, slots=True)
class TransformAndWrite(Operation):
    """Clamps, norms and rotates as it writes. Queries change in place, keys and values as they are stored."""

    write: op.Write
    clamp: op.Clamp | None
    norms: op.NormHeads | None
    rotate: op.Rotate | None


def rewritten(operations: Sequence[Operation]) -> list[Operation]:
    """The same in fewer launches."""
    found: list[Operation] = []
    for operation in operations:
        last = found[-1] if found else None
        if (
            isinstance(operation, op.Norm)
            and isinstance(last, op.Add)
            and operation.source == last.target == "residual"
        ):
            found[-1] = AddAndNorm(last.source, operation.target, last, operation.norm)
        elif isinstance(operation, op.Write) and operation.attention.transforms:
            found.append(_with_transform(operation, found))
        else:
            found.append(operation)
    return found


def _with_transform(write: op.Write, before: list[Operation]) -> Operation:
    """The write with what ends `before` and an attention can do as it writes, which is removed from there."""
    clamp: op.Clamp | None = None
    norms: op.NormHeads | None = None
    rotate: op.Rotate | None = None
    while clamp is None and before:
        last = before[-1]
        follows = norms is not None and norms.fused is not None and norms.fused.follows_rotation
        if isinstance(last, op.Clamp) and last.target == write.source:
            clamp = last
        elif isinstance(last, op.Rotate) and rotate is None and (norms is None or follows):
            rotate = last
        elif isinstance(last, op.NormHeads) and norms is None and last.fused is not None:
            if rotate is not None and last.fused.follows_rotation:
                break
            norms = last
        else:
            break
        before.pop()
    return TransformAndWrite(write.source, write.target, write, clamp, norms, rotate)


class Interpreter:
    """Runs a program on any device. Implements `Executor`."""

    def __init__(self, program: Program, ops: Ops) -> None:
        self._ops = ops
        visited = program.operations
        plain = [operation for operation in visited if not isinstance(operation, op.Visit)]
        self._steps = {visits: _with_ends(rewritten(each)) for visits, each in ((True, visited), (False, plain))}
        self._output = program.operations[-1]
        self._selects = any(isinstance(operation, op.Select) for operation in visited)

    def run(self, residual: Tensor, caches: Sequence[Tensor], step: StepContext, *, visits: bool = False) -> Tensor:
        steps, run = self._steps[visits], Run(self._ops, residual, caches, step)
        if len(step.batch.sample_rows) or not self._selects:
            for operation, ended in steps:
                run.apply(operation)
                for register in ended:
                    del run.registers[register]
        else:  # what follows the last write to a cache has no reader
            last = max((index for index, (operation, _) in enumerate(steps) if _writes(operation)), default=-1)
            for operation, _ in steps[: last + 1]:
                run.apply(operation)
            run.registers["residual"] = residual[:0]
            run.apply(self._output)
        return run.registers["output"]


def _writes(operation: Operation) -> bool:
    """Whether the operation writes to a cache."""
    match operation:
        case op.NormLatents(latents=latents):
            return _takes_latents(latents)
        case op.AttendLatents(latents=latents):
            return not _takes_latents(latents)
    return isinstance(operation, op.Write | TransformAndWrite | op.AdvanceStates)


def _takes_latents(latents: op.LatentOperands) -> bool:
    """Whether the attention norms and rotates as it writes and attends."""
    return latents.attention.latent is not None and isinstance(latents.kv_norm, TorchNorm)


def _with_ends(operations: Sequence[Operation]) -> list[tuple[Operation, list[Register]]]:
    """Each with the registers that no later one reads, so that their memory is free."""
    found: list[tuple[Operation, list[Register]]] = []
    live: set[Register] = {"output"}
    for operation in reversed(operations):
        used = {*operation.reads, operation.target}
        found.append((operation, sorted(used - live)))
        if operation.target not in operation.reads:
            live.discard(operation.target)
        live.update(operation.reads)
    return found[::-1]


class Run:
    """The registers of one step: [rows, columns] each."""

    def __init__(self, ops: Ops, residual: Tensor, caches: Sequence[Tensor], step: StepContext) -> None:
        self.registers: dict[Register, Tensor] = {"residual": residual}
        self._ops = ops
        self._unwritten = iter(caches)
        # The first one, for attention to what was written before the step; without caches, nothing is read.
        self._cache = next(iter(caches), residual)
        self._step = step

    def apply(self, operation: Operation) -> None:
        registers, step = self.registers, self._step
        source, target = registers[operation.source], operation.target
        match operation:
            case op.Multiply(linear=linear, site=site):
                registers[target] = product = linear(source)
                step.add_adapters(site, source, product)
            case op.Norm(norm=norm):
                registers[target] = norm(source)
            case op.Add():
                registers[target] = self._add(operation, None)
            case AddAndNorm(add=add, norm=norm):
                registers[target] = self._add(add, norm)
            case op.Scale(factor=factor):
                registers[target] = source * factor
            case op.Activate(function=function):
                registers[target] = function(source)
            case TransformAndWrite():
                self._transform_and_write(operation)
            case op.Write(attention=attention, scales=scales):
                _, keys, values = _heads(source, attention)
                self._next_cache()
                attention.write_kv(self._cache, keys, values, step.batch.slots, scales=scales)
            case op.Attend(attention=attention, sinks=sinks, bias=bias, scales=scales):
                queries, metadata = _heads(source, attention)[0], step.metadata[attention.name]
                attended = attention.attend(queries, self._cache, metadata, sinks, bias, scales)
                registers[target] = attended.reshape(len(source), -1)
            case op.AdvanceStates(net=net, sources=sources):
                registers[target] = net([registers[each] for each in sources], self._next_cache(), step.states)
            case op.Pick(pieces=pieces):
                registers[target] = torch.cat([_picked(source, each) for each in pieces], 1)
            case op.Gate(function=function):
                gates = function(source)
                registers[target].unflatten(1, (gates.shape[1], -1)).mul_(gates[:, :, None])
            case op.Experts(experts=experts):
                registers[target] = experts(source, registers.get("shared"), step)
            case op.NormLatents(latents=latents):
                registers[target] = self._norm_latents(source, latents)
            case op.AttendLatents(latents=latents):
                registers[target] = self._attend_latents(source, latents)
            case op.Clamp(bound=bound):
                source.clamp_(-bound, bound)
            case op.NormHeads():
                _norm_heads(source, operation)
            case op.Rotate(attention=attention, cos=cos, sin=sin, interleaved=interleaved):
                queries, keys, _ = _heads(source, attention)
                self._ops.rotate(queries, keys, cos, sin, step.batch.positions, interleaved=interleaved)
            case op.ScaleQueries(attention=attention, factors=factors, period=period):
                _heads(source, attention)[0].mul_(factors[(step.batch.positions + 1) // period, None, None])
            case op.Gather(group=group, widths=widths):
                registers[target] = group.all_gather_columns(source, widths)
            case op.Reduce(group=group):
                registers[target] = group.all_reduce(source)
            case op.Convert(dtype=dtype):
                registers[target] = source.to(dtype)
            case op.Select():
                self._select(operation)
            case op.Visit(visitor=visitor):
                visitor(source, step)
            case op.Copy():
                registers[target] = source
            case _:
                raise TypeError(f"no operator runs {type(operation).__name__}")

    def _add(self, add: op.Add, norm: PackedNorm | None) -> Tensor:
        """The norm of the sum; None: the sum."""
        other = None if add.other is None else self.registers[add.other]
        summand = Summand(self.registers[add.source], add.norm, add.factor, other)
        return self._ops.add(self.registers[add.target], summand, norm)

    def _next_cache(self) -> Tensor:
        self._cache = next(self._unwritten)
        return self._cache

    def _transform_and_write(self, operation: TransformAndWrite) -> None:
        write, norms, rotate = operation.write, operation.norms, operation.rotate
        queries, keys, values = _heads(self.registers[operation.source], write.attention)
        positions, slots = self._step.batch.positions, self._step.batch.slots
        clip = None if operation.clamp is None else operation.clamp.bound
        fused = None if norms is None else norms.fused
        rotation = None if rotate is None else Rotation(rotate.cos, rotate.sin, positions, rotate.interleaved)
        transform = None if clip is fused is rotation is None else Transform(queries, clip, fused, rotation)
        self._next_cache()
        write.attention.write_kv(self._cache, keys, values, slots, transform, write.scales)

    def _norm_latents(self, x: Tensor, latents: op.LatentOperands) -> Tensor:
        query_norm, norm = latents.q_norm, latents.kv_norm
        if _takes_latents(latents):
            assert latents.attention.latent is not None
            assert isinstance(norm, TorchNorm)
            weight = query_norm.weight if isinstance(query_norm, TorchNorm) else None
            tables = latents.cos, latents.sin, self._step.batch.positions
            down = interface.Latents(x, weight, norm.weight, norm.variant.eps, *tables)
            self._next_cache()
            slots = self._step.batch.slots
            found = latents.attention.latent.write_latents(self._cache, down, slots, latents.scales)
            return x if found is None else found
        return x if query_norm is None else query_norm(x[:, : latents.query_dim])

    def _attend_latents(self, x: Tensor, latents: op.LatentOperands) -> Tensor:
        attention, step, num_rows = latents.attention, self._step, len(x)
        num_heads, dim = attention.shape.num_heads, latents.dim
        plain, rotary = x.split([num_heads * latents.plain_dim, num_heads * latents.rotary_dim], 1)
        plain, rotary = plain.unflatten(1, (num_heads, -1)), rotary.unflatten(1, (num_heads, -1))
        metadata = step.metadata[attention.name]
        if _takes_latents(latents):
            assert attention.latent is not None
            absorbed = x.new_empty((num_rows, num_heads, dim))
            latents.absorb(plain, absorbed, step)
            parts = LatentQueries(absorbed, rotary, latents.cos, latents.sin)
            attended = attention.latent.attend_latents(parts, self._cache, metadata, latents.scales)
        else:
            latent, key = self.registers["latents"][:, latents.query_dim :].split([dim, latents.rotary_dim], 1)
            self._ops.rotate(rotary, key[:, None], latents.cos, latents.sin, step.batch.positions)
            queries = x.new_empty((num_rows, num_heads, attention.shape.head_dim))
            latents.absorb(plain, queries[..., :dim], step)
            queries[..., dim:] = rotary
            keys = torch.cat([latents.kv_norm(latent), key], 1)[:, None]
            self._next_cache()
            attention.write_kv(self._cache, keys, keys[..., :dim], step.batch.slots, scales=latents.scales)
            attended = attention.attend(queries, self._cache, metadata, scales=latents.scales)
        values = attended.new_empty((num_rows, num_heads, latents.unfold.out_features))
        latents.unfold(attended, values, step)
        return values.flatten(1)

    def _select(self, select: op.Select) -> None:
        rows = self._step.batch.sample_rows
        if len(rows) < len(self.registers[select.source]):
            self.registers = {register: self.registers[register][rows] for register in select.reads}
            self._step = self._step.select(rows)


def _heads(x: Tensor, attention: interface.Attention) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [rows, heads, dim], of which the last two may be missing."""
    shape = attention.shape
    first = shape.num_heads * shape.head_dim
    second = first + shape.num_kv_heads * shape.head_dim

    def by_heads(part: Tensor, dim: int) -> Tensor:
        return part.unflatten(1, (part.shape[1] // dim, dim))

    queries, keys, values = x[:, :first], x[:, first:second], x[:, second:]
    return by_heads(queries, shape.head_dim), by_heads(keys, shape.head_dim), by_heads(values, shape.output_dim)


def _picked(x: Tensor, pieces: op.Pieces) -> Tensor:
    """[rows, count * width]"""
    return x.unfold(1, pieces.width, 1)[:, pieces.first :: pieces.step][:, : pieces.count].flatten(1)


def _norm_heads(x: Tensor, operation: op.NormHeads) -> None:
    first = 0
    for norm, num_heads in zip(operation.norms, operation.num_heads, strict=True):
        width = num_heads * operation.head_dim
        part = x[:, first : first + width].unflatten(1, (num_heads, operation.head_dim))
        part.copy_(norm(part))
        first += width

"""Fits a model's spec and names to the tensors that its checkpoint stores, above all to its token tables.

config.json says whether the output head is the embedding (tied). The checkpoint may disagree. As in transformers 5, a
stored head that differs from the embedding is the model's head, and a token table that is stored only under another
name is the embedding. An untied head that is not stored is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from penstock_server.errors import ConfigError
from penstock_server.models.spec import ModelSpec, NameMap
from penstock_server.weights.checkpoint import Checkpoint, Part
from penstock_server.weights.location import Location, Locator
from penstock_server.weights.memory import PIECE_BYTES

EMBEDDING, HEAD = "embedding.weight", "head.weight"
STACKED_EXPERTS = "layers.{i}.mlp.experts.gate_up.weight"

Shapes = Mapping[str, tuple[int, ...]]
IsSame = Callable[[Location, Location, tuple[int, ...]], bool]
"""Whether a checkpoint holds the same tensor of this shape in two places."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A spec, and the places of its parameters in one checkpoint."""

    spec: ModelSpec
    locator: Locator
    note: str = ""  # for people: what the checkpoint decides against config.json


def fit(
    spec: ModelSpec,
    names: NameMap,
    locator: Locator | None,
    stored: Shapes,
    is_same: IsSame | None,
    *,
    drafts_with_mtp: bool = False,
) -> Fitted:
    """locator: of a format with its own tensor names, used instead of `names`. stored: the checkpoint's tensors and
    their shapes. is_same: None if only the shapes are at hand; equal shapes then count as equal tables.

    Raises ConfigError if the checkpoint lacks an untied head, or has several tables where the model has one.
    """
    note = ""
    if locator is None:
        names = names.for_checkpoint(stored)
        if STACKED_EXPERTS in names.names.keys() & names.others.keys():
            spec = spec.with_expert_storage("stacked")
        names = _with_stored_embedding(spec, names, stored)
        _check_copies(spec, names, stored, is_same)
        spec, locator, note = _with_stored_head(spec, names, stored, is_same)
    elif _has_head(spec) and locator.locate(HEAD).name in stored:
        spec = replace(spec, head=replace(spec.head, tied=False))
    if _has_head(spec) and not spec.head.tied:
        head, embedding = locator.locate(HEAD).name, locator.locate(EMBEDDING).name
        if head not in stored and embedding in stored:
            raise ConfigError(
                f"the checkpoint lacks the output head, {head}, and config.json does not tie it to the embedding; if "
                'the embedding is the head, set "tie_word_embeddings": true in config.json'
            )
    return Fitted(spec.for_checkpoint(locator, stored, drafts_with_mtp=drafts_with_mtp), locator, note)


def same_in(checkpoint: Checkpoint) -> IsSame:
    """`IsSame` of a checkpoint, which is read up to the first difference."""

    def is_same(one: Location, other: Location, shape: tuple[int, ...]) -> bool:
        num_rows, *columns = shape
        can_split = all(place.has_independent_rows(checkpoint) for place in (one, other))
        step = max(1, PIECE_BYTES // (4 * math.prod(columns))) if can_split else num_rows
        for first in range(0, num_rows, step):
            rows = range(first, min(num_rows, first + step))
            tables = torch.empty((2, len(rows), *columns))
            for place, table in zip((one, other), tables, strict=True):
                place.read(checkpoint, shape, Part(0, rows), table)
            if not torch.equal(*tables):
                return False
        return True

    return is_same


def _has_head(spec: ModelSpec) -> bool:
    return spec.pooling is None and not spec.is_encoder


def _with_stored_embedding(spec: ModelSpec, names: NameMap, stored: Shapes) -> NameMap:
    """The names, with the first stored copy of the embedding in place of an embedding that is not stored."""
    if names.locate(EMBEDDING).name in stored:
        return names
    head = [names.locate(HEAD).name] if _has_head(spec) and spec.head.tied else []
    found = next((name for name in (*names.copies, *head) if name in stored), None)
    return names if found is None else names | {"embedding": found.removesuffix(".weight")}


def _with_stored_head(
    spec: ModelSpec, names: NameMap, stored: Shapes, is_same: IsSame | None
) -> tuple[ModelSpec, NameMap, str]:
    """The spec without a tie if the checkpoint stores another head; or the names that ignore a copy. And a note."""
    head, embedding = (names.locate(HEAD), names.locate(EMBEDDING)) if _has_head(spec) else (None, None)
    if head is None or embedding is None or not spec.head.tied or head.name not in stored or head == embedding:
        return spec, names, ""
    if _differ(embedding, head, stored, is_same):
        note = (
            f"config.json ties the output head to the embedding, but the checkpoint's {head.name} differs and is used"
        )
        return replace(spec, head=replace(spec.head, tied=False)), names, "" if spec.head.may_be_own else note
    note = f"if {head.name} differs from the embedding, it is the output head, although config.json ties the two"
    names = replace(names, ignored=(*names.ignored, re.escape(head.name)))
    return spec, names, note if is_same is None else ""


def _check_copies(spec: ModelSpec, names: NameMap, stored: Shapes, is_same: IsSame | None) -> None:
    """Refuses copies of the embedding that are none."""
    embedding = names.locate(EMBEDDING)
    for name in names.copies:
        if {name, embedding.name} <= stored.keys() and _differ(embedding, Location(name), stored, is_same):
            raise ConfigError(
                f"the checkpoint's {name} differs from {embedding.name}; encoder and decoder of {spec.architecture} "
                "models must share one token table"
            )


def _differ(one: Location, other: Location, stored: Shapes, is_same: IsSame | None) -> bool:
    """Whether two tables are known to differ."""
    if stored.get(one.name) != stored[other.name]:
        return True
    return one != other and is_same is not None and not is_same(one, other, stored[one.name])

"""Chooses and loads the drafter: of `--speculative-model`, or the checkpoint's own, or n-grams."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock_server.device.native.build import find_build
from penstock_server.engine.drafting.draft_model import DraftModel
from penstock_server.engine.drafting.eagle import EagleHead, is_eagle_head
from penstock_server.engine.drafting.head import HeadDrafter
from penstock_server.engine.drafting.interface import Drafter, SentDrafter
from penstock_server.engine.drafting.medusa import HeadKernels, MedusaDrafter, read_heads
from penstock_server.engine.drafting.mtp import MtpHead
from penstock_server.engine.drafting.ngram import NgramDrafter
from penstock_server.engine.drafting.vocabulary import check_vocabulary
from penstock_server.errors import ConfigError
from penstock_server.models.config import Config
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import CausalModel, LoadOptions
from penstock_server.parallel import RankGroup

logger = logging.getLogger(__name__)

LoadModel = Callable[[LoadOptions, RankGroup], CausalModel]


def drafting_refusal(model: CausalModel, group: RankGroup) -> str:
    """Why steps verify no drafts; empty: they do. Drafts change no bit if rows are independent; otherwise, on a GPU, no
    more than another sequence in the batch does."""
    if model.pooler is not None:
        return f"{model.traits.architecture} generates no tokens; leave the flag out"
    if group.stage.size > 1:  # only the last stage would know which drafts are right
        return f"the model has {group.stage.size} pipeline stages; leave the flag out, or --pipeline-parallel-size"
    if model.traits.is_row_independent or model.traits.is_recordable:
        return ""
    if not isinstance(model, Decoder):
        return f"{model.traits.architecture} runs on transformers; leave the flag out"
    return (
        "this needs native kernels on a CPU, or Triton kernels on a GPU, and attention runs on "
        f"{model.traits.attention_name} here; leave the flag out, or install the kernels"
    )


def load_drafter(
    folder: Path | None,
    model: CausalModel,
    options: LoadOptions,
    load_model: LoadModel,
    group: RankGroup,
) -> Drafter:
    """The drafter of one rank; all ranks call it together. folder: of a draft model, an EAGLE-3 head or Medusa heads;
    None: the model's multi-token prediction layer if it was loaded with one, otherwise n-gram lookup. options: those of
    the model. Raises ConfigError for a drafter that does not fit the model, or a folder if the model verifies no
    drafts."""
    refusal = drafting_refusal(model, group)
    if folder is None:
        if refusal or not isinstance(model, Decoder) or model.taps.mtp is None:
            return NgramDrafter()
        logger.info("drafts come from the checkpoint's multi-token prediction layer")
        num_layers = Config.read(options.folder).optional_int("num_nextn_predict_layers") or 1
        if num_layers > 1:
            logger.info("%d further multi-token prediction layers are ignored", num_layers - 1)
        return HeadDrafter(MtpHead(model, model.taps.mtp, options.device), options.device)
    if refusal:
        raise ConfigError(f"--speculative-model {folder}: no drafts are verified here, because {refusal}")
    config = Config.read(folder)
    if (layout := config.values.get("speculators_model_type")) is not None:
        raise ConfigError(
            f"--speculative-model {folder}: {config.path.name} has the layout of the speculators library "
            f"(speculators_model_type {layout!r}), which is not read; use an EAGLE-3 head in the layout of EAGLE's "
            "authors, Medusa heads, a draft model, or `--speculative-model ngram`"
        )
    if config.optional_int("medusa_num_heads"):
        native = find_build(options.device, options.dtype, options.cpu_isa)
        heads = read_heads(folder, model, HeadKernels.of(options.device, options.dtype, native), group)
        return SentDrafter() if heads is None else MedusaDrafter(heads)
    if is_eagle_head(folder):
        return _eagle(folder, model, options)
    if model.traits.window_tokens:
        raise ConfigError(
            f"--speculative-model {folder}: a draft model reads whole texts, and this model, whose layers all have a "
            "sliding window, releases their beginnings; use `--speculative-model ngram`, or Medusa heads"
        )
    if group.rank:
        return SentDrafter()
    if model.traits.max_source_tokens:
        raise ConfigError(f"--speculative-model {folder}: no draft model reads the source of an encoder-decoder")
    check_vocabulary(folder, options.folder)
    drafting = load_model(
        replace(options, folder=folder, quantize="", max_adapters=0, deterministic=False), RankGroup()
    )
    if drafting.pooler is not None or drafting.traits.max_source_tokens or drafting.images is not None:
        raise ConfigError(
            f"--speculative-model {folder} is a {drafting.traits.architecture}, must be a decoder that generates text"
        )
    if drafting.states is not None:
        raise ConfigError(
            f"--speculative-model {folder} is a {drafting.traits.architecture}, which keeps a state between tokens; "
            "use a draft model of attention layers alone, or `--speculative-model ngram`"
        )
    return DraftModel(drafting, model.traits.vocab_size, options.device)


def _eagle(folder: Path, model: CausalModel, options: LoadOptions) -> HeadDrafter:
    if (
        not isinstance(model, Decoder)
        or model.embedding is None
        or model.embedding.tokens.group.size > 1
        or model.embedding.project is not None
        or model.traits.max_source_tokens
        or model.traits.window_tokens
        or model.adapters is not None
    ):
        raise ConfigError(
            f"--speculative-model {folder}: an EAGLE-3 head reads a decoder on one rank, without adapters (those of "
            "--lora-adapters and the model's own), projected embeddings, or a sliding window in all layers; leave the "
            "flag out, or --num-shard and --lora-adapters"
        )
    head = EagleHead(folder, model, options)
    model.observe(head)
    return HeadDrafter(head, options.device)

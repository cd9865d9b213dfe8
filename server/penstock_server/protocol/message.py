"""Converts the messages of proto/worker.proto to the engine's own types, and back. Only this and `service` import the
generated protobuf code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock_server.errors import PlanError
from penstock_server.pb import worker_pb2 as pb
from penstock_server.protocol.config import Description, ImageInput, LoadConfig
from penstock_server.protocol.phase import Phase
from penstock_server.protocol.plan import (
    Adapter,
    Advances,
    Fault,
    Grammar,
    Image,
    ImageSpan,
    NewSequence,
    Plan,
    Sampling,
    Save,
    StepResult,
    ThoughtLimit,
    Tokens,
    Top,
    Transfer,
    TransferKind,
)

PROTOCOL_VERSION: int = pb.PROTOCOL_VERSION_CURRENT


def parse_load_config(message: bytes) -> LoadConfig | None:
    """What a serialized LoadRequest says; None if it is of another version of the protocol."""
    request = pb.LoadRequest.FromString(message)
    return load_config(request) if request.protocol_version == PROTOCOL_VERSION else None


def load_config(request: pb.LoadRequest) -> LoadConfig:
    return LoadConfig(
        model_path=Path(request.model_path),
        block_tokens=request.block_tokens,
        dtype=request.dtype,
        rendezvous=request.rendezvous,
        trust_remote_code=request.trust_remote_code,
        num_threads=request.num_threads,
        watermark_gamma=request.watermark_gamma,
        watermark_delta=request.watermark_delta,
        attention=request.attention,
        cpu_isa=request.cpu_isa,
        kv_cache_dtype=request.kv_cache_dtype,
        dequantize=request.dequantize,
        quantize=request.quantize,
        activation_bits=request.activation_bits,
        deterministic=request.deterministic,
        background=request.background,
        max_adapters=request.max_adapters,
        max_adapter_rank=request.max_adapter_rank,
        speculative_model=Path(request.speculative_model) if request.speculative_model else None,
        drafts_with_mtp=request.drafts_with_mtp,
        recent_answer_tokens=request.recent_answer_tokens,
        num_stages=max(1, request.num_stages),
    )


def phases_message(phases: tuple[Phase, ...]) -> list[pb.Phase]:
    return [pb.Phase(name=phase.name, seconds=phase.seconds) for phase in phases]


def pooling_message(description: Description) -> pb.Pooling | None:
    pooling = description.pooling
    if pooling is None:
        return None
    return pb.Pooling(
        task=pb.TASK_RERANK if pooling.task == "rerank" else pb.TASK_EMBED,
        num_dimensions=description.num_dimensions,
        is_normalized=pooling.is_normalized,
        reads_all_outputs=pooling.outputs == "mean",
        is_matryoshka=pooling.is_matryoshka,
        matryoshka_dimensions=pooling.matryoshka_dimensions,
        has_token_types=pooling.has_token_types,
    )


def image_input_message(image_input: ImageInput | None) -> pb.ImageInput | None:
    if image_input is None:
        return None
    return pb.ImageInput(
        placeholder_id=image_input.placeholder_id,
        placeholder=image_input.placeholder,
        template_text=image_input.template_text,
        is_whole=image_input.is_whole,
        is_prompt_whole=image_input.is_prompt_whole,
        text_prefix=image_input.text_prefix,
        text_suffix=image_input.text_suffix,
        max_bytes=image_input.max_bytes,
        has_adapter=image_input.has_adapter,
    )


def plan_of(message: pb.Plan) -> Plan:
    return Plan(
        step=message.step,
        freed_sequence_ids=tuple(message.freed_sequence_ids),
        new_sequences=[_new_sequence(new) for new in message.new_sequences],
        advances=_advances(message.advances),
        drafts_by_lookup=message.drafts_by_lookup,
        drafts_only_forced=message.drafts_only_forced,
        transfers=_transfers(message.transfers),
        saves=_saves(message.saves),
    )


def _saves(message: pb.Saves) -> Sequence[Save]:
    columns = (
        _column(message.sequence_ids, "<u8"),
        _column(message.num_tokens, "<u4"),
        _column(message.snapshots, "<u4"),
    )
    if len({len(column) for column in columns}) > 1:
        raise PlanError("the columns of the saves do not have the same length")
    return [Save(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _transfers(message: pb.Transfers) -> Sequence[Transfer]:
    if not (message.kinds or message.sources or message.targets):
        return ()
    columns = (_column(message.kinds, "u1"), _column(message.sources, "<u4"), _column(message.targets, "<u4"))
    if len({len(column) for column in columns}) > 1:
        raise PlanError("the columns of the transfers do not have the same length")
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [Transfer(TransferKind(kind), source, target) for kind, source, target in rows]


def _advances(message: pb.Advances) -> Advances:
    return Advances(
        sequence_ids=_column(message.sequence_ids, "<u8"),
        num_tokens=_column(message.num_tokens, "<u4"),
        sample=_column(message.sample, "u1") != 0,
        num_new_blocks=_column(message.num_new_blocks, "<u4"),
        new_block_ids=_column(message.new_block_ids, "<u4"),
        num_draft_tokens=_column(message.num_draft_tokens, "<u4"),
        last_token_ids=_column(message.last_token_ids, "<u4"),
    )


def _column(packed: bytes, kind: str) -> npt.NDArray[Any]:
    """A column of the protocol as an array over the same memory."""
    width = np.dtype(kind).itemsize
    if len(packed) % width:
        raise PlanError(f"a column has {len(packed)} bytes, which is not a multiple of {width}")
    return np.frombuffer(packed, kind)


def _new_sequence(message: pb.NewSequence) -> NewSequence:
    return NewSequence(
        sequence_id=message.sequence_id,
        token_ids=list(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        num_computed_tokens=message.num_computed_tokens,
        block_ids=list(message.block_ids),
        sampling=_sampling(message.sampling, message.grammar),
        num_source_tokens=message.num_source_tokens,
        num_second_text_tokens=message.num_second_text_tokens,
        adapter=adapter_of(message.adapter),
        images=tuple(ImageSpan(Image(span.hash, span.data), span.offset) for span in message.images),
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
        snapshot=message.snapshot if message.HasField("snapshot") else None,
    )


def adapter_of(message: pb.Adapter) -> Adapter | None:
    return Adapter(message.id, Path(message.path)) if message.id else None


_LISTS = {"logit_bias", "stop_token_ids", "bad_words"}
_SCALARS = tuple(name for name in pb.Sampling.DESCRIPTOR.fields_by_name if name not in _LISTS)


def _sampling(message: pb.Sampling, grammar: pb.Grammar) -> Sampling:
    """Fields have the same names on both sides."""
    return Sampling(
        **{name: getattr(message, name) for name in _SCALARS},
        logit_bias=tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
        stop_token_ids=tuple(message.stop_token_ids),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        grammar=grammar_of(grammar),
    )


def grammar_of(message: pb.Grammar) -> Grammar | None:
    kind, thoughts = message.WhichOneof("kind"), None
    if message.HasField("thoughts"):
        limit = message.thoughts
        end_ids = tuple(limit.end_ids)
        if not (end_ids and limit.close):
            raise PlanError("a limit of thoughts has no tokens that end them, or no marker")
        thoughts = ThoughtLimit(limit.max_tokens, limit.open, limit.close, end_ids, limit.reopens)
    if kind is None:
        return None if thoughts is None else Grammar("any", "", thoughts)
    return Grammar(kind, getattr(message, kind), thoughts)


_FAULTS = {Fault.SERVER: pb.FAULT_SERVER, Fault.REQUEST: pb.FAULT_REQUEST, Fault.NONE: pb.FAULT_NONE}


def result_message(result: StepResult) -> pb.StepResult:
    timing = result.timing
    return pb.StepResult(
        step=result.step,
        sequence_ids=result.sequence_ids.astype("<u8").tobytes(),
        num_draft_tokens=result.num_draft_tokens.astype("<u4").tobytes(),
        drafted_by_model=result.drafted_by_model.tobytes(),
        sampled=tokens_message(result.sampled),
        vectors=result.vectors.astype("<f4").tobytes(),
        prompts=[
            pb.PromptTokens(sequence_id=each, tokens=tokens_message(tokens)) for each, tokens in result.prompts.items()
        ],
        errors=[
            pb.SequenceError(
                sequence_id=failure.sequence_id,
                reason=failure.reason,
                fault=_FAULTS[failure.fault],
            )
            for failure in result.failures
        ],
        timing=pb.StepTiming(
            prepare_seconds=timing.prepare_s,
            forward_seconds=timing.forward_s,
            sample_seconds=timing.sample_s,
            idle_seconds=timing.idle_s,
            draft_seconds=timing.draft_s,
        ),
    )


def tokens_message(tokens: Tokens) -> pb.Tokens:
    return pb.Tokens(
        ids=tokens.ids.astype("<u4").tobytes(),
        logprobs=tokens.logprobs.astype("<f4").tobytes(),
        top=[_top(index, top) for index, top in tokens.tops.items()],
    )


def _top(index: int, top: Top) -> pb.TopTokens:
    ids, logprobs = zip(*top, strict=True) if top else ((), ())
    return pb.TopTokens(index=index, ids=np.array(ids, "<u4").tobytes(), logprobs=np.array(logprobs, "<f4").tobytes())

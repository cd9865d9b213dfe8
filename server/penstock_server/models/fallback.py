"""Serves causal models of transformers that have no decoder of ours: its modules with our paged attention and cache.

All tokens of a step are one row of its input; positions and the cache tell sequences apart. Not every model works this
way, so each is checked at load: in chunks and in a batch it must compute the logits that it computes for a text alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock_server.attention.interface import StepAdapters, StepBatch, window_tokens
from penstock_server.errors import ConfigError
from penstock_server.models import pager
from penstock_server.models.adapter import Adapters
from penstock_server.models.config import Config
from penstock_server.models.fallback_check import check_logits
from penstock_server.models.foreign import FOREIGN_ERRORS, read_config, transformers
from penstock_server.models.foreign_rope import take_batch_ropes
from penstock_server.models.interface import LoadOptions, States
from penstock_server.models.pooler import Pooler
from penstock_server.models.support import (
    CODE_KEY,
    FALLBACK,
    NATIVE,
    builtin_class,
    refusal,
    support_of,
)
from penstock_server.parallel import RankGroup
from penstock_server.vision.encoder import ImageEncoder
from penstock_server.weights.format import quantization_config, transformers_renamings

logger = logging.getLogger(__name__)


class Fallback:
    """A causal model of transformers, on one rank. Implements `CausalModel`."""

    def __init__(self, model: Any, options: LoadOptions) -> None:
        self.architecture: str = model.config.model_type
        self.load_phases: list[tuple[str, float]] = []
        self.caches: list[Tensor] = []
        self._model = model
        self._trunk = _trunk(model)
        self._ropes = take_batch_ropes(model)
        lengths = _lengths(model.config.get_text_config())
        self.max_position_tokens = lengths.max_position_tokens
        self.default_position_tokens = lengths.default_position_tokens
        self.serve_up_to(self.default_position_tokens)
        self.max_source_tokens = 0
        self.decoder_prefix: tuple[int, ...] = ()
        self.pooler: Pooler | None = None
        self.adapters: Adapters | None = None
        self.images: ImageEncoder | None = None
        self.states: States | None = None
        self._pager = pager.Pager(
            options.device, options.dtype, options.block_tokens, options.attention, options.cpu_isa
        )
        _record(self._pager, model, options.device)
        model.set_attn_implementation(pager.PAGED)
        attentions = self._pager.layers
        self.num_layers = len(attentions)
        self.hidden_size = 0  # only drafters read it, and drafts are not verified here
        self.window_tokens = window_tokens(attentions)
        self.attention_name = self._pager.attention.name
        self.is_row_independent = False
        self.is_recordable = False  # transformers' code may read device memory on the host
        self.kv_bytes_per_block = sum(attention.bytes_per_block() for attention in attentions)
        self.weight_bytes = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
        self.vocab_size = self._head(torch.zeros((1, _width(model)), dtype=options.dtype, device=options.device)).shape[
            1
        ]

    def allocate_cache(self, num_blocks: int) -> None:
        self.caches = []  # first: the old and the new pool may not fit together
        self.caches = [attention.allocate(num_blocks) for attention in self._pager.layers]

    def sample(self) -> Fallback:
        return self

    def serve_up_to(self, max_sequence_tokens: int) -> None:
        for rope in self._ropes:
            rope.fix(max_sequence_tokens)

    def forward(self, batch: StepBatch) -> Tensor:
        ids, positions = batch.token_ids[None], batch.positions[None]
        run = partial(self._trunk, input_ids=ids, position_ids=positions, use_cache=False, return_dict=True)
        out = self._pager.step(batch, self.caches, run)
        hidden: Tensor = out.last_hidden_state[0, batch.sample_rows]
        return hidden

    def logits(self, outputs: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        return self._head(outputs)

    def head_rows(self, token_ids: Tensor) -> Tensor:
        raise AssertionError("a row's bits may depend on its batch, so no drafts are verified")

    def own_logits(self, ids: Tensor) -> Tensor:
        """The model's logits [tokens, vocab] for one text [tokens], with its own attention and without a cache."""
        self._model.set_attn_implementation("eager")
        try:
            logits: Tensor = self._model(input_ids=ids[None], use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(pager.PAGED)
        return logits

    def _head(self, outputs: Tensor) -> Tensor:
        """From the decoder's outputs to logits, by the model's own code including scales and caps: its forward pass
        runs with the decoder replaced."""
        self._trunk.forward = lambda *_, **__: _Hidden(outputs[None])
        ids = torch.zeros((1, outputs.shape[0]), dtype=torch.int64, device=outputs.device)
        try:
            logits: Tensor = self._model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
        finally:
            del self._trunk.forward
        return logits.to(outputs.dtype)


class _Hidden:
    """A decoder's outputs as the model's head reads them: one tensor, and None for every optional output."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


def load_fallback(options: LoadOptions, group: RankGroup) -> Fallback:
    """Raises ConfigError if the folder's model cannot be served over our cache, or not on this many ranks."""
    begin = time.perf_counter()
    config = Config.read(options.folder)
    model_type = config.require("model_type", str)
    runs_code = _runs_code(model_type, config, options)
    check_request(model_type, config, options, group)
    runner = "the checkpoint's own code" if runs_code else f"transformers {transformers().__version__}"
    logger.warning("model type %s has no native decoder: %s runs it, slower and on one rank", model_type, runner)
    with _refusing(config, model_type):
        model = _read(config, options, runs_code)
        _check_class(model_type, model)
        loaded = time.perf_counter()
        fallback = Fallback(model, options)
        check_logits(fallback, fallback.own_logits, options)
        fallback.caches = []
    fallback.load_phases = [("read weights", loaded - begin), ("check model", time.perf_counter() - loaded)]
    return fallback


@dataclass(frozen=True, slots=True)
class Outline:
    """What a model takes that transformers would run, known without its weights."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    max_position_tokens: int
    default_position_tokens: int
    weight_bytes: int
    kv_bytes_per_token: int
    is_complete: bool  # False: its layers could not be run, so only its configuration is known


def outline(options: LoadOptions, group: RankGroup, weights: Mapping[str, Tensor] | None) -> Outline:
    """weights: the checkpoint's tensors on the device meta; None: unknown.

    Raises the ConfigError of `load_fallback`, except for what only computing with the weights shows.
    """
    config = Config.read(options.folder)
    model_type = config.require("model_type", str)
    runs_code = _runs_code(model_type, config, options)
    check_request(model_type, config, options, group)
    with _refusing(config, model_type):
        model = _read(config, replace(options, device=torch.device("meta")), runs_code, weights)
        _check_class(model_type, model)
        _trunk(model)
        take_batch_ropes(model)
        _width(model)
        text = model.config.get_text_config()
        num_layers, lengths = text.num_hidden_layers, _lengths(text)
        recorder = pager.Pager(options.device, options.dtype, options.block_tokens, options.attention, options.cpu_isa)
        num_heads = text.num_attention_heads
        num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
        kv_bytes = 2 * num_layers * num_kv_heads * head_dim * options.dtype.itemsize
        is_complete = True
        try:
            _record(recorder, model, torch.device("meta"))
            num_heads, num_kv_heads = recorder.shapes[0].num_heads, recorder.shapes[0].num_kv_heads
            kv_bytes = sum(layer.bytes_per_block() for layer in recorder.layers) // options.block_tokens
        except (NotImplementedError, RuntimeError):
            # A layer reads values, which are not there, so that not all layers are known.
            is_complete = False
        weight_bytes = sum(each.numel() * each.itemsize for each in [*model.parameters(), *model.buffers()])
    sizes = (num_layers, num_heads, num_kv_heads, text.vocab_size)
    longest, default = lengths.max_position_tokens, lengths.default_position_tokens
    return Outline(*sizes, longest, default, weight_bytes, kv_bytes, is_complete)


def check_request(model_type: str, config: Config, options: LoadOptions, group: RankGroup) -> None:
    """Raises ConfigError for what transformers does not do, or not on this many ranks."""
    if options.kv_dtype is not None:
        raise config.refuse(
            f"model type {model_type!r} is run by transformers, which is supported only with a KV cache of the model's "
            "dtype; remove --kv-cache-dtype"
        )
    if options.deterministic:
        raise config.refuse(
            f"model type {model_type!r} is run by transformers, whose results depend on the batch; "
            "remove --deterministic"
        )
    if group.num_ranks > 1:
        raise config.refuse(
            f"model type {model_type!r} is run by transformers, which is supported on one rank only, not on "
            f"{group.num_ranks}; `penstock models` lists the types that are supported on several ranks"
        )
    if group.stage.size > 1:
        raise config.refuse(
            f"model type {model_type!r} is run by transformers, which is not split into pipeline stages; "
            "remove --pipeline-parallel-size"
        )


@contextmanager
def _refusing(config: Config, model_type: str) -> Iterator[None]:
    """Turns what transformers raises into a ConfigError that names the model type."""
    try:
        yield
    except ConfigError as error:
        raise config.refuse(f"model type {model_type!r} is not served: {error}") from error
    except FOREIGN_ERRORS as error:
        message = " ".join(str(error).split())[:500]
        raise config.refuse(f"model type {model_type!r} does not run over the paged cache: {message}") from error


def _check_class(model_type: str, model: Any) -> None:
    reason = refusal(model_type, type(model), model.config.to_dict())
    if reason is not None:
        raise ConfigError(reason)


def _trunk(model: Any) -> Any:
    """The decoder without its head."""
    # COMPAT: Llama 4's `base_model_prefix` is not the name of its decoder.
    trunk = getattr(model, "model", model) if model.base_model is model else model.base_model
    if trunk is model:
        raise ConfigError("its class does not separate its decoder from its head")
    return trunk


def _record(recorder: pager.Pager, model: Any, device: torch.device) -> None:
    """Finds the model's attention layers with a text of two tokens."""
    recorder.plug_in(model)
    model.set_attn_implementation(pager.RECORDING)
    ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
    positions = torch.arange(2, device=device)[None]
    with pager.unpacked() if device.type == "meta" else nullcontext():
        recorder.record(partial(_trunk(model), input_ids=ids, position_ids=positions, use_cache=False))


def _runs_code(model_type: str, config: Config, options: LoadOptions) -> bool:
    """Whether to run the checkpoint's own code: only if it is trusted and transformers does not know the model."""
    has_code = CODE_KEY in (config.values.get("auto_map") or {})
    if has_code and options.trust_remote_code and builtin_class(model_type) is None:
        return True
    quantization = quantization_config(options.folder)
    support = support_of(model_type, config.values | ({"quantization_config": quantization} if quantization else {}))
    if support not in (NATIVE, FALLBACK):
        raise config.refuse(support)
    return False


def _read(config: Config, options: LoadOptions, runs_code: bool, weights: Mapping[str, Tensor] | None = None) -> Any:
    """The model in eval mode on its device, read from safetensors files only. On the device meta: of these `weights`,
    or of those that its configuration implies."""
    library = transformers()
    library.utils.logging.disable_progress_bar()
    # The checkpoint's own code has a configuration of its own.
    settings = None if runs_code else read_config(options.folder)
    on_meta: dict[str, Any] = {}
    if options.device.type == "meta":
        if weights is None or runs_code:
            settings = settings or library.AutoConfig.from_pretrained(
                options.folder, trust_remote_code=runs_code, local_files_only=True
            )
            with torch.device("meta"):
                return library.AutoModelForCausalLM.from_config(
                    settings, dtype=options.dtype, trust_remote_code=runs_code
                ).eval()
        on_meta = {"state_dict": dict(weights), "device_map": "meta"}
    # The automatic class does not accept tensors without a folder.
    loader = builtin_class(config.require("model_type", str)) if on_meta else library.AutoModelForCausalLM
    assert loader is not None
    model, info = loader.from_pretrained(
        None if on_meta else options.folder,
        config=settings,
        dtype=options.dtype,
        trust_remote_code=runs_code,
        local_files_only=True,
        use_safetensors=True,
        weights_only=True,
        key_mapping=transformers_renamings(options.folder) or None,
        output_loading_info=True,
        **on_meta,
    )
    for key in ("missing_keys", "mismatched_keys"):
        if info.get(key):
            names = sorted(map(str, info[key]))
            raise ConfigError(f"its weights have {len(names)} {key.replace('_', ' ')}, e.g. {names[0]}")
    if info.get("unexpected_keys"):
        names = sorted(info["unexpected_keys"])
        logger.warning("%d tensors of %s are unused, e.g. %s", len(names), config.path.parent, names[0])
    return model.eval().requires_grad_(False).to(options.device)


def _lengths(text: Any) -> Config:
    """The configuration, from which the lengths of sequences are read. Raises ConfigError if it does not limit them."""
    for key in ("max_position_embeddings", "max_sequence_length", "seq_length"):
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return Config({**text.to_dict(), "max_position_embeddings": value}, Path("config.json"))
    raise ConfigError("its config.json does not limit the length of texts: it lacks max_position_embeddings")


def _width(model: Any) -> int:
    """Features of the decoder's outputs."""
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError("it has no output head")
    width: int = head.weight.shape[1]
    return width

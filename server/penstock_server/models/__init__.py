"""Loads models. Importing this module does not import torch."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_server.layers.linear import SchemeOf
    from penstock_server.models.interface import CausalModel, LoadOptions
    from penstock_server.parallel import RankGroup

logger = logging.getLogger(__name__)


def is_described(folder: Path) -> bool:
    """Whether a prepared folder's model is built here. Otherwise it runs on transformers. Raises ConfigError."""
    from penstock_server.models.config import Config
    from penstock_server.models.registry import ARCHITECTURES, ENCODERS
    from penstock_server.vision.family import FAMILIES

    return Config.read(folder).require("model_type", str) in {*ARCHITECTURES, *ENCODERS, *FAMILIES}


def load_model(options: LoadOptions, group: RankGroup, exact: bool | None = None) -> CausalModel:
    """This rank's shard of the model in a prepared folder. It still needs `allocate_cache`.

    exact: whether several ranks compute the results of one to the bit (`Shard.exact`); None: on a CPU, or if
    `options.deterministic`. Raises ConfigError if the folder's model cannot be served on this many ranks.
    """
    from penstock_server.device import choose_ops
    from penstock_server.device.attention import ModelAttention
    from penstock_server.layers.adapter import AdapterSites
    from penstock_server.layers.context import BuildContext
    from penstock_server.layers.layout import WeightLayout
    from penstock_server.layers.linear import dense_everywhere
    from penstock_server.layers.native_compiler import NotNativeError
    from penstock_server.layers.quantized import quantized_in_layers, stored_everywhere
    from penstock_server.layers.shard import Shard
    from penstock_server.models.adapter import check_model, refusal
    from penstock_server.models.decoder import Decoder
    from penstock_server.models.fallback import load_fallback
    from penstock_server.models.parameters import parameters
    from penstock_server.models.pooling import foreign_pooling, read_pooling
    from penstock_server.models.registry import read_spec
    from penstock_server.models.stage import served_in, stage_of
    from penstock_server.models.tie import fit, same_in
    from penstock_server.models.vision import load_images, own_adapter
    from penstock_server.weights import kv_scale
    from penstock_server.weights.adapter import StoredWeight
    from penstock_server.weights.folder import DEFAULT_ADAPTER
    from penstock_server.weights.format import open_checkpoint, quantization_config
    from penstock_server.weights.loader import Loader
    from penstock_server.weights.quantization.flag import format_at_load

    if not is_described(options.folder):
        if read_pooling(options.folder) is not None:
            raise foreign_pooling(options.folder)
        if options.max_adapters or (options.folder / DEFAULT_ADAPTER).is_dir():
            raise refusal("its model type runs on transformers")
        return load_fallback(options, group)
    whole, names = read_spec(options.folder)
    spec = served_in(whole, group.stage)
    if whole.reads_images and not spec.reads_images and group.rank == 0 and group.stage.is_last:
        logger.warning("images are refused: stages of --pipeline-parallel-size serve the text model alone")
    if exact is None:
        # The ranks of GPUs add their results up in an order that depends on the number of rows.
        exact = options.device.type == "cpu" or options.deterministic
    ops = choose_ops(
        options.device,
        options.dtype,
        options.activation_bits,
        deterministic=options.deterministic,
        cpu_isa=options.cpu_isa,
    )
    format_ = format_at_load(options.quantize, options.folder, dequantize=options.dequantize)
    if format_ is not None and ops.quantized_packer is None:
        format_ = None
        logger.warning("--quantize %s has no effect: %s operators have no kernels for it", options.quantize, ops.name)
    scheme_of: SchemeOf = dense_everywhere
    if not options.dequantize:
        scheme_of = stored_everywhere if format_ is None else partial(quantized_in_layers, format_)
    shard = Shard.of(spec.hidden_size, spec.vocab_size, group, exact)
    layout = WeightLayout(shard, scheme_of)
    checkpoint, locator = open_checkpoint(options.folder)
    shapes = {name: checkpoint.shape(name) for name in checkpoint.names()}
    fitted = fit(spec, names, locator, shapes, same_in(checkpoint), drafts_with_mtp=options.drafts_with_mtp)
    spec, locator = fitted.spec, fitted.locator
    if fitted.note and group.rank == 0 and group.stage.is_last:
        logger.warning(fitted.note)
    table = parameters(spec, layout)
    layers, held = stage_of(spec, table, group.stage)
    sites, own = None, own_adapter(options.folder, spec)
    if options.max_adapters or own is not None:
        check_model(spec, group, ops, own)
        # Not the checkpoint's names: adapters are made with transformers.
        stored = partial(StoredWeight.of, options.folder, locator, table)
        locators = (names, *names.alternatives)
        of_options = options.max_adapters, options.max_adapter_rank
        sites = AdapterSites(table, locators, *of_options, stored, ops, options.device, own)
    context = BuildContext(
        loader=Loader(checkpoint, table, locator, options.dtype, options.device, ops.kept, held),
        ops=ops,
        layout=layout,
        attention=ModelAttention(
            options.device,
            options.dtype,
            options.kv_dtype,
            options.attention,
            deterministic=options.deterministic,
            cpu_isa=options.cpu_isa,
        ),
        max_position_tokens=spec.max_position_tokens,
        block_tokens=options.block_tokens,
        default_position_tokens=spec.default_position_tokens,
        adapter_sites=sites,
    )
    if options.kv_dtype is not None:
        has_scales = kv_scale.has_scales(checkpoint)
        if has_scales:
            kv_scale.check_scales(quantization_config(options.folder))
        source = "the checkpoint" if has_scales else "1.0, because the checkpoint has none"
        name = str(options.kv_dtype).removeprefix("torch.")
        logger.info("keys and values are stored in %s, with scales of %s", name, source)
    try:
        model = Decoder(spec, context, layers, partial(load_images, options) if spec.reads_images else None)
    except NotNativeError as reason:
        raise refusal(f"native kernels have no {reason}", own) from reason
    return model

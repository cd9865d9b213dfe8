"""Loads models. Importing this imports no torch."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock_server.models.interface import CausalModel, LoadOptions
    from penstock_server.parallel import RankGroup


def load_model(options: LoadOptions, group: RankGroup, exact: bool | None = None) -> CausalModel:
    """This rank's share of the model in a prepared folder, ready but for its KV pool.

    exact: whether several ranks compute the very numbers that one does (`Shard.exact`); None: on a CPU, and where the
    options ask for it. Raises ConfigError when the folder does not hold a model that can be served on so many ranks.
    """
    from penstock_server.kernels import choose_ops
    from penstock_server.layers.context import BuildContext
    from penstock_server.layers.shard import Shard
    from penstock_server.models.config import Config
    from penstock_server.models.decoder import Decoder
    from penstock_server.models.fallback import load_fallback
    from penstock_server.models.parameters import parameters
    from penstock_server.models.registry import ARCHITECTURES, read_spec
    from penstock_server.weights.format import open_checkpoint
    from penstock_server.weights.loader import Loader

    begin = time.perf_counter()
    if Config.read(options.folder).require("model_type", str) not in ARCHITECTURES:
        return load_fallback(options, group)
    spec, names = read_spec(options.folder)
    if exact is None:
        exact = options.device.type == "cpu" or options.deterministic
    shard = Shard.of(spec.hidden_size, spec.vocab_size, group, exact)
    checkpoint, locator = open_checkpoint(options.folder)
    locator = locator or names.fitted(checkpoint.names())
    spec = spec.fitted(locator, checkpoint.names())
    loader = Loader(checkpoint, parameters(spec, shard), locator, options.dtype, options.device)
    context = BuildContext(
        loader=loader,
        ops=choose_ops(options.device, options.dtype),
        shard=shard,
        hidden_size=spec.hidden_size,
        max_position_tokens=spec.max_position_tokens,
        block_tokens=options.block_tokens,
    )
    opened = time.perf_counter()
    model = Decoder(spec, context)
    model.load_phases = [("open checkpoint", opened - begin), ("read weights", time.perf_counter() - opened)]
    return model

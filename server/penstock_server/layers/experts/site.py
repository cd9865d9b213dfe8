"""The sites of adapters in the experts of a layer.

PEFT changes experts in two ways: each matrix of an expert as a module of its own, as checkpoints have them, or the
parameters of all experts together, as transformers 5 has them. An adapter changes a layer in one of them.
"""

from __future__ import annotations

import torch

from penstock_server.layers.adapter import AdapterSites, SitePart
from penstock_server.layers.experts.shard import ExpertShard
from penstock_server.layers.experts.spec import MoeSpec
from penstock_server.weights.adapter import Module


def expert_sites(spec: MoeSpec, shard: ExpertShard, prefix: str, sites: AdapterSites) -> int | None:
    """Registers two sites for each expert of this rank: of gate and up, whose columns follow each other, and of down.
    Returns the first one's number; None: adapters cannot change these experts."""
    owners = [name.removesuffix(".weight") for name in sites.located(f"{prefix}.modules.experts.weight")]
    if not owners:
        return None
    num_experts, width, hidden = spec.routing.num_experts, spec.intermediate_size, shard.shard.hidden_size
    inner = range(width) if shard.intermediate is None else shard.intermediate.mine
    into_hidden = shard.intermediate is not None and shard.shard.exact
    down_rows = torch.tensor(shard.shard.hidden.mine if into_hidden else range(hidden))
    down_inputs = range(width) if into_hidden else inner
    rows = torch.tensor(inner)
    both = torch.cat([2 * rows, 2 * rows + 1] if spec.module_interleaves else [rows, width + rows])

    def parameter(name: str, stored: str, out_features: int, in_features: int) -> str:
        # Modules of earlier versions of transformers have a weight of all experts, as their checkpoints.
        own = [each for each in sites.located(f"{prefix}.experts.{stored}.weight") if each.endswith(".weight")]
        names = [f"{owner}.{name}" for owner in owners] + own
        return sites.register(names, Module(names[0], out_features, in_features, num_experts, swaps=spec.module_swaps))

    gate_up = parameter("gate_up_proj", "gate_up", 2 * width, hidden)
    down = parameter("down_proj", "down", hidden, width)

    def apart(name: str, whole: str, expert: int) -> list[str]:
        """The module of one expert's matrix, if it has any."""
        names = [each.removesuffix(".weight") for each in sites.located(f"{prefix}.experts.{name}.weight", expert)]
        sizes = (hidden, width) if name == "down" else (width, hidden)
        return [sites.register(names, Module(names[0], *sizes, part_of=whole))] if names else []

    of_each: list[list[SitePart]] = []
    for expert in shard.experts.mine:
        of_each.append([SitePart(gate_up, both, 0, range(hidden), expert=expert)])
        of_each[-1] += [SitePart(each, rows, 0, range(hidden)) for each in apart("gate", gate_up, expert)]
        of_each[-1] += [SitePart(each, rows, len(rows), range(hidden)) for each in apart("up", gate_up, expert)]
        of_each.append([SitePart(down, down_rows, 0, down_inputs, expert=expert)])
        of_each[-1] += [SitePart(each, down_rows, 0, down_inputs) for each in apart("down", down, expert)]
    return sites.add_experts(of_each)

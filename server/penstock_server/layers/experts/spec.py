"""A mixture of experts as data: how tokens find their experts, what an expert is, how checkpoints store them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.errors import ConfigError
from penstock_server.kernels.activation import ACTIVATIONS
from penstock_server.layers.mlp import MlpSpec

SCORINGS = ("softmax", "softmax-chosen", "sigmoid", "sparsemixer")
GROUP_SCORES = ("best", "best-two")
CLAMPED_SWIGLU = "clamped-swiglu"

# How a checkpoint stores the matrices of all experts, dimension by dimension: e expert, i intermediate, h hidden, 2 the
# gate and up. What is written together is folded into one dimension. A bias lacks the dimension of its matrix' inputs.
STORAGES: dict[str, dict[str, str]] = {
    # One tensor for each matrix of each expert, with {e} in the name map (most publishers: Mixtral, Qwen, OLMoE,
    # DeepSeek, Phi-3.5-MoE), or one for each matrix of all (GGUF).
    "apart": {"gate": "e i h", "up": "e i h", "down": "e h i"},
    # Granite, and what transformers 5 writes with save_original_format=False.
    "stacked": {"gate_up": "e 2i h", "down": "e h i"},
    # gpt-oss: by inputs, and gate and up in turn.
    "by-input": {"gate_up": "e h i2", "down": "e i h"},
    # DBRX: all experts' rows one behind the other, the matrix out by its inputs.
    "rows": {"gate": "ei h", "up": "ei h", "down": "ei h"},
}


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """Scores of all experts, a choice of `top_k`, and the weights of their results.

    scoring: "softmax" over all experts (Mixtral, Qwen, OLMoE, DeepSeek V2, DBRX); "softmax-chosen", over the logits of
    the chosen ones (gpt-oss, Granite); "sigmoid" of each (DeepSeek V3); "sparsemixer" (Phi-3.5-MoE,
    https://arxiv.org/abs/2409.12136).
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    norm_power: float | None = None  # the chosen scores are divided by their norm of this power; None: kept as they are
    norm_epsilon: float = 0.0
    scale: float = 1.0  # of the weights, at the end
    has_bias: bool = False  # of the logits
    has_correction: bool = False  # added to the scores for the choice, not for the weights (DeepSeek V3)
    is_wide: bool = False  # logits in float32 whatever the model's type
    num_groups: int = 1  # experts are chosen from the best groups only, each num_experts / num_groups in a row
    top_groups: int = 1
    group_score: str = "best"  # of a group: its best expert (DeepSeek V2), or the sum of its "best-two" (V3)
    jitter: float = 0.0  # sparsemixer: experts further than twice this below the best, relatively, do not count

    def __post_init__(self) -> None:
        _check_one_of("routing", self.scoring, SCORINGS)
        _check_one_of("group score", self.group_score, GROUP_SCORES)
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"config.json: a token cannot go to {self.top_k} of {self.num_experts} experts; "
                f"from 1 to {self.num_experts} are possible"
            )
        per_group, rest = divmod(self.num_experts, max(1, self.num_groups))
        if self.num_groups < 1 or rest or (self.group_score == "best-two" and per_group < 2):
            raise ConfigError(f"config.json: {self.num_experts} experts cannot be in {self.num_groups} equal groups")
        if not 1 <= self.top_groups <= self.num_groups or self.top_groups * per_group < self.top_k:
            raise ConfigError(
                f"config.json: {self.top_k} experts cannot be chosen from {self.top_groups} of {self.num_groups} "
                f"groups of {per_group}"
            )


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """The MLP of a layer as a mixture of experts, with or without an expert that every token goes to."""

    routing: RoutingSpec
    intermediate_size: int  # of one expert
    activation: str = "silu"  # of the gate: a key of ACTIVATIONS, or gpt-oss's, see layer.py
    has_bias: bool = False  # of all matrices of the experts
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    storage: str = "apart"
    shared_intermediate_size: int = 0  # 0: no shared expert. Several shared experts are one, so much wider
    shared_is_gated: bool = False  # whether its result is multiplied with a sigmoid of its own (Qwen2-MoE)

    @property
    def is_swiglu(self) -> bool:
        """What `Ops.pack_gate_up` computes."""
        return self.activation != CLAMPED_SWIGLU and ACTIVATIONS[self.activation] is ACTIVATIONS["silu"]

    @property
    def shared(self) -> MlpSpec | None:
        return MlpSpec(self.shared_intermediate_size, self.activation) if self.shared_intermediate_size else None

    def __post_init__(self) -> None:
        _check_one_of("activation of experts", self.activation, (*ACTIVATIONS, CLAMPED_SWIGLU))
        _check_one_of("storage of experts", self.storage, tuple(STORAGES))
        if self.intermediate_size < 1:
            raise ConfigError(f"config.json: experts must be at least 1 wide, not {self.intermediate_size}")


def _check_one_of(what: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ConfigError(f"config.json: {what} {given!r} is not supported; supported: {', '.join(allowed)}")

"""A mixture of experts as data: the routing, the experts, and how checkpoints store them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock_server.device.activation import ACTIVATIONS
from penstock_server.errors import ConfigError
from penstock_server.layers.mlp import MlpSpec

SCORINGS = ("softmax", "softmax-chosen", "sigmoid", "sparsemixer")
GROUP_SCORES = ("best", "best-two")
CLAMPED_SWIGLU = "clamped-swiglu"

# The dimensions of the experts' matrices in a checkpoint: e expert, i intermediate, h hidden, 2 gate and up. Letters
# written together are one folded dimension. A bias lacks the dimension of its matrix's inputs.
STORAGES: dict[str, dict[str, str]] = {
    # Either a tensor per matrix and expert, with {e} in the name map (most publishers: Mixtral, Qwen, OLMoE, DeepSeek,
    # Phi-3.5-MoE), or a tensor per matrix for all experts (GGUF).
    "apart": {"gate": "e i h", "up": "e i h", "down": "e h i"},
    # Granite, and what transformers 5 writes with save_original_format=False.
    "stacked": {"gate_up": "e 2i h", "down": "e h i"},
    # gpt-oss: transposed, gate and up interleaved.
    "by-input": {"gate_up": "e h i2", "down": "e i h"},
    # Qwen3-VL: transposed.
    "transposed": {"gate_up": "e h 2i", "down": "e i h"},
    # gpt-oss in MXFP4: a tensor per matrix and expert.
    "by-output": {"gate_up": "e i2 h", "down": "e h i"},
    # Nemotron-H: the activation of up(x), without a gate.
    "ungated": {"up": "e i h", "down": "e h i"},
    # DBRX: the experts' rows concatenated, `down` transposed.
    "rows": {"gate": "ei h", "up": "ei h", "down": "ei h"},
}


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How each token's `top_k` experts and their weights follow from the router's logits.

    scoring: "softmax" over all experts (Mixtral, Qwen, OLMoE, DeepSeek V2, DBRX); "softmax-chosen" over the chosen
    experts (gpt-oss, Granite); "sigmoid" (DeepSeek V3); "sparsemixer" (Phi-3.5-MoE, https://arxiv.org/abs/2409.12136).
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    norm_power: float | None = None  # the chosen scores are divided by their p-norm; None: they are not
    norm_epsilon: float = 0.0
    scale: float = 1.0  # factor of the weights, applied last
    has_bias: bool = False  # the logits have a bias
    has_correction: bool = False  # added to the scores for the choice only, not to the weights (DeepSeek V3)
    is_wide: bool = False  # logits in float32, whatever the model's dtype
    num_groups: int = 1  # experts are chosen from the best groups only; a group is consecutive experts
    top_groups: int = 1
    group_score: str = "best"  # a group's score: of its "best" expert (DeepSeek V2), the sum of its "best-two" (V3)
    scales_inputs: bool = False  # weights are factors of the experts' inputs, not of their outputs (Llama 4)
    jitter: float = 0.0  # sparsemixer: experts more than twice this below the best, relatively, are excluded

    def __post_init__(self) -> None:
        _check_one_of("routing", self.scoring, SCORINGS)
        _check_one_of("group score", self.group_score, GROUP_SCORES)
        assert not (self.is_wide and self.has_bias)
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
    """The MLP of a layer as a mixture of experts, with or without a shared expert."""

    routing: RoutingSpec
    intermediate_size: int  # for one expert
    activation: str = (
        "silu"  # for the gate, or for up if there is none: a key of ACTIVATIONS, or CLAMPED_SWIGLU (gpt-oss)
    )
    has_bias: bool = False  # all matrices of the experts have a bias
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    storage: str = "apart"
    # Layout of the parameters of transformers' module, which adapters change. interleaves: gate and up alternate
    # (gpt-oss). swaps: they are [experts, inputs, outputs], which PEFT takes for [experts, outputs, inputs] (Llama 4).
    module_interleaves: bool = False
    module_swaps: bool = False
    shared_intermediate_size: int = 0  # 0: no shared expert. Several are one of their total width
    shared_is_gated: bool = False  # its result is multiplied by the sigmoid of a learned gate (Qwen2-MoE)

    @property
    def is_gated(self) -> bool:
        return self.storage != "ungated"

    @property
    def is_swiglu(self) -> bool:
        """Whether `Ops.pack_gate_up` computes it."""
        return (
            self.is_gated and self.activation != CLAMPED_SWIGLU and ACTIVATIONS[self.activation] is ACTIVATIONS["silu"]
        )

    @property
    def shared(self) -> MlpSpec | None:
        size = self.shared_intermediate_size
        return MlpSpec(size, self.activation, self.is_gated) if size else None

    def __post_init__(self) -> None:
        _check_one_of("activation of experts", self.activation, (*ACTIVATIONS, CLAMPED_SWIGLU))
        _check_one_of("storage of experts", self.storage, tuple(STORAGES))
        if self.intermediate_size < 1:
            raise ConfigError(f"config.json: experts must be at least 1 wide, not {self.intermediate_size}")


def _check_one_of(what: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ConfigError(f"config.json: {what} {given!r} is not supported; supported: {', '.join(allowed)}")

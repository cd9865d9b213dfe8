"""A model as data: each architecture builds a `ModelSpec` from config.json, and one decoder runs them all."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from penstock_server.errors import ConfigError
from penstock_server.layers.attention import AttentionSpec
from penstock_server.layers.embedding import EmbeddingSpec
from penstock_server.layers.experts import MoeSpec
from penstock_server.layers.gated_delta import GatedDeltaSpec
from penstock_server.layers.latent_attention import LatentAttentionSpec
from penstock_server.layers.mamba import MambaSpec
from penstock_server.layers.mamba2 import Mamba2Spec
from penstock_server.layers.mlp import MlpSpec
from penstock_server.layers.norm import NormSpec
from penstock_server.layers.short_conv import ShortConvSpec
from penstock_server.protocol.config import Pooling
from penstock_server.weights.location import Location, Locator


class NormPlacement(Enum):
    """Places of a layer's norms; f is its attention or its MLP, x its input."""

    PRE = "x + f(norm(x))"
    POST = "x + norm(f(x))"  # OLMo 2
    BOTH = "x + norm(f(norm(x)))"  # Gemma 2
    SUM = "norm(x + f(x))"  # OPT-350m, BART


# Parts that remember earlier tokens, by keys and values or by a state.
MemorySpec = AttentionSpec | GatedDeltaSpec | LatentAttentionSpec | Mamba2Spec | MambaSpec | ShortConvSpec


@dataclass(frozen=True, slots=True)
class Multipliers:
    """Factors of what the parts of a layer add to the residual, of the residual there, and of what the MLP reads."""

    attention: float = 1.0
    beside: float = 1.0
    mlp: float = 1.0
    mlp_input: float = 1.0
    attention_residual: float = 1.0
    mlp_residual: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Attention and MLP, sequential or parallel, or one of them. The type of each part's spec selects the class that
    runs it."""

    attention: MemorySpec | None
    mlp: MlpSpec | MoeSpec | None
    norm: NormSpec
    placement: NormPlacement = NormPlacement.PRE
    parallel: bool = False  # x + attention(norm(x)) + mlp(norm(x)) (GPT-J, GPT-NeoX)
    has_attention_norm: bool = True  # if there are norms before the parts (ModernBERT's first layer has none here)
    shares_norm: bool = False  # if parallel: the MLP has no norm of its own and reads the attention's
    residual_is_normed: bool = False  # the norm's result replaces the residual (a BLOOM option)
    multipliers: Multipliers = Multipliers()
    cross: AttentionSpec | None = None  # cross-attention over the source, between attention and MLP
    beside: Mamba2Spec | None = None  # reads the attention's input; what both make is added (Falcon-H1)

    @property
    def plain_attention(self) -> AttentionSpec:
        """`attention`, which must be neither latent nor a state."""
        assert isinstance(self.attention, AttentionSpec)
        return self.attention

    @property
    def plain_mlp(self) -> MlpSpec:
        """`mlp`, which must not be a mixture of experts."""
        assert isinstance(self.mlp, MlpSpec)
        return self.mlp

    @property
    def memories(self) -> tuple[MemorySpec, ...]:
        """The parts that remember earlier tokens, in the order of their caches."""
        return tuple(part for part in (self.beside, self.attention) if part is not None)

    @property
    def has_norms_before(self) -> bool:
        return self.placement in (NormPlacement.PRE, NormPlacement.BOTH)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that the residual bypasses, in order."""
        parts = {"attention": self.attention, "cross": self.cross, "mlp": self.mlp}
        return tuple(name for name, spec in parts.items() if spec is not None)


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """From the final norm to the logits."""

    tied: bool  # its weight is the token embedding's
    bias: bool = False
    multiplier: float = 1.0
    is_normalized: bool = False  # its weight's rows are divided by their lengths (Baichuan 2)
    soft_cap: float | None = None  # logits become cap * tanh(logits / cap) (Gemma 2)
    may_be_own: bool = False  # whatever config.json says: checkpoints of the architecture do not follow it (T5 1.1)
    logits_bias: bool = False  # a number per token that is added to its logit (BART), if the checkpoint has them


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """From a pooled vector to one logit: a linear layer, or two with an activation and maybe a norm between them."""

    bias: bool = False
    dense_activation: str | None = None  # None: there is no first layer
    dense_bias: bool = True
    norm: NormSpec | None = None


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """The encoder in front of the decoder. They share the token table."""

    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    max_source_tokens: int
    decoder_prefix: tuple[int, ...]  # token ids between every source and its answer

    def __post_init__(self) -> None:
        if self.max_source_tokens < 1 or not self.layers or not self.decoder_prefix:
            raise ConfigError(
                "config.json: an encoder needs at least one layer, a source length of at least 1, and a "
                "decoder_start_token_id"
            )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder: embedding, layers, final norm, head, and an encoder or none. Or an encoder alone, with layers that
    attend to whole sources."""

    architecture: str
    hidden_size: int
    max_position_tokens: int
    embedding: EmbeddingSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    head: HeadSpec  # not loaded if outputs are pooled
    encoder: EncoderSpec | None = None
    pooling: Pooling | None = None  # None: it generates tokens
    classifier: ClassifierSpec | None = None  # for rerankers
    # The multi-token prediction layer that drafts; its parameters are numbered behind those of the layers. None: there
    # is none, or it is not used.
    mtp: LayerSpec | None = None
    reads_images: bool = False  # its architecture is a key of `FAMILIES`
    featured_layers: tuple[int, ...] = ()  # in front of these, image tokens get features
    # Layers that attend to images: the layer that each is in front of, and the largest number of states of an image.
    image_layers: tuple[tuple[int, LayerSpec], ...] = ()
    max_image_states: int = 0
    # The longest sequence unless longer ones are asked for; None: `max_position_tokens`.
    default_position_tokens: int | None = None

    def __post_init__(self) -> None:
        layers = [*self.layers, *(() if self.encoder is None else self.encoder.layers)]
        attention = [layer.attention for layer in layers if isinstance(layer.attention, AttentionSpec)]
        mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, MlpSpec)]
        for name, sizes in (
            ("vocab_size", [self.vocab_size]),
            ("hidden_size", [self.hidden_size]),
            ("max_position_tokens", [self.max_position_tokens]),
            ("num_layers", [len(self.layers)]),
            ("num_kv_heads", [spec.num_kv_heads for spec in attention]),
            ("head_dim", [spec.head_dim for spec in attention]),
            ("intermediate_size", [spec.intermediate_size for spec in mlps]),
        ):
            if min(sizes, default=1) < 1:
                raise ConfigError(f"config.json: {name} must be at least 1, not {min(sizes)}")
        for spec in attention:
            if spec.num_heads % spec.num_kv_heads:
                raise ConfigError(
                    f"config.json: {spec.num_heads} attention heads are not a multiple of {spec.num_kv_heads} KV heads"
                )

    @property
    def vocab_size(self) -> int:
        return self.embedding.vocab_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_encoder(self) -> bool:
        """Whether all tokens of a sequence attend to each other."""
        attention = [layer.attention for layer in self.layers if isinstance(layer.attention, AttentionSpec)]
        return any(spec.mask.part == "source" for spec in attention)

    @property
    def max_source_tokens(self) -> int:
        """The longest source; 0: no part of a sequence is one."""
        if self.encoder is not None:
            return self.encoder.max_source_tokens
        return self.max_position_tokens if self.is_encoder else 0

    def pooled(self, pooling: Pooling) -> ModelSpec:
        """The spec of a model whose outputs are pooled. A decoder has its classifier after the last token."""
        longest = min(self.max_position_tokens, pooling.max_tokens or self.max_position_tokens)
        size = self.hidden_size
        for dense in pooling.dense:
            if dense.in_features != size or dense.out_features < 1:
                sizes = f"{dense.in_features} numbers to {dense.out_features}"
                raise ConfigError(f"{dense.weights.parent}: from {sizes} is not possible; its input has {size}")
            size = dense.out_features
        classifier = self.classifier or ClassifierSpec()
        return replace(
            self,
            max_position_tokens=longest,
            default_position_tokens=min(longest, self.default_position_tokens or longest),
            pooling=replace(pooling, has_token_types=self.embedding.num_types > 1),
            classifier=classifier if pooling.task == "rerank" else None,
        )

    @property
    def mtp_prefix(self) -> str:
        """Prefix of the parameters of the layer `mtp`."""
        return f"layers.{self.num_layers}"

    def for_checkpoint(self, locator: Locator, stored: Collection[str], *, drafts_with_mtp: bool = False) -> ModelSpec:
        """The spec for a checkpoint that stores these tensors, which decide whether logits have a bias, and whether
        there is a layer `mtp`, which is kept if it drafts. Its head is tied only if it is so in the checkpoint. Raises
        ConfigError for a tied head that is not supported."""
        head = self.head
        if head.tied and head.is_normalized:
            raise ConfigError("config.json: a head that is tied to the embedding and normalized is not supported")
        has_bias = head.logits_bias and locator.locate("head.logits_bias").name in stored
        drafts = drafts_with_mtp and self.mtp is not None
        drafts = drafts and locator.locate(f"{self.mtp_prefix}.mtp.project.weight").name in stored
        return replace(self, head=replace(head, logits_bias=has_bias), mtp=self.mtp if drafts else None)

    def with_expert_storage(self, storage: str) -> ModelSpec:
        """The spec for a checkpoint whose format stores gated experts differently. storage: a key of STORAGES."""

        def stored(layer: LayerSpec) -> LayerSpec:
            if not isinstance(layer.mlp, MoeSpec) or not layer.mlp.is_gated:
                return layer
            return replace(layer, mlp=replace(layer.mlp, storage=storage))

        mtp = None if self.mtp is None else stored(self.mtp)
        return replace(self, layers=tuple(map(stored, self.layers)), mtp=mtp)


@dataclass(frozen=True, slots=True)
class NameMap:
    """The checkpoint's names of our parameters, with {i} for the layer, and its tensors that are not needed.

    A key is a parameter's name without `.weight` or `.bias`, which is then appended to both names, or its whole name. A
    key with a layer's number is for this layer alone.
    """

    names: Mapping[str, str | Location]
    ignored: tuple[str, ...] = field(default=())  # regular expressions, matched against whole names
    prefix: str = ""  # prefix of names; absent from a model that was saved without its head
    layers: tuple[int, ...] = ()  # the checkpoint's number of each layer; empty: all have ours
    # For checkpoints in other layouts, in which the prefix has no names, and for adapters, which may have any of them.
    alternatives: tuple[NameMap, ...] = ()
    copies: tuple[str, ...] = ()  # tensors that hold the embedding once more, if they are there
    # Other names, for checkpoints that have tensors of these names and none of those in `names`.
    others: Mapping[str, str | Location] = field(default_factory=dict)

    def pooled(self) -> NameMap:
        """For a model whose outputs are pooled: it may have a head, and a causal reranker has a classifier."""
        head = Location("") if "head" not in self.names else self.locate("head.weight")
        stem = re.escape(head.name.removesuffix(".weight"))
        ignored = (*self.ignored, rf"{stem}\.(weight|bias)") if stem else self.ignored
        return replace(self, names={"classifier.out": "score", **self.names}, ignored=ignored)

    def __or__(self, names: Mapping[str, str | Location]) -> NameMap:
        """This map with these names added or replaced."""
        return replace(self, names={**self.names, **names})

    def locate(self, parameter: str) -> Location:
        """layers.3.attention.q.weight → model.layers.3.self_attn.q_proj.weight"""
        layer, name = split_layer(parameter)
        if parameter in self.names or parameter.rpartition(".")[0] in self.names:
            layer, name = None, parameter
        if layer is not None and self.layers:
            layer = self.layers[layer]
        stem, _, suffix = name.rpartition(".")
        suffix = "" if name in self.names else f".{suffix}"
        found = self.names[name] if name in self.names else self.names[stem]
        location = Location(found) if isinstance(found, str) else found
        return replace(location, name=f"{location.name}{suffix}".replace("{i}", str(layer)))

    def for_checkpoint(self, stored: Collection[str]) -> NameMap:
        """The map for a checkpoint that stores these tensors: this one, an alternative, or without the prefix; with
        other names where the checkpoint has these."""
        layout = self._layout(stored)
        if not layout.others:
            return layout
        kinds = {_without_numbers(name) for name in stored}

        def is_stored(found: str | Location | None) -> bool:
            name = found.name if isinstance(found, Location) else found
            return name is not None and any(_without_numbers(name + suffix) in kinds for suffix in ("", ".weight"))

        def first(key: str) -> str | Location | None:
            return layout.names.get(key, layout.names.get(key.removesuffix(".weight")))

        return layout | {
            key: other for key, other in layout.others.items() if is_stored(other) and not is_stored(first(key))
        }

    def _layout(self, stored: Collection[str]) -> NameMap:
        layouts = (self, *self.alternatives)
        for layout in layouts:
            if not layout.prefix or any(name.startswith(layout.prefix) for name in stored):
                # The head may have its name in another layout.
                heads = [each.names["head"] for each in (layout, *layouts) if each._holds_head(stored)]
                return layout | {"head": heads[0]} if heads else layout
        bare = re.escape(self.prefix)
        return replace(
            self.renamed(lambda name: name.removeprefix(self.prefix)),
            ignored=tuple(pattern.removeprefix(bare) for pattern in self.ignored),
            prefix="",
            alternatives=(),
            copies=tuple(name.removeprefix(self.prefix) for name in self.copies),
        )

    def renamed(self, change: Callable[[str], str]) -> NameMap:
        """This map with other names for the parameters' tensors."""

        def changed(names: Mapping[str, str | Location]) -> dict[str, str | Location]:
            return {
                key: change(each) if isinstance(each, str) else replace(each, name=change(each.name))
                for key, each in names.items()
            }

        return replace(self, names=changed(self.names), others=changed(self.others))

    def _holds_head(self, stored: Collection[str]) -> bool:
        return "head" in self.names and self.locate("head.weight").name in stored


def split_layer(parameter: str) -> tuple[int | None, str]:
    """layers.3.mlp.up.weight → (3, layers.{i}.mlp.up.weight). Names outside of layers are returned with None."""
    found = re.fullmatch(r"((?:encoder\.)?layers\.)(\d+)(\..+)", parameter)
    if found is None:
        return None, parameter
    return int(found[2]), f"{found[1]}{{i}}{found[3]}"


def _without_numbers(name: str) -> str:
    """model.layers.3.mlp.experts.1.up_proj.weight → model.layers.#.mlp.experts.#.up_proj.weight, as of names with {i}
    and {e}."""
    return re.sub(r"\.(\d+|\{[ie]\})(?=\.)", ".#", name)

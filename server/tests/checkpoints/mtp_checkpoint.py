"""Tiny random checkpoints with a multi-token prediction layer, and a reference of what the layer drafts."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

NUM_LAYERS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS + 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,  # so that no rounding sends a token to another expert
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
DEEPSEEK = {
    **EXPERTS,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
GLM = {**EXPERTS, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True}
QWEN = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


@dataclass(frozen=True)
class Layout:
    """How a family publishes the layer."""

    config: str
    values: dict[str, Any]
    parts: tuple[str, str, str, str]  # the norms of tokens and of outputs, the projection, and the last norm
    prefix: str  # in front of the names of the parts
    layer: str  # the same for the rest of the layer
    has_copies: bool  # the layer has copies of embedding and head
    offset: float = 0.0  # added to the weights of norms


OF_LAYER = f"model.layers.{NUM_LAYERS}."
DEEPSEEK_V3 = Layout(
    "DeepseekV3Config", DEEPSEEK, ("enorm", "hnorm", "eh_proj", "shared_head.norm"), OF_LAYER, OF_LAYER, True
)
GLM4_MOE = replace(DEEPSEEK_V3, config="Glm4MoeConfig", values=GLM)
QWEN3_5 = Layout(
    "Qwen3_5TextConfig",
    QWEN,
    ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "mtp.",
    "mtp.layers.0.",
    False,
    offset=1.0,
)


@dataclass
class Reference:
    """The model by transformers, whose last decoder layer is the multi-token prediction layer's, and other parts."""

    whole: Any
    parts: dict[str, Tensor]  # by their published names
    layout: Layout = DEEPSEEK_V3

    @classmethod
    def random(cls, layout: Layout = DEEPSEEK_V3, **changes: Any) -> Reference:
        config = getattr(transformers, layout.config)(**{**SIZES, **layout.values, **changes})
        torch.manual_seed(4)
        whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in whole.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
                else:
                    parameter.normal_(std=0.8 / parameter.shape[-1] ** 0.5)
        hidden = config.hidden_size
        tokens, outputs, project, norm = layout.parts
        parts = {f"{name}.weight": torch.rand(hidden) + 0.5 - layout.offset for name in (tokens, outputs, norm)}
        parts[f"{project}.weight"] = torch.randn(hidden, 2 * hidden) * (0.6 / hidden**0.5)
        return cls(whole, parts, layout)

    @property
    def model(self) -> Any:
        """Without the layer."""
        model = copy.copy(self.whole)
        model._modules = dict(self.whole._modules)
        inner = copy.copy(self.whole.model)
        inner._modules = dict(self.whole.model._modules)
        inner.config = copy.deepcopy(self.whole.config)
        inner.config.num_hidden_layers = NUM_LAYERS
        inner.layers = nn.ModuleList(self.whole.model.layers[:NUM_LAYERS])
        model.model = inner
        return model

    def save(self, folder: Path) -> Path:
        self.whole.save_pretrained(folder)
        return self.complete(folder)

    def complete(self, folder: Path) -> Path:
        """Makes a saved model one whose last layer predicts several tokens, with copies of embedding and head."""
        path, values = folder / "config.json", json.loads((folder / "config.json").read_text())
        counts = {"num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
        if "layer_types" in values:
            counts["layer_types"] = values["layer_types"][:NUM_LAYERS]
        path.write_text(json.dumps({**values, **counts}))
        tensors = load_file(folder / "model.safetensors")
        copies = {
            "embed_tokens.weight": tensors["model.embed_tokens.weight"],
            "shared_head.head.weight": tensors["lm_head.weight"],
        }
        parts = {**self.parts, **(copies if self.layout.has_copies else {})}
        tensors = {
            f"{self.layout.layer}{name.removeprefix(OF_LAYER)}" if name.startswith(OF_LAYER) else name: part
            for name, part in tensors.items()
        }
        tensors |= {f"{self.layout.prefix}{name}": part.contiguous().clone() for name, part in parts.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def save_knowing(self, text: list[int], folder: Path, to: Path) -> None:
        """Copies the saved model, with a layer whose first draft is right everywhere in a text."""
        tensors, layer = load_file(folder / "model.safetensors"), f"model.layers.{NUM_LAYERS}."
        for name, tensor in tensors.items():
            if name.startswith(layer) and "norm" in name:
                tensor.fill_(1)
            elif name.startswith(layer) and name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()  # the layer adds nothing to its input
        # A fitted `eh_proj` maps what is read at each position to the row of the head of the token after the next one.
        ones = torch.ones(self.whole.config.hidden_size)
        reader = Reference(self.whole, {"enorm.weight": ones, "hnorm.weight": ones})
        with torch.inference_mode():
            outputs = self.model.model(torch.tensor([text])).last_hidden_state[0, :-2]
            tokens = self.whole.model.embed_tokens(torch.tensor(text[1:-1]))
            read = torch.cat((reader.norm("enorm", tokens), reader.norm("hnorm", outputs)), 1)
            rows = torch.nn.functional.normalize(tensors["lm_head.weight"][text[2:]])
            tensors[f"{layer}eh_proj.weight"] = (torch.linalg.pinv(read) @ rows).T.contiguous()
        save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
        (to / "config.json").write_text((folder / "config.json").read_text())

    def norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.whole.config.rms_norm_eps
        weight = self.parts[f"{name}.weight"] + self.layout.offset
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    @torch.inference_mode()
    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The tokens that the model generates, over the whole text for each."""
        text = list(prompt)
        for _ in range(num_tokens):
            outputs = self.model.model(torch.tensor([text])).last_hidden_state[0, -1]
            text.append(int(self.whole.lm_head(outputs).argmax()))
        return text[len(prompt) :]

    @torch.inference_mode()
    def draft(self, text: list[int], num_drafts: int) -> tuple[list[int], Tensor]:
        """The most probable drafts, and the logits [drafts, vocabulary] that they come from: by the formula of the
        report, over the whole text for each draft."""
        outputs = self.model.model(torch.tensor([text])).last_hidden_state[0, :-1]
        ids, logits = list(text), []
        of_tokens, of_outputs, project, last = self.layout.parts
        for _ in range(num_drafts):
            tokens = self.whole.model.embed_tokens(torch.tensor(ids[1:]))
            joined = torch.cat((self.norm(of_tokens, tokens), self.norm(of_outputs, outputs)), 1)
            x = (joined @ self.parts[f"{project}.weight"].T)[None]
            positions = torch.arange(len(joined))[None]
            later = torch.ones(len(joined), len(joined)).triu(1).bool()
            found = self.whole.model.layers[NUM_LAYERS](
                x,
                attention_mask=torch.zeros(later.shape).masked_fill(later, float("-inf"))[None, None],
                position_ids=positions,
                position_embeddings=self.whole.model.rotary_emb(x, positions),
            )
            found = self.norm(last, (found[0] if isinstance(found, tuple) else found)[0, -1])
            logits.append(self.whole.lm_head(found))
            ids.append(int(logits[-1].argmax()))
            outputs = torch.cat((outputs, found[None]))
        return ids[len(text) :], torch.stack(logits)

"""Tiny random DeepSeek-V3 checkpoints with a multi-token prediction layer, and a reference of what the layer drafts."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

NUM_LAYERS = 2
VALUES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS + 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,  # so that no rounding sends a token to another expert
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass
class Reference:
    """The model by transformers, whose last decoder layer is the multi-token prediction layer's, and other parts."""

    whole: Any
    parts: dict[str, Tensor]  # by their published names

    @classmethod
    def random(cls, **changes: Any) -> Reference:
        config = transformers.DeepseekV3Config(**{**VALUES, **changes})
        torch.manual_seed(4)
        whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in whole.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
                else:
                    parameter.normal_(std=0.8 / parameter.shape[-1] ** 0.5)
        hidden = config.hidden_size
        parts = {f"{name}.weight": torch.rand(hidden) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
        parts["eh_proj.weight"] = torch.randn(hidden, 2 * hidden) * (0.6 / hidden**0.5)
        return cls(whole, parts)

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
        path.write_text(json.dumps({**values, **counts}))
        tensors = load_file(folder / "model.safetensors")
        copies = {
            "embed_tokens.weight": tensors["model.embed_tokens.weight"],
            "shared_head.head.weight": tensors["lm_head.weight"],
        }
        layer = {f"model.layers.{NUM_LAYERS}.{name}": part for name, part in {**self.parts, **copies}.items()}
        tensors |= {name: part.contiguous().clone() for name, part in layer.items()}
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
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * self.parts[f"{name}.weight"]

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
        for _ in range(num_drafts):
            tokens = self.whole.model.embed_tokens(torch.tensor(ids[1:]))
            joined = torch.cat((self.norm("enorm", tokens), self.norm("hnorm", outputs)), 1)
            x = (joined @ self.parts["eh_proj.weight"].T)[None]
            positions = torch.arange(len(joined))[None]
            later = torch.ones(len(joined), len(joined)).triu(1).bool()
            found = self.whole.model.layers[NUM_LAYERS](
                x,
                attention_mask=torch.zeros(later.shape).masked_fill(later, float("-inf"))[None, None],
                position_ids=positions,
                position_embeddings=self.whole.model.rotary_emb(x, positions),
            )
            found = self.norm("shared_head.norm", (found[0] if isinstance(found, tuple) else found)[0, -1])
            logits.append(self.whole.lm_head(found))
            ids.append(int(logits[-1].argmax()))
            outputs = torch.cat((outputs, found[None]))
        return ids[len(text) :], torch.stack(logits)

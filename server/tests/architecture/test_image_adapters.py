"""Adapters of models that read images change the text model's layers: the logits are those of `peft`, also through an
image. Adapters of what encodes images are refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from image_cases import make_image_model
from penstock_server.engine.sequence import SequenceTable, TableLimits
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.plan import Adapter, ImageSpan, NewSequence
from safetensors.torch import load_file, save_file
from test_adapters import loaded, make_adapter
from test_images import IMAGES, Made, logits_of, prompts_of

pytest.importorskip("peft")
pytestmark = pytest.mark.native

TEXT_LAYERS = r".*(language_model|text_model)\.layers.*_proj|.*lm_head|.*embed_tokens"
TARGETS = {
    "mllama": r".*language_model\.layers\.[124]\..*_proj",  # between the layers that attend to images
    "phi4-multimodal": r"model\.layers.*_proj|.*lm_head|.*embed_tokens",
}


def load(folder: Path) -> Decoder:
    of_adapters: dict[str, Any] = {"max_adapters": 2, "max_adapter_rank": 8}
    model = load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 16, **of_adapters), RankGroup())
    assert isinstance(model, Decoder)
    return model


def adapter_of(folder: Path, base: Path, targets: str) -> tuple[Path, Any]:
    kind = transformers.AutoModelForMultimodalLM
    return make_adapter(folder, base, 1, kind, target_modules=targets)


@pytest.mark.parametrize(
    "name",
    [
        *("llava", "qwen2-vl", "qwen3-vl", "qwen3.5", "idefics3", "mllama", "phi4-multimodal"),
        pytest.param("gemma3", marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_peft_and_neighbours_keep_their_bits(name: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    reference = make_image_model(name, base)
    folder, adapted = adapter_of(tmp_path / "adapter", base, TARGETS.get(name, TEXT_LAYERS))
    model = load(base)
    (adapter,) = loaded(model, [folder])
    assert model.images is not None
    batch = prompts_of(model.images)[:2]
    together = logits_of(model, model.images, [batch[0], *batch], 7, [None, adapter, adapter])
    made = Made(name, adapted.get_base_model(), base)
    for logits, prompt in zip(together[1:], batch, strict=True):
        torch.testing.assert_close(logits, made.logits(prompt), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(together[0], Made(name, reference, base).logits(batch[0]), atol=2e-4, rtol=2e-4)
    (plain,) = logits_of(model, model.images, batch[:1], 7)
    assert torch.equal(together[0], plain)
    model.images.close()


def test_a_sequence_with_images_has_the_models_own_adapter_unless_it_names_one(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_image_model("phi4-multimodal", base)
    model = load(base)
    assert model.adapters is not None
    assert model.images is not None
    own, named = model.adapters.own, Adapter(1, base / "vision-lora")
    assert own is not None
    (loaded_by_name,) = loaded(model, [named.folder])
    table = SequenceTable(TableLimits(model.traits.vocab_size, 16, 16, 256, 4), model.adapters, model.images)
    (encoded,) = model.images.encode(IMAGES[:1])
    ids, spans = encoded.token_ids.tolist(), [ImageSpan(IMAGES[0], 0)]
    for number, (images, adapter) in enumerate([(spans, None), (spans, named), ([], None), ([], named)], 1):
        table.add(NewSequence(number, ids, len(ids), images=images, adapter=adapter))
    rows = table.rows([1, 2, 3, 4])
    assert table.adapter[rows].tolist() == [own.id, 1, 0, 1]
    assert [table.salts(row, 0, 1)[:1] for row in rows] == [(own.id,), (1,), (), (1,)]
    found = table.adapters_of(rows)
    assert found.loaded == [loaded_by_name, model.adapters.get(own)]
    assert found.of_tokens.tolist() == [1, 0, -1, 0]
    model.adapters.unload(own.id)
    assert model.adapters.get(own) is found.loaded[1], "it stays as long as the model"
    model.images.close()


def test_a_merged_adapter_is_missing_and_a_damaged_one_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_image_model("phi4-multimodal", tmp_path)
    (tmp_path / "vision-lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"vision-lora/adapter_config\.json: peft_type is None"):
        load(tmp_path)
    shutil.rmtree(tmp_path / "vision-lora")
    model = load(tmp_path)
    assert model.adapters is not None
    assert model.adapters.own is None
    assert "prompts with images use the plain weights" in caplog.text


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Decoder]:
    base = tmp_path_factory.mktemp("llava")
    make_image_model("llava", base)
    return base, load(base)


def test_names_of_earlier_versions_of_transformers_are_known(llava: tuple[Path, Decoder], tmp_path: Path) -> None:
    base, model = llava
    assert model.images is not None
    folder, _ = adapter_of(tmp_path / "adapter", base, TEXT_LAYERS)
    (adapter,) = loaded(model, [folder])
    path = folder / "adapter_model.safetensors"
    renamed = {
        name.replace("model.model.language_model.", "model.language_model.model.").replace(
            "model.lm_head", "model.language_model.lm_head"
        ): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path)
    prompt = prompts_of(model.images)[2]
    (other,) = loaded(model, [folder])
    found, expected = (logits_of(model, model.images, [prompt], 7, [each])[0] for each in (other, adapter))
    assert torch.equal(found, expected)


def test_an_adapter_of_the_vision_tower_is_refused_by_name(llava: tuple[Path, Decoder], tmp_path: Path) -> None:
    base, model = llava
    folder, _ = adapter_of(tmp_path / "adapter", base, r".*layers.0.*q_proj")
    with pytest.raises(
        ConfigError, match=r"changes 1 modules .*vision_tower\..*; they change linear layers and experts of the text"
    ):
        loaded(model, [folder])

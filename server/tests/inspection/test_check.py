"""`penstock check` describes a model and all its problems; `penstock models` lists what can be served."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import save_gguf
from hub_server import SHA, Hub, running
from huggingface_hub import constants
from penstock_server.device.quantized import ALL_KEPT, Kept, QuantFormat, stays_quantized
from penstock_server.errors import ConfigError
from penstock_server.hub.download import download
from penstock_server.inspection import catalog, check
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.models.registry import ARCHITECTURES
from penstock_server.parallel import RankGroup
from penstock_server.weights.gguf.selection import Reference
from quantized_checkpoints import gptq, save_quantized
from safetensors.torch import load_file, save_file
from test_quantized_checkpoints import CASES, SIZES
from test_quantized_layers_differ import save_compressed
from tiny_model import save_case
from tiny_models import make_model, save_model
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("model_cache")

TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<|end|>"}]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return with_tokenizer(save_model(make_model("llama"), tmp_path / "model"))


def with_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def run(capsys: Any, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Returns (exit status, report)."""
    status = check.main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_tokenizer_larger_than_the_embedding_is_named(folder: Path, capsys: Any) -> None:
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    vocabulary = {f"token {id_}": id_ for id_ in range(vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary}}))
    assert run(capsys, str(folder))[1]["notes"] == []
    # A token that only the settings of the tokenizer have counts, too.
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    status, report = run(capsys, str(folder))
    assert (status, report["text"]["num_tokens"]) == (0, vocab_size + 1)
    assert vocab_size in report["text"]["eos_token_ids"]
    assert report["notes"] == [
        f"the tokenizer has {vocab_size + 1} tokens, but the model has {vocab_size} embeddings: "
        "texts with the others are refused"
    ]


def test_a_valid_folder_is_described(folder: Path, capsys: Any) -> None:
    status, report = run(capsys, str(folder), "--num-shard", "2", "--dtype", "float32")
    assert (status, report["problems"], report["notes"], report["servable"]) == (0, [], [], True)
    assert report["num_parameters"] == sum(
        tensor.numel() for tensor in load_file(folder / "model.safetensors").values()
    )
    assert report["stored_as"] == {"F32": 30}
    assert report["weights"]["files"] == {"model.safetensors": (folder / "model.safetensors").stat().st_size}
    text = report["text"]
    assert (text["tokenizer"], text["num_tokens"], text["chat_template"]) == ("BPE", 3, "chat_template.jinja")
    layout = report["layout"]
    assert (layout["architecture"], layout["dtype"], layout["max_position_tokens"]) == ("llama", "float32", 256)
    assert [(rank["num_heads"], rank["num_kv_heads"]) for rank in layout["ranks"]] == [(3, 1), (3, 1)]
    assert all(rank["fitting_tokens"] > 0 for rank in layout["ranks"])


def test_the_stated_memory_equals_that_of_loading(folder: Path, capsys: Any) -> None:
    _, report = run(capsys, str(folder), "--dtype", "float32")
    rank = report["layout"]["ranks"][0]
    # Native attention pads these heads.
    options = LoadOptions(folder, torch.float32, torch.device("cpu"), 16, attention="reference")
    model = load_model(options, RankGroup())
    assert rank["weight_bytes"] == model.weight_bytes
    assert rank["kv_bytes_per_token"] * 16 == model.kv_bytes_per_block
    assert (rank["state_bytes"], rank["snapshot_bytes"], model.states) == (0, 0, None)


@pytest.mark.parametrize("name", ["falcon-h1", "mamba", "mamba2", "nemotron-h", "qwen3-5"])
def test_the_states_of_a_sequence_are_stated(name: str, tmp_path: Path, capsys: Any) -> None:
    folder = with_tokenizer(save_case(name, tmp_path))
    _, report = run(capsys, str(folder), "--dtype", "float32")
    rank = report["layout"]["ranks"][0]
    model = load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 16), RankGroup())
    assert model.states is not None
    assert rank["weight_bytes"] == model.weight_bytes
    assert rank["kv_bytes_per_token"] * 16 == model.kv_bytes_per_block
    assert (rank["state_bytes"], rank["snapshot_bytes"]) == (
        model.states.bytes_per_slot,
        model.states.bytes_per_snapshot,
    )


@pytest.mark.native
@pytest.mark.parametrize("name", ["gptq 4 bits", "w8a8", "bitsandbytes nf4", "fp8", "hqq 4 bits"])
def test_quantized_weights_are_described_with_the_memory_of_loading(name: str, tmp_path: Path, capsys: Any) -> None:
    options, quantize = CASES[name]
    folder, _ = save_quantized(make_model("qwen2", **SIZES), tmp_path, options, quantize)
    status, report = run(capsys, str(with_tokenizer(folder)), "--dtype", "bfloat16")
    assert (status, report["problems"]) == (0, [])
    model = load_model(LoadOptions(folder, torch.bfloat16, torch.device("cpu"), 16), RankGroup())
    assert report["layout"]["ranks"][0]["weight_bytes"] == model.weight_bytes
    bits, with_scales = (8, 8.5) if name in ("w8a8", "fp8") else (4, 5)
    described = re.search(r"stay in (\d) bits, (\d\.\d\d) each with their scales$", report["layout"]["quantization"])
    assert described
    assert int(described[1]) == bits
    assert bits < float(described[2]) <= with_scales


def orders_that_differ(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return gptq(4, 32, symmetric=False, in_order=not name.endswith(("k_proj", "up_proj", "down_proj")))(name, weight)


def save_gptq(folder: Path) -> None:
    options, _ = CASES["gptq in activation order"]
    save_quantized(make_model("qwen2", **SIZES), folder, options, orders_that_differ)[0].rename(folder / "model")
    for path in (folder / "model").iterdir():
        path.rename(folder / path.name)


@pytest.mark.native
@pytest.mark.parametrize("save", [save_compressed, save_gptq])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fused_layers_that_are_dequantized_are_counted_so(
    save: Callable[[Path], Any], dtype: str, tmp_path: Path, capsys: Any
) -> None:
    """Integers next to 8-bit floats, weights next to dense ones, and weights with other orders of columns."""
    save(tmp_path)
    status, report = run(capsys, str(with_tokenizer(tmp_path)), "--dtype", dtype)
    assert (status, report["problems"]) == (0, [])
    model = load_model(LoadOptions(tmp_path, getattr(torch, dtype), torch.device("cpu"), 16), RankGroup())
    assert report["layout"]["ranks"][0]["weight_bytes"] == model.weight_bytes
    if save is save_gptq:  # q, k and v, and gate and up are dense
        dense = load_model(
            LoadOptions(tmp_path, getattr(torch, dtype), torch.device("cpu"), 16, dequantize=True), RankGroup()
        )
        kept = 3 * (64 * 64 + 64 * 128) * getattr(torch, dtype).itemsize
        assert kept / 2 < dense.weight_bytes - model.weight_bytes < kept


def test_weights_of_one_layer_stay_quantized_only_together() -> None:
    integers, floats, order = QuantFormat(8, 32), QuantFormat(8, 32, code="e4m3fn"), torch.tensor([1, 0])
    assert stays_quantized([(integers, None), (floats, None)], ALL_KEPT)
    assert not stays_quantized([(integers, None), (floats, None)], Kept(mixed=False))
    assert not stays_quantized([(integers, None), (integers, order)], ALL_KEPT)
    assert stays_quantized([(integers, order), (integers, order.clone())], ALL_KEPT)
    assert not stays_quantized([(integers, order)], ALL_KEPT, is_reordered=True)
    assert not stays_quantized([(integers, None), (floats, None)], ALL_KEPT, is_reordered=True)
    assert not stays_quantized([(integers, None)], Kept(any=False))


def test_sampling_defaults_are_shown_and_entries_without_effect_are_named(folder: Path, capsys: Any) -> None:
    config = {"temperature": 0.6, "top_p": "0.9", "top_k": 20.0, "min_p": None, "num_beams": 4, "length_penalty": 1.0}
    (folder / "generation_config.json").write_text(json.dumps(config))
    status, report = run(capsys, str(folder))
    assert (status, report["text"]["sampling_defaults"]) == (0, {"temperature": 0.6, "top_k": 20})
    assert report["notes"] == [
        'generation_config.json: top_p is "0.9", must be a number from 0 to 1; it is ignored',
        "generation_config.json: no effect here, but in transformers: num_beams 4",
    ]
    check.main([str(folder)])
    assert "sampling       temperature 0.6, top_k 20, except on TGI's routes\n" in capsys.readouterr().out


def test_a_generation_config_that_the_server_cannot_read_is_a_problem(folder: Path, capsys: Any) -> None:
    (folder / "generation_config.json").write_text('{"temperature": NaN}')
    status, report = run(capsys, str(folder))
    assert status == 1
    assert "generation_config.json is not valid JSON: NaN is not a number of JSON" in report["problems"][0]


def test_all_problems_are_reported_at_once(folder: Path, capsys: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["stray"] = tensors.pop("model.norm.weight")
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:7].clone()
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}}}')
    (folder / "generation_config.json").write_text("{")
    status, report = run(capsys, str(folder), "--num-shard", "7")
    assert status == 1
    messages = "\n".join(report["problems"])
    for part in (
        "tokenizer.json has no vocabulary",
        "generation_config.json is not valid JSON",
        "lacks 1 of 30 tensors: model.norm.weight",
        "holds 1 tensors that the model has no place for: stray",
        "tensor lm_head.weight has shape [7, 48] in the checkpoint, but config.json implies [131, 48]",
        "1 weights are of type F8_E4M3",
        "cannot be split over 7 ranks",
    ):
        assert part in messages
    assert len(report["problems"]) == 7


def test_only_biases_of_zeros_may_be_more_than_the_model_has(folder: Path, capsys: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    bias = "model.layers.0.mlp.down_proj.bias"
    save_file(tensors | {bias: torch.zeros(48)}, folder / "model.safetensors")
    assert run(capsys, str(folder))[0] == 0
    save_file(tensors | {bias: torch.ones(48)}, folder / "model.safetensors")
    status, report = run(capsys, str(folder))
    assert status == 1
    assert f"holds 1 biases of layers that have none in this model: {bias}" in report["problems"][0]


def test_a_head_of_its_own_is_named_and_counted(tmp_path: Path, capsys: Any) -> None:
    folder = with_tokenizer(save_model(make_model("llama-tied"), tmp_path / "model"))
    _, tied = run(capsys, str(folder), "--dtype", "float32")
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.clone()}, folder / "model.safetensors")
    status, copied = run(capsys, str(folder), "--dtype", "float32")
    assert (status, copied["notes"], copied["layout"]["ranks"][0]["weight_bytes"]) == (
        0,
        [],
        tied["layout"]["ranks"][0]["weight_bytes"],
    )
    save_file({**tensors, "lm_head.weight": table + 1}, folder / "model.safetensors")
    status, own = run(capsys, str(folder), "--dtype", "float32")
    note = "config.json ties the output head to the embedding, but the checkpoint's lm_head.weight differs and is used"
    assert (status, own["notes"]) == (0, [note])
    assert own["layout"]["ranks"][0]["weight_bytes"] - tied["layout"]["ranks"][0]["weight_bytes"] == table.nbytes
    torch.save({**tensors, "lm_head.weight": table + 1}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    _, unknown = run(capsys, str(folder), "--dtype", "float32")
    assert unknown["notes"] == [
        "if lm_head.weight differs from the embedding, it is the output head, although config.json ties the two"
    ]


def test_an_index_beside_a_whole_file_is_noted(folder: Path, capsys: Any) -> None:
    shards = dict.fromkeys(load_file(folder / "model.safetensors"), "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    status, report = run(capsys, str(folder))
    note = "model.safetensors.index.json is not used, because there is model.safetensors"
    assert (status, report["notes"], list(report["weights"]["files"])) == (0, [note], ["model.safetensors"])
    load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 16), RankGroup())


def test_every_damaged_file_is_named(tmp_path: Path, capsys: Any) -> None:
    folder = with_tokenizer(save_model(make_model("llama"), tmp_path / "model", "60KB"))
    files = sorted(folder.glob("*.safetensors"))
    for path in files[:2]:
        path.write_bytes(path.read_bytes()[:-5])
    status, report = run(capsys, str(folder))
    assert status == 1
    assert [files[0].name in report["problems"][0], files[1].name in report["problems"][1]] == [True, True]
    assert report["layout"]["architecture"] == "llama"


def test_a_vocabulary_that_cannot_be_converted_is_named(folder: Path, capsys: Any) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_bytes(b"x")
    (folder / "chat_template.jinja").unlink()
    status, report = run(capsys, str(folder))
    assert status == 1
    hint = "it has vocab.json, which cannot be converted"
    assert report["problems"][0].endswith(f"has no tokenizer.json; {hint}")
    assert "no chat template" in report["notes"][0]


def test_a_slow_tokenizer_is_described_as_converted(folder: Path, capsys: Any) -> None:
    (folder / "tokenizer.json").unlink()
    source = Path(__file__).parents[1] / "tokenizer" / "sentencepiece" / "t5.model"
    (folder / "spiece.model").write_bytes(source.read_bytes())
    status, report = run(capsys, str(folder))
    assert (status, report["problems"]) == (0, [])
    assert report["text"]["tokenizer"] == "Unigram"
    (folder / "spiece.model").write_bytes(b"x")
    status, report = run(capsys, str(folder))
    assert status == 1
    assert "spiece.model is damaged or not a SentencePiece model" in report["problems"][0]


def test_pickles_are_described_without_conversion(tmp_path: Path, capsys: Any) -> None:
    model = make_model("llama")
    model.config.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    status, report = run(capsys, str(with_tokenizer(tmp_path / "model")))
    assert (status, report["problems"], report["stored_as"]) == (0, [], {"F32": 30})
    assert not list((tmp_path / "cache").glob("penstock/*"))


def test_a_gguf_file_is_described(tmp_path: Path, capsys: Any) -> None:
    status, report = run(capsys, str(save_gguf(make_model("llama"), tmp_path / "tiny.gguf")))
    assert report["weights"]["kind"] == "gguf"
    assert report["stored_as"]["F32"] > 0
    assert report["text"]["tokenizer"] == "BPE"
    assert (status, report["problems"]) == (0, [])


def test_a_missing_model_is_one_problem(capsys: Any) -> None:
    assert check.main(["/nowhere/model"]) == 1
    messages = capsys.readouterr().out
    assert "problem        there is no file or folder /nowhere/model" in messages
    assert messages.endswith("cannot be served\n")


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the model of `folder`, and an empty cache."""
    with running(Hub({path.name: path.read_bytes() for path in folder.iterdir()})) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield hub


def test_only_headers_of_a_hub_model_s_weights_are_read(hub: Hub, capsys: Any) -> None:
    status, report = run(capsys, "someone/tiny")
    assert (status, report["problems"]) == (0, [])
    assert report["origin"] == f"on the hub, commit {SHA}"
    assert report["stored_as"] == {"F32": 30}
    fetched = [asked for name, asked in hub.gets if name == "model.safetensors"]
    assert fetched
    assert all(fetched)


def test_metadata_of_a_hub_model_s_files_says_how_torchao_quantized_it(hub: Hub, tmp_path: Path, capsys: Any) -> None:
    from test_quantized_torchao import save

    stored, _ = save("int4", tmp_path / "torchao")
    hub.files.update({path.name: path.read_bytes() for path in stored.iterdir()})
    status, report = run(capsys, "someone/tiny", "--dtype", "bfloat16")
    assert (status, report["problems"]) == (0, [])
    assert report["layout"]["quantization"] == "torchao: 21 weights stay in 4 bits, 5.00 each with their scales"


def test_a_failing_hub_leaves_the_cached_model_to_describe(
    hub: Hub, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_HUB_RETRIES", "0")
    hub.status = 503
    status, report = run(capsys, "someone/tiny")
    assert status == 1
    assert report["problems"][0].startswith("someone/tiny is not in the cache, and the hub answered ")
    hub.status = 200
    snapshot = download(Reference("someone/tiny")).folder
    hub.status = 503
    status, report = run(capsys, "someone/tiny")
    assert (status, report["problems"], report["stored_as"]) == (0, [], {"F32": 30})
    assert report["origin"] == f"from the hub, commit {SHA}, in the cache, {snapshot}"


def test_the_list_of_models_equals_the_loader_s_table(capsys: Any) -> None:
    assert catalog.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["architectures"] == sorted(ARCHITECTURES)
    assert catalog.main([]) == 0
    assert all(f"  {name}\n" in capsys.readouterr().out for name in list(ARCHITECTURES)[:1])


def verdict_of_loading(folder: Path, num_ranks: int) -> str:
    """The message of the error; empty: it loads."""
    try:
        load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 16), RankGroup(0, num_ranks))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "num_ranks", "is_served"),
    [
        ("flex_olmo", 1, True),
        ("vaultgemma", 1, True),
        ("vaultgemma", 2, False),
        ("zamba", 1, False),
        ("lfm3", 1, False),
        ("marian", 1, False),
        ("lacks a tensor", 1, False),
        ("quantized", 1, False),
        ("own code", 1, False),
        ("dynamic rope", 1, True),
    ],
)
def test_the_verdict_on_models_of_transformers_is_that_of_loading(
    name: str, num_ranks: int, is_served: bool, tmp_path: Path, capsys: Any
) -> None:
    model_type = name if name in ("flex_olmo", "vaultgemma") else "vaultgemma"
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    sizes |= {"vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
    if model_type == "flex_olmo":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": None}
    changes: dict[str, Any] = {}
    if name in ("zamba", "lfm3", "marian"):
        changes = {"model_type": name}
    elif name == "own code":
        changes = {"model_type": "of_its_own", "auto_map": {"AutoModelForCausalLM": "a.B"}}
    elif name == "dynamic rope":
        changes = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1000.0}}
    elif name == "quantized":
        changes = {"quantization_config": {"quant_method": "awq"}}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    folder = with_tokenizer(save_model(model, tmp_path / "model"))
    if name == "lacks a tensor":
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    path = folder / "config.json"
    values = json.loads(path.read_text())
    if name == "lfm3":
        changes["layer_types"] = ["conv", "full_attention"]
    path.write_text(json.dumps(values | changes))
    status, report = run(capsys, str(folder), "--num-shard", str(num_ranks), "--dtype", "float32")
    message = verdict_of_loading(folder, num_ranks)
    assert (status == 0, message == "") == (is_served, is_served)
    assert report["problems"] == ([message] if message else [])
    if is_served:
        loaded = load_model(LoadOptions(folder, torch.float32, torch.device("cpu"), 16), RankGroup())
        rank = report["layout"]["ranks"][0]
        assert (rank["num_layers"], rank["num_heads"], rank["num_kv_heads"]) == (2, 2, 2)
        assert rank["weight_bytes"] == loaded.weight_bytes
        assert rank["kv_bytes_per_token"] == loaded.kv_bytes_per_block // 16
        assert report["layout"]["max_position_tokens"] == loaded.max_position_tokens
        assert report["layout"]["default_position_tokens"] == loaded.traits.default_position_tokens == 64
        assert report["layout"]["vocab_size"] == loaded.traits.vocab_size == 64

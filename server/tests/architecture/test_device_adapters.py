"""Adapters on the layers of a GPU, in Triton's interpreter or on a GPU: their logits are those of `peft`, in one batch
with other adapters and the base, on one rank and on two; recorded steps use any adapter; and no step waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES, VOCAB
from fake_cuda import fake_cuda, launched, record_eagerly
from fake_cuda import load as load_fake
from late_device import make_late
from model_driver import ModelDriver
from penstock_server import device as devices
from penstock_server.device.attention.interface import StepBatch
from penstock_server.device.triton import device as triton_device
from penstock_server.engine.graphs import Bucket, CudaRecorder, StepGraphs
from penstock_server.engine.host_batch import HostBatch
from penstock_server.engine.sequence import TableLimits
from penstock_server.engine.transfer import Upload
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.plan import Adapter, Advances, NewSequence, Plan
from rank_threads import run_ranks
from test_adapters import ACCURATE, BLOCK_TOKENS, MAX_RANK, loaded, logits_of, make_adapter, reference, save, targets
from test_deterministic import one_at_a_time
from tested_device import DEVICE, one_order_of_sums, triton_skip_reason
from tiny_models import prompts

if reason := triton_skip_reason():
    pytest.skip(reason, allow_module_level=True)

from penstock_server.device.triton.invariant import InvariantOps
from penstock_server.device.triton.ops import TritonOps

# Fused and separate projections, interleaved heads, transposed weights, latent attention, a mixture with a shared MLP.
NAMES = ("llama", "phi3", "gpt-neox", "gpt2", "deepseek-v2", "qwen2-moe")
OFTEN = ("llama", "deepseek-v2")


@contextmanager
def triton_everywhere(ops: type[TritonOps] = TritonOps) -> Iterator[None]:
    """On a CPU, in the interpreter, models get the operators of a GPU."""
    with one_order_of_sums() if ops is InvariantOps else nullcontext(), pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(triton_device, "unavailable_reason", lambda device: None)
            patch.setattr(devices, "choose_ops", lambda device, dtype, *_, **__: ops(device, dtype))
            patch.setattr(triton_device, "launch", one_at_a_time(triton_device.launch))
        yield


def load(folder: Path, group: RankGroup | None = None, exact: bool = False, **options: Any) -> Decoder:
    of_adapters = {"max_adapters": 2, "max_adapter_rank": MAX_RANK}
    given = LoadOptions(folder, torch.float32, DEVICE, BLOCK_TOKENS, attention="triton", **of_adapters, **options)
    model = load_model(given, group or RankGroup(), exact=exact)
    assert isinstance(model, Decoder)
    return model


def texts() -> list[list[int]]:
    return prompts(3, [12, 12, 11], VOCAB)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in NAMES]
)
def test_logits_are_those_of_peft(name: str, tmp_path: Path) -> None:
    folder = save(name, CASES[name], tmp_path / "base")
    one, one_model = make_adapter(tmp_path / "one", folder, 1, **targets(name))
    other, other_model = make_adapter(tmp_path / "other", folder, 2, r=5, use_rslora=True, **targets(name))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with triton_everywhere():
        model = load(folder)
        first, second = loaded(model, [one, other])
        found = logits_of(model, texts(), [first, None, second])
    for text, logits, expected in zip(texts(), found, (one_model, base, other_model), strict=True):
        torch.testing.assert_close(logits, reference(expected, text), **ACCURATE)


@pytest.mark.parametrize("is_tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_embedding_and_head_are_those_of_peft(is_tied: bool, tmp_path: Path) -> None:
    case = CASES["llama"]
    folder = save("llama", replace(case, values={**case.values, "tie_word_embeddings": is_tied}), tmp_path / "base")
    both, head = ["embed_tokens", "lm_head", "q_proj"], ["lm_head"]
    one, one_model = make_adapter(tmp_path / "one", folder, 1, target_modules=both)
    other, other_model = make_adapter(tmp_path / "other", folder, 2, r=5, target_modules=head)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with triton_everywhere():
        model = load(folder)
        first, second = loaded(model, [one, other])
        found = logits_of(model, texts(), [first, None, second])
        plain = logits_of(model, texts(), [None] * 3)
    for text, logits, expected in zip(texts(), found, (one_model, base, other_model), strict=True):
        torch.testing.assert_close(logits, reference(expected, text), **ACCURATE)
    assert torch.equal(found[1], plain[1])


@pytest.mark.parametrize(
    "name",
    ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3-moe", "gpt-oss", "llama4"))],
)
def test_experts_are_those_of_peft(name: str, tmp_path: Path) -> None:
    folder = save(name, CASES[name], tmp_path / "base")
    changed = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    one, one_model = make_adapter(tmp_path / "one", folder, 1, **changed)
    other, other_model = make_adapter(tmp_path / "other", folder, 2, r=5, use_rslora=True, **changed)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with triton_everywhere():
        model = load(folder)
        first, second = loaded(model, [one, other])
        found = logits_of(model, texts(), [first, None, second])
    for text, logits, expected in zip(texts(), found, (one_model, base, other_model), strict=True):
        torch.testing.assert_close(logits, reference(expected, text), **ACCURATE)
    assert (found[0] - reference(base, texts()[0])).abs().max() > 0.01


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the ranks are threads, which would share a GPU's stream")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral", "mixtral-two-experts")]
)
def test_ranks_have_the_adapters_of_their_experts_or_of_their_parts_of_experts(name: str, tmp_path: Path) -> None:
    """Three ranks: fewer experts than ranks are split."""
    folder = save(name, CASES[name], tmp_path / "base")
    changed = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    one, one_model = make_adapter(tmp_path / "one", folder, 1, **changed)

    def logits(group: RankGroup) -> torch.Tensor:
        model = load(folder, group)
        return logits_of(model, texts()[1:], [*loaded(model, [one]), None])[0]

    with triton_everywhere():
        of_ranks = run_ranks(2 if name == "mixtral" else 3, logits)
    for found in of_ranks:
        torch.testing.assert_close(found, reference(one_model, texts()[1]), **ACCURATE)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the ranks are threads, which would share a GPU's stream")
@pytest.mark.parametrize("exact", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_ranks_compute_what_one_does(exact: bool, tmp_path: Path) -> None:
    """With `exact`, the ranks gather and compute the same bits."""
    folder = save("llama", CASES["llama"], tmp_path / "base")
    changed = r".*(_proj|embed_tokens|lm_head)"
    one, one_model = make_adapter(tmp_path / "one", folder, 1, target_modules=changed)

    def logits(group: RankGroup) -> torch.Tensor:
        model = load(folder, group, exact)
        return logits_of(model, texts()[1:], [*loaded(model, [one]), None])[0]

    with triton_everywhere(InvariantOps if exact else TritonOps):
        alone = logits(RankGroup())
        of_ranks = run_ranks(2, logits)
    torch.testing.assert_close(alone, reference(one_model, texts()[1]), **ACCURATE)
    for found in of_ranks:
        assert torch.equal(found, alone) if exact else torch.allclose(found, alone, **ACCURATE)


@pytest.mark.slow
def test_adapters_are_added_to_quantized_weights(tmp_path: Path) -> None:
    case = CASES["llama"]
    folder = save("llama", replace(case, values={**case.values, "intermediate_size": 128}), tmp_path / "base")
    one, one_model = make_adapter(tmp_path / "one", folder, 1)
    text = texts()[0]
    with triton_everywhere():
        model = load(folder, quantize="eetq", activation_bits=16)
        (adapter,) = loaded(model, [one])
        with_adapter, plain = (logits_of(model, [text], [each])[0] for each in (adapter, None))
    expected, base = reference(one_model, text), reference(one_model.unload(), text)
    error = (plain - base).norm() / base.norm()
    assert (with_adapter - expected).norm() / expected.norm() < 2 * error + 0.02


class RecordedDriver(ModelDriver):
    """Every step replays one recorded step."""

    BUCKET = Bucket(32, 32, has_adapters=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        limits = TableLimits(VOCAB, self.block_tokens, self.num_blocks, self.BUCKET.max_context_tokens, 32)
        record = record_eagerly if DEVICE.type == "cpu" else CudaRecorder()
        self.graphs = StepGraphs(self.model, limits, DEVICE, record)
        with torch.inference_mode():
            self.graphs.add([self.BUCKET])

    def forward(self, batch: HostBatch, on_device: StepBatch) -> torch.Tensor:
        upload = Upload(DEVICE)
        self.BUCKET.pad(batch, self.block_tokens).put(upload.add)
        upload.start()
        return self.graphs.forward(self.BUCKET, upload.memory, batch.num_tokens)


def test_one_recorded_step_gives_the_logits_of_peft_whatever_adapters_its_rows_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was recorded without any."""
    folder = save("llama", CASES["llama"], tmp_path / "base")
    one, one_model = make_adapter(tmp_path / "one", folder, 1)
    other, other_model = make_adapter(tmp_path / "other", folder, 2, r=5, use_rslora=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if DEVICE.type == "cpu":
        make_late(monkeypatch)
    with triton_everywhere():
        model = load(folder)
        first, second = loaded(model, [one, other])
        driver = RecordedDriver(model, BLOCK_TOKENS)
        found = [
            logits_of(model, texts(), adapters, driver)
            for adapters in ([first, None, second], [second, first, first], [None] * 3)
        ]
    expected = [[one_model, base, other_model], [other_model, one_model, one_model], [base] * 3]
    for of_step, models in zip(found, expected, strict=True):
        for text, logits, each in zip(texts(), of_step, models, strict=True):
            torch.testing.assert_close(logits, reference(each, text), **ACCURATE)


def steps(folder: Path, adapters: list[Adapter | None]) -> list[Plan]:
    """A prompt of each sequence, and a decode step."""
    new = [
        NewSequence(i, [7] * 5, 5, block_ids=[2 * i, 2 * i + 1], adapter=adapter) for i, adapter in enumerate(adapters)
    ]
    ids = list(range(len(adapters)))
    return [
        Plan(1, new_sequences=new, advances=Advances.of(ids, [5] * len(ids), [True] * len(ids))),
        Plan(2, advances=Advances.of(ids, [1] * len(ids), [True] * len(ids))),
    ]


@pytest.mark.parametrize("name", ["llama", "deepseek-v2"])
def test_a_step_with_adapters_waits_for_nothing_and_two_launches_add_them_to_a_layer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a step without any launches none of their kernels."""
    folder = save(name, CASES[name], tmp_path / "base")
    adapter = Adapter(1, make_adapter(tmp_path / "one", folder, 1, **targets(name))[0])
    monkeypatch.setattr("penstock_server.device.triton.low_rank.address_of", lambda tensor: 1 << 40)
    with fake_cuda() as launches:
        engine = load_fake(folder, max_adapters=2, max_adapter_rank=MAX_RANK)
        assert engine.model.adapters is not None
        engine.model.adapters.load(adapter)  # not by the engine, whose thread has no fake tensors
        for adapters in ([None, None], [None, adapter]):
            engine.reset()
            for plan in steps(folder, adapters):
                found = launched((engine, launches), plan)
                assert (found.num_uploads, found.num_downloads) == (1, 1)
                num_sites = sums_of_a_step(engine.model) if adapters[1] else 0
                # With the head, and with the embedding, whose A is looked up.
                expected = Counter(shrink_kernel=num_sites + 1, expand_kernel=num_sites + 2, look_up_kernel=1)
                low_rank = Counter({key: found.kernels[key] for key in expected})
                assert low_rank == (expected if adapters[1] else Counter())
        engine.close()


def sums_of_a_step(model: Any) -> int:
    """Launches of each kernel: for each linear layer that adapters can change, routers among them, for both products of
    all experts, and in latent attention for the projections to and from the latent of all heads."""
    experts = [
        layer.mlp.experts for layer in model.layers if "Experts" in type(getattr(layer.mlp, "experts", None)).__name__
    ]
    num_routers = sum(not each.router.spec.is_wide for each in experts)  # adapters change no float32 router
    has_shared = sum(getattr(layer.mlp, "shared", None) is not None for layer in model.layers)
    is_latent = "Latent" in type(model.layers[0].attention).__name__
    return len(model.layers) * (2 + 3 * is_latent) + num_routers + 2 * (len(model.layers) + has_shared)

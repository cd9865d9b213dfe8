"""Every architecture against transformers: logits in two dtypes and greedy tokens; several ranks against one."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import CASES, VOCAB, Case
from engine_run import BLOCK_TOKENS, EngineRun
from model_driver import DrivenSequence, ModelDriver, interpret, is_native
from models_page import SWEEP_HEADING, Measured
from near_tie import Followed, assert_greedy, has_experts
from penstock_server.device.state import CHUNK_TOKENS
from penstock_server.errors import ConfigError
from penstock_server.models import load_model
from penstock_server.models.config import Config
from penstock_server.models.decoder import Decoder
from penstock_server.models.interface import LoadOptions
from penstock_server.models.registry import ARCHITECTURES, read_spec
from penstock_server.parallel import RankGroup
from rank_pool import RankPool
from rank_program import run
from safetensors.torch import load_file, save_file
from shares import held_bytes, num_copied_elements
from tested_device import DEVICE
from tiny_model import make_model, save_model
from tiny_models import prompts

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 64


@dataclass
class Made:
    """A case's model, and the folder it was saved to."""

    name: str
    case: Case
    reference: transformers.PreTrainedModel
    reference_folder: Path
    folder: Path  # differs from it for layouts that transformers has no class for

    @property
    def shortest(self) -> int:
        return self.case.shortest

    @property
    def block_tokens(self) -> int:
        """Tokens of an engine's block, which must have whole chunks of states if the model keeps any."""
        return CHUNK_TOKENS if self.case.keeps_state else BLOCK_TOKENS

    def sequence(self, driver: ModelDriver, text: list[int]) -> DrivenSequence:
        return driver.sequence(text, self.case.num_source(text))

    def logits(self, text: list[int], reference: transformers.PreTrainedModel | None = None) -> torch.Tensor:
        """[tokens, vocab], zeros for source tokens; by the case's model or the given one."""
        return reference_logits(reference or self.reference, text, self.case.num_source(text))

    @functools.cached_property
    def rank_arguments(self) -> dict[str, Any]:
        """What `rank_program.run` computes, on one rank and on several."""
        texts = prompts(4, [19, self.shortest + 12, self.shortest + 1], VOCAB)
        sources = [self.case.num_source(text) for text in texts]
        return {"dtype": "float32", "texts": texts, "num_tokens": 6, "sources": sources}

    @functools.cached_property
    def one_rank(self) -> dict[str, Any]:
        return run(self.folder, group=RankGroup(), **self.rank_arguments)


@torch.inference_mode()
def reference_logits(model: transformers.PreTrainedModel, text: list[int], num_source: int) -> torch.Tensor:
    if not num_source:
        return model(torch.tensor([text]), use_cache=False).logits[0]
    source, answer = torch.tensor([text[:num_source]]), torch.tensor([text[num_source:]])
    logits = model(source, decoder_input_ids=answer, use_cache=False).logits[0]
    return torch.nn.functional.pad(logits, (0, 0, num_source, 0))


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in CASES])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Scoped to the module so that all tests of a case run in succession and share its model."""
    case = CASES[request.param]
    reference = make_model(request.param, case)
    folder = reference_folder = save_model(reference, tmp_path_factory.mktemp(request.param))
    if case.published is not None:
        folder = case.published.save(reference, reference_folder / "published")
    return Made(request.param, case, reference, reference_folder, folder)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()


def driver_of(folder: Path, dtype: torch.dtype, block_tokens: int) -> ModelDriver:
    model = load_model(LoadOptions(folder, dtype, DEVICE, block_tokens), RankGroup())
    return ModelDriver(model, block_tokens=block_tokens)


@pytest.mark.column("float32")
def test_a_mixed_batch_gives_the_logits_of_transformers(made: Made, measured: Measured) -> None:
    driver = driver_of(made.folder, torch.float32, block_tokens=4)
    texts = prompts(1, [42, made.shortest + 9, made.shortest + 2, made.shortest], VOCAB)
    expected = [made.logits(text) for text in texts]
    first, second, third, fourth = (made.sequence(driver, text) for text in texts)
    steps = [
        [(first, max(7, first.num_source)), (second, max(8, second.num_source))],
        [(second, 1), (first, 1), (third, made.shortest)],
        [(third, 1), (first, 28), (fourth, made.shortest)],
        [(third, 1), (first, 1)],
    ]
    for step in steps:
        begins = [sequence.num_computed for sequence, _ in step]
        logits = driver.step(step, every_row=True)
        wanted = torch.cat(
            [
                expected[texts.index(sequence.token_ids)][max(begin, sequence.num_source) : begin + count]
                for (sequence, count), begin in zip(step, begins, strict=True)
            ]
        )
        torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        measured.difference(made.name, "float32", float((logits - wanted).abs().max()))


@pytest.mark.column("bfloat16")
def test_bfloat16_logits_are_those_of_transformers(
    made: Made, measured: Measured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 2e-2 of the logits' scale, both as root mean squares; transformers computes in bfloat16 too. Where
    rounding decides between two experts, transformers is made to follow our choice, in at most a tenth of the rows."""
    followed = Followed()
    followed.record(monkeypatch)
    driver = driver_of(made.folder, torch.bfloat16, block_tokens=16)
    if has_experts(made.reference) and isinstance(driver.model, Decoder) and is_native(driver.model):
        interpret(driver.model)  # routers inside of the one native call are not seen
    text = prompts(2, [30], VOCAB)[0]
    sequence = made.sequence(driver, text)
    logits = driver.step([(sequence, 30)], every_row=True)
    reference = type(made.reference).from_pretrained(made.reference_folder, dtype=torch.bfloat16)
    followed.lead(reference)
    rounded = made.logits(text, reference.eval()).float()[sequence.num_source :]
    exact = made.logits(text)
    difference = float((logits - rounded).norm() / exact.norm())
    assert difference < 2e-2
    assert followed.num_layers == len(followed.choices)
    assert followed.num_changed <= followed.num_rows // 10
    measured.difference(made.name, "bfloat16", difference)


@pytest.mark.column("greedy")
def test_greedy_tokens_are_those_of_transformers(made: Made, measured: Measured) -> None:
    """In chunks and batches, with a shared prefix and a preemption. If each token is the argmax of transformers after
    the tokens before it, then transformers would have generated the same text. Models with sources share no prefix, and
    those with states none without a snapshot."""
    shared, first, other = prompts(3, [10, made.shortest + 4, 6], VOCAB)
    texts = [first, [*shared, *other[:3]], [*shared, *other[2:]]]
    run = EngineRun(made.folder, num_source=made.case.num_source, block_tokens=made.block_tokens)
    num_shared = 0 if made.case.has_encoder or run.engine.model.states is not None else len(shared)
    found = run.greedy(texts, NUM_TOKENS, shared_tokens=num_shared, chunk=7)
    for text, tokens in zip(texts, found, strict=True):
        assert_greedy(made.logits([*text, *tokens])[len(text) - 1 : -1], tokens)
        measured.tokens(made.name, len(tokens))


@pytest.mark.parametrize(
    ("size", "exact"),
    [
        pytest.param(size, exact, marks=pytest.mark.column(f"{size} ranks"))
        for size, exact in ((2, True), (3, True), (4, True), (2, False))
    ],
)
def test_ranks_agree_with_one(made: Made, pool: RankPool, size: int, exact: bool, measured: Measured) -> None:
    """Logits and tokens equal those of one rank, and the ranks hold its weights once, plus the expected replicas."""
    one = made.one_rank
    several = pool.run(made.folder, size, exact=exact, **made.rank_arguments)
    torch.testing.assert_close(several["logits"], one["logits"], atol=1e-4, rtol=1e-4)
    assert several["tokens"] == one["tokens"]
    assert several["ranks_weight_bytes"] == [held_bytes(made.folder, rank, size, exact) for rank in range(size)]
    copies = 4 * sum(num_copied_elements(made.folder, size, exact).values())
    assert sum(several["ranks_weight_bytes"]) == one["weight_bytes"] + copies
    measured.difference(made.name, f"{size} ranks", float((several["logits"] - one["logits"]).abs().max()))


def test_every_architecture_has_a_case() -> None:
    if lacking := [name for name, case in CASES.items() if case.config_class is None]:
        pytest.skip(f"transformers {transformers.__version__} has no configuration of {', '.join(lacking)}")
    tested = {case.model_type for case in CASES.values()}
    assert set(ARCHITECTURES) == tested


def test_multi_token_prediction_layers_are_ignored(tmp_path: Path) -> None:
    make_model("deepseek-v3", CASES["deepseek-v3"]).save_pretrained(tmp_path)
    weights, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    draft = {f"model.layers.3.{name}": torch.zeros(2) for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")}
    save_file({**weights, **draft}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    assert driver_of(tmp_path, torch.float32, block_tokens=4).model.traits.num_layers == 3
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"2 tensors that the model has no place for: model\.layers\.3\.eh_proj"):
        driver_of(tmp_path, torch.float32, block_tokens=4)


def test_the_theta_of_published_dbrx_configurations_is_read(tmp_path: Path) -> None:
    """transformers 5 ignores the theta of such a configuration, with which the checkpoint was trained."""
    values = {**CASES["dbrx"].sizes, **CASES["dbrx"].values, "model_type": "dbrx"}
    del values["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    rope = read_spec(tmp_path)[0].layers[0].plain_attention.rope
    assert rope is not None
    assert rope.theta == 1000.0


def test_longrope_factors_follow_the_longest_served_sequence(tmp_path: Path) -> None:
    """transformers selects by the text's length, so ours equals it for long texts or for short ones, as limited."""
    case = CASES["phi3-long-rope"]
    values = {**case.values, "original_max_position_embeddings": 32}
    reference = make_model("phi3-long-rope", replace(case, values=values))
    driver = driver_of(save_model(reference, tmp_path), torch.float32, block_tokens=4)
    short, long = prompts(6, [20, 40], VOCAB)
    for served, text, other in ((256, long, short), (32, short, None)):
        driver.model.serve_up_to(served)
        for tokens, is_equal in ((text, True), (other, False)):
            if tokens is not None:
                logits = driver.step([(driver.sequence(tokens), len(tokens))], every_row=True)
                with torch.inference_mode():
                    expected = reference(torch.tensor([tokens]), use_cache=False).logits[0]
                assert torch.allclose(logits, expected, atol=1e-4, rtol=1e-4) == is_equal


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.published is None])
def test_missing_configuration_keys_have_the_defaults_of_transformers(name: str) -> None:
    case = CASES[name]
    check_defaults(case, {**case.sizes, **case.values})
    if case.model_type in ("deepseek_v2", "dots1", "falcon_h1", "glm4_moe", "lfm2_moe"):
        return  # transformers has no default for numbers of experts or layer_types, or one of heads of an odd size
    sizes = getattr(transformers, case.config)().to_dict()
    check_defaults(case, {key: sizes[key] for key in case.sizes if key in sizes and key != "num_key_value_heads"})


def check_defaults(case: Case, given: dict[str, Any]) -> None:
    """The builder reads the same spec from the values and from the configuration that transformers makes of them."""
    whole = getattr(transformers, case.config)(**copy.deepcopy(given)).to_dict()
    build, path = ARCHITECTURES[case.model_type], Path("config.json")
    assert build(Config(given, path)) == build(Config(whole, path))


def test_the_page_of_models_lists_every_architecture(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--models-table", None):
        pytest.skip("the page is being written")
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8").split(SWEEP_HEADING)[0]
    listed = re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)
    assert listed == sorted(ARCHITECTURES), "the page is stale: make docs"
    assert "✗" not in page
    assert "not run" not in page


def test_a_model_that_was_saved_without_its_head_is_the_same_model(tmp_path: Path) -> None:
    reference = make_model("gpt2", CASES["gpt2"])
    reference.transformer.save_pretrained(tmp_path)
    text = prompts(5, [12], VOCAB)[0]
    driver = driver_of(tmp_path, torch.float32, block_tokens=4)
    with torch.inference_mode():
        expected = reference(torch.tensor([text])).logits[0]
    torch.testing.assert_close(
        driver.step([(driver.sequence(text), 12)], every_row=True), expected, atol=1e-4, rtol=1e-4
    )

"""A pipeline of stages gives the tokens and logprobs of one rank, to the bit, and each stage holds its layers only."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_model import BLOCK_TOKENS as FAKE_BLOCK_TOKENS
from fake_model import POISON, VOCAB, FakeModel, continuation
from image_cases import VOCAB as IMAGE_VOCAB
from image_cases import make_image_model
from native_builds import BUILD
from penstock_server.collectives.distributed import Distributed
from penstock_server.engine import Engine
from penstock_server.engine.step import BROKEN_LOGITS
from penstock_server.errors import ConfigError
from penstock_server.inspection import check
from penstock_server.models import load_model
from penstock_server.models.decoder import Decoder
from penstock_server.parallel import RankGroup, Stage, split_layers
from penstock_server.protocol.plan import NewSequence, Plan, Sampling
from pipeline_ranks import CPU, Recorder, loaded_engine, options_of, run_script, run_stages
from plans import Advance, Output, columns, step
from program_environment import program_environment
from test_engine import LIMITS as FAKE_LIMITS
from test_engine import Driver, prompt_of
from tiny_models import make_model, save_model

DTYPE = torch.bfloat16 if BUILD is not None else torch.float32


@pytest.mark.parametrize(
    ("variant", "num_stages", "num_shards"),
    [("qwen2", 2, 1), ("llama-tied", 3, 1), ("llama", 2, 2)],
)
def test_stages_agree_with_one_rank(variant: str, num_stages: int, num_shards: int, tmp_path: Path) -> None:
    options = options_of(save_model(make_model(variant), tmp_path), DTYPE)
    one = Recorder(loaded_engine(options, RankGroup()))
    expected = run_script(one, 131)
    found, engines = run_stages(options, num_stages, num_shards, one.plans)
    assert found == expected
    models = [engine.model for engine in engines]
    num_layers = [model.traits.num_layers for model in models[::num_shards]]
    assert sum(num_layers) == one.engine.model.traits.num_layers == 3
    assert min(num_layers) >= 1
    assert sum(model.kv_bytes_per_block for model in models) == one.engine.model.kv_bytes_per_block
    assert max(model.weight_bytes for model in models) < 0.8 * one.engine.model.weight_bytes


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3.5"])
def test_stages_serve_the_text_of_a_model_that_reads_images(name: str, tmp_path: Path) -> None:
    make_image_model(name, tmp_path)
    options = options_of(tmp_path, DTYPE)
    one = Recorder(loaded_engine(options, RankGroup()))
    assert one.engine.model.images is not None
    expected = run_script(one, IMAGE_VOCAB)
    found, engines = run_stages(options, 2, 1, one.plans)
    assert found == expected
    assert [engine.model.images for engine in engines] == [None, None]


def test_a_stage_reads_only_its_own_weights(tmp_path: Path) -> None:
    options = options_of(save_model(make_model("llama"), tmp_path), DTYPE)
    middle = load_model(options, RankGroup(stage=Stage(1, 3, everyone=ALONE)))
    assert isinstance(middle, Decoder)
    assert (middle.traits.num_layers, middle.embedding, middle.last.head, middle.last.norm) == (1, None, None, None)
    whole = load_model(options, RankGroup())
    assert middle.weight_bytes * 3 < whole.weight_bytes


class Alone(Distributed):
    """Stands for the ranks of all stages."""

    def minimum(self, value: int) -> int:
        return value


ALONE = Alone()


def fake_stages() -> list[Driver]:
    """The last stage and the one before. The fake model needs nothing of another stage: each one reads the tokens."""
    stages = [Stage(index, 2, everyone=ALONE) for index in (1, 0)]
    engines = [Engine(FakeModel(), RankGroup(stage=stage), CPU, FAKE_BLOCK_TOKENS) for stage in stages]
    for engine in engines:
        engine.warm_up(FAKE_LIMITS)
    return [Driver(engine) for engine in engines]


def run_plans(drivers: list[Driver], plans: list[Plan]) -> list[list[Output]]:
    """What the last stage returns, after checking that all stages have computed the same tokens."""
    last, before = ([step(driver.engine, plan) for plan in plans] for driver in drivers)
    assert before == [[] for _ in plans]
    first, second = (driver.engine.model for driver in drivers)
    assert isinstance(first, FakeModel)
    assert isinstance(second, FakeModel)
    assert torch.equal(first.cache, second.cache), "both stages computed the same tokens"
    return last


def plan_of(step: int, new: list[NewSequence], advances: list[Advance], last: list[int]) -> Plan:
    listed = replace(columns(advances), last_token_ids=np.array(last, np.uint32))
    return Plan(step, new_sequences=new, advances=listed)


def test_stages_learn_sampled_tokens_from_the_next_plan() -> None:
    prompt = prompt_of(1, 5)
    expected = continuation(prompt, 3)
    first = plan_of(1, [NewSequence(1, prompt, 5)], [Advance(1, 5, [0, 1], sample=True)], [prompt[-1]])
    later = [plan_of(i + 2, [], [Advance(1, 1, sample=True)], [expected[i]]) for i in range(2)]
    outputs = run_plans(fake_stages(), [first, *later])
    assert [output.tokens[0].id for [output] in outputs] == expected


def test_a_sequence_that_fails_in_the_last_stage_stays_in_the_steps_of_all_stages() -> None:
    """Chunks of its prompt are in flight, and the stages before have computed them."""
    prompt = [*prompt_of(1, 3), POISON, *prompt_of(2, 4)]
    sampling = Sampling(prompt_logprobs=True)
    plans = [
        plan_of(1, [NewSequence(1, prompt, 8, sampling=sampling)], [Advance(1, 4, [0])], [prompt[-1]]),
        plan_of(2, [], [Advance(1, 4, [1], sample=True)], [prompt[-1]]),
    ]
    [[failed], _] = run_plans(fake_stages(), plans)
    assert failed.error == BROKEN_LOGITS


def test_a_last_token_outside_of_the_vocabulary_fails_its_sequence() -> None:
    prompt = prompt_of(1, 5)
    plan = plan_of(1, [NewSequence(1, prompt, 5)], [Advance(1, 5, [0, 1], sample=True)], [VOCAB])
    [output] = step(fake_stages()[0].engine, plan)
    assert output.error == f"token id {VOCAB} is outside of the vocabulary of {VOCAB}"


@pytest.mark.parametrize(
    ("costs", "head_cost", "num_stages", "sizes"),
    [
        ([1] * 8, 0, 2, [4, 4]),
        ([1] * 30, 8, 2, [19, 11]),  # the head takes as long as eight layers
        ([1, 1, 6, 1, 1], 0, 3, [2, 1, 2]),
        ([1, 1], 100, 2, [1, 1]),
    ],
)
def test_layers_are_split_by_their_weights(costs: list[int], head_cost: int, num_stages: int, sizes: list[int]) -> None:
    parts = split_layers(costs, head_cost, num_stages)
    assert [len(part) for part in parts] == sizes
    assert [layer for part in parts for layer in part] == list(range(len(costs)))


def test_what_cannot_be_split_is_refused(tmp_path: Path) -> None:
    options = options_of(save_model(make_model("llama"), tmp_path), DTYPE)
    with pytest.raises(ConfigError, match="3 layers cannot be split into 4 pipeline stages; at most 3 are possible"):
        load_model(options, RankGroup(stage=Stage(0, 4)))
    with pytest.raises(ConfigError, match="its layers are split into pipeline stages; omit --lora-adapters"):
        load_model(replace(options, max_adapters=1, max_adapter_rank=8), RankGroup(stage=Stage(0, 2)))
    with pytest.raises(ConfigError, match="3 ranks cannot form 2 pipeline stages with the same number of ranks"):
        RankGroup.join(0, 3, "", "gloo", None, num_stages=2)


def test_check_reports_the_share_of_each_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(save_model(make_model("llama"), tmp_path))
    check.main([folder, "--pipeline-parallel-size", "2", "--dtype", "float32", "--json"])
    ranks = json.loads(capsys.readouterr().out)["layout"]["ranks"]
    assert [(rank["first_layer"], rank["num_layers"]) for rank in ranks] == [(2, 1), (0, 2)]
    options = options_of(Path(folder), torch.float32)
    models = [load_model(options, RankGroup(stage=Stage(index, 2, everyone=ALONE))) for index in (1, 0)]
    assert [rank["weight_bytes"] for rank in ranks] == [model.weight_bytes for model in models]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_processes_join_stages_and_links(size: int, tmp_path: Path) -> None:
    program = Path(__file__).parents[1] / "programs" / "pipeline_program.py"
    arguments = [str(size), "2", f"file://{tmp_path}/rendezvous"]
    ranks = [[sys.executable, str(program), str(rank), *arguments] for rank in range(size)]
    processes = [subprocess.Popen(rank, env=program_environment(), stderr=subprocess.PIPE, text=True) for rank in ranks]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * size, "\n".join(errors)

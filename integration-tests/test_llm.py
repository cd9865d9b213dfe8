"""The Python package: `LLM` and its server, from start to end."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import byte_model
import numpy as np
import pytest
from binary import PENSTOCK, TIMEOUT_S, Server, children, name
from client import ask
from penstock import (
    LLM,
    AsyncLLM,
    FileSummary,
    LoRARequest,
    PenstockError,
    RequestError,
    Result,
    SamplingParams,
    SettingError,
    StartError,
    StoppedError,
    StructuredOutputsParams,
)
from random_adapter import make_adapter
from test_lifecycle import wait_until_gone

PROGRAM = Path(__file__).parent / "llm_program.py"
PROMPTS = ["The capital of Japan is", "Roses are red,", "1, 1, 2, 3, 5, 8,", "def quicksort(items):"]
CHAT = [{"role": "user", "content": "What is the capital of Japan?"}]
GREEDY = SamplingParams(max_tokens=12, temperature=0)


@pytest.fixture(scope="module", autouse=True)
def binary() -> Iterator[None]:
    """The binary that the other tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_BINARY", str(PENSTOCK))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def llm(binary: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    adapter = make_adapter(tmp_path_factory.mktemp("adapters") / "poet", seed=1)
    with LLM(
        max_total_tokens=1024,
        max_concurrent_requests=16,
        enable_prefill_logprobs=True,
        lora_adapters=f"poet={adapter}",
    ) as llm:
        yield llm


def texts(results: list[Result]) -> list[str]:
    return [result.text for result in results]


def test_tokens_and_logprobs_are_the_bits_of_the_server(llm: LLM, server: Server) -> None:
    for params in ({"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 7, "n": 2}):
        found = llm.generate(PROMPTS, SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True, **params))
        body = {"max_tokens": 12, "logprobs": 2, "return_token_ids": True, "ignore_eos": True, **params}
        answers = [ask(server, "/v1/completions", {"prompt": prompt, **body}).json for prompt in PROMPTS]
        assert [(one.index, one.prompt) for one in found] == list(enumerate(PROMPTS))
        for one, answer in zip(found, answers, strict=True):
            assert one.prompt_token_ids == answer["choices"][0]["prompt_token_ids"]
            for number, (output, choice) in enumerate(zip(one.outputs, answer["choices"], strict=True)):
                assert output.index == choice["index"] == number
                assert (output.text, output.token_ids) == (choice["text"], choice["token_ids"])
                assert output.finish_reason == choice["finish_reason"]
                assert output.logprobs == choice["logprobs"]["token_logprobs"]
                held = [token in top for token, top in zip(output.token_ids, output.top_logprobs, strict=True)]
                assert held == [True] * 12
            assert (one.text, one.token_ids) == (one.outputs[0].text, one.outputs[0].token_ids)


def test_token_ids_are_a_prompt(llm: LLM) -> None:
    (as_text,) = llm.generate(PROMPTS[0], GREEDY)
    (as_ids,) = llm.generate(as_text.prompt_token_ids, GREEDY)
    assert (as_ids.prompt_token_ids, as_ids.text) == (as_text.prompt_token_ids, as_text.text)
    (scored,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert [token and list(token) for token in scored.prompt_logprobs] == [
        None,
        *([token_id] for token_id in as_text.prompt_token_ids[1:]),
    ]


def test_results_have_the_order_of_the_prompts_and_each_prompt_its_params(llm: LLM) -> None:
    num_tokens = [1 + 37 * i % 23 for i in range(60)]  # more than are in flight
    params = [SamplingParams(max_tokens=num, temperature=0, ignore_eos=True) for num in num_tokens]
    found = llm.generate([f"{i}:" for i in range(60)], params)
    assert [one.prompt for one in found] == [f"{i}:" for i in range(60)]
    assert [len(one.token_ids) for one in found] == num_tokens
    with pytest.raises(ValueError, match="1 sampling_params were given for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_chat_and_its_stream_are_the_servers_answer(llm: LLM, server: Server) -> None:
    expected = ask(server, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 6, "temperature": 0}).json
    text = expected["choices"][0]["message"]["content"]
    first, second = llm.chat([CHAT, CHAT], SamplingParams(max_tokens=6, temperature=0, logprobs=1))
    assert first.text == second.text == text
    assert [token in top for token, top in zip(first.token_ids, first.top_logprobs, strict=True)] == [True] * 6
    assert len(first.logprobs) == 6
    chunks = list(llm.stream(CHAT, SamplingParams(max_tokens=6, temperature=0)))
    assert "".join(chunk.text for chunk in chunks) == text
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == first.token_ids
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]


def test_a_tool_call_is_a_list_of_plain_objects(llm: LLM) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    (found,) = llm.chat(CHAT, SamplingParams(max_tokens=100, temperature=0), tools=[tool], tool_choice="required")
    assert found.finish_reason == "tool_calls"
    assert [call["function"]["name"] for call in found.tool_calls] == ["weather"]
    assert json.loads(found.tool_calls[0]["function"]["arguments"])["city"]


def test_a_stream_that_is_left_early_ends_the_generation(llm: LLM) -> None:
    for chunk in llm.stream(PROMPTS[0], SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)):
        assert chunk.text
        break
    stream = llm.stream(PROMPTS[0], GREEDY)
    assert "".join(chunk.text for chunk in stream) == llm.generate(PROMPTS[0], GREEDY)[0].text


def test_outputs_match_schemas_patterns_and_choices(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["age"],
        "additionalProperties": False,
    }

    class Person:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return schema

    params = [
        *(SamplingParams(max_tokens=60, seed=1, json_schema=one) for one in (schema, json.dumps(schema), Person)),
        SamplingParams(max_tokens=60, seed=1, regex="[a-c]{5}"),
        SamplingParams(max_tokens=60, seed=1, choice=["Kyoto", "Osaka"]),
    ]
    *objects, pattern, choice = texts(llm.generate(["A:"] * 5, params))
    assert all(json.loads(text)["age"] in range(10) for text in objects)
    assert len(pattern) == 5
    assert set(pattern) <= set("abc")
    assert choice in ("Kyoto", "Osaka")


def test_a_refused_parameter_is_an_error_with_the_servers_message(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt 1: `temperature` must be >= 0\.0") as refused:
        llm.generate(PROMPTS, [GREEDY, SamplingParams(temperature=-1), GREEDY, GREEDY])
    error = refused.value
    assert (error.index, error.status, error.code, error.param) == (1, 400, "validation", "temperature")
    with pytest.raises(RequestError, match="temperature"):
        list(llm.stream("x", SamplingParams(temperature=-1)))
    with pytest.raises(RequestError, match="it generates text"):
        llm.embed(["x"])
    with pytest.raises(TypeError, match="heat"):
        SamplingParams(heat=1)


def test_every_prompt_is_checked_before_one_is_computed(llm: LLM) -> None:
    """An endless prompt stands before the bad one: the error does not wait for it."""
    endless = SamplingParams(max_tokens=1000, ignore_eos=True)
    before = llm.info()
    with pytest.raises(RequestError, match=r"prompt 2: .*max_total_tokens|prompt 2: .*must be <= ") as refused:
        llm.generate(["a", "b", "word " * 2000], endless)
    assert (refused.value.index, refused.value.status) == (2, 400)
    assert llm.info() == before
    for bad, message in [
        ("", "prompt 2: is empty"),
        (None, "prompt 2: is None"),
        (float("nan"), "prompt 2: is nan"),
        ([1 << 30], "prompt 2: "),
    ]:
        with pytest.raises(RequestError, match=message):
            llm.generate(["a", "b", bad], endless)
    with pytest.raises(RequestError, match="prompt 1: message 0 is 'Hi'"):
        llm.chat([CHAT, ["Hi"]], endless)
    with pytest.raises(RequestError, match="prompt 1: temperature is nan"):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(temperature=float("nan"))])


def test_kept_errors_leave_the_other_results(llm: LLM) -> None:
    given = ["a", None, "b", "word " * 2000, "c"]
    found = llm.generate(given, GREEDY, on_error="keep")
    assert [one.error is None for one in found] == [True, False, True, False, True]
    assert texts([found[0], found[2], found[4]]) == texts(llm.generate(["a", "b", "c"], GREEDY))
    with pytest.raises(RequestError, match="prompt 1: is None"):
        _ = found[1].text
    assert [row.get("status") for one in found for row in one.rows()] == [None, 400, None, 400, None]
    with pytest.raises(ValueError, match='on_error is \'skip\', must be "raise" or "keep"'):
        llm.generate("a", on_error="skip")


def test_code_for_vllm_runs(llm: LLM) -> None:
    """As in vLLM's examples, with its names of prompts, parameters, results and the tokenizer's methods."""
    params = SamplingParams(temperature=0, top_p=1.0, max_tokens=np.int64(4), n=1)
    prompts = [{"prompt": PROMPTS[0]}, {"prompt_token_ids": np.array([1, 2, 3])}]
    outputs = llm.generate(prompts, sampling_params=params, use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].text == output.text
        assert len(output.outputs[0].token_ids) == 4
        assert output.finished
    assert outputs[1].prompt_token_ids == [1, 2, 3]
    assert texts(llm.generate(prompt_token_ids=[[1, 2, 3]], sampling_params=params)) == [outputs[1].text]
    constrained = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    assert llm.chat(messages=CHAT, sampling_params=constrained, use_tqdm=False)[0].outputs[0].text in ("yes", "no")
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    assert tokenizer.encode(text, add_special_tokens=False) == ids == llm.chat(CHAT, params)[0].prompt_token_ids
    assert tokenizer.decode(ids) == text
    assert tokenizer("a")["input_ids"] == tokenizer.encode("a")
    with pytest.raises(ImportError, match="penstock has no AsyncLLMEngine; use AsyncLLM"):
        from penstock import AsyncLLMEngine  # noqa: F401


def test_an_adapter_answers_where_it_is_named(llm: LLM) -> None:
    prompt, poet = PROMPTS[0], LoRARequest("poet", 1, "/where/vllm/finds/it")
    base, changed = llm.generate([prompt, prompt], GREEDY, lora_request=[None, poet])
    assert base.text == llm.generate(prompt, GREEDY)[0].text
    assert changed.text == llm.generate(prompt, GREEDY, lora_request="poet")[0].text != base.text
    scored = dataclasses.replace(GREEDY, logprobs=0)
    assert llm.chat(CHAT, scored, lora_request=poet)[0].logprobs != llm.chat(CHAT, scored)[0].logprobs
    with pytest.raises(
        ValueError, match=r"lora_request 1 is 'bard', which is not served; use LLM\(lora_adapters='bard="
    ):
        llm.generate([prompt, prompt], GREEDY, lora_request=[poet, LoRARequest("bard", 2, "/bard")])


def test_wrong_params_and_arguments_of_a_call_are_named(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"sampling_params 1 is \{'max_tokens': 2\}, must be SamplingParams"):
        llm.generate(["a", "b"], [GREEDY, {"max_tokens": 2}])  # type: ignore[list-item]
    with pytest.raises(TypeError, match=r"sampling_params is \{'max_tokens': 2\}, must be SamplingParams"):
        llm.generate("a", {"max_tokens": 2})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unknown argument sampling_param; did you mean sampling_params"):
        llm.generate("a", sampling_param=GREEDY)
    params = llm.get_default_sampling_params()
    params.max_tokens, params.logprobs = 3, 1
    (found,) = llm.generate("a", params, tokenization_kwargs={})
    output = found.outputs[0]
    assert output.cumulative_logprob == sum(output.logprobs or [])
    assert (found.request_id, len(output.token_ids)) == ("0", 3)


def test_the_limits_for_clients_do_not_bind_the_only_user(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=20, stop=[f"stop {i}" for i in range(40)])
    (found,) = llm.generate("a", params)
    assert [len(top) for top in found.top_logprobs] == [20, 20]


def test_a_seed_of_the_model_numbers_the_requests_without_one(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(max_model_len=256, gpu_memory_utilization=0.9, enforce_eager=True, dtype="auto", seed=7) as seeded:
        assert seeded.info()["max_total_tokens"] == 256
        found = [*seeded.generate(["A", "A"], params), *seeded.generate("A", params)]
    expected = llm.generate(["A"] * 3, [dataclasses.replace(params, seed=seed) for seed in (7, 8, 9)])
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert found[0].token_ids != found[1].token_ids


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_batch_sise": 8}, "unknown setting max_batch_sise; did you mean max_batch_size, "),
        ({"xyzzy": 8}, "unknown setting xyzzy; docs/flags.md lists all settings"),
        ({"port": 80}, "port is not a setting of LLM: the server listens on a private unix socket"),
        ({"deterministic": "yes"}, "deterministic is 'yes', must be True or False"),
        ({"max_batch_size": "x"}, "invalid value 'x' for '--max-batch-size"),
        ({"cuda_memory_fraction": 7}, "--cuda-memory-fraction is 7, must be above 0 and at most 1"),
        ({"ngrok_edge": "a"}, "--ngrok-edge is refused"),
    ],
)
def test_a_wrong_setting_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as refused:
        LLM(**settings)
    assert str(refused.value).startswith(message)


def test_a_server_that_does_not_start_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(StartError, match="there is no file or folder /nonexistent/model"):
        LLM("/nonexistent/model")
    assert not list(tmp_path.iterdir())


def test_asyncio_callers_share_a_server_and_a_closed_one_answers_no_more(tmp_path: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(max_total_tokens=8100, num_shard=1, deterministic=False, cuda_graphs=[0]) as llm:
            both = await asyncio.gather(*(llm.generate(PROMPTS, GREEDY) for _ in range(2)))
            assert texts(both[0]) == texts(both[1])
            streamed = [chunk.text async for chunk in llm.stream(PROMPTS[0], GREEDY)]
            assert "".join(streamed) == both[0][0].text
            assert (await llm.info())["max_total_tokens"] == 8100
            endless = asyncio.create_task(llm.generate("x", SamplingParams(max_tokens=8000, ignore_eos=True)))
            await anext(llm.stream(PROMPTS[0], GREEDY))
        with pytest.raises(StoppedError):
            await endless
        with pytest.raises(StoppedError, match="the server was closed"):
            await llm.generate("x")

    asyncio.run(run())


@dataclass
class Run:
    """A program that completes a file, its server and the process that it has forked."""

    program: subprocess.Popen[str]
    server_pid: int
    forked_pid: int

    def wait_for_results(self, destination: Path, num: int) -> None:
        while not destination.exists():
            assert self.program.poll() is None or destination.exists()
            time.sleep(0.01)
        found = 0
        with destination.open("rb") as results:
            while found < num:
                has_ended = self.program.poll() is not None  # before the look: its last results may come with its end
                found += results.read().count(b"\n")
                assert found >= num or not has_ended, f"the program ended after {found} results"
                time.sleep(0.01)

    def kill(self) -> None:
        """Leaves no process but the forked one, which is ended too."""
        try:
            self.program.kill()
            self.program.wait()
            wait_until_gone([self.server_pid])
        finally:
            with suppress(ProcessLookupError):
                os.kill(self.forked_pid, signal.SIGKILL)


def launch(source: Path, destination: Path, *, max_tokens: int = 8, max_in_flight: int = 4, model: str = "") -> Run:
    arguments = [PROGRAM, source, destination, str(max_tokens), str(max_in_flight), *([model] if model else [])]
    program = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    pids = children(program.pid)
    (server_pid,) = (pid for pid in pids if name(pid) == PENSTOCK.name)
    (forked_pid,) = pids - {server_pid}
    return Run(program, server_pid, forked_pid)


def cut_in_a_line(destination: Path) -> int:
    """What a kill may leave: cuts into the last line, and returns the number of whole ones."""
    whole = destination.read_bytes().rpartition(b"\n")[0]
    destination.write_bytes(whole + b'\n{"id": "line')
    return whole.count(b"\n") + 1


def test_a_killed_run_leaves_no_process_and_is_resumed_without_losing_or_doubling_a_line(
    llm: LLM, tmp_path: Path
) -> None:
    source, destination = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    ids = [f"line {i}" for i in range(200)]
    source.write_text("".join(json.dumps({"id": line_id, "prompt": f"{line_id} is"}) + "\n" for line_id in ids))
    run = launch(source, destination)
    run.wait_for_results(destination, 20)
    run.kill()
    num_done = cut_in_a_line(destination)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    summary = llm.generate_file(source, destination, params)
    assert summary == FileSummary(num_resumed=num_done, num_completed=200 - num_done, num_failed=0)
    results = [json.loads(line) for line in destination.read_text().splitlines()]
    assert [result["id"] for result in results] == ids
    assert [result["text"] for result in results] == texts(llm.generate([f"{line_id} is" for line_id in ids], params))


def test_ctrl_c_ends_the_call_and_leaves_no_process(tmp_path: Path) -> None:
    source, destination = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"id": i, "prompt": "A story:"}) + "\n" for i in range(5000)))
    run = launch(source, destination)
    run.wait_for_results(destination, 1)
    run.program.send_signal(signal.SIGINT)
    assert run.program.wait(TIMEOUT_S) != 0
    wait_until_gone([run.server_pid, run.forked_pid])


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_100_000_prompts_in_flat_memory_and_a_kill_in_the_middle(tmp_path: Path) -> None:
    model, source, destination = tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    model.mkdir()
    byte_model.save(model, max_tokens=512, window=None)
    num, options = 100_000, {"max_tokens": 2, "max_in_flight": 128, "model": str(model)}
    with source.open("w") as lines:
        lines.writelines(json.dumps({"id": i, "prompt": f"{i:08}"}) + "\n" for i in range(num))
    resident: list[tuple[float, float]] = []
    for num_results in (num // 2, num):
        run = launch(source, destination, **options)
        for done in (num_results - 40_000, num_results - 20_000, num_results - 2_000):
            run.wait_for_results(destination, done)
            resident.append((memory_mib(run.program.pid), memory_mib(run.server_pid)))
        if num_results < num:
            run.kill()
            cut_in_a_line(destination)
    assert run.program.wait(TIMEOUT_S) == 0
    assert [json.loads(line)["id"] for line in destination.open()] == list(range(num))
    for first, _, last in (resident[:3], resident[3:]):
        assert last[0] < first[0] + 16, f"the client's memory in MiB: {resident}"
        assert last[1] < first[1] + 32, f"the server's memory in MiB: {resident}"


def test_the_package_imports_without_torch_and_numpy() -> None:
    code = "import penstock, sys; sys.exit(bool({'torch', 'numpy', 'penstock_server'} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_refused_line_of_a_file_has_the_servers_message(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"id": 1, "prompt": ""}\n{"id": 2, "prompt": "x", "params": {"max_tokens": 1}}\n')
    assert llm.generate_file(tmp_path / "in", tmp_path / "out") == FileSummary(0, 2, 1)
    refused, answered = map(json.loads, (tmp_path / "out").read_text().splitlines())
    assert (refused["id"], refused["status"], "prompt" in refused["error"]) == (1, 400, True)
    assert len(answered["token_ids"]) == 1
    (tmp_path / "in").write_text('{"id": 1, "prompt": "x", "params": {"heat": 1}}')
    with pytest.raises(PenstockError, match="unknown params: heat"):
        llm.generate_file(tmp_path / "in", tmp_path / "out2")


def test_the_examples_of_the_page_run(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parent.parent / "docs" / "python.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) > 5
    # All but the last one use one server, which has started already.
    monkeypatch.setattr("penstock.LLM", lambda: llm)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in examples:
        exec(example, names)
    assert names["as_choice"].text in ("yes", "no")
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", names["as_date"].text)
    assert "city" in json.loads(names["as_json"].text)
    assert names["answer"].text
    assert [len(results) for results in names["both"]] == [1, 1]

"""The figures of draft tokens."""

from __future__ import annotations

from typing import Any

from figure import speculation
from speculation import COMPLETION_SAMPLINGS, SAMPLINGS, num_different, repeated_share, sampled_requests


def test_a_figure_compares_each_load_with_and_without_drafts() -> None:
    def load(off: float, on: float, **drafts: float) -> dict[str, Any]:
        return {"off": {"tokens_per_s": off}, "on": {"tokens_per_s": on, **drafts}}

    loads = {"copying": load(10, 30, drafted=8, accepted=6), "32 streams": load(100, 99)}
    peer = {"loads": {"copying": load(10, 15)}, "different": 2}
    repeat = {"penstock": {"loads": loads, "different": 0}, "llama.cpp": peer}
    record = {"repeats": [repeat, repeat], "sampled": {"requests": 1000, "different": 1}}
    figures = {figure.name: figure for figure in speculation(record)}
    assert figures["penstock, copying: throughput with drafts, to without"].values == [3, 3]
    assert figures["penstock, copying: right drafts"].values == [75, 75]
    assert figures["penstock, 32 streams: throughput with drafts, to without"].target == "≥ 0.98"
    assert figures["llama.cpp, copying: throughput with drafts, to without"].target == ""
    assert figures["llama.cpp: answers of these loads that differ"].row()[2] == "4"
    assert figures["penstock: answers that differ, of 1,000 requests with every kind of sampling"].values == [1]


def test_copying_counts_the_lines_that_the_prompt_has() -> None:
    request = {"inputs": "1. one\n2. two\n"}
    tokens = [{"text": text} for text in ("1.", " one\n", "2.", " two\n", "3. six\n")]
    share = repeated_share(request, tokens)
    assert share == 14 / 21
    load = {"off": {"tokens_per_s": 10, "repeated": share}, "on": {"tokens_per_s": 30}}
    repeat = {"penstock": {"loads": {"copying": load}, "different": 0}}
    figures = {figure.name: figure for figure in speculation({"repeats": [repeat]})}
    repeated = figures["penstock, copying: the answers' text that the prompt has"]
    assert (repeated.values, repeated.target) == ([100 * share], "≥ 80 %")


def test_medusa_heads_have_figures_of_their_own() -> None:
    modes = {"off": {"tokens_per_s": 10}, "on": {"tokens_per_s": 11}, "heads": {"tokens_per_s": 14, "drafted": 4}}
    modes["heads"]["accepted"] = 3
    repeat = {"penstock": {"loads": {"free chat": modes}, "different": 0}}
    figures = {figure.name: figure for figure in speculation({"repeats": [repeat]})}
    ratio = figures["penstock, free chat: throughput with drafts of Medusa heads, to without"]
    assert (ratio.values, ratio.target) == ([1.4], "≥ 1.3")
    assert figures["penstock, free chat: right drafts of Medusa heads"].values == [75]
    assert figures["penstock, free chat: throughput with drafts, to without"].target == ""


def test_forced_tokens_have_a_figure_without_a_target() -> None:
    modes = {"off": {"tokens_per_s": 10}, "forced": {"tokens_per_s": 12}, "on": {"tokens_per_s": 18}}
    repeat = {"penstock": {"loads": {"JSON form": modes}, "different": 0}}
    figures = {figure.name: figure for figure in speculation({"repeats": [repeat]})}
    forced = figures["penstock, JSON form: throughput with drafts of forced tokens, to without"]
    assert (forced.values, forced.target) == ([1.2], "")
    assert figures["penstock, JSON form: throughput with drafts, to without"].target == "≥ 1.7"


def test_a_second_model_has_figures_by_its_name_and_changed_answers_are_counted_by_what_drafts() -> None:
    def modes(**different: int) -> dict[str, Any]:
        return {mode: {"tokens_per_s": 10, "requests": 4, "different": num} for mode, num in different.items()}

    loads = {"copying": modes(off=0, on=0), "JSON form": modes(off=0, on=1)}
    servers = ("penstock, Gemma 3 270M", "llama.cpp, Gemma 3 270M")
    repeat = {server: {"loads": loads, "different": 1} for server in servers}
    record = {"repeats": [repeat, repeat], "sampled, Gemma 3 270M": {"requests": 10, "different": 0}}
    figures = {figure.name: figure for figure in speculation(record)}
    assert figures["penstock, Gemma 3 270M, copying: throughput with drafts, to without"].target == "≥ 2.5"
    for server, target in zip(servers, ("0", ""), strict=True):
        changed = figures[f"{server}: answers that drafts change, of 16"]
        assert (changed.target, changed.row()[2]) == (target, "2")
    name = "penstock, Gemma 3 270M: answers that differ, of 10 requests with every kind of sampling"
    assert figures[name].values == [0]
    assert not [
        name for name in figures if "these loads" in name or "llama.cpp, Gemma 3 270M: answers that differ" in name
    ]


def test_requests_have_every_kind_of_sampling_in_turn() -> None:
    every = [*SAMPLINGS, *COMPLETION_SAMPLINGS]
    requests = sampled_requests(["a", "b"], 2 * len(every))
    asked = [request.get("parameters", request) for request in requests]
    assert len({parameters["seed"] for parameters in asked}) == len(requests)
    kinds = [{key: given.get(key) for key in kind} for given, kind in zip(asked, 2 * every, strict=True)]
    assert kinds == 2 * every
    assert sum("prompt" in request for request in requests) == 2 * len(COMPLETION_SAMPLINGS)


def test_answers_differ_in_a_token_or_in_what_comes_with_it() -> None:
    answers = [([1, 2], None), ([3], "x"), ([4], None)]
    others = [([1, 2], None), ([3], "y"), ([5], None)]
    assert num_different(answers, others) == 2

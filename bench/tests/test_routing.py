"""The loads of the comparison of routers, and what its report counts."""

import random

from routing import chats, hot_spot, report, summary

WORDS = ["one", "two", "three"]


def test_a_turn_begins_with_the_turn_before_it_and_users_share_system_prompts() -> None:
    prompts = [prompt.text(WORDS, "name") for prompt in chats(random.Random(0), 60.0, 10.0, num_users=9)]
    systems = {prompt[:200] for prompt in prompts}
    longer = [text for text in prompts if any(other != text and text.startswith(other) for other in prompts)]
    assert len(systems) == 8
    assert len(longer) > len(prompts) / 2


def test_the_hot_spot_is_one_group() -> None:
    groups = [prompt.parts[0] for prompt in hot_spot(random.Random(0), 2048)]
    counts = sorted((groups.count(group) for group in set(groups)), reverse=True)
    assert len(counts) == 64
    assert counts[0] > 2048 / 10 > 5 * counts[-1]


def test_errors_are_counted_and_a_replica_with_all_work_is_an_imbalance() -> None:
    answers = [{"sent_s": 0.0, "ttft_s": 1.0, "ended_s": 2.0}, {"sent_s": 0.0, "status": 503}]
    counted = [{"queried": 100.0, "hit": 20.0}, {"queried": 0.0, "hit": 0.0}]
    found = summary(answers, counted)
    assert (found["num_errors"], found["hit_rate"], found["imbalance"]) == (1, 0.2, 2.0)
    run = {"answers": answers, "router_cpu_s": 0.5, **found}
    record = {"started": "", "command": "", "revision": "", "machine": {"vendor": "", "num_cores": 2}}
    assert "| ours   | 20.0 %" in report({**record, "repeats": [{"chats": {"ours": run}}]})

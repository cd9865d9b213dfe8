"""The priority of threads, and the GPU that they compute on."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from current_device import CurrentDevice
from fake_model import BLOCK_TOKENS, FakeModel, load_fake
from penstock_server.engine import Engine
from penstock_server.grammar.compiler import MAX_RUNNING
from penstock_server.host.background import run_in_background
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.protocol.plan import Adapter

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_only_the_job_and_its_threads_have_a_low_priority() -> None:
    before = niceness()

    def job() -> tuple[int, int]:
        with ThreadPoolExecutor(1) as thread:
            return niceness(), thread.submit(niceness).result()

    low = max(10, before)
    assert run_in_background(job, CPU) == (low, low)
    with ThreadPoolExecutor(1) as thread:
        assert (niceness(), thread.submit(niceness).result()) == (before, before)


def test_a_job_of_a_server_with_an_even_lower_priority_keeps_it() -> None:
    """A container without privileges may not raise it, so a standby group failed to load in one."""

    def server() -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        return run_in_background(niceness, CPU)

    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(server).result() == 19


def test_an_error_of_the_job_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_in_background(lambda: 1 // 0, CPU)


@pytest.mark.parametrize("background", [False, True])
def test_a_load_in_the_background_has_a_low_priority(background: bool) -> None:
    found = []

    def load(options: LoadOptions, group: RankGroup) -> FakeModel:
        found.append(niceness())
        return load_fake(options, group)

    Engine.load(LoadConfig(Path("nowhere"), BLOCK_TOKENS, background=background), load_model=load)
    assert found == [max(10, niceness()) if background else niceness()]


def test_a_rank_loads_models_and_adapters_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On threads of their own, each of which starts with GPU 0."""
    current = CurrentDevice.patched(monkeypatch)
    found = []

    class Adapters:
        def load(self, adapter: Adapter) -> None:
            found.append(current.device)

    def load(options: LoadOptions, group: RankGroup) -> FakeModel:
        found.append(current.device)
        return load_fake(options, group)

    for name in ("choose_device", "open_device"):
        monkeypatch.setattr(f"penstock_server.engine.engine.{name}", lambda *_: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = LoadConfig(Path("nowhere"), BLOCK_TOKENS, background=True)
    engine, _ = Engine.load(config, rank=1, load_model=load)
    engine.model.adapters = Adapters()  # type: ignore[attr-defined]
    engine.load_adapter(Adapter(1, Path("one")), [])
    assert found == [torch.device("cuda", 1)] * 2
    assert current.device == torch.device("cuda", 0), "the caller's"


def test_a_standby_group_reads_no_vocabulary_and_has_no_trial_process(embedded_folder: Path) -> None:
    config = LoadConfig(embedded_folder, BLOCK_TOKENS, background=True)
    engine, _ = Engine.load(config, load_model=load_fake)
    engine.warm_up(WarmUpConfig(16, 2, 16, num_blocks=8, proven=True))
    compiler = engine._parts.compiler
    assert compiler is not None
    assert compiler._reading is None
    assert [trial._process for trial in compiler._trials.queue] == [None] * MAX_RUNNING
    engine.close()

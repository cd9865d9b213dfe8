"""What is not held twice: the bytes of weights, and libraries in processes that do not need them."""

from __future__ import annotations

import subprocess
import sys

import pytest

LOADED = """
import gc, re
from pathlib import Path
import torch
from penstock_server.models import load_model
from penstock_server.models.interface import LoadOptions
from penstock_server.parallel import RankGroup
from penstock_server import fork_server
from penstock_server.heap import return_free_pages
from penstock_server.prepare import embedded_gguf, prepare

def private():
    return_free_pages()
    fields = re.findall(r"^Private_\\w+: +(\\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return sum(map(int, fields)) << 10

fork_server._import_all()
from penstock_server.grammar.vocabulary import Vocabulary
held = [each for each in gc.get_objects() if isinstance(each, Vocabulary)]
folder = Path(prepare(None).folder)
before = private()
model = load_model(LoadOptions(folder, torch.bfloat16, torch.device("cpu"), 16), RankGroup())
print(private() - before, model.weight_bytes, ".gguf" in Path("/proc/self/maps").read_text(), len(held))
"""
IMPORTED = {
    "trial": "import penstock_server.grammar.trial, penstock_server.grammar.start",
    "prepare": "import penstock_server.prepare",
}


def output_of(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_loaded_model_holds_its_weights_once_and_the_fork_server_no_vocabulary() -> None:
    taken, weights, is_mapped, num_vocabularies = output_of(LOADED).splitlines()[-1].split()
    assert (is_mapped, num_vocabularies) == ("False", "0")
    assert int(weights) < int(taken) < 1.5 * int(weights)


@pytest.mark.parametrize("name", IMPORTED)
def test_small_processes_load_neither_torch_nor_numpy(name: str) -> None:
    code = f"import sys\n{IMPORTED[name]}\nprint(sorted({{'torch', 'numpy', 'tokenizers'}} & set(sys.modules)))"
    assert output_of(code) == "[]\n"

"""What is not held: a second copy of the weights, what only grammars need before the first one, and libraries in
processes that do not need them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from penstock_server.host import nvidia

PRIVATE = """
import re
from pathlib import Path
from penstock_server.host.heap import return_free_pages

def private():
    return_free_pages()
    fields = re.findall(r"^Private_\\w+: +(\\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return sum(map(int, fields)) << 10

"""
LOADED = f"""
import gc, sys
{PRIVATE}
from penstock_server.process import fork_server
from penstock_server.prepare import prepare

fork_server._import_all()
from penstock_server.protocol.config import LoadConfig, WarmUpConfig
from penstock_server.engine import Engine
from penstock_server.grammar.vocabulary import Vocabulary
folder = Path(prepare(None).folder)
before = private()
engine, description = Engine.load(LoadConfig(folder, 16, device="cpu"))
taken = private() - before
engine.warm_up(WarmUpConfig(max_step_tokens=16, max_step_sequences=2, max_sequence_tokens=64, num_blocks=20))
num_vocabularies = sum(isinstance(each, Vocabulary) for each in gc.get_objects())
num_processes = sum(trial._process is not None for trial in engine._parts.compiler._trials.queue)
is_mapped = ".gguf" in Path("/proc/self/maps").read_text()
has_bindings = "cuda.bindings.driver" in sys.modules
print(taken, description.weight_bytes, is_mapped, num_vocabularies, num_processes, has_bindings)
"""
VOCABULARY = f"""
{PRIVATE}
from penstock_server.grammar.compiler import TOKEN_BYTES
from penstock_server.grammar.start import build_start
from penstock_server.grammar.vocabulary import fast_vocabulary, read_vocabulary
from penstock_server.prepare import prepare
folder = Path(prepare(None).folder)
before = private()
vocabulary = fast_vocabulary(read_vocabulary(folder))
print(private() - before, vocabulary.tokenizer.vocab_size * TOKEN_BYTES)
"""
FREED = f"""
import ctypes, threading
{PRIVATE}
from penstock_server.host.heap import use_one_arena

use_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]

def use(num_bytes):
    memory = libc.malloc(num_bytes)
    ctypes.memset(memory, 1, num_bytes)
    libc.free(memory)

use(30 << 20)  # which glibc maps, and from now on smaller pieces are in arenas
before = private()
thread = threading.Thread(target=use, args=(24 << 20,))
thread.start()
thread.join()
print(private() - before)
"""
IMPORTED = {
    "trial": "import penstock_server.grammar.trial, penstock_server.grammar.start",
    "prepare": "import penstock_server.prepare",
}


def output_of(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.native
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_ready_worker_holds_its_weights_once_and_nothing_that_only_grammars_need() -> None:
    taken, weights, is_mapped, num_vocabularies, num_processes, has_bindings = (
        output_of(LOADED).splitlines()[-1].split()
    )
    assert (is_mapped, num_vocabularies, num_processes) == ("False", "0", "0")
    assert has_bindings == "False" or nvidia.DRIVER.exists()
    assert int(weights) < int(taken) < 1.5 * int(weights)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_vocabulary_takes_no_more_than_is_reserved_for_it() -> None:
    taken, reserved = map(int, output_of(VOCABULARY).split())
    assert taken < reserved


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_that_a_thread_has_freed_goes_back_to_the_system() -> None:
    assert int(output_of(FREED)) < 4 << 20


@pytest.mark.parametrize("name", IMPORTED)
def test_small_processes_load_neither_torch_nor_numpy(name: str) -> None:
    code = f"import sys\n{IMPORTED[name]}\nprint(sorted({{'torch', 'numpy', 'tokenizers'}} & set(sys.modules)))"
    assert output_of(code) == "[]\n"

"""The surroundings of all tests, whatever shell, terminal or developer's settings they are started from.

The programs that tests start inherit them. PENSTOCK_BINARY, PENSTOCK_PYTHON and PENSTOCK_TEST_DEVICE choose what is
tested, so they stay, and so do the variables that choose the devices of PENSTOCK_TEST_DEVICE.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
KEPT = {"PENSTOCK_PYTHON"}
DEVICES = {"CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"}
# Settings of libraries and clients: the Hub, numeric libraries, Ray, traces, platforms, APIs and languages.
PREFIXES = re.compile(
    "HF_|HUGGING|TRANSFORMERS_|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|RAY_|OTEL_|SM_|SAGEMAKER_|AIP_|OPENAI_|ANTHROPIC_|LANGCHAIN_|"
    "LANGSMITH_|HELM_|LC_|LANG|PYTHONWARNINGS"
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGPROF)
PR_SET_THP_DISABLE = 41
# A test's folder and a socket in it need up to 80 of the 107 bytes of a unix socket's address.
MAX_TEMPORARY_FOLDER_BYTES = 25
MIN_OPEN_FILES = 4096
# KV pool of servers without --max-batch-total-tokens, 1.5 times the embedded model's longest sequence.
POOL_TOKENS = 12288


def make_definite() -> None:
    """Call it before torch is imported, on the main thread."""
    drop_settings()
    os.environ["LC_ALL"] = "C.UTF-8"
    # The prepared embedded model; a home may be read-only.
    os.environ["HF_HOME"] = str(ROOT / ".make" / "huggingface")
    # PERF: to back the default pool of 1 GiB costs each worker up to 4 s of system time, for tests that fill a few MiB.
    os.environ["MAX_BATCH_TOTAL_TOKENS"] = str(POOL_TOKENS)
    if len(os.fsencode(tempfile.gettempdir())) > MAX_TEMPORARY_FOLDER_BYTES:
        os.environ["TMPDIR"], tempfile.tempdir = "/tmp", None
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in SIGNALS:
        if signal.getsignal(number) == signal.SIG_IGN:
            # A program that is started gets the default action in place of a handler; "ignored" it would inherit.
            signal.signal(number, lambda *_: None)
    os.umask(0o022)
    if sys.platform == "linux":
        # PERF: a virtual machine's host may back each huge page anew, for 8 ms. Small pages are used again.
        ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MIN_OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(MIN_OPEN_FILES, hard), hard))


def drop_settings() -> None:
    kept = KEPT | (DEVICES if "PENSTOCK_TEST_DEVICE" in os.environ else set())
    dropped = settings()
    for name in set(os.environ) - kept:
        if name in dropped or PREFIXES.match(name) or name.lower().endswith("_proxy"):
            del os.environ[name]


def settings() -> set[str]:
    """The variables that the binary reads: those of the tables in docs/flags.md."""
    page = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    return set(re.findall(r"^\| (?:`--[^|]*\| )?`([A-Z][A-Z0-9_]+)`", page, re.MULTILINE))

"""The model worker of Penstock: one process per rank, driven by a stream of plans."""

import os

# torch asks for huge pages under its large CPU tensors. PERF: new memory is touched by the huge page, not by 4 KiB.
# Set here, because torch reads it once, at its first tensor. A value in the environment takes precedence.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

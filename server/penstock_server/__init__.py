"""The model worker of Penstock: one process per rank, driven by a stream of plans."""

import os

# torch asks for huge pages under its large CPU tensors. PERF: new memory is touched by the huge page, not by 4 KiB.
# Here, because torch looks once, at its first tensor; whoever sets it otherwise is obeyed.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

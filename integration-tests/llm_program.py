"""Completes a file with `LLM`, next to a forked process that outlives it. Says when the server is ready."""

from __future__ import annotations

import multiprocessing
import sys
import time

from penstock import LLM, SamplingParams

if __name__ == "__main__":
    source, destination, max_tokens, max_in_flight, *model = sys.argv[1:]
    with LLM(*model, max_total_tokens=512, max_concurrent_requests=int(max_in_flight)) as llm:
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()
        print("ready", flush=True)
        llm.generate_file(
            source, destination, SamplingParams(max_tokens=int(max_tokens), temperature=0, ignore_eos=True)
        )

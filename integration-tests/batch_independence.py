"""Whether a server's answers depend on what else it computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from binary import Server
from client import ask

NUM_TOKENS = 40
TEXTS = ["a river " * 6, "so it was said", "x" * 30]


def check(server: Server) -> None:
    """Raises AssertionError if answers together differ from answers alone."""

    def generate(text: str) -> list[int]:
        parameters = {"max_new_tokens": NUM_TOKENS, "details": True}
        answer = ask(server, "/generate", {"inputs": text, "parameters": parameters})
        return [token["id"] for token in answer.json["details"]["tokens"]]

    alone = [generate(text) for text in TEXTS]
    with ThreadPoolExecutor(len(TEXTS)) as pool:
        assert list(pool.map(generate, TEXTS)) == alone
    assert all(len(answer) == NUM_TOKENS for answer in alone)

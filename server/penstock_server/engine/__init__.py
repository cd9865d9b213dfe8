"""The engine: a loaded model, its KV pool and its sequences, advanced one plan at a time."""

from penstock_server.engine.engine import Engine

__all__ = ["Engine"]

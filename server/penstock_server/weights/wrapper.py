"""Tensor names without what wrappers of training add to them. Imports no torch.

torch.compile, FSDP and activation checkpointing put a module of theirs around any module, whose name no model has.
DataParallel, DistributedDataParallel and PEFT put one around the whole model: then every tensor has their prefix.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from penstock_server.errors import ConfigError

_MODULES = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PREFIXES = ("module.", "base_model.model.")
_OF_ADAPTERS = re.compile(r"\.(lora_\w+|base_layer|modules_to_save|original_module)\.")


def unwrapped(names: Collection[str]) -> dict[str, str]:
    """The tensors of a checkpoint: stored name → name in the model that was wrapped. Raises ConfigError if two tensors
    have one name then."""
    plain = {name: _MODULES.sub("", name) for name in names}
    prefix = _prefix(plain.values())
    plain = {name: each.removeprefix(prefix) for name, each in plain.items()}
    if len(set(plain.values())) < len(plain):
        stored: dict[str, str] = {}
        for name, each in plain.items():
            if each in stored:
                raise ConfigError(f"the checkpoint holds {each} twice, as {stored[each]} and as {name}")
            stored[each] = name
    return plain


def renamings(names: Collection[str]) -> dict[str, str]:
    """The same for transformers: regular expression → what replaces it. Empty if there is nothing to remove."""
    num_modules = max((len(_MODULES.findall(name)) for name in names), default=0)
    prefix = _prefix([_MODULES.sub("", name) for name in names])
    # transformers replaces one occurrence for each pattern, so patterns must differ.
    found = {_MODULES.pattern + "(?:)" * number: "" for number in range(num_modules)}
    return found | ({rf"^{re.escape(prefix)}": ""} if prefix else {})


def note_on(names: Collection[str]) -> str:
    """For people: what is removed from the names; empty if nothing is."""
    removed = next(((name, each) for name, each in unwrapped(names).items() if name != each), None)
    return "" if removed is None else f"tensor names are those of a wrapped model: {removed[0]} is read as {removed[1]}"


def _prefix(names: Collection[str]) -> str:
    """The prefixes that all names have. Those of PEFT belong to the names of an adapter."""
    prefix = ""
    is_adapter = any(_OF_ADAPTERS.search(name) for name in names)
    while names:
        found = next((each for each in _PREFIXES if all(name.startswith(prefix + each) for name in names)), "")
        if not found or (is_adapter and found == _PREFIXES[1]):
            return prefix
        prefix += found
    return prefix

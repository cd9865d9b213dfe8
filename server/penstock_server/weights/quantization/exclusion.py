"""Layers that a checkpoint's options exclude from quantization.

A weight's own tensors say whether it is quantized, so a list of excluded layers changes nothing if it is right. If it
is not, the checkpoint is refused: transformers would load such a layer without its codes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from penstock_server.errors import ConfigError
from penstock_server.weights.quantization.stored import pattern

IsExcluded = Callable[[str], bool]
"""Matches a layer's name."""


def check_exclusions(options: Mapping[str, Any], weights: Collection[str]) -> None:
    """weights: the names of those that are quantized. Raises ConfigError if the options exclude one of them."""
    for option, read in _OPTIONS.items():
        entries = options.get(option) or []
        if isinstance(entries, str):
            # COMPAT: tools write what they were given as text.
            entries = [] if entries.strip().lower() in ("", "null", "none") else [entries]
        if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
            raise ConfigError(f"quantization_config.{option} is {entries!r}, must be a list of names")
        if not entries:
            continue
        _refuse(option, weights, read(entries))
    included = options.get(INCLUDED) or []
    if not isinstance(included, list):
        raise ConfigError(f"quantization_config.{INCLUDED} is {included!r}, must be a list")
    ends = [end for each in included for end in (each if isinstance(each, list) else [each])]
    if not all(isinstance(end, str) for end in ends):
        raise ConfigError(f"quantization_config.{INCLUDED} is {included!r}, must be lists of names")
    if ends:
        _refuse(INCLUDED, weights, lambda name: not name.endswith(tuple(ends)))


def _refuse(option: str, weights: Iterable[str], is_excluded: IsExcluded) -> None:
    for weight in weights:
        layer = weight.removesuffix(".weight")
        if is_excluded(layer):
            raise ConfigError(f"quantization_config.{option} says that {layer} is not quantized, but it is")


def by_part(entries: Sequence[str]) -> IsExcluded:
    """As in transformers: an entry is how a name ends, or a regular expression of how it starts, up to the end of one
    of its parts. One that starts with `*`, as no regular expression does, is read as in `by_wildcard`. Raises
    ConfigError for an invalid one."""
    if wildcards := [entry for entry in entries if entry.startswith("*")]:
        others = [entry for entry in entries if entry not in wildcards]
        is_wild, is_other = by_wildcard(wildcards), by_part(others) if others else lambda _: False
        return lambda name: is_wild(name) or is_other(name)
    ends = tuple(entries)
    starts = pattern(f"(?:{'|'.join(f'(?:{pattern(entry).pattern})' for entry in entries)})" r"(?:(?<=\.)|(?=\.|$))")
    return lambda name: name.endswith(ends) or starts.match(name) is not None


def by_name(entries: Sequence[str]) -> IsExcluded:
    """As in compressed-tensors: an entry is a name, or with `re:` a regular expression of how a name starts. Raises
    ConfigError for an invalid one."""
    names = {entry for entry in entries if not entry.startswith("re:")}
    starts = [pattern(entry.removeprefix("re:")) for entry in entries if entry.startswith("re:")]
    return lambda name: name in names or any(start.match(name) for start in starts)


def by_wildcard(entries: Sequence[str]) -> IsExcluded:
    """As in Quark and ModelOpt: an entry is a name in which `*` stands for any characters, or with `re:` a regular
    expression of how a name starts. Raises ConfigError for an invalid one."""
    is_named = by_name(entries)
    return lambda name: is_named(name) or any(fnmatchcase(name, entry) for entry in entries)


def by_tag(entries: Sequence[str]) -> IsExcluded:
    """As in HQQ: an entry is a name without its numbers, `model` and `layers`."""
    tags = set(entries)
    return lambda name: ".".join(part for part in name.split(".") if not _is_place(part)) in tags


def _is_place(part: str) -> bool:
    return part in ("model", "layers") or part.isnumeric()


# GPTQModel excludes layers by rules of its option `dynamic`.
_OPTIONS: Mapping[str, Callable[[Sequence[str]], IsExcluded]] = {
    "exclude": by_wildcard,  # Quark
    "exclude_modules": by_wildcard,  # ModelOpt
    "ignore": by_wildcard,  # compressed-tensors, whose names have no wildcards, and ModelOpt
    "ignored_layers": by_part,  # fp8, by other tools than transformers
    "llm_int8_skip_modules": by_part,  # bitsandbytes
    "module_not_to_convert": by_part,
    "modules_to_not_convert": by_part,
    "skip_modules": by_tag,  # HQQ
}
# How the names of quantized layers end, in lists that the quantizer did one after the other. Of GPTQ, by transformers.
INCLUDED = "modules_in_block_to_quantize"

"""What the methods share: a quantized weight of a checkpoint, and the unpacking of small integers."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from penstock_server.device.quantized import Number, QuantFormat, QuantizedRows
from penstock_server.errors import ConfigError

CODE_BITS = (2, 3, 4, 5, 6, 8)
# The names of `QuantFormat` for the types of scales.
NUMBERS: Mapping[str, Number] = MappingProxyType({"F16": "float16", "BF16": "bfloat16", "F32": "float32"})
FLOATS = tuple(NUMBERS)
_GREATEST = {"uint4": 15, "uint8": 255}
# What to do with a checkpoint that is refused.
INSTEAD = "serve the original model with --quantize eetq, or a GPTQ, AWQ or GGUF version of it"


class Header(Protocol):
    """A tensor of the checkpoint."""

    @property
    def dtype(self) -> str:
        """As safetensors names it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]: ...


Headers = Mapping[str, Header]


class Read(Protocol):
    """Reads a tensor of the checkpoint."""

    def __call__(self, name: str, rows: range | None = None) -> Tensor:
        """The tensor in its stored type, on the CPU; rows: only these indices of its first dimension. Raises
        NotDownloadedError if there are only headers, see `penstock_server.inspection`."""
        ...


ReadMetadata = Callable[[], Mapping[str, str]]
"""The metadata of the checkpoint's files, joined."""


class NotDownloadedError(ConfigError):
    """Only the headers of the tensors are known."""


class TensorError(ConfigError):
    """A tensor of the checkpoint is damaged. `QuantizedCheckpoint` adds its file to the message."""

    def __init__(self, tensor: str, message: str) -> None:
        super().__init__(message)
        self.tensor = tensor


@dataclass(frozen=True, slots=True)
class Kind:
    """Weights that a method can read, for docs/quantization.md."""

    what: str
    bits: tuple[int, ...]
    is_kept: bool = True  # quantized in memory, where there are kernels


class StoredWeight(Protocol):
    """A quantized weight [out_features, in_features] of a checkpoint."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that it consists of."""
        ...

    def dense(self, read: Read) -> Tensor:
        """The whole weight [out_features, in_features] in floating point."""
        ...


class Method(Protocol):
    """A way to quantize, with the options of one checkpoint."""

    @property
    def name(self) -> str:
        """Name of the method, `quant_method` in config.json."""
        ...

    def find(self, headers: Headers) -> dict[str, StoredWeight]:
        """The quantized weights among these tensors, by the names that they would have if they were dense. Raises
        ConfigError if a weight is incomplete or not as the options say."""
        ...


@dataclass(frozen=True, slots=True)
class Affine(ABC):
    """A weight of codes of at most 8 bits with scales, and zero points, of groups. Implements `StoredWeight`."""

    name: str  # without the suffixes of its tensors
    shape: tuple[int, int]
    tensors: tuple[str, ...]
    format: QuantFormat

    def order(self, read: Read) -> Tensor | None:
        """The input feature of each column of `rows` [in_features] int64, if columns are not in order."""
        return None

    @abstractmethod
    def rows(self, read: Read, rows: range) -> QuantizedRows:
        """These rows, quantized."""

    def affine_rows(self, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> QuantizedRows:
        """codes [rows, in_features] uint8; scales, zeros [rows, groups]; zeros count if the format has them. Raises
        ConfigError if a zero point is not of the format's type."""
        kept = None if zeros is None or self.format.zeros is None else zeros.float().contiguous()
        most = _GREATEST.get(self.format.zeros or "")
        if kept is not None and most is not None and kept.numel() and (kept.min() < 0 or kept.max() > most):
            raise ConfigError(
                f"{self.name} is damaged: it has zero points from {kept.min():g} to {kept.max():g}, must be from 0 to "
                f"{most}"
            )
        return QuantizedRows(codes.contiguous(), scales.float().contiguous(), kept)

    def dense(self, read: Read) -> Tensor:
        rows = self.rows(read, range(self.shape[0]))
        dense, order = rows.dequantized(self.format), self.order(read)
        return dense if order is None else dense[:, order.argsort()]


def unpack_bits(words: Tensor, bits: int, count: int) -> Tensor:
    """[rows, n] int32, each row a stream of little-endian numbers of `bits` bits → [rows, count] uint8."""
    # A column of one word may count as contiguous with strides that no view of its bytes allows.
    as_bytes = (
        words.clone(memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
        .view(len(words), words.shape[1] * words.itemsize)
    )
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        parts = as_bytes[:, :, None] >> shifts & (1 << bits) - 1
        return parts.flatten(1)[:, :count].contiguous()
    stream = as_bytes[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
    each = stream.flatten(1)[:, : count * bits].unflatten(1, (count, bits))
    return (each << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def checked_codes(codes: Tensor, bits: int, tensor: str) -> Tensor:
    """The codes [rows, columns] uint8. Raises ConfigError if one has more bits."""
    if bits < 8 and codes.numel() and int(codes.max()) >> bits:
        raise TensorError(tensor, f"tensor {tensor} is damaged: it has codes of more than {bits} bits")
    return codes


def integer_zeros(greatest: int) -> Number:
    """The type of zero points from 0 to `greatest`, at most 2048."""
    return "uint4" if greatest < 16 else "uint8" if greatest < 256 else "float16"


def affine_format(
    name: str, bits: int, group: int, in_features: int, *, zeros: Number | None, scale_dtype: str
) -> QuantFormat:
    """Format of the weight `name`. group: `group_size` of the config; zeros: the type of stored zero points, None if
    implied; scale_dtype: one of FLOATS. Raises ConfigError for groups that do not fit."""
    if group < 0 or group >= in_features:
        group = math.ceil(in_features / 32) * 32
    elif in_features % group:
        raise ConfigError(f"{name}: groups of {group} do not divide {in_features} input features")
    if bits not in CODE_BITS or (group != 16 and group % 32):
        raise ConfigError(
            f"{name}: weights of {bits} bits in groups of {group} are not supported; supported are 2 to 6 and 8 bits "
            "in groups of 16 or of a multiple of 32"
        )
    number = NUMBERS.get(scale_dtype, "float32")  # another type is refused with the tensor's name
    return QuantFormat(bits, group, 1 << (bits - 1), zeros is not None, number, zeros)


def layout_of(options: Mapping[str, object], default: str, *keys: str) -> str:
    """The layout of GPTQ or AWQ weights, in lower case. keys: of the method's own tool; GPTQModel has two others."""
    given = (options.get(key) for key in (*keys, "checkpoint_format", "format"))
    return str(next((value for value in given if value), default)).lower()


def group_size(value: object) -> int:
    """A method's `group_size`: -1 or None, or a number of input features. Raises ConfigError for anything else."""
    if value is None:
        return -1
    if type(value) is not int or value < -1 or value == 0:
        raise ConfigError(f"quantization_config.group_size is {value!r}, must be -1 or at least 1")
    return value


def pattern(text: str) -> re.Pattern[str]:
    """A regular expression of `quantization_config`. Raises ConfigError if it is invalid."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(f"quantization_config has an invalid regular expression {text!r}: {error}") from error


def feature_order(tensor: str, group: int, read: Read) -> Tensor | None:
    """The input features by group [in_features] int64, from the group of each feature; None if they are in order.
    Raises ConfigError if the groups are not of this size."""
    groups, order = read(tensor).long().sort(stable=True)
    if not torch.equal(groups, torch.arange(len(groups)) // group):
        raise TensorError(
            tensor,
            f"tensor {tensor} is damaged: it does not say for every feature which of {-(-len(groups) // group)} groups "
            f"of {group} it belongs to",
        )
    return None if torch.equal(order, torch.arange(len(order))) else order


def complete(headers: Headers, name: str, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    """The tensors of a weight. Raises ConfigError if one is missing."""
    tensors = tuple(f"{name}{suffix}" for suffix in suffixes)
    for tensor in tensors:
        if tensor not in headers:
            raise TensorError(tensors[0], f"the checkpoint is damaged: it has {tensors[0]}, but not {tensor}")
    return tensors


def expect(headers: Headers, tensor: str, shape: tuple[int, ...], *dtypes: str) -> None:
    """Raises ConfigError if the tensor has another shape, or none of these types."""
    header = headers[tensor]
    if header.shape != shape:
        raise TensorError(tensor, f"tensor {tensor} has shape {list(header.shape)}, its weight implies {list(shape)}")
    if header.dtype not in dtypes:
        raise TensorError(tensor, f"tensor {tensor} is of type {header.dtype}, must be {' or '.join(dtypes)}")


def matrix_shape(headers: Headers, tensor: str, *dtypes: str) -> tuple[int, int]:
    """The shape of a tensor that must be a matrix of one of these types. Raises ConfigError if it is not, or empty."""
    shape = headers[tensor].shape
    if len(shape) != 2 or not math.prod(shape):
        raise TensorError(tensor, f"tensor {tensor} has shape {list(shape)}, must be a matrix")
    expect(headers, tensor, shape, *dtypes)
    return shape[0], shape[1]

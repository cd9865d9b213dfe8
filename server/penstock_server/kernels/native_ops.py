"""The operators as native kernels: bf16 on CPUs with AVX-512 BF16, from the package `penstock_kernels`.

A row's result never depends on the other rows. The kernels take addresses, so shapes and dtypes are checked here.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from penstock_kernels import Kernels
    from torch import Tensor

    from penstock_server.kernels.ops import Elementwise, Lookup, Weight


def available() -> bool:
    """Whether the package is installed and this CPU supports it."""
    if importlib.util.find_spec("penstock_kernels") is None:
        return False
    import penstock_kernels

    return penstock_kernels.supported()


def make_kernels(num_threads: int | None = None) -> Kernels:
    """A kernel context that runs on torch's own OpenMP threads, by default on all of them."""
    import penstock_kernels
    import torch

    return penstock_kernels.Kernels(num_threads or torch.get_num_threads(), _gomp_parallel())


def argmax_logprob(
    logits: Tensor, places: npt.NDArray[np.int64] | None = None, masks: npt.NDArray[np.int32] | None = None
) -> tuple[Tensor, Tensor]:
    """The greedy choice of each row of logits [rows, vocab] bf16: ids [rows] int64 (the lowest of equal ones) and their
    logprobs [rows] float32.

    places: the rows whose choice is restricted by masks [places, words]; bit b of word w allows token 32 * w + b. A row
    that contains NaN or +infinity, in an allowed place or not, has id -1 and logprob NaN; a row whose mask allows no
    token has logprob NaN.
    """
    return NativeOps().argmax_logprob(logits, places, masks)


class NativeLinear:
    """A packed linear layer. The native package owns the memory of its weight."""

    __slots__ = ("_apply", "in_features", "out_features", "packed")

    def __init__(self, kernels: Kernels, weight: Weight, bias: Tensor | None, *, gated: bool) -> None:
        import torch

        from penstock_server.kernels.ops import pieces_of

        assert weight.dtype == torch.bfloat16
        rows, self.in_features = weight.shape
        if bias is not None:
            assert (bias.dtype, bias.shape) == (torch.bfloat16, (rows,))
            bias = bias.contiguous()
        self.packed = kernels.linear(rows, self.in_features, bias.data_ptr() if bias is not None else None, gated)
        num_filled = 0
        for piece in pieces_of(weight):
            piece = piece.contiguous()
            assert (piece.dtype, piece.shape[1]) == (torch.bfloat16, self.in_features)
            assert num_filled + piece.shape[0] <= rows
            self.packed.fill(piece.data_ptr(), num_filled, piece.shape[0])
            num_filled += piece.shape[0]
        assert num_filled == rows
        self._apply = self.packed.apply
        self.out_features = rows // 2 if gated else rows

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in_features] → [rows, out_features]. If gated, silu(gate) * up of a weight with gate rows first."""
        rows, features = x.shape
        stride, step = x.stride()
        assert (features, step) == (self.in_features, 1)
        y = x.new_empty((rows, self.out_features))
        self._apply(x.data_ptr(), stride, rows, y.data_ptr())
        return y

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight: [ids] int64 → [ids, in_features]. Not for gated layers."""
        assert ids.is_contiguous()
        import torch

        rows = torch.empty((ids.shape[0], self.in_features), dtype=torch.bfloat16)
        self.packed.copy_rows(ids.data_ptr(), ids.shape[0], rows.data_ptr())
        return rows


class NativeElementwise:
    """A function of one bf16 number as a table of its 65,536 results. torch computes the end of a vector loop
    differently from the rest, so with torch's function a result would depend on the number's place in the batch."""

    __slots__ = ("_look_up", "_table")

    def __init__(self, kernels: Kernels, function: Elementwise) -> None:
        import torch

        patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
        self._table = function(patterns.view(1, -1).view(torch.bfloat16)).contiguous()
        assert (self._table.dtype, self._table.shape) == (torch.bfloat16, (1, 1 << 16))
        self._look_up = kernels.look_up

    def __call__(self, x: Tensor) -> Tensor:
        rows, dim = x.shape
        stride, step = x.stride()
        assert (x.dtype, step) == (self._table.dtype, 1)
        y = x.new_empty((rows, dim))
        self._look_up(self._table.data_ptr(), (x.data_ptr(), stride, rows), y.data_ptr(), dim)
        return y


class NativeOps:
    """Implements `Ops`."""

    name = "native"

    def __init__(self, num_threads: int | None = None) -> None:
        self._kernels = make_kernels(num_threads)
        self._elementwise: dict[Elementwise, NativeElementwise] = {}

    def pack_linear(self, weight: Weight, bias: Tensor | None) -> NativeLinear:
        return NativeLinear(self._kernels, weight, bias, gated=False)

    def pack_tied(self, weight: Weight) -> tuple[NativeLinear, Lookup]:
        """The packed weight serves both."""
        linear = self.pack_linear(weight, None)
        return linear, linear.rows

    def pack_gate_up(self, weight: Weight, bias: Tensor | None) -> NativeLinear:
        """weight [2 * dim, in_features], gate first. The layer returns silu(gate) * up [rows, dim]."""
        return NativeLinear(self._kernels, weight, bias, gated=True)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.is_contiguous()
        rows, dim = x.shape
        y = x.new_empty((rows, dim))
        self._kernels.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, dim, eps)
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert x.shape == residual.shape
        assert x.is_contiguous()
        assert residual.is_contiguous()
        rows, dim = x.shape
        y = x.new_empty((rows, dim))
        self._kernels.add_rms_norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), y.data_ptr(), rows, dim, eps)
        return y

    def rotate(self, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        rows, heads, head_dim = queries.shape
        self._kernels.rotate(
            (queries.data_ptr(), token_stride(queries), heads),
            (keys.data_ptr(), token_stride(keys), keys.shape[1]),
            (cos.data_ptr(), sin.data_ptr(), positions.data_ptr(), cos.shape[1]),
            head_dim,
            rows,
        )

    def elementwise(self, function: Elementwise) -> Elementwise:
        # PERF: layers share a table, which stays in the cores' caches from one layer to the next.
        if function not in self._elementwise:
            self._elementwise[function] = NativeElementwise(self._kernels, function)
        return self._elementwise[function]

    def argmax_logprob(
        self, logits: Tensor, places: npt.NDArray[np.int64] | None = None, masks: npt.NDArray[np.int32] | None = None
    ) -> tuple[Tensor, Tensor]:
        """See the function `argmax_logprob`."""
        import numpy as np
        import torch

        assert logits.dtype == torch.bfloat16
        assert logits.is_contiguous()
        rows, vocab = logits.shape
        ids = torch.empty(rows, dtype=torch.int64)
        logprobs = torch.empty(rows, dtype=torch.float32)
        addresses: npt.NDArray[np.uintp] | None = None
        if places is not None and masks is not None and len(places):
            assert masks.dtype == np.int32
            assert masks.shape[0] == len(places)
            assert 32 * masks.shape[1] >= vocab
            assert masks.strides[1] == 4
            addresses = np.zeros(rows, np.uintp)
            addresses[places] = masks.ctypes.data + np.arange(len(places)) * masks.strides[0]
        self._kernels.argmax_logprob(
            (logits.data_ptr(), rows, vocab),
            None if addresses is None else addresses.ctypes.data,
            ids.data_ptr(),
            logprobs.data_ptr(),
        )
        return ids, logprobs


def token_stride(x: Tensor) -> int:
    """Elements between tokens of x [tokens, heads, head_dim], whose heads must be contiguous; x may be a view of a
    fused tensor."""
    stride, head_stride, step = x.stride()
    assert step == 1
    assert head_stride == x.shape[2] or x.shape[1] == 1
    return stride


def _gomp_parallel() -> int | None:
    """The address of `GOMP_parallel` in the libgomp that torch runs on; None if torch uses another OpenMP."""
    import torch

    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*")):
        library = ctypes.CDLL(str(path))  # already loaded: returns the same library
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    return None

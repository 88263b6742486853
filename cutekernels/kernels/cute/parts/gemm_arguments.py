"""The arguments of gemm's bodies: of a product alone, and of one with a norm in front or a gate behind."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from cutekernels.kernels.cute.parts.epilogue import EpilogueOperands
from cutekernels.kernels.cute.parts.launch import Launched
from cutekernels.kernels.cute.parts.tile_share import Workspace


@dataclass(frozen=True)
class NormOperands:
    """Operands of a norm in front, beside the tokens."""

    mGamma: cute.Tensor | None = None  # (K,)
    mRstd: cute.Tensor | None = None  # (M,), where it is given
    eps: Float32 | None = None


NO_WORKSPACE = Workspace()


@dataclass(frozen=True)
class GemmOperands:
    """Operands of a product with any epilogue; those of a further one are in ``epilogue.own``."""

    mD: cute.Tensor  # ([L,] M, N)
    mA: cute.Tensor  # ([L,] M, K)
    mB: cute.Tensor  # ([L,] K, N); with ``norm`` (N, K), as ``nn.Linear`` has it
    epilogue: EpilogueOperands
    workspace: Workspace = NO_WORKSPACE  # where CTAs share tiles
    norm: NormOperands | None = None


class GemmBody(Launched):
    """The common part of the bodies."""

    norm: Any  # in front, of bodies that take one

    @property
    def weighted(self) -> bool:
        return self.norm is not None and self.norm.weighted

    @property
    def squaring(self) -> bool:
        return self.norm is not None and self.norm.statistics

    def extend(self, given: GemmOperands, stream: cuda.CUstream):
        """Launches the body."""
        raise NotImplementedError

    @cute.jit
    def __call__(
        self,
        mD: cute.Tensor,  # ([L,] M, N)
        mA: cute.Tensor,  # ([L,] M, K)
        mB: cute.Tensor,  # ([L,] K, N)
        mC: cute.Tensor | None,  # ([L,] M, N)
        mBias: cute.Tensor | None,  # (N,)
        alpha: Float32,
        beta: Float32,
        *rest: Any,  # where CTAs share tiles the workspace's tensors; the stream
    ):
        epilogue = EpilogueOperands(mC, mBias, alpha, beta)
        self.extend(GemmOperands(mD, mA, mB, epilogue, Workspace(*rest[:-1])), rest[-1])

    @cute.jit
    def with_norm(
        self,
        mD: cute.Tensor,  # (M, N), or (M, I) where gated
        mX: cute.Tensor,  # (M, K)
        mW: cute.Tensor,  # (N, K), or (2 * I, K) where gated: the gates' rows first
        mBias: cute.Tensor | None,  # (N,)
        mGamma: cute.Tensor | None,  # (K,)
        mRstd: cute.Tensor | None,  # (M,)
        eps: Float32,
        *rest: Any,  # likewise
    ):
        """A norm of the tokens in front, or a gate behind, as the body has them."""
        epilogue, norm = EpilogueOperands(None, mBias, Float32(1.0), Float32(0.0)), NormOperands(mGamma, mRstd, eps)
        self.extend(GemmOperands(mD, mX, mW, epilogue, Workspace(*rest[:-1]), norm), rest[-1])


def transpose(t: cute.Tensor) -> cute.Tensor:
    """``(X, Y)`` as ``(Y, X)``."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 0]))


def rows_first(t: cute.Tensor) -> cute.Tensor:
    """``([L,] X, Y)`` as ``(X, Y, L)``."""
    return batch_last(t, (0, 1))


def columns_first(t: cute.Tensor) -> cute.Tensor:
    """``([L,] X, Y)`` as ``(Y, X, L)``."""
    return batch_last(t, (1, 0))


def batch_last(t: cute.Tensor, order: tuple[int, int]) -> cute.Tensor:
    if cute.rank(t) == 3:
        return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[order[0] + 1, order[1] + 1, 0]))
    matrix = cute.select(t.layout, mode=list(order))
    return cute.make_tensor(t.iterator, cute.append(matrix, cute.make_layout(1, stride=0)))

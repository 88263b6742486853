"""``gemm``: the public function over the GEMM declaration, its gradients, its registration.

A repeated call goes from :func:`gemm` to its launch through a cache of calls; whatever else takes the op's path
(``GEMM_PATH``).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from cutekernels import dispatch, torch_names
from cutekernels.errors import UnsupportedProblem
from cutekernels.kernels.activations import Activation
from cutekernels.ops.products.dense import GEMM, AddressedLaunch
from cutekernels.ops.products.gradients import before_activation, column_sums, reads_value
from cutekernels.ops.products.schedules.problem import WIDEST, GemmConfig
from cutekernels.ops.shared import paths
from cutekernels.ops.shared.calls import define_with_out, splitting, text_of
from cutekernels.ops.shared.checks import check_apart, check_arguments, check_fits, check_tensor, check_word, kinds_of
from cutekernels.ops.shared.dtypes import DTYPES
from cutekernels.ops.shared.paths import PLAIN, Call, CallCache, Inputs, direct, empty_copy, refuse_gradient
from cutekernels.ops.shared.strides import alignment, pairs

_INPUTS = "Tensor a, Tensor b, Tensor? c, Tensor? bias"
_OPTIONS = "float alpha=1.0, float beta=0.0, str activation='none', str accumulate='fp32', str? config=None"
_KINDS = kinds_of(f"{_INPUTS}, {_OPTIONS}")
_NAMES = DTYPES.names
CALLS = CallCache()  # a and b alone: a guard takes one number of tensors
FUSED_CALLS = CallCache()  # with C or a bias
# Copies make large products of unaligned operands up to 5 times faster: docs/notes/host.md#copies (H200, 2026-11).
_COPY_FROM = 2**28  # products M*N*K from which copies pay
_COPY_EXTENT = 128  # and the least M and N: below, the operands are most of the traffic
_recent = CALLS.recent.get
_increment_version = torch_names.increment_version
_is_grad_enabled = torch.is_grad_enabled
_any_requires_grad = torch_names.any_requires_grad
_levels = torch_names.levels
_is_compiling = torch.compiler.is_compiling


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    accumulate: Literal["fp32", "fp16"] = "fp32",
    out: Tensor | None = None,
    config: GemmConfig | str | None = None,
) -> Tensor:
    """``out = activation(alpha * a @ b + beta * c + bias)``, accumulated in fp32, rounded once.

    Args:
        a: ``(M, K)`` or ``(B, M, K)``, fp16 or bf16 (on the CPU fp32 and fp64 too). K or M contiguous
            (``x.t()`` costs nothing); 16-byte aligned rows are fastest, any alignment works. Strides with no
            contiguous extent cost a copy of that operand.
        b: ``(K, N)`` or ``(B, K, N)``, dtype of ``a``, likewise; ``weight.t()`` of an ``(N, K)`` weight is free.
            Where only one of ``a`` and ``b`` has a batch, the other is used for every entry of it.
        c: ``(M, N)`` or ``(B, M, N)``, shape and dtype of the result. With ``beta=0`` it is never read.
        alpha: factor of the product.
        beta: factor of ``c``.
        bias: ``(N,)``, dtype of ``a`` or fp32.
        activation: ``"relu" | "gelu" | "gelu_tanh" | "silu"``; None for identity.
        accumulate: ``"fp32"``, or ``"fp16"`` for fp16 operands: faster on GeForce and Ada, and less exact.
        out: where to write: shape and dtype of the result, N or M contiguous, a slice included. It may be ``c``
            itself, element upon element; any other overlap with an operand is refused. Not differentiable.
        config: overrides the tuned choice, as a :class:`GemmConfig` or its text. Ignored on the CPU.

    Returns:
        ``(M, N)`` or ``(B, M, N)``, dtype of ``a``; or ``out``. Differentiable in a, b, c and bias.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched extents, dtypes or devices, ``c`` missing where
            ``beta`` is not 0, an ``out`` that overlaps an operand or itself, ``out`` together with gradients.
        InvalidConfig: ``config`` breaks a rule of the op.
    """
    try:
        name = "none" if activation is None else activation
        if beta == 0.0:
            if c is not None:
                check_tensor("gemm", "c", c)
            c = None
        elif c is None:
            raise ValueError  # explained below; keys and guards do not hold beta
        plain = c is None and bias is None
        if plain and type(b) is Tensor and not _is_compiling() and _levels._current_level < 0:
            # CallCache.replay, written out for a and b alone: 0.4 us less (docs/notes/host.md#gemm).
            at_b = b.data_ptr()
            found = _recent(at_b if out is None else ~at_b)
            if found is not None:
                guard, (its_name, its_accumulate), its_config, _, terms, known, call = found[0]
                if (
                    its_name is not name
                    or its_accumulate is not accumulate
                    or its_config is not config
                    or (terms and ((terms[0] and _is_grad_enabled()) or terms[1] != paths._current_device()))
                ):
                    pass
                elif out is None:
                    if guard(a, b):
                        addresses = [a.data_ptr(), at_b]
                        if addresses == known or call.fits((a, b), addresses, known):
                            return call.run(None, (a, b), addresses, (alpha, beta))[0]
                elif guard(*(operands := (out, a, b))):
                    addresses = [out.data_ptr(), a.data_ptr(), at_b]
                    if addresses == known or call.fits(operands, addresses, known):
                        if (fire := call.fire) is not None:
                            fire(addresses, (alpha, beta))
                        else:
                            call.launch(*operands, alpha, beta)  # type: ignore[misc]
                        _increment_version((out,))
                        return out
        calls, inputs = (CALLS, (a, b)) if plain else (FUSED_CALLS, (a, b, c, bias))
        text = text_of(config, GemmConfig)
        call_of = (None if out is None else (out,)), inputs, (name, accumulate), (alpha, beta), text
        if _is_grad_enabled() and out is None and not _is_compiling() and _any_requires_grad(a, b, c, bias):
            return GEMM_PATH(a, b, c, bias, alpha, beta, name, accumulate, text)  # type: ignore[no-any-return]
        if not _is_compiling():
            made = calls.replay(*call_of) if type(b) in PLAIN else None  # a fake's address is not to be read
            if made is None and direct(a, b, c, bias, out):
                made = calls.recall(call_of)
            if made is not None:
                return made[0]
    except UnsupportedProblem:
        raise
    except (ValueError, TypeError, RuntimeError, BufferError, AttributeError):
        # Launches refuse arguments and some tensors have no address: torch's op takes them or says what is wrong.
        pass
    check_word("gemm", "activation", activation, optional=True)
    name = "none" if activation is None else activation
    check_arguments("gemm", _KINDS, (a, b, c, bias, alpha, beta, name, accumulate))
    check_tensor("gemm", "out", out, optional=True)
    options = alpha, beta, name, accumulate, text_of(config, GemmConfig)
    if out is None:
        through_torch = torch.ops.cutekernels.gemm if _is_compiling() else GEMM_PATH
        return through_torch(a, b, c, bias, *options)  # type: ignore[no-any-return]
    refuse_gradient(a, b, c, bias, out)
    torch.ops.cutekernels.gemm_out(a, b, c, bias, out, *options)
    return out


def linear_into(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation | None = None
) -> None:
    """``linear`` of a dense weight, written to ``out``."""
    if x.dim() == 2:
        gemm(x, weight.t(), bias=bias, activation=activation, out=out)
        return
    check_tensor("linear", "x", x)
    check_tensor("linear", "out", out)
    shape = (*x.shape[:-1], weight.shape[0])
    check_fits(out, shape, x)
    rows = math.prod(shape[:-1])
    try:
        flat = out.view(rows, shape[-1])
    except RuntimeError:  # no single stride walks out's rows
        refuse_gradient(x, weight, bias, out)
        check_apart(out, [("x", x), ("weight", weight), ("bias", bias)])
        flat = out.new_empty((rows, shape[-1]))
        out.copy_(gemm(rows_of(x), weight.t(), bias=bias, activation=activation, out=flat).view(shape))
    else:
        gemm(rows_of(x), weight.t(), bias=bias, activation=activation, out=flat)


# ---- from operands to a launch --------------------------------------------------------------------------


def first_call(
    results: tuple[Tensor] | None, inputs: tuple[Any, ...], scalars: tuple[float, float], options: tuple[str, str],
    config: str | None,
) -> Tensor:  # fmt: skip
    """A product on a GPU that no guard passed: recalled by its key, or checked, posed, planned and launched.

    Calls that need no copies are cached.
    """
    a, b, c, bias = inputs
    beta = scalars[1]
    inputs = a, b, c if beta != 0.0 else None, bias
    calls, given = (CALLS, inputs[:2]) if inputs[2] is None and bias is None else (FUSED_CALLS, inputs)
    call_of = results, given, options, scalars, config
    if beta == 0.0 or c is not None:  # keys and guards do not hold beta, by which a missing C is refused
        made = calls.replay(*call_of) or calls.recall(call_of)
        if made is not None:
            return made[0]
    (result,) = _check(results, inputs, beta, *options)
    if result.numel() == 0:
        return result
    if result.dim() == 3:
        a, b = [t if t.dim() == 3 else t.expand(result.shape[0], *t.shape) for t in (a, b)]
    a, b, c = canonical(a), canonical(b), None if inputs[2] is None else canonical(inputs[2])
    copied = worth_copying(a, b)
    a, b = (k_contiguous(a) if copied[0] else a), (k_contiguous(b.mT).mT if copied[1] else b)
    bias = None if bias is None else bias.contiguous()
    target = result if result.stride(-1) == 1 or result.stride(-2) == 1 else empty_copy(result)
    with torch.cuda.device(a.get_device()):
        problem = GEMM.problem(target, a, b, c, bias, activation=options[0], accumulate=options[1])
        launch = dispatch.plan(GEMM, problem, a.get_device(), config).launch
        if all(t is u for t, u in zip((target, a, b, c, bias), (result, *inputs), strict=True)):
            fire = launch.settle(target, a, b, bias is not None) if isinstance(launch, AddressedLaunch) else None
            plain = calls is CALLS
            by_tensors = (lambda out, a, b, *scalars: launch(out, a, b, None, None, *scalars)) if plain else launch
            apart = () if results is None else pairs(1, (result, *given), in_place=(3,))
            call = Call.of(by_tensors, given, (result,) if results is None else (), apart, fire)
            return calls.add(call, call_of)[0]
        launch(target, a, b, c, bias, *scalars)
        if target is not result:
            result.copy_(target)
        elif results is not None:
            _increment_version(results)
    return result


def worth_copying(a: Tensor, b: Tensor) -> tuple[bool, bool]:
    """Whether to copy canonical a, and b, into aligned rows first, because their own rows slow a large product."""
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    narrow = alignment(a) <= 2, alignment(b) <= 2
    if not any(narrow) or m * n * k < _COPY_FROM or min(m, n) < _COPY_EXTENT:
        return False, False
    return (True, True) if k % WIDEST else narrow  # a K that grows, grows in both


def k_contiguous(t: Tensor) -> Tensor:
    """A copy of ``([B,] rows, K)`` with K contiguous and grown to a multiple of 8 with zeros, which change no sum."""
    if t.dim() == 3 and t.stride(0) == 0:
        return k_contiguous(t[0]).expand(t.shape[0], -1, -1)
    k = t.shape[-1]
    copy = t.new_empty((*t.shape[:-1], -(-k // WIDEST) * WIDEST))
    copy[..., :k] = t
    copy[..., k:] = 0
    return copy


def canonical(t: Tensor) -> Tensor:
    """``t`` itself where one of its last two strides is 1; else a view or a copy of which that is true."""
    if t.stride(-1) == 1 or t.stride(-2) == 1:
        return t
    if t.shape[-1] == 1:  # a stride never taken
        return t.as_strided(t.shape, (*t.stride()[:-1], 1))
    if t.shape[-2] == 1:
        return t.as_strided(t.shape, (*t.stride()[:-2], 1, t.stride(-1)))
    return t.contiguous()


# ---- torch.library --------------------------------------------------------------------------------------


def rows_of(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # -1 is ambiguous without elements


def _gemm_launch(
    a: Tensor, b: Tensor, c: Tensor | None, bias: Tensor | None, alpha: float = 1.0, beta: float = 0.0,
    activation: str = "none", accumulate: str = "fp32", config: str | None = None,
) -> Tensor:  # fmt: skip
    """``gemm`` on a GPU: a product like one before at once."""
    options, scalars = (activation, accumulate), (alpha, beta)
    if bias is None and c is None and beta == 0.0:
        made = CALLS.replay(None, (a, b), options, scalars, config)
        if made is not None:
            return made[0]
    return first_call(None, (a, b, c, bias), scalars, options, config)


def launch_into(
    a: Tensor, b: Tensor, c: Tensor | None, bias: Tensor | None, out: Tensor, alpha: float = 1.0, beta: float = 0.0,
    activation: str = "none", accumulate: str = "fp32", config: str | None = None,
) -> None:  # fmt: skip
    """``gemm`` on a GPU into ``out``, which graphs call most: a product like one before at once."""
    options, scalars, made = (activation, accumulate), (alpha, beta), None
    if c is None and beta == 0.0:
        if bias is None:
            made = CALLS.replay((out,), (a, b), options, scalars, config)
        else:
            made = FUSED_CALLS.replay((out,), (a, b, None, bias), options, scalars, config)
    if made is None:
        first_call((out,), (a, b, c, bias), scalars, options, config)


def _check(
    results: tuple[Tensor] | None, inputs: Inputs, beta: float, activation: str, accumulate: str, *, apart: bool = True
) -> tuple[Tensor, ...]:
    """The result: given, or new. Raises UnsupportedProblem for arguments that pose no problem."""
    if beta != 0.0 and inputs[2] is None:
        raise UnsupportedProblem(f"beta={beta} needs c")
    read = inputs if beta != 0.0 else (*inputs[:2], None, inputs[3])
    options = {"activation": activation, "accumulate": accumulate}
    GEMM.admit(read, results or (), **options)
    if results is None:
        return GEMM.fresh(*read, **options)
    if apart:  # fakes have no memory
        check_apart(results[0], zip(GEMM.inputs, inputs, strict=True), in_place="c")
    return results


def cpu(results, inputs, alpha=1.0, beta=0.0, activation="none", accumulate="fp32", config=None):  # type: ignore[no-untyped-def]
    _check(results, inputs, beta, activation, accumulate)
    (made,) = GEMM.evaluate(*inputs, alpha, beta, activation=activation)
    if results is None:
        return made
    results[0].copy_(made)
    return None


def _fake(results, inputs, alpha=1.0, beta=0.0, activation="none", accumulate="fp32", config=None):  # type: ignore[no-untyped-def]
    made = _check(results, inputs, beta, activation, accumulate, apart=False)
    return made[0] if results is None else None


# ---- gradients ------------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, c, bias, alpha, beta, activation, accumulate, _ = inputs
    ctx.options = (alpha, beta, activation, accumulate)
    ctx.has = (c is not None, bias is not None)
    ctx.save_for_backward(a, b, c if beta != 0.0 else None, bias, output if reads_value(activation) else None)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """dz = grad * activation'(z); da = alpha dz b^T; db = alpha a^T dz; dc = beta dz; dbias = sum of dz."""
    a, b, c, bias, output = ctx.saved_tensors
    alpha, beta, activation, accumulate = ctx.options
    z = partial(GEMM_PATH, a, b, c, bias, alpha, beta, "none", accumulate, None)
    dz = before_activation(grad, output, activation, z)
    da = db = dc = dbias = None
    if ctx.needs_input_grad[0]:
        da = product(dz, b.mT, alpha) if a.dim() == dz.dim() else _sum_over_batch(dz, b.mT, alpha)
    if ctx.needs_input_grad[1]:
        db = product(a.mT, dz, alpha) if b.dim() == dz.dim() else _sum_over_batch(a.mT, dz, alpha)
    if ctx.has[0] and ctx.needs_input_grad[2]:
        dc = dz * beta
    if ctx.has[1] and ctx.needs_input_grad[3]:
        dbias = column_sums(dz, bias.dtype)
    return da, db, dc, dbias, None, None, None, None, None


def product(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    return GEMM_PATH(a, b, None, None, alpha, 0.0, "none", "fp32", None)  # type: ignore[no-any-return]


def _sum_over_batch(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """``alpha * sum_b x[b] @ y[b]``, as one product over the joint extent (batch, K); y or x may be unbatched."""
    batch = (x if x.dim() == 3 else y).shape[0]
    x = x if x.dim() == 3 else x.expand(batch, *x.shape)
    y = y if y.dim() == 3 else y.expand(batch, *y.shape)
    joint_x = x.permute(1, 0, 2).reshape(x.shape[1], batch * x.shape[2])
    joint_y = y.reshape(batch * y.shape[1], y.shape[2])
    return product(joint_x, joint_y, alpha)


def check_depth(x: Tensor, k: int, n: int | None = None) -> None:
    """Refuses an ``x`` that a weight of ``k`` columns, and ``n`` rows, does not multiply."""
    if x.dim() == 0 or x.shape[-1] != k:
        hint = f": weight is (N, K), pass its t() of ({k}, {n})" if x.dim() and x.shape[-1] == n else ""
        raise UnsupportedProblem(f"x must be (..., K) with weight's K={k}; its shape is {tuple(x.shape)}{hint}")


GEMM_PATH = define_with_out(
    "gemm",
    _INPUTS,
    _OPTIONS,
    lambda results: [launch_into if results else _gemm_launch, *splitting(4, cpu, _fake)(results)],
    gradient=_gradient,
    remember=_remember,
    autocast="lower",
)

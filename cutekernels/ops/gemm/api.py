"""``gemm`` and ``linear``: the public functions over the GEMM declaration, their gradients, their registration.

The warm path is the first lines of :func:`gemm`: a guard, or a table lookup keyed by all that a plan and its launch
depend on, then the launch. Whatever is unusual (a first sight, gradients, tracing, subclasses, CPU tensors) leaves it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cutekernels import dispatch
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.gemm.launch import AddressedLaunch, current_stream
from cutekernels.ops.gemm.op import ACTIVATIONS, DTYPES, GEMM, WIDEST, GemmConfig, GemmProblem, reference
from cutekernels.ops.shared import call_cache
from cutekernels.ops.shared.strides import overlaps_itself, relation, span_bytes

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_one_gpu = False  # known after the first launch; then keys need not name devices

_is_compiling = torch.compiler.is_compiling
_traced_by_dynamo = torch.compiler.is_dynamo_compiling  # 0.1 us less; other tracers make tensors that guards refuse
_recent = call_cache.recent.get
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_increment_version = torch._C._increment_version


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: Tensor | None = None,
    activation: str | None = None,
    accumulate: str = "fp32",
    out: Tensor | None = None,
    config: GemmConfig | str | None = None,
) -> Tensor:
    """``out = activation(alpha * a @ b + beta * c + bias)``, accumulated in fp32, rounded once.

    Args:
        a: ``(M, K)`` or ``(B, M, K)``, fp16 or bf16. K or M contiguous (``x.t()`` costs nothing); 16-byte aligned
            rows are fastest, any alignment works. Strides with no contiguous extent cost a copy of that operand.
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
    if beta == 0.0:
        c = None
    elif c is None:  # refused there; keys and guards know nothing of beta
        return _general(a, b, c, alpha, beta, bias, activation, accumulate, out, config)
    key: Any = None
    try:
        if type(b) is Tensor and c is None and bias is None and config is None and not _traced_by_dynamo():
            at_b = b.data_ptr()
            found = _recent(at_b if out is not None else ~at_b)
            if found is not None:
                guard, launch, numbers, device, its_activation, its_accumulate, places, call = found
                if its_activation is not activation or its_accumulate is not accumulate:
                    pass
                elif out is None:
                    if guard(a, b) and ((at_a := a.data_ptr()) | at_b) & 15 == call.bits:
                        fresh = a.new_empty(call.shape)
                        if numbers is None:
                            launch(fresh, a, b, c, bias, alpha, beta)
                        else:
                            launch(fresh.data_ptr(), at_a, at_b, *numbers, alpha, beta, current_stream(device))
                        return fresh
                elif guard(a, b, out):
                    at_a = a.data_ptr()
                    at = out.data_ptr()
                    there = places[0] == at_a and places[1] == at
                    if not there and call.fits(at_a, at_b, at):
                        places[:] = at_a, at
                        there = True
                    if there:
                        if numbers is None:
                            launch(out, a, b, c, bias, alpha, beta)
                        else:
                            launch(at, at_a, at_b, *numbers, alpha, beta, current_stream(device))
                        _increment_version((out,))
                        return out
        if (
            type(a) is Tensor
            and (type(b) is Tensor or type(b) is Parameter)
            and not _is_compiling()
            and not (_grad_enabled() and _wants_gradient(a, b, c, bias, out))
            and not _dispatch_modes()
        ):
            at_a = a.data_ptr()
            at_b = b.data_ptr()
            rare = None
            if c is not None or bias is not None or config is not None or not _one_gpu:
                rare = _rare(a, b, c, bias, out, config)
            if out is None:
                bits = (at_a | at_b) & 15
                key = (
                    a.shape, a.stride(), b.shape, b.stride(), a.dtype, b.dtype, a.get_device(), b.get_device(),
                    bits, activation, accumulate, rare,
                )  # fmt: skip
                call = call_cache.calls[key]
                fresh = a.new_empty(call.shape)
                call.launch(fresh, a, b, c, bias, alpha, beta)
                if rare is None:
                    call_cache.expect(~at_b, call, a, b)
                return fresh
            if type(out) is Tensor:
                at = out.data_ptr()
                bits = (at_a | at_b | at) & 15
                key = (
                    a.shape, a.stride(), b.shape, b.stride(), out.shape, out.stride(), a.dtype, b.dtype, out.dtype,
                    a.get_device(), b.get_device(), out.get_device(), bits, activation, accumulate, rare,
                )  # fmt: skip
                call = call_cache.calls[key]
                if (
                    call.fits(at_a, at_b, at)
                    and (bias is None or relation(out, bias) == "apart")
                    and (c is None or c is out or relation(out, c) != "overlap")
                ):
                    call.launch(out, a, b, c, bias, alpha, beta)
                    _increment_version((out,))
                    if rare is None:
                        call_cache.expect(at_b, call, a, b, out)
                    return out
    except KeyError:
        return _first(key, a, b, c, alpha, beta, bias, activation, accumulate, out, config)
    except (ValueError, TypeError, RuntimeError, BufferError):
        # What a launch refuses, and tensors without an address: the general path takes them or says what is wrong.
        pass
    return _general(a, b, c, alpha, beta, bias, activation, accumulate, out, config)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None, out: Tensor | None = None
) -> Tensor:
    """``out[..., n] = activation(sum_k x[..., k] * weight[n, k] + bias[n])``, accumulated in fp32, rounded once.

    Args:
        x: ``(..., K)``, fp16 or bf16. Any strides; K contiguous and 16-byte aligned rows are fastest. Leading
            dimensions that no single stride walks cost a copy.
        weight: ``(N, K)``, dtype of ``x``: the layout of ``nn.Linear.weight``.
        bias: ``(N,)``, dtype of ``x`` or fp32.
        activation: ``"relu" | "gelu" | "gelu_tanh" | "silu"``; None for identity.
        out: where to write, ``(..., N)``; must not overlap an input. Not differentiable.

    Returns:
        ``(..., N)``, dtype of ``x``; or ``out``. Differentiable in x, weight and bias.

    Raises:
        UnsupportedProblem: a dtype no kernel takes, mismatched extents, dtypes or devices, an ``out`` that
            overlaps an input or itself, ``out`` together with gradients.
    """
    if weight.dim() != 2:
        raise UnsupportedProblem(f"weight must be (N, K); its shape is {tuple(weight.shape)}")
    if x.dim() == 2:
        return gemm(x, weight.t(), bias=bias, activation=activation, out=out)
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise UnsupportedProblem(f"x must be (..., K) with weight's K={weight.shape[1]}; its shape is {tuple(x.shape)}")
    rows, shape = math.prod(x.shape[:-1]), (*x.shape[:-1], weight.shape[0])
    flat = x.reshape(rows, x.shape[-1])
    if out is None:
        return gemm(flat, weight.t(), bias=bias, activation=activation).view(shape)
    _check_fits(out, shape, x)
    try:
        flat_out = out.view(rows, shape[-1])
    except RuntimeError:  # no single stride walks out's rows
        _refuse_gradient(x, weight, bias, out)
        _check_apart(out, x=x, weight=weight, bias=bias)
        out.copy_(gemm(flat, weight.t(), bias=bias, activation=activation).view(shape))
    else:
        gemm(flat, weight.t(), bias=bias, activation=activation, out=flat_out)
    return out


# ---- the slow path --------------------------------------------------------------------------------------


def _rare(
    a: Tensor, b: Tensor, c: Tensor | None, bias: Tensor | None, out: Tensor | None, config: GemmConfig | str | None
) -> tuple[Any, ...]:
    """The key's part for what most calls do without: C, a bias, a forced config, a second GPU."""
    facts: list[Any] = [config, torch.cuda.current_device() if a.is_cuda else -1]
    for t in (c, bias):
        facts += [None] if t is None else [type(t), t.shape, t.stride(), t.dtype, t.data_ptr() & 15]
    return (*facts, *(None if t is None else t.get_device() for t in (a, b, c, bias, out)))


def _first(
    key: Any, a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, bias: Tensor | None,
    activation: str | None, accumulate: str, out: Tensor | None, config: GemmConfig | str | None,
) -> Tensor:  # fmt: skip
    """The first sight of a problem: through the general path, then into the warm table if a launch is all it takes."""
    global _one_gpu
    result = _general(a, b, c, alpha, beta, bias, activation, accumulate, out, config)
    operands = [t for t in (a, b, c, result) if t is not None]
    as_they_are = all(canonical(t) is t and t.dim() == result.dim() for t in operands) and (
        bias is None or bias.is_contiguous()
    )
    copies = any(worth_copying(a, b))  # made each time
    if (
        result.is_cuda
        and result.get_device() == torch.cuda.current_device()
        and result.numel()
        and as_they_are
        and not copies
    ):
        _one_gpu = torch.cuda.device_count() == 1
        problem = pose(a, b, c, bias, activation, accumulate, result)
        launch = dispatch.plan(GEMM, problem, a.get_device(), config).launch
        bits = (a.data_ptr() | b.data_ptr() | (0 if out is None else out.data_ptr())) & 15
        spans = span_bytes(a), span_bytes(b), span_bytes(result)
        numbers = launch.numbers(result, a, b) if isinstance(launch, AddressedLaunch) else None
        call_cache.remember(
            key, call_cache.Call(launch, *spans, tuple(result.shape), bits, activation, accumulate, numbers)
        )
    return result


def _wants_gradient(*tensors: Tensor | None) -> bool:
    return any(t is not None and t.requires_grad for t in tensors)


def _refuse_gradient(*tensors: Tensor | None) -> None:
    if _grad_enabled() and _wants_gradient(*tensors):
        raise UnsupportedProblem("out= is not differentiable: leave it out, or call under torch.no_grad()")


def _general(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, bias: Tensor | None,
    activation: str | None, accumulate: str, out: Tensor | None, config: GemmConfig | str | None,
) -> Tensor:  # fmt: skip
    text = None if config is None else str(config)
    name = activation or "none"
    if out is None:
        return torch.ops.cutekernels.gemm(a, b, c, bias, alpha, beta, name, accumulate, text)  # type: ignore[no-any-return]
    _refuse_gradient(a, b, c, bias, out)
    torch.ops.cutekernels.gemm_out(a, b, c, bias, out, alpha, beta, name, accumulate, text)
    return out


def pose(
    a: Tensor, b: Tensor, c: Tensor | None, bias: Tensor | None, activation: str | None, accumulate: str, out: Tensor
) -> GemmProblem:
    """The problem these canonical tensors pose (see :func:`canonical`)."""
    batched = out.dim() == 3
    operands = [t for t in (a, b, c, out) if t is not None]
    return GemmProblem(
        m=out.shape[-2],
        n=out.shape[-1],
        k=a.shape[-1],
        batch=out.shape[0] if batched else 1,
        dtype=_NAMES[a.dtype],
        a_major="k" if a.stride(-1) == 1 else "m",
        b_major="n" if b.stride(-1) == 1 else "k",
        out_major="n" if out.stride(-1) == 1 else "m",
        c="none" if c is None else "n" if c.stride(-1) == 1 else "m",
        bias="none" if bias is None else "fp32" if bias.dtype == torch.float32 else "same",
        activation=activation or "none",
        accumulate=accumulate,
        a_align=alignment(a),
        b_align=alignment(b),
        c_align=WIDEST if c is None else alignment(c),
        out_align=alignment(out),
        batched=batched,
        wide=any(span_bytes(t) >= 2 * 2**31 for t in operands),
    )


def alignment(t: Tensor) -> int:
    """Elements in the widest vector that address, strides and contiguous extent allow: 8, 4, 2 or 1."""
    along = -1 if t.stride(-1) == 1 else -2
    bits = WIDEST | (t.data_ptr() // t.element_size()) | t.shape[along]
    for i in range(t.dim()):
        if i != t.dim() + along:
            bits |= t.stride(i)
    return bits & -bits


# Copying an operand moves a few bytes per element; loading it element by element costs the whole product a multiple.
# 4095^3 bf16 on an H200: 2395 -> 467 us, where cuBLAS takes 907; at alignment 4, 399 -> 469 (2026-11-21).
_COPY_FROM = 2**28  # products M*N*K from which copies pay
_COPY_EXTENT = 128  # and the least M and N: below, the operands are most of the traffic


def worth_copying(a: Tensor, b: Tensor) -> tuple[bool, bool]:
    """Which canonical operands to copy into aligned rows first, because their own would slow a large product."""
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


def _check(
    a: Tensor, b: Tensor, c: Tensor | None, bias: Tensor | None, beta: float, activation: str, accumulate: str
) -> tuple[int, ...]:
    """The result's shape. Raises UnsupportedProblem for arguments that pose no problem."""
    if a.dim() not in (2, 3) or b.dim() not in (2, 3):
        raise UnsupportedProblem(
            f"a and b must be matrices or batches of them; they have shapes {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.shape[-1] != b.shape[-2]:
        raise UnsupportedProblem(
            f"a's K={a.shape[-1]} must be b's K={b.shape[-2]}; shapes {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.dim() == b.dim() == 3 and a.shape[0] != b.shape[0]:
        raise UnsupportedProblem(f"a and b must have one batch; they have {a.shape[0]} and {b.shape[0]}")
    batch = a.shape[:1] if a.dim() == 3 else b.shape[:-2]
    shape = (*batch, a.shape[-2], b.shape[-1])
    if activation not in ACTIVATIONS:
        known = ", ".join(name for name in ACTIVATIONS if name != "none")
        raise UnsupportedProblem(f"activation must be one of {known}, or None; it is {activation!r}")
    if beta != 0.0 and c is None:
        raise UnsupportedProblem(f"beta={beta} needs c")
    if c is not None and tuple(c.shape) != shape:
        raise UnsupportedProblem(f"c must have the result's shape {shape}; it has {tuple(c.shape)}")
    if bias is not None and tuple(bias.shape) != shape[-1:]:
        raise UnsupportedProblem(f"bias must be (N,) = ({shape[-1]},); its shape is {tuple(bias.shape)}")
    for name, t in (("b", b), ("c", c), ("bias", bias)):
        if t is None:
            continue
        if t.dtype != a.dtype and not (name == "bias" and t.dtype == torch.float32):
            raise UnsupportedProblem(f"{name} must have a's dtype {a.dtype}; it has {t.dtype}: cast it")
        if t.device != a.device:
            raise UnsupportedProblem(f"{name} must be on a's device {a.device}; it is on {t.device}")
    if accumulate not in ("fp32", "fp16"):
        raise UnsupportedProblem(f"accumulate must be fp32 or fp16; it is {accumulate!r}")
    if accumulate == "fp16" and a.dtype != torch.float16:
        raise UnsupportedProblem(f"accumulate='fp16' is for fp16 operands; they are {a.dtype}")
    if not a.dtype.is_floating_point or (not a.device.type == "cpu" and a.dtype not in _NAMES):
        raise UnsupportedProblem(f"gemm takes fp16 and bf16; got {a.dtype}")
    return shape


def _check_fits(out: Tensor, shape: tuple[int, ...], a: Tensor) -> None:
    if tuple(out.shape) != shape or out.dtype != a.dtype or out.device != a.device:
        raise UnsupportedProblem(
            f"out must be {shape}, {a.dtype}, on {a.device}; it is {tuple(out.shape)}, {out.dtype}, on {out.device}"
        )


def _check_apart(out: Tensor, **operands: Tensor | None) -> None:
    """Refuses an ``out`` that overlaps itself or an operand; only ``c`` it may be, element upon element."""
    if overlaps_itself(out):
        raise UnsupportedProblem(f"out must not overlap itself; its strides are {out.stride()}: give it dense memory")
    for name, t in operands.items():
        if t is None:
            continue
        how = relation(out, t)
        if how == "overlap" or (how == "same" and name != "c"):
            raise UnsupportedProblem(f"out overlaps {name}: give it memory of its own")


def _run(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    alpha: float,
    beta: float,
    activation: str,
    accumulate: str,
    config: str | None,
) -> None:
    """Poses, plans and launches for checked GPU tensors."""
    if out.dim() == 3:
        a = a if a.dim() == 3 else a.expand(out.shape[0], *a.shape)
        b = b if b.dim() == 3 else b.expand(out.shape[0], *b.shape)
    if out.numel() == 0:
        return
    a, b, c = canonical(a), canonical(b), None if c is None else canonical(c)
    copied = worth_copying(a, b)
    a, b = (k_contiguous(a) if copied[0] else a), (k_contiguous(b.mT).mT if copied[1] else b)
    target = (
        out
        if out.stride(-1) == 1 or out.stride(-2) == 1
        else torch.empty_like(out, memory_format=torch.contiguous_format)
    )
    bias = None if bias is None else bias.contiguous()
    with torch.cuda.device(a.device):
        problem = pose(a, b, c, bias, activation, accumulate, target)
        plan = dispatch.plan(GEMM, problem, a.get_device(), config)
        plan.launch(target, a, b, c, bias, alpha, beta)
        if target is not out:
            out.copy_(target)


# ---- torch.library --------------------------------------------------------------------------------------

_ARGS = "Tensor a, Tensor b, Tensor? c, Tensor? bias"
_OPTIONS = "float alpha=1.0, float beta=0.0, str activation='none', str accumulate='fp32', str? config=None"


def register(library: torch.library.Library) -> None:
    """Defines the ops in ``library`` (namespace "cutekernels"): schemas, GPU and CPU, fakes, autograd."""
    library.define(f"gemm({_ARGS}, {_OPTIONS}) -> Tensor")
    library.define(f"gemm_out({_ARGS}, Tensor(a!) out, {_OPTIONS}) -> ()")
    library.impl("gemm", _gemm_cuda, "CUDA")
    library.impl("gemm", _gemm_cpu, "CPU")
    library.impl("gemm_out", _gemm_out_cuda, "CUDA")
    library.impl("gemm_out", _gemm_out_cpu, "CPU")
    torch.library.register_fake("cutekernels::gemm", _gemm_fake, lib=library)
    torch.library.register_fake("cutekernels::gemm_out", _gemm_out_fake, lib=library)
    torch.library.register_autograd("cutekernels::gemm", _gemm_backward, setup_context=_remember, lib=library)


def _gemm_cuda(a, b, c, bias, alpha=1.0, beta=0.0, activation="none", accumulate="fp32", config=None):  # type: ignore[no-untyped-def]
    c = c if beta != 0.0 else None
    out = a.new_empty(_check(a, b, c, bias, beta, activation, accumulate))
    _run(a, b, c, bias, out, alpha, beta, activation, accumulate, config)
    return out


def _gemm_cpu(a, b, c, bias, alpha=1.0, beta=0.0, activation="none", accumulate="fp32", config=None):  # type: ignore[no-untyped-def]
    c = c if beta != 0.0 else None
    _check(a, b, c, bias, beta, activation, accumulate)
    return reference(a, b, c, bias, alpha, beta, activation=activation)


def _gemm_fake(a, b, c, bias, alpha=1.0, beta=0.0, activation="none", accumulate="fp32", config=None):  # type: ignore[no-untyped-def]
    return a.new_empty(_check(a, b, c if beta != 0.0 else None, bias, beta, activation, accumulate))


def _gemm_out_cuda(a, b, c, bias, out, alpha=1.0, beta=0.0, activation="none", accumulate="fp32", config=None):  # type: ignore[no-untyped-def]
    c = c if beta != 0.0 else None
    _check_fits(out, _check(a, b, c, bias, beta, activation, accumulate), a)
    _check_apart(out, a=a, b=b, c=c, bias=bias)
    _run(a, b, c, bias, out, alpha, beta, activation, accumulate, config)


def _gemm_out_cpu(a, b, c, bias, out, alpha=1.0, beta=0.0, activation="none", accumulate="fp32", config=None):  # type: ignore[no-untyped-def]
    c = c if beta != 0.0 else None
    _check_fits(out, _check(a, b, c, bias, beta, activation, accumulate), a)
    _check_apart(out, a=a, b=b, c=c, bias=bias)
    out.copy_(reference(a, b, c, bias, alpha, beta, activation=activation))


def _gemm_out_fake(a, b, c, bias, out, alpha=1.0, beta=0.0, activation="none", accumulate="fp32", config=None):  # type: ignore[no-untyped-def]
    _check_fits(out, _check(a, b, c if beta != 0.0 else None, bias, beta, activation, accumulate), a)


# ---- gradients ------------------------------------------------------------------------------------------


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, c, bias, alpha, beta, activation, accumulate, _ = inputs
    ctx.options = (alpha, beta, activation, accumulate)
    ctx.has = (c is not None, bias is not None)
    ctx.save_for_backward(a, b, c if beta != 0.0 else None, bias, output if activation == "relu" else None)


def _gemm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """dz = grad * activation'(z); da = alpha dz b^T; db = alpha a^T dz; dc = beta dz; dbias = sum of dz.

    z, which the fused forward never stored, is computed again; ReLU needs only its sign, which the output has.
    """
    a, b, c, bias, output = ctx.saved_tensors
    alpha, beta, activation, accumulate = ctx.options
    op = torch.ops.cutekernels.gemm
    if activation == "none":
        dz = grad
    elif activation == "relu":
        dz = torch.where(output > 0, grad, torch.zeros_like(grad))
    else:
        z = op(a, b, c, bias, alpha, beta, "none", accumulate)
        wide = torch.float64 if z.dtype == torch.float64 else torch.float32
        dz = (grad.to(wide) * _SLOPES[activation](z.to(wide))).to(grad.dtype)
    da = db = dc = dbias = None
    if ctx.needs_input_grad[0]:
        da = op(dz, b.mT, None, None, alpha, 0.0) if a.dim() == dz.dim() else _summed(dz, b.mT, alpha)
    if ctx.needs_input_grad[1]:
        db = op(a.mT, dz, None, None, alpha, 0.0) if b.dim() == dz.dim() else _summed(a.mT, dz, alpha)
    if ctx.has[0] and ctx.needs_input_grad[2]:
        dc = dz * beta
    if ctx.has[1] and ctx.needs_input_grad[3]:
        dbias = dz.sum(tuple(range(dz.dim() - 1)), dtype=torch.promote_types(dz.dtype, torch.float32)).to(bias.dtype)
    return da, db, dc, dbias, None, None, None, None, None


def _summed(x: Tensor, y: Tensor, alpha: float) -> Tensor:
    """``alpha * sum_b x[b] @ y[b]``, as one product over the joint extent (batch, K); y or x may be unbatched."""
    batch = (x if x.dim() == 3 else y).shape[0]
    x = x if x.dim() == 3 else x.expand(batch, *x.shape)
    y = y if y.dim() == 3 else y.expand(batch, *y.shape)
    joint_x = x.permute(1, 0, 2).reshape(x.shape[1], batch * x.shape[2])
    joint_y = y.reshape(batch * y.shape[1], y.shape[2])
    return torch.ops.cutekernels.gemm(joint_x, joint_y, None, None, alpha, 0.0)  # type: ignore[no-any-return]


def _silu_slope(z: Tensor) -> Tensor:
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def _gelu_slope(z: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(z * math.sqrt(0.5))) + z * torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)


def _gelu_tanh_slope(z: Tensor) -> Tensor:
    k = math.sqrt(2 / math.pi)
    t = torch.tanh(k * (z + 0.044715 * z**3))
    return 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * k * (1 + 3 * 0.044715 * z * z)


_SLOPES = {"silu": _silu_slope, "gelu": _gelu_slope, "gelu_tanh": _gelu_tanh_slope}

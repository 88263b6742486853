"""Repeated calls of tensor ops: what is cached, what a replay costs the host, and how a kernel is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import cutekernels as ck
import cutekernels.ops.library
from bench.host import entered
from cutekernels.backends.triton import Recipe, TritonKernel
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.activations.op import GELU_MUL, SILU_MUL
from cutekernels.ops.moe.permute import MOE_PERMUTE
from cutekernels.ops.moe.route import MOE_ROUTE
from cutekernels.ops.norms.op import LAYER_NORM, RMS_NORM
from cutekernels.ops.rope.op import ROPE
from cutekernels.ops.shared import calls, paths
from cutekernels.ops.shared.triton_op import Launch
from tests.gpu_path import H200, launching
from tests.host_cost import host_cost

BF16 = torch.bfloat16


class Kernel:
    """A kernel that records its arguments: called, or settled and fired."""

    def __init__(self) -> None:
        self.called: list[tuple[Any, ...]] = []
        self.fired: list[tuple[Any, ...]] = []

    def __call__(self, grid: tuple[int, int, int], *args: Any) -> None:
        self.called.append(args)

    def settle(self, grid: tuple[int, int, int], numbers: Any, others: int) -> Any:
        def fire(addresses: list[int], scalars: tuple[Any, ...]) -> None:
            assert others == len(addresses) + len(scalars)
            self.fired.append((*addresses, *numbers, *scalars))

        return fire


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """Every plan's kernel; the device is that of CPU tensors."""
    made = Kernel()
    with launching(lambda op, problem: op.bind(problem, op.default(problem, H200), made)):
        yield made


def run(gate: Tensor, up: Tensor, out: Tensor | None = None) -> Tensor:
    return calls.run(SILU_MUL, None if out is None else (out,), (gate, up))[0]


@pytest.fixture
def recalled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The keys that were made: one for each call that no guard passed."""
    keys: list[object] = []
    made = paths.cache_key
    monkeypatch.setattr(paths, "cache_key", lambda *args: keys.append(found := made(*args)) or found)
    return keys


# ---- what is cached -------------------------------------------------------------------------------------


def test_each_call_launches_with_its_own_addresses(kernel: Kernel) -> None:
    joint = torch.randn(4, 32, dtype=BF16)
    gate, up = joint.chunk(2, dim=-1)
    for _ in range(2):
        out = run(gate, up)
        assert kernel.fired[-1] == (out.data_ptr(), gate.data_ptr(), up.data_ptr(), 4, 16, 16, 1, 32, 1, 32, 1)
    other = torch.empty(4, 16, dtype=BF16)
    assert run(gate, up, other) is other
    assert kernel.fired[-1][0] == other.data_ptr()
    assert kernel.called == []


def test_the_last_call_at_an_address_is_confirmed_by_a_guard(kernel: Kernel, recalled: list[object]) -> None:
    """Another shape, stride, type, alignment, option or count of operands is another call, whoever came last."""
    x, y, wide = torch.randn(4, 32, dtype=BF16), torch.randn(4, 32, dtype=BF16), torch.randn(4, 64, dtype=BF16)
    halves = x.half(), y.half()
    ways: list[Any] = [
        lambda: run(x, y),
        lambda: run(x, y, torch.empty_like(x)),
        lambda: run(x[:2], y[:2]),
        lambda: run(wide[:, :32], x),
        lambda: run(wide[:, 2:34], x),
        lambda: run(*halves),
        lambda: calls.run(GELU_MUL, None, (x, y), options=("none",)),
        lambda: calls.run(GELU_MUL, None, (x, y), options=("tanh",)),
    ]
    for way in (*ways, *ways):
        way()
        fired, made = kernel.fired[-1], len(recalled)
        way()
        assert len(recalled) == made, "confirmed by the guard"
        assert kernel.fired[-1][3:] == fired[3:]
    assert len(kernel.fired) == 4 * len(ways)
    run(x, x)
    assert kernel.fired[-1][3:5] == (1, 128)
    with pytest.raises(UnsupportedProblem, match="got torch.float16: convert it"):
        run(x, x.half())
    with pytest.raises(UnsupportedProblem, match="each extent the same"):
        run(x, x[:2])


def test_each_operand_s_alignment_is_its_own(kernel: Kernel) -> None:
    """The same two alignments the other way round are another call."""
    memory = torch.randn(400, dtype=BF16)
    aligned, odd, more, odder = (memory[i : i + 64].view(2, 32) for i in (0, 72 + 1, 144, 216 + 1))
    for _ in range(2):
        for gate, up in ((aligned, odd), (odd, aligned), (more, odder), (odder, more)):
            run(gate, up)
    assert len(SILU_MUL.calls.calls) == 2


def test_a_parameter_seen_without_gradients_is_differentiated_with_them(kernel: Kernel) -> None:
    gate, up = torch.nn.Parameter(torch.randn(4, 32)), torch.randn(4, 32)
    with torch.no_grad():
        run(gate, up)
        assert SILU_MUL.calls.replay(None, (gate, up), ()) is not None
    assert SILU_MUL.calls.replay(None, (gate, up), ()) is None
    assert ck.silu_mul(gate, up).requires_grad


def test_a_call_found_with_gradients_is_launched_within_the_function(
    kernel: Kernel, recalled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = torch.randn(4, 32), torch.nn.Parameter(torch.randn(32))
    monkeypatch.setattr(RMS_NORM.path, "_differentiated_on_cpu", RMS_NORM.path.differentiated)
    for eps in (1e-5, 1e-6, 1e-6):
        made = len(recalled)
        y = ck.rms_norm(x := x.clone(), weight, eps=eps)
        assert kernel.fired[-1][:3] == (y.data_ptr(), x.data_ptr(), weight.data_ptr())
        assert kernel.fired[-1][-2:] == (eps, 0.0)
        assert (len(recalled) > made) is (eps == 1e-5)
    assert type(y.grad_fn).__name__ == "rms_normBackward"
    assert entered(lambda: ck.rms_norm(x, weight)) <= 8
    with torch.no_grad():
        assert entered(lambda: ck.rms_norm(x, weight)) <= 6
    y.sum().backward()
    expected = torch.zeros_like(weight, requires_grad=True)
    torch.nn.functional.rms_norm(x, (32,), expected, 1e-6).sum().backward()
    torch.testing.assert_close(weight.grad, expected.grad)
    with pytest.raises(UnsupportedProblem, match="once"):
        torch.autograd.grad(ck.rms_norm(x, weight).square().sum(), weight, create_graph=True)[0].sum().backward()


def test_results_in_place_of_an_input_are_replayed(kernel: Kernel, recalled: list[object]) -> None:
    x, y = torch.randn(4, 32, dtype=BF16), torch.randn(4, 32, dtype=BF16)
    run(x, y, torch.empty_like(x))
    made = len(recalled)
    for _ in range(2):
        run(x, y, x)
    assert len(recalled) == made + 2  # of x in two places no guard can tell
    for _ in range(3):
        run(x, y, x.view(4, 32))
    assert len(recalled) == made + 2
    assert kernel.fired[-1][:3] == (x.data_ptr(), x.data_ptr(), y.data_ptr())


def test_absent_operands_are_part_of_a_call(
    kernel: Kernel, recalled: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight alone and a bias alone look alike to a guard."""
    x, vector = torch.randn(4, 32, dtype=BF16), torch.randn(32, dtype=BF16)
    ways = ((vector, None), (None, vector), (None, None))
    for turn in range(3):  # the calls take turns, and each keeps its guard
        for weight, bias in ways:
            made = len(recalled)
            (y,) = calls.run(LAYER_NORM, None, (x, weight, bias), scalars=(1e-5,))
            addresses = [0 if t is None else t.data_ptr() for t in (y, x, weight, bias)]
            assert kernel.fired[-1][:4] == tuple(addresses)
            assert (len(recalled) > made) is (turn == 0)


def test_a_view_that_negates_is_not_read_as_it_lies(kernel: Kernel) -> None:
    spectrum = torch.randn(4, 32, dtype=torch.complex64)
    plain, negated = spectrum.imag, spectrum.conj().imag
    for _ in range(2):
        run(plain, torch.empty(4, 32))
        with pytest.raises(UnsupportedProblem, match="resolve_neg"):
            run(negated, torch.empty(4, 32))
    run(negated.resolve_neg(), torch.empty(4, 32))


def test_an_address_of_ever_other_calls_gets_no_more_guards(kernel: Kernel) -> None:
    x, y = torch.randn(200, 32, dtype=BF16), torch.randn(200, 32, dtype=BF16)
    for rows in range(1, 100):
        run(x[:rows], y[:rows])
    assert not SILU_MUL.calls.recent
    run(x[:7], y[:7])
    assert kernel.fired[-1][3:5] == (1, 7 * 32)
    paths.forget()
    run(x, y)
    assert list(SILU_MUL.calls.recent) == [y.data_ptr()]


def test_without_torch_s_guards_calls_are_recalled_by_key(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "TensorGuards", None)
    x = torch.randn(4, 32, dtype=BF16)
    for _ in range(3):
        run(x, x.clone())
    assert not SILU_MUL.calls.recent
    assert len(SILU_MUL.calls.calls) == 1
    assert len(kernel.fired) == 3


def test_another_device_s_call_is_made_there(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext(entered.append(index)))
    x, y = torch.randn(2, 32, dtype=BF16), torch.randn(2, 32, dtype=BF16)
    run(x, y)
    run(x, y)
    assert entered == [-1]  # where the kernel was planned and loaded
    monkeypatch.setattr(paths, "_current_device", lambda: 3)
    run(x, y)
    assert entered == [-1, -1]
    assert len(kernel.fired) == 3


def test_overlaps_are_refused_on_the_warm_path_too(kernel: Kernel) -> None:
    memory = torch.randn(400, dtype=BF16)
    gate, up = memory[:64].view(2, 32), memory[64:128].view(2, 32)
    for begin, refused in ((128, False), (64, False), (0, False), (8, True), (120, True), (136, False)):
        out = memory[begin : begin + 64].view(2, 32)
        if refused:
            with pytest.raises(UnsupportedProblem, match="element upon element"):
                run(gate, up, out)
        else:
            run(gate, up, out)
    assert len(kernel.fired) == 4
    empty = torch.empty(0, 32, dtype=BF16)
    run(empty, empty, empty)


def test_a_launch_called_with_tensors_passes_what_follows_from_their_strides() -> None:
    kernel = Kernel()
    launch = Launch(kernel, (1, 1, 1), 2, lambda x, y: (x.stride(0), 0 if y is None else y.stride(0)))
    x, y = torch.randn(4, 8), torch.randn(8, 4).t()
    launch(x, y, 0.5)
    launch(x, None, 0.25)
    launch(y, x, 0.125)
    assert kernel.called == [
        (x.data_ptr(), y.data_ptr(), 8, 1, 0.5),
        (x.data_ptr(), 0, 8, 0, 0.25),
        (y.data_ptr(), x.data_ptr(), 1, 8, 0.125),
    ]
    launch.settle((x, None), 1)([1, 0], (0.5,))
    assert kernel.fired == [(1, 0, 8, 0, 0.5)]
    plain: list[Any] = []
    Launch(lambda grid, *args: plain.append(args), (1, 1, 1), 2, lambda x, y: (7,)).settle((x, y), 0)([1, 2], ())
    assert plain == [(1, 2, 7)]


def test_a_warm_call_costs_the_host_less_than_4_5_keys(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the launch itself. 2.9 on 2026-11-22, on a box where a key takes 1.1 us."""
    monkeypatch.setattr(kernel, "settle", lambda grid, numbers, others: lambda addresses, scalars: None)
    gate, up, out = (torch.randn(16, 4096, dtype=BF16) for _ in range(3))
    results, inputs, call = (out,), (gate, up), calls.run
    call(SILU_MUL, results, inputs)
    found = host_cost(partial(call, SILU_MUL, results, inputs), calls=50, chunks=100)
    assert found < 4.5


# ---- how Triton is called -------------------------------------------------------------------------------

SIGNATURE = {"x_ptr": "*fp32", "n": "i64", "BLOCK": "constexpr", "eps": "fp32", "WIDE": "constexpr"}
RECIPE = Recipe("cutekernels.kernels.triton.activations", "x", SIGNATURE, {"BLOCK": 1, "WIDE": 1}, {}, {}, 90)


def kernel_of(*compiled: Any) -> TritonKernel:
    """A kernel whose binaries are these, one for each device in the order of their first launches."""
    left = iter(compiled)
    binary = SimpleNamespace(recipe=RECIPE, compiled=lambda: next(left), spread=lambda *args: args)
    return TritonKernel(binary)  # type: ignore[arg-type]


class CudaLauncher:
    """Triton's, as far as we look into it."""

    launch_cooperative_grid = False
    launch_pdl = False
    profile_scratch_size = 0
    arg_annotations = "annotations"
    kernel_signature = b"signature"

    def __init__(self, seen: list[tuple[Any, ...]], scratch: int = 0) -> None:
        self.global_scratch_size = scratch
        self.launch = lambda *args: seen.append(("inner", *args))


class Compiled:
    """The part of Triton's CompiledKernel that the launcher uses."""

    packed_metadata = "metadata"

    def __init__(self, function: int, seen: list[tuple[Any, ...]], run: object = None) -> None:
        self.function, self.seen, self.run = function, seen, run

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *args, stream: self.seen.append(("public", *grid, stream, self.function, *args))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A stand-in for CUDA; the list's only item is the current device."""
    current = [2]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("cutekernels.torch_names.current_device", lambda: current[0])
    monkeypatch.setattr("cutekernels.torch_names.current_stream", lambda device: 7000 + device)
    return current


FLAT = ("inner", 5, 1, 1, 7002, 11, False, False, None, None, "metadata", None, None, None, 64, 9, None, 0.5, None)
PACKED = (
    *("inner", 5, 1, 1, 7002, 11, False, False, "metadata", None, None, None, None, None),
    *("annotations", b"signature", (64, 9, None, 0.5, None)),
)
PUBLIC = ("public", 5, 1, 1, 7002, 11, 64, 9, None, 0.5, None)


@pytest.mark.parametrize(
    ("version", "scratch", "expected"),
    [
        *(("3.6.0", 0, FLAT), ("3.7.1", 0, PACKED), ("3.8.0", 0, PACKED), ("3.9.0", 0, PACKED), ("3.10.0", 0, PUBLIC)),
        *(("3.6.0", 128, PUBLIC), ("3.7.1", 128, PUBLIC)),
    ],
)
def test_triton_s_own_function_is_called_where_its_form_is_known(
    cuda: list[int], monkeypatch: pytest.MonkeyPatch, version: str, scratch: int, expected: tuple[Any, ...]
) -> None:
    """Called or fired, arguments are the same, constexprs at the end included; scratch memory takes the long way."""
    from triton.backends.nvidia import driver

    if expected is PACKED and "arg_annotations" not in driver.CudaLauncher.__init__.__code__.co_names:
        pytest.skip("the installed Triton's launcher has other names, so its form is not taken for known")
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr("triton.__version__", version)
    kernel = kernel_of(Compiled(11, seen, CudaLauncher(seen, scratch)))
    kernel((5, 1, 1), 64, 9, None, 0.5)
    kernel((5, 1, 1), 64, 9, None, 0.5, None)
    kernel.settle((5, 1, 1), (9, None), 2)([64], (0.5,))
    assert seen == [expected] * 3


def test_a_settled_kernel_stays_on_its_device_and_keeps_its_binary(
    cuda: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    binaries = [Compiled(f, seen) for f in (11, 22)]
    kernel = kernel_of(*binaries)
    fire = kernel.settle((1, 1, 1), (9, None), 2)
    cuda[0] = 5
    other = kernel.settle((1, 1, 1), (9, None), 2)
    assert fire.owner is other.owner is kernel  # type: ignore[attr-defined]
    fire([64], (0.5,))
    other([64], (0.5,))
    assert [args[4:6] for args in seen] == [(7002, 11), (7005, 22)]


LOGITS, IDS = torch.randn(4, 16), torch.randint(0, 1, (4, 2), dtype=torch.int32)
HEADS, TABLE = torch.randn(1, 3, 2, 16, dtype=BF16), torch.randn(9, 8)
EQUAL = {  # a warm call, and the same with an equal value of another kind
    "renormalize": (lambda flag: ck.moe_route(LOGITS, 2, renormalize=flag), True, 1),
    "top_k": (lambda number: ck.moe_route(LOGITS, number), 2, 2.0),
    "num_experts": (lambda number: ck.moe_permute(IDS, number), 1, True),
    "interleaved": (lambda flag: ck.rope(HEADS, None, TABLE, TABLE, interleaved=flag), True, 1),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_refused_cold_is_refused_warm(name: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and guards take 1 for True."""
    function, value, equal = EQUAL[name]
    for op in (MOE_ROUTE, MOE_PERMUTE, ROPE):
        monkeypatch.setattr(op.path, "_cpu", partial(_launched, op))
    for _ in range(2):
        function(value)
    assert len(kernel.fired) + len(kernel.called) == 2
    with pytest.raises(UnsupportedProblem, match=name):
        function(equal)
    assert len(kernel.fired) + len(kernel.called) == 2


def _launched(op: Any, *args: Any) -> Any:
    n, m = len(op.inputs), len(op.inputs) + len(op.options)
    made = calls.run(op, None, args[:n], options=args[n:m], scalars=args[m:-1])
    return made[0] if len(made) == 1 else made

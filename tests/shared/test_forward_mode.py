"""Forward-mode derivatives: no op has them, and none drops them silently."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.activations.op import SILU_MUL
from cutekernels.ops.products import api as matmul
from cutekernels.ops.shared import paths
from cutekernels.ops.shared.calls import run
from tests.gpu_path import launching
from tests.host_cost import direct_anywhere
from tests.public_calls import calls

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, in forward_ad
COMPOSED = ("fold",)  # torch's own ops, which have the derivative
CASES = {
    name: [key for key, value in given.items() if isinstance(value, Tensor) and value.is_floating_point()]
    for name, (_, given) in calls().items()
    if name not in COMPOSED
}
OF_X = [name for name, arguments in CASES.items() if "x" in arguments]


@pytest.mark.parametrize("name", [name for name, arguments in CASES.items() if arguments])
def test_a_tangent_is_refused(name: str) -> None:
    function, given = calls()[name]
    for argument in CASES[name]:
        x = given[argument]
        with forward_ad.dual_level(), pytest.raises(UnsupportedProblem, match="no forward-mode derivative"):
            function(**given | {argument: forward_ad.make_dual(x, torch.ones_like(x))})


@pytest.mark.parametrize("name", OF_X)
def test_jvp_and_jacfwd_are_refused(name: str) -> None:
    function, given = calls()[name]
    rest = {key: value for key, value in given.items() if key not in ("x", "out")}

    def of(x: Tensor) -> Any:
        return function(x=x, **rest)

    with pytest.raises(UnsupportedProblem, match="no forward-mode derivative"):
        torch.func.jvp(of, (given["x"],), (given["x"],))
    with pytest.raises(UnsupportedProblem, match="no forward-mode derivative"):
        torch.func.jacfwd(of)(given["x"])


def test_fold_has_the_derivative() -> None:
    w, weight = torch.ones(3), torch.full((2, 3), 2.0)
    assert torch.equal(torch.func.jvp(lambda w: ck.fold(w, weight), (w,), (w,))[1], weight)


def test_others_pass_while_a_level_is_open() -> None:
    x = torch.randn(4, 8)
    with forward_ad.dual_level():
        assert torch.equal(ck.rms_norm(x), ck.rms_norm(x.clone()))


def test_gradients_of_gradients_are_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(4, 4), torch.ones(4, 4))
        y = ck.silu_mul(x)
        with pytest.raises(UnsupportedProblem, match="silu_mul_packed_backward has no forward-mode"):
            torch.autograd.grad(y, x, dual)


def test_repeated_calls_are_not_replayed() -> None:
    out, gate, up = torch.empty(4, 8), torch.randn(4, 8), torch.randn(4, 8)
    with launching(lambda op, problem: lambda *args: None):
        for _ in range(2):
            run(SILU_MUL, (out,), (gate, up))
        assert SILU_MUL.calls.replay((out,), (gate, up), ()) is not None
        with forward_ad.dual_level():
            assert SILU_MUL.calls.replay((out,), (gate, up), ()) is None
            assert not direct_anywhere()(gate, up)
            dual = forward_ad.make_dual(gate, torch.ones_like(gate))
            with pytest.raises(UnsupportedProblem, match="no forward-mode"):
                ck.silu_mul(dual, up, out=out)


def test_a_repeated_gemm_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paths, "_current_device", lambda: -1)
    launches: list[Any] = []
    a, b, out = torch.randn(4, 8), torch.randn(8, 8), torch.empty(4, 8)
    paths.forget()
    call = paths.Call.of(lambda *args: launches.append(args), (a, b), ())
    matmul.CALLS.add(call, ((out,), (a, b), ("none", "fp32"), (1.0, 0.0), None))
    ck.gemm(a, b, out=out)
    assert len(launches) == 2
    with forward_ad.dual_level(), pytest.raises(UnsupportedProblem, match="no forward-mode"):
        ck.gemm(forward_ad.make_dual(a, torch.ones_like(a)), b, out=out)
    assert len(launches) == 2
    paths.forget()


# ---- gradients by torch.func ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")  # vmap has no rule for the op
@pytest.mark.parametrize("name", OF_X)
def test_gradients_of_torch_func_are_those_of_autograd(name: str) -> None:
    function, given = calls()[name]
    rest = {key: value for key, value in given.items() if key not in ("x", "out")}

    def of(x: Tensor) -> Tensor:
        y = function(x=x, **rest)
        return ((y if isinstance(y, Tensor) else y[0]).float() ** 2).sum()

    x = given["x"].detach().requires_grad_()
    try:
        (wanted,) = torch.autograd.grad(of(x), x)
    except UnsupportedProblem as refused:  # an op without a backward
        with pytest.raises(UnsupportedProblem, match=str(refused)[:20]):
            torch.func.grad(of)(given["x"])
        return
    torch.testing.assert_close(torch.func.grad(of)(given["x"]), wanted)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_vmap_and_torch_func_nest() -> None:
    many, w = torch.randn(2, 3, 8), torch.randn(8, requires_grad=True)
    wanted = torch.stack([torch.autograd.grad((ck.rms_norm(x, w) ** 3).sum(), w)[0] for x in many])
    each = torch.vmap(torch.func.grad(lambda w, x: (ck.rms_norm(x, w) ** 3).sum()), (None, 0))(w.detach(), many)
    torch.testing.assert_close(each, wanted)
    whole = torch.func.grad(lambda w: (torch.vmap(lambda x: ck.rms_norm(x, w))(many) ** 3).sum())(w.detach())
    torch.testing.assert_close(whole, wanted.sum(0))
    with pytest.raises(UnsupportedProblem, match="rms_norm_backward has no gradient"):
        torch.func.jacrev(torch.func.grad(lambda w: (ck.rms_norm(many, w) ** 3).sum()))(w.detach())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_autograd_passes_around_transforms() -> None:
    x, w = (torch.randn(2, 3, 8, requires_grad=True) for _ in range(2))
    expected = torch.autograd.grad(ck.rms_norm(x).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(torch.vmap(ck.rms_norm)(x).sum(), x)[0], expected)
    beside = torch.func.grad(lambda t: (t * ck.rms_norm(x)).sum())(w.detach())
    torch.testing.assert_close(torch.autograd.grad(beside.sum(), x)[0], expected)

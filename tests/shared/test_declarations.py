"""Declarations: samples of suites, ops of torch; of Triton ops random problems. No family asks these again."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import cutekernels.ops.library  # noqa: F401  registers all
from cutekernels import gpu
from cutekernels.errors import UnsupportedProblem
from cutekernels.op import Problem
from cutekernels.ops import registry
from cutekernels.ops.norms.rows import NormOp
from cutekernels.ops.optimizer.op import ADAMW_COUNT, ADAMW_SQUARES, ADAMW_TABLE
from cutekernels.ops.shared.declared_op import DeclaredOp
from cutekernels.ops.shared.triton_op import TritonOp

OPS = [op for op in registry.OPS if isinstance(op, TritonOp)]
DECLARED = [op for op in registry.OPS if isinstance(op, DeclaredOp)]
H200 = gpu.lookup("h200")
MOST_CLASSES = 4  # Op, DeclaredOp, TritonOp or CuteOp, the op; a family's part stands beside the third
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)


def depth(kind: type) -> int:
    """Classes of the package in the longest chain of inheritance from ``kind`` up."""
    ours = kind.__module__.startswith("cutekernels.")
    return ours + max(map(depth, kind.__bases__), default=0)


@pytest.mark.parametrize("op", [*DECLARED, ADAMW_TABLE, ADAMW_SQUARES, ADAMW_COUNT], ids=lambda op: op.name)
def test_an_op_is_few_classes_deep(op: Any) -> None:
    assert depth(type(op)) <= MOST_CLASSES


def test_every_op_is_declared() -> None:
    assert list(registry.OPS) == DECLARED


def changed(problem: Any, changes: dict[str, Any]) -> Any:
    """``problem`` with those of ``changes`` that are problems, one after another."""
    for name, value in changes.items():
        try:
            problem = problem.replace(**{name: value})
        except UnsupportedProblem:
            continue
    return problem


@st.composite
def problems(draw: st.DrawFn, op: Any) -> Problem:
    """A problem of the suite with other words and sizes, of which one may be large.

    Alignment and layout change first: lengths of rows depend on them.
    """
    base = op.Problem.parse(draw(st.sampled_from(op.suite)))
    large = draw(st.sampled_from(base.extent_names()))
    names = sorted((f.name for f in fields(base)), key=lambda name: name not in ("layout", "align"))
    changes = {}
    for name in names:
        values = base.__dataclass_fields__[name].metadata.get("values")
        some = st.integers(0, 1 << 20 if name == large else 70) if values is None else st.sampled_from(values)
        if values is None or draw(st.booleans()):
            changes[name] = draw(some)
    return changed(base, changes)  # type: ignore[no-any-return]


def shrunk(op: Any, text: str, most: int = 9) -> Any:
    """A problem of the suite with extents of ``most`` or so."""
    problem = op.Problem.parse(text)
    few = changed(problem, {name: min(getattr(problem, name), most) for name in problem.extent_names()})
    return changed(few, {name: min(getattr(few, name), 128) for name in few.extent_names()})  # of packed tiles


def bits(value: Any) -> Any:
    """Bits, which equal only themselves: caches have NaN where nobody reads them."""
    return value.contiguous().view(torch.uint8).tolist() if isinstance(value, Tensor) and value.dim() else value


def parts(op: Any, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Inputs and numbers of a sample."""
    return args[: len(op.inputs)], args[len(op.inputs) :]


@every_op
@given(data=st.data(), spec=st.sampled_from(gpu.GPUS))
@settings(deadline=None, max_examples=25)
def test_the_default_of_any_problem_is_valid_and_texts_round_trip(
    op: Any, data: st.DataObject, spec: gpu.GpuSpec
) -> None:
    problem = data.draw(problems(op))
    try:
        config = op.default(problem, spec)
    except UnsupportedProblem as error:  # of norms: rows times heads that no grid holds
        assert "more tiles than a grid's" in str(error) and problem.rows * problem.heads >= 1 << 31
        return
    assert op.why_not(problem, config, spec) is None, (problem, config)
    assert op.estimate_us(problem, config, spec) > 0
    assert op.Config.parse(str(config)) == config
    assert type(problem).parse(str(problem)) == problem
    assert problem.bucket().bucket() == problem.bucket()
    x, y, z = op.grid(problem, config, *([spec.sm_count] if isinstance(op, NormOp) else []))
    assert x < 1 << 31 and max(y, z) < 1 << 16


def small(op: Any, text: str) -> Any:
    """A problem of the suite, shrunk; of a cache, one page of it."""
    problem = shrunk(op, text, 40)
    paged = "seq_kv" in problem.extent_names() and getattr(problem, "page_size", 0)
    return problem.replace(seq_kv=problem.page_size) if paged else problem


@pytest.mark.parametrize("op", DECLARED, ids=lambda op: op.name)
def test_samples_of_the_suite_pose_their_problem(op: Any) -> None:
    """Two of one seed are alike, of another are not; references have the results' shapes and types."""
    for problem in {str(each): each for each in (small(op, text) for text in op.suite)}.values():
        args = op.sample(problem, "cpu", 3)
        inputs, _ = parts(op, args)
        results = op.outputs(problem, *args)
        assert op.problem(*results, *inputs, **{name: getattr(problem, name) for name in op.options}) == problem
        for again, alike in ((op.sample(problem, "cpu", 3), True), (op.sample(problem, "cpu", 4), False)):
            same = [bits(a) == bits(b) for a, b in zip(args, again, strict=True)]
            assert all(same) is alike, problem
        looks = [(t.shape, t.dtype) for t in op.reference(problem, *args)]
        assert looks == [(t.shape, t.dtype) for t in results], problem


@pytest.mark.parametrize(
    "op",
    [op for op in DECLARED if "dtype" in {*op.Problem.__dataclass_fields__} - {*op.options}],
    ids=lambda op: op.name,
)
def test_doubles_are_for_the_cpu(op: Any) -> None:
    problem = shrunk(op, op.suite[0])
    args = op.sample(problem, "cpu", 0)
    options = {name: getattr(problem, name) for name in op.options}
    given = (*op.outputs(problem, *args), *parts(op, args)[0])
    wide = [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in given]
    with pytest.raises(UnsupportedProblem, match="on a GPU takes .*(bf16|fp32).*; got torch.float64"):
        op.problem(*wide, **options)


# ---- ops of torch ---------------------------------------------------------------------------------------

# Those that write to what is there, or have an option of a result's name, are checked in their own files.
CHECKED = [op for op in OPS if hasattr(op, "path") and op.name != "kv_append" and not {*op.results} & {*op.options}]
ONCE = ("silu_mul", "gelu_mul", "bias_gelu", "rms_norm", "add_rms_norm", "layer_norm", "moe_route", "moe_combine")
DIFFERENTIABLE = (*ONCE, "embedding", "moe_gather", "rope")


def posed(op: Any, gradient: bool = False, device: str = "cpu") -> tuple[list[Any], dict[str, Any], tuple[Any, ...]]:
    """Inputs, options and numbers; the first floating input wants a gradient."""
    problem = shrunk(op, op.suite[0])
    inputs, numbers = parts(op, op.sample(problem, device, 0))
    if gradient:
        next(t for t in inputs if t is not None and t.is_floating_point()).requires_grad_()
    return [*inputs], {name: getattr(problem, name) for name in op.options}, numbers


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("op", CHECKED, ids=lambda op: op.name)
def test_opcheck(op: Any, device: str) -> None:
    """torch's own checks of the op, and of the one that writes to given results."""
    for gradient in {False, op.name in DIFFERENTIABLE}:
        inputs, options, numbers = posed(op, gradient, device)
        rest = (*options.values(), *numbers)
        torch.library.opcheck(getattr(torch.ops.cutekernels, op.name).default, (*inputs, *rest))
        if not gradient:
            results = op.fresh(*inputs, **options)
            torch.library.opcheck(getattr(torch.ops.cutekernels, f"{op.name}_out").default, (*inputs, *results, *rest))


@pytest.mark.parametrize("name", ONCE)
def test_second_derivatives_are_refused_clearly(name: str) -> None:
    op: Any = registry.get(name)
    inputs, options, numbers = posed(op, True)
    made = op.path(*inputs, *options.values(), *numbers, None)
    leaf = next(t for t in inputs if t is not None and t.requires_grad)
    y = made if isinstance(made, Tensor) else made[0]
    (grad,) = torch.autograd.grad(y.square().sum(), leaf, create_graph=True)
    with pytest.raises(UnsupportedProblem, match="differentiable once"):
        grad.sum().backward()

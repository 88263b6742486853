"""Modules of a model that no row of ``families.py`` names, known by what they are made of.

A norm is a vector and an epsilon, an MLP two or three projections and an activation, a rotary embedding the function of
an attention layer that turns queries and keys. What is found so is a guess. It stays only where our kernels give the
module's own results: on a copy with random weights in fp32, gradients too, in training and out of it, and in bf16;
then, on the module itself, in its own type.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from cutekernels.integrations.transformers import checkpoints, experts, modules, projections, turns
from cutekernels.integrations.transformers.families import ACTIVATIONS, Family, activation_of, gate_of
from cutekernels.nn.mlp import Gate, has_no_hooks

Guess = tuple[type, Family]  # a class of modules.py, and the conventions that it reads
_QUANTIZED = (
    "its weights are quantized, which patch reads in models of its families alone: put cutekernels.nn.QuantizedLinear "
    "there"
)
_GATES: tuple[Gate, ...] = ("silu", "gelu", "gelu_tanh")
_FP32 = 64 * 2.0**-23
_TOKENS = 6
_TURNS = "inv_freq"  # the buffer of a rotary embedding, behind the type of layers that it is for
_EXPERTS = 8
UNKNOWN = Family("", "", windowed=None)


@dataclass
class Found:
    """Modules of a model that are replaced: ``(role, module, guess)``, and ``(path, reason)`` of what is left."""

    replaced: list[tuple[str, Any, Guess]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)


def drawing_nothing(call: Any) -> Any:
    """``call`` with gradients, which draws nothing from the caller's generator."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            return call(*args, **kwargs)

    return wrapped


@drawing_nothing
def find(model: torch.nn.Module, apart: set[int]) -> Found:
    """The modules whose results our kernels give, each compared. ``apart``: ``id`` of those not asked for."""
    found, known = Found(), dict[object, Guess | str]()
    tables = _tables(model)
    places = Counter(id(child) for parent in model.modules() for child in parent._modules.values() if child is not None)
    for path, module in model.named_modules():
        if id(module) in apart:
            continue
        role, guesses = _guesses(module, tables)
        if not role:
            if checkpoints.is_quantized(module) and hasattr(module, "in_features"):
                found.left.append((path, _QUANTIZED))
            elif any(True for _ in module.parameters(recurse=False)):
                found.left.append((path, "no kernel is known by its structure"))
            continue
        reason = _why_not(role, module, places[id(module)])
        if not reason and isinstance(guesses, str):
            reason = guesses
        if reason:
            found.left.append((path, reason))
            continue
        kind = type(module) if role == "rotary" else _kind(module)
        if kind not in known:
            known[kind] = _chosen(role, module, list(guesses), tables)
        chosen = known[kind]
        reason = chosen if isinstance(chosen, str) else _differs(role, module, chosen)
        if reason or isinstance(chosen, str):
            found.left.append((path, reason))
        else:
            found.replaced.append((role, module, chosen))
    return found


def _why_not(role: str, module: Any, places: int) -> str:
    """Why a module is not even compared, or ""."""
    own = list(module.named_parameters())
    if "forward" in module.__dict__:
        return "its forward has been replaced (by device_map's hooks, say)"
    if any(not has_no_hooks(part) for part in module.modules()):
        return "it has hooks, or a part of it has"
    if places > 1:
        return "it stands in several places of the model"
    if role == "rotary":
        return ""
    if any(map(projections.sharded, module.modules())) or any(type(p) is not torch.nn.Parameter for _, p in own):
        return "its weights are no plain parameters (quantized or sharded)"
    if any(p.is_meta for _, p in own):
        return "its weights are on the meta device, where nothing can be compared"
    if any(map(checkpoints.is_quantized, module.modules())) or any(not p.is_floating_point() for _, p in own):
        return _QUANTIZED
    if any(not projections.multiplied(p, p) for _, p in own if p.dim() > 1):
        return f"on a GPU kernels multiply fp16 and bf16, and its weights are {own[0][1].dtype}"
    return ""


_PLAIN = (bool, int, float, str, tuple, list, dict, torch.dtype, type(None))


def _kind(module: Any) -> object:
    """The key of modules that one comparison serves: classes, shapes, and all options."""
    parts = []
    for name, part in module.named_modules():
        options = {k: repr(v) for k, v in part.__dict__.items() if isinstance(v, _PLAIN) and k[:1] != "_"}
        shapes = [(k, tuple(p.shape), p.dtype) for k, p in part.named_parameters(recurse=False)]
        parts.append((name, type(part), tuple(sorted(options.items())), tuple(shapes)))
    return tuple(parts)


# ---- guesses --------------------------------------------------------------------------------------------


def _guesses(module: Any, tables: _Tables | None) -> tuple[str, Any]:
    """A module's role and what may compute it, or why nothing does; ``("", ())`` for one of no known structure."""
    if type(module) is torch.nn.Linear:
        return "linear", [(modules.Linear, UNKNOWN)]
    if turns.TURN in _names(module) and turns.TURN in inspect.unwrap(type(module).forward).__globals__:
        if not turns.within_reach(type(module).forward):
            return "rotary", "its forward is wrapped by code that keeps it out of reach"
        if tables is None:
            return "rotary", "the model has no rotary embedding whose cosines have a known form"
        return "rotary", [(modules.Turned, Family("", "", table=tables.form, interleaved=x)) for x in (False, True)]  # type: ignore[arg-type]
    stacked = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    if all(p is not None and p.dim() == 3 for p in stacked):
        left = experts.why_not_experts(module)
        return "experts", left or [(experts.Experts, UNKNOWN)]
    if not _takes_one(module):
        return "", ()
    children = dict(module.named_children())
    parameters = dict(module.named_parameters(recurse=False))
    if not children and parameters.keys() in ({"weight"}, {"weight", "bias"}) and _epsilon(module) is not None:
        if module.weight.dim() == 1 and not module._buffers:
            return "norm", list(_norms(parameters))
        return "", ()
    linears = {name: child for name, child in children.items() if type(child) is torch.nn.Linear}
    act = activation_of(module) if any(hasattr(module, name) for name in ACTIVATIONS) else None
    if len(linears) not in (2, 3) or parameters or any(c is not act for n, c in children.items() if n not in linears):
        return "", ()
    if act is not None and gate_of(act) is None:
        return "mlp", f"no kernel has the gate of {type(act).__name__}"
    return "mlp", list(_mlps(linears, None if act is None else gate_of(act)))


def _names(module: Any) -> tuple[str, ...]:
    """Names in the code of a module's forward."""
    return getattr(getattr(inspect.unwrap(type(module).forward), "__code__", None), "co_names", ())


def _takes_one(module: Any) -> bool:
    """Whether a module's forward has one argument."""
    taken = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(taken) == 1 and taken[0].kind in (taken[0].POSITIONAL_ONLY, taken[0].POSITIONAL_OR_KEYWORD)


def _epsilon(module: Any) -> float | None:
    own = getattr(module, "variance_epsilon", None)
    own = getattr(module, "eps", None) if own is None else own
    return own if isinstance(own, float) else None


def _norms(parameters: dict[str, Any]) -> Iterator[Guess]:
    yield modules.LayerNorm, Family("", "", layer_norm=True)
    if "bias" not in parameters:
        for offset in (0.0, 1.0):
            for rounding in ("huggingface", "once"):
                yield modules.Norm, Family("", "", weight_offset=offset, rounding=rounding)


def _mlps(linears: dict[str, Any], gate: Gate | None) -> Iterator[Guess]:
    """Each order of projections that fit behind one another. ``gate``: None where code alone has it."""
    for names in permutations(linears):
        *first, last = (linears[name] for name in names)
        if any(x.in_features != first[0].in_features or x.out_features != first[0].out_features for x in first):
            continue
        for own in _GATES if gate is None else (None,):
            if len(first) == 2 and last.in_features == first[1].out_features:
                yield modules.PackedMlp, Family("", "", mlp=names, gate=own)
            elif len(first) == 1 and last.in_features == first[0].out_features // 2:
                yield modules.Mlp, Family("", "", mlp=names, gate=own, joined_mlp=True)
            elif len(first) == 1 and last.in_features == first[0].out_features:
                yield modules.PlainMlp, Family("", "", mlp=names, gate=own, gated=False)


# ---- rotary embeddings ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tables:
    """Cosines and sines ``(1, S, R)`` of a model, and how a row of them is made up, as ``Family.table`` says it."""

    form: str
    cos: Tensor
    sin: Tensor


def _tables(model: torch.nn.Module) -> _Tables | None:
    """Those of a model's rotary embedding, or None where there is none, or several that are not alike."""
    found: list[_Tables] = []
    kinds = [
        (m, name) for m in model.modules() for name in m._buffers if name.endswith(_TURNS) and "original" not in name
    ]
    for module, name in kinds:
        turns, kind = module._buffers[name], name.removesuffix(_TURNS).removesuffix("_")
        if turns is None or turns.is_meta or not has_no_hooks(module):
            continue
        ids = torch.arange(3, 3 + _TOKENS, device=turns.device)[None]
        given = (torch.zeros((), device=turns.device), ids, *([kind] if kind else []))  # of a type of layers
        made = attempt(module, *given)
        if (
            not isinstance(made, tuple)
            or len(made) != 2
            or not all(isinstance(t, Tensor) and t.dim() == 3 for t in made)
        ):
            return None
        cos, sin = (t.detach().float() for t in made)
        forms = {
            "once": cos.shape[-1] == len(turns),
            "halves": all(torch.equal(t[..., : t.shape[-1] // 2], t[..., t.shape[-1] // 2 :]) for t in (cos, sin)),
            "twice": all(torch.equal(t[..., ::2], t[..., 1::2]) for t in (cos, sin)),
        }
        if sum(forms.values()) != 1:
            return None
        found.append(_Tables(next(form for form, so in forms.items() if so), cos, sin))
    return found[0] if len({t.form for t in found}) == 1 else None


# ---- comparisons ----------------------------------------------------------------------------------------


def attempt(call: Callable[..., Any], *given: Any) -> Any:
    """The result of a foreign forward, or its failure."""
    try:
        return call(*given)
    except Exception as error:  # noqa: BLE001  of code that nobody here knows: the module is left with these words
        return error


def _chosen(role: str, module: Any, guesses: list[Guess], tables: _Tables | None) -> Guess | str:
    """The guess whose results are the module's own; or by how much the best one differs."""
    if role == "linear":
        return guesses[0]
    if role == "rotary":
        distances = [_turned_distance(module, guess[1], tables) for guess in guesses]
        best = min(range(len(guesses)), key=lambda i: distances[i])
        return guesses[best] if distances[best] <= 1 else difference(distances[best] * _FP32)
    twin = attempt(lambda: copy.deepcopy(_fewer(module) if role == "experts" else module).to("cpu", torch.float32))
    if isinstance(twin, Exception):
        return f"no copy of it can be compared ({type(twin).__name__})"
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in twin.parameters():
            drawn = torch.randn(p.shape, generator=generator)
            p.copy_(drawn * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.5 + drawn.abs() / 2)
            p.requires_grad_(True)
    half = copy.deepcopy(twin).to(torch.bfloat16).eval()
    closest, found = float("inf"), list[tuple[float, int]]()
    for i, guess in enumerate(guesses):
        wide = max(_distance(role, twin.train(mode), guess, gradients=True) for mode in (False, True))
        closest = min(closest, wide)
        if wide <= _FP32 and (near := _distance(role, half, guess)) <= tolerance(torch.bfloat16):
            found.append((near, i))  # conventions of rounding differ there
    return guesses[min(found)[1]] if found else difference(closest)


def _fewer(module: Any) -> Any:
    """A module of experts with the first of them."""
    few = copy.copy(module)
    few._parameters = {n: torch.nn.Parameter(p.detach()[:_EXPERTS]) for n, p in module._parameters.items()}
    if hasattr(few, "num_experts"):
        few.num_experts = len(few.down_proj)
    return few


def _differs(role: str, module: Any, guess: Guess) -> str:
    """Why a module's own results are not those of ``guess`` in its own type, or ""."""
    if role == "rotary":
        return ""
    dtype = next(p.dtype for p in module.parameters())
    with torch.no_grad():
        distance = _distance(role, module, guess)
    return "" if distance <= tolerance(dtype) else difference(distance)


def tolerance(dtype: torch.dtype) -> float:
    return max(_FP32, 16 * torch.finfo(dtype).eps)


def difference(distance: float) -> str:
    if distance == float("inf"):
        return "no kernel gives results of its kind"
    return f"its results differ from any kernel's, in training or out of it, by {distance:.1e} of the largest at best"


def _distance(role: str, module: Any, guess: Guess, gradients: bool = False) -> float:
    """The largest difference between a module's results and a guess's, of the largest result; inf for another kind."""
    original: Any = type(module)
    ours = copy.copy(module)
    ours.__class__ = modules.swapped(guess[0], original, guess[1])
    ours._modules = {name: _patched_linear(child) for name, child in module._modules.items()}
    wanted = [p for p in module.parameters() if gradients]
    compared: list[float] = []
    for given in _inputs(role, module, guess[1]):
        results = [attempt(_results, m, given, wanted) for m in (module, ours)]
        theirs, mine = results
        if isinstance(theirs, Exception):
            continue  # rows of this shape are not for it
        if isinstance(mine, Exception) or len(mine) != len(theirs):
            return float("inf")
        compared += map(relative, mine, theirs)
    return max(compared, default=float("inf"))


def _patched_linear(module: Any) -> Any:
    """A part of a module as it will be beside the guess, which may not compute with projections as they were."""
    if type(module) is not torch.nn.Linear:
        return module
    made = copy.copy(module)
    made.__class__ = modules.swapped(modules.Linear, torch.nn.Linear, UNKNOWN)
    return made


def _results(module: Any, given: list[Tensor], wanted: list[Any]) -> list[Any]:
    """A module's result, and where gradients of ``wanted`` count, those and the inputs' along a fixed direction."""
    given = [x.clone().requires_grad_(bool(wanted) and x.is_floating_point()) for x in given]
    out = module(*given)
    if not wanted or not isinstance(out, Tensor) or not out.requires_grad:
        return [out]
    along = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    tracked = [x for x in given if x.requires_grad]
    return [out, *torch.autograd.grad(out, [*tracked, *wanted], along, allow_unused=True)]


def relative(ours: Any, theirs: Any) -> float:
    if ours is None and theirs is None:
        return 0.0  # gradients of what is not used
    if not isinstance(ours, Tensor) or not isinstance(theirs, Tensor):
        return float("inf")
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    size = float(theirs.detach().abs().max())
    worst = float((ours.detach().double() - theirs.detach().double()).abs().max())
    return worst / size if size > 0 else (0.0 if worst == 0 else float("inf"))


def _inputs(role: str, module: Any, family: Family) -> list[list[Tensor]]:
    """Rows of several sizes: small ones let a norm's epsilon count, shifted ones its mean, large ones a clamp."""
    first = module.gate_up_proj if role == "experts" else next(module.parameters())
    width = getattr(module, family.mlp[0]).in_features if role == "mlp" else first.shape[-1]
    generator = torch.Generator().manual_seed(1)
    if role == "experts":  # two of them a token, as routers choose
        scores = torch.rand(_TOKENS, len(first), generator=generator).topk(min(2, len(first)))
        width = first.shape[1] if getattr(module, "is_transposed", False) else width
        x = torch.randn(_TOKENS, width, generator=generator)
        to = {"device": first.device, "dtype": first.dtype}
        return [[(x * size).to(**to), scores.indices.to(first.device), scores.values.to(**to)] for size in (1.0, 1e3)]
    shapes = [(2, _TOKENS, width), (_TOKENS, width), *([(2, 3, 4, width)] if role == "norm" else [])]
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    if role == "norm":
        drawn += [drawn[0] * 1e-3, drawn[0] * 100.0, drawn[0] + 2.0]
    elif role == "mlp" and first.dtype != torch.float16:
        drawn += [drawn[0] * 1e3]  # where a gate is clamped
    return [[x.to(first.device, first.dtype)] for x in drawn]


def _turned_distance(module: Any, family: Family, tables: _Tables | None) -> float:
    """As :func:`_distance`, of the function that turns queries and keys, in units of the tolerance."""
    assert tables is not None
    own = inspect.unwrap(type(module).forward).__globals__[turns.TURN]
    ours, compared = turns.turning(own, family), list[float]()
    turned = tables.cos.shape[-1] * (2 if tables.form == "once" else 1)
    generator = torch.Generator().manual_seed(1)
    for width in (turned, 2 * turned):  # where only a part of each head turns, the function may see all of it
        for dtype in (torch.float32, torch.bfloat16):
            q, k = (torch.randn((2, heads, _TOKENS, width), generator=generator).to(dtype) for heads in (4, 2))
            cos, sin = (t.cpu().to(dtype) for t in (tables.cos, tables.sin))
            theirs, mine = (attempt(f, q, k, cos, sin) for f in (own, ours))
            if isinstance(theirs, Exception):
                continue
            if not isinstance(theirs, tuple) or not isinstance(mine, tuple) or len(theirs) != 2:
                return float("inf")
            compared += [relative(a, b) / tolerance(dtype) for a, b in zip(mine, theirs, strict=True)]
    return max(compared, default=float("inf"))

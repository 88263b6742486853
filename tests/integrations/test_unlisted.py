"""``ck.patch(model)``: what structure tells is right, and what differs is left alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cutekernels as ck
from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers import attention, families, modules
from tests import every_model
from tests.integrations import tiny
from tests.integrations.test_registered import made
from tests.integrations.test_transformers import close, snapshot
from tests.integrations.tiny import tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
OWN: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256}
ALL = {"norm", "mlp", "rotary", "linear", "attention", "causal"}
ROW = {"norm", "linear", "attention", "layer", "causal"}
# What is found, and reasons among those to leave the rest.
FOUND: dict[str, tuple[set[str], list[str]]] = {
    # Neighbours that turn and norms rounded once; layer norms and a part of each head; norms of queries and keys.
    "helium": (ALL, []),
    "stablelm": (ALL, []),
    "hunyuan_v1_dense": (ALL, []),
    # A norm's weight behind one, another gate; dropout in code; a rotary embedding for each type of layers.
    "nemotron": (ALL - {"norm", "mlp"}, ["differ from any kernel's", "the gate of ReLUSquared"]),
    "seed_oss": (ALL - {"mlp"}, ["in training or out of it"]),
    "olmo3": (ALL, []),
    # Experts behind a sigmoid router, whose result an MLP is changed in place by; latent keys and values; attention
    # that is not dispatched.
    "dots1": (ALL | {"experts"}, []),
    "llama4_text": (ALL - {"rotary"}, []),
    "deepseek_v3": (ALL - {"attention"} | {"experts"}, ["k and v must have one shape"]),
    "bloom": ({"norm", "linear", "causal"}, ["does not dispatch it by name"]),
    # Families with a row: an output gate and the delta rule, with and without experts; a sigmoid router; biases and
    # clamped gates; heads that are too wide in some layers alone.
    "qwen3_5_text": (ROW | {"mlp", "gated_norm"}, ["gated delta rule"]),
    "qwen3_5_moe_text": (ROW | {"mlp", "gated_norm", "experts"}, ["gated delta rule"]),
    "qwen3_next": (ROW | {"mlp", "gated_norm", "experts"}, ["gated delta rule"]),
    "glm4_moe": (ROW | {"mlp", "experts"}, []),
    "gpt_oss": (ROW | {"experts"}, []),
    "gemma4_text": (ROW - {"layer"} | {"mlp"}, ["it is 512"]),
}


@pytest.mark.parametrize("kind", FOUND)
def test_models_that_no_row_names(kind: str) -> None:
    """Logits, padded ones, loss, gradients and tokens are the model's own."""
    verdict, report = every_model.tried(kind)
    assert verdict == "right"
    roles, left = FOUND[kind]
    assert report.patched.keys() == roles, str(report)
    assert all(any(rule in reason for _, reason in report.left) for rule in left), str(report)


def test_a_model_found_by_structure_comes_back_as_it_was() -> None:
    model, ids = made("Helium", **OWN).train(), tokens()
    model.model.layers[1].eval()
    before, modes, drawn = snapshot(model), [m.training for m in model.modules()], torch.get_rng_state()
    with torch.no_grad():
        expected = model(ids).logits
        with ck.patch(model) as report:
            assert torch.equal(torch.get_rng_state(), drawn) and [m.training for m in model.modules()] == modes
            assert {path for path, _ in report.left} == {"model.embed_tokens"}
            assert model.config._attn_implementation == "cutekernels" and report.fused == {"mlp": 2}
            close(pickle.loads(pickle.dumps(model))(ids).logits, expected)
            close(torch.compile(copy.deepcopy(model), backend="eager")(ids).logits, expected)
    after = snapshot(model)
    assert after["classes"] == before["classes"] and after["attributes"] == before["attributes"]
    assert after["attention"] == before["attention"]


def test_rounding_is_the_modules_own() -> None:
    """In bf16 the two ways to round a norm differ in their last bit."""
    for name in ("Helium", "HunYuanDenseV1"):
        model = made(name, **OWN).to(torch.bfloat16)
        norm, x = model.model.norm, torch.randn(64, 64).to(torch.bfloat16)
        expected = norm(x)
        with ck.patch(model):
            assert isinstance(norm, modules.Norm) and torch.equal(norm(x), expected)


def test_a_wrong_kernel_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(place: Any, name: str) -> None:
        call = getattr(place, name)
        monkeypatch.setattr(place, name, lambda *a, **k: call(*a, **k) * 1.001)

    model, ids = made("Helium", **OWN), tokens()
    expected = model(ids).logits
    spoil(modules, "linear_cross_entropy")
    with ck.patch(model) as report:
        assert "the loss" in dict(report.left) and report.patched["attention"] == 2
    for name in ("rms_norm", "gate_mul", "project"):
        spoil(modules, name)
    spoil(attention, "attention")
    turn = families.rope
    monkeypatch.setattr(families, "rope", lambda q, k, *rest, **options: turn(-q, k, *rest, **options))
    report = ck.patch(model)
    assert not report.patched and len(report.left) == 5 + 2 + 2 + 15 + 3
    assert torch.equal(model(ids).logits, expected)


# ---- single modules -------------------------------------------------------------------------------------


class Rms(nn.Module):
    """A plain norm; what differs from it is below."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-5

    def normed(self, x: Tensor) -> Tensor:
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x).to(x.dtype)


class OnePlus(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return ((1 + self.weight.float()) * self.normed(x)).to(x.dtype)


class Wide(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.float() * self.normed(x)


class Detached(Rms):
    def normed(self, x: Tensor) -> Tensor:
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).detach()


class OtherEpsilon(Rms):
    def normed(self, x: Tensor) -> Tensor:
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)


class AcrossTokens(Rms):
    """A norm like a plain one on two dimensions, on four not."""

    def normed(self, x: Tensor) -> Tensor:
        axes = (-1, -2) if x.dim() == 4 else (-1,)
        return x.float() * torch.rsqrt(x.float().square().mean(axes, keepdim=True) + self.eps)


class Swiglu(nn.Module):
    """Llama's own names, and the gate in code alone."""

    def __init__(self, bias: bool = False, wide: int = 48) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*s, bias=bias) for s in ((32, wide), (wide, 32), (32, wide)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class QuickGelu(Swiglu):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(1.702 * gate) * self.w3(x))  # type: ignore[no-any-return]


class Turning(nn.Module):
    """Its rotary embedding is a method, no function of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def apply_rotary_pos_emb(self, x: Tensor) -> Tensor:
        return x * self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_rotary_pos_emb(x)


class Plain(nn.Module):
    """Without a gate, and the activation in code alone."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.acts = nn.Linear(32, 48), nn.Linear(48, 32), act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.acts(self.up(x)))  # type: ignore[no-any-return]


class Clamped(Swiglu):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x).clamp(max=30.0)) * self.w3(x))  # type: ignore[no-any-return]


class Scaled(Swiglu):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x)) + x  # type: ignore[no-any-return]


class UpFirst(Swiglu):
    """The gate is the second projection."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w1(x) * F.gelu(self.w3(x), approximate="tanh"))  # type: ignore[no-any-return]


class Dropping(Swiglu):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize(
    ("make", "role"),
    [
        (Rms, "norm"), (OnePlus, "norm"), (lambda: nn.RMSNorm(32, 1e-5), "norm"), (lambda: nn.LayerNorm(32), "norm"),
        (lambda: nn.LayerNorm(32, bias=False), "norm"), (Swiglu, "mlp"), (lambda: Swiglu(True), "mlp"),
        (lambda: Swiglu(wide=32), "mlp"), (UpFirst, "mlp"), (lambda: Plain(F.gelu), "mlp"),
        (lambda: Plain(lambda x: x * torch.sigmoid(1.702 * x)), ""), (lambda: Plain(lambda x: x), ""),
        (Wide, ""), (Detached, ""), (OtherEpsilon, ""),
        (AcrossTokens, ""), (QuickGelu, ""), (Clamped, ""), (Scaled, ""), (Dropping, ""),
        (Turning, ""),
    ],
    ids=lambda x: getattr(x, "__name__", x) or "left",
)  # fmt: skip
def test_a_module_is_replaced_only_where_it_computes_the_same(make: Callable[[], nn.Module], role: str) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(make()).eval()
    x = torch.randn(3, 7, 32)
    expected = model(x)
    with ck.patch(model) as report:
        assert bool(role) == isinstance(model[0], modules.Patched)
        assert not role or report.patched[role] == 1
        assert any(path == "0" for path, _ in report.left) != bool(role)
        close(model(x), expected)


class Listed(Swiglu):
    """Another activation, by an option that is no number."""

    def __init__(self, acts: list[str]) -> None:
        super().__init__()
        self.acts = acts

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(getattr(F, self.acts[0])(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


def test_modules_of_one_class_with_other_options_are_compared_anew() -> None:
    model = nn.Sequential(Listed(["silu"]), Listed(["relu"]), Listed(["gelu"])).eval().half()
    x = torch.randn(2, 3, 32).half()
    expected = model(x)
    with ck.patch(model):
        assert [isinstance(one, modules.Patched) for one in model] == [True, False, True]
        assert [one.family.gate for one in model if isinstance(one, modules.Patched)] == ["silu", "gelu"]
        torch.testing.assert_close(model(x), expected, atol=2**-9, rtol=2**-8)


def hooked(model: Any) -> None:
    model.a.w1.register_forward_hook(lambda *_: None)


def replaced(model: Any) -> None:
    model.a.forward = lambda x: -x


def shared(model: Any) -> None:
    model.b = model.a


def quantized(model: Any) -> None:
    for linear in (model.a.w1, model.a.w2, model.a.w3):
        linear.weight = nn.Parameter(torch.ones(linear.weight.shape, dtype=torch.int8), requires_grad=False)


def sharded(model: Any) -> None:
    model.a.w1._is_fsdp_managed_module = True


class Packed(nn.Parameter):
    """A quantizer's tensor."""


def subclassed(model: Any) -> None:
    model.a.w1.weight = Packed(model.a.w1.weight.detach())


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (hooked, "hooks"), (replaced, "forward has been replaced"), (shared, "several places"),
        (quantized, "quantized"), (sharded, "sharded"), (subclassed, "no plain parameters"),
        (lambda model: model.to("meta"), "meta device"),
    ],
    ids=["hooks", "forward", "shared", "quantized", "sharded", "subclass", "meta"],
)  # fmt: skip
def test_what_cannot_be_compared_is_left(change: Callable[[Any], Any], rule: str) -> None:
    model = nn.Module()
    model.a, model.n = Swiglu(), Rms()
    change(model.eval())
    report = ck.patch(model)
    assert any(path == "a" and rule in reason for path, reason in report.left), report
    assert not isinstance(model.a, modules.Patched)
    assert (rule == "meta device") != isinstance(model.n, modules.Norm)


def test_other_calls_are_refused() -> None:
    for wrong in (None, 1, "llama"):
        with pytest.raises(UnsupportedProblem, match=r"patch takes a torch\.nn\.Module"):
            ck.patch(wrong)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedProblem, match="unlisted as a bool"):
        ck.patch(nn.Linear(2, 2), unlisted=1)  # type: ignore[arg-type]
    model = nn.Sequential(Rms())
    with pytest.raises(UnsupportedProblem, match=r"this is a Sequential: leave unlisted=False away"):
        ck.patch(model, unlisted=False)
    ck.patch(model, unlisted=True)
    with pytest.raises(UnsupportedProblem, match="patched already"):
        ck.patch(model)
    copied = copy.deepcopy(model)
    ck.unpatch(model)
    assert type(model[0]) is Rms and isinstance(copied[0], modules.Norm)


@pytest.mark.parametrize("unlisted", [True, False])
def test_a_listed_model_is_patched_by_its_row(unlisted: bool) -> None:
    report = ck.patch(tiny.model("llama").train(), unlisted=unlisted)
    assert report.patched["attention"] == 2 and not report.left


def test_parts_of_a_family_are_patched_by_their_row() -> None:
    """In a wrapper, whose other modules are found by structure."""
    model = nn.ModuleDict({"one": tiny.model("llama"), "other": Rms(), "two": tiny.model("qwen3")}).eval()
    ids = tokens()
    expected = [model[name](ids).logits for name in ("one", "two")]
    with ck.patch(model) as report:
        assert report.patched == {
            "causal": 2, "layer": 4, "attention": 4, "linear": 30, "mlp": 4, "norm": 15,
        } and report.fused == {"attention": 4, "mlp": 4} and not report.left  # fmt: skip
        for name, logits in zip(("one", "two"), expected, strict=True):
            close(model[name](ids).logits, logits)
    assert not any(isinstance(m, modules.Patched) for m in model.modules())

"""Quantized projections that transformers has loaded, patched on a GPU: results, gradients, memory, compiled graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cutekernels as ck
from cutekernels.integrations.transformers.checkpoints import quantized_weight
from tests.integrations import tiny
from tests.integrations.test_quantized_models import LAYOUTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("one_seed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),  # where the tests' twins are fp32
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),  # torch's, where it imports its compiler
]
WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_key_value_heads": 4}
SCALES = ("weight_scale_inv", "weight_scale", "scales", "absmax")


def pair(name: str) -> tuple[Any, Any]:
    """A bf16 model on the GPU whose projections have the layout ``name``, and its fp32 twin with decoded weights."""
    torch.manual_seed(3)
    model = tiny.model("llama", torch.float32, **WIDE)
    twin = tiny.model("llama", torch.float32, **WIDE)
    for path, linear in list(twin.named_modules()):
        if type(linear) is torch.nn.Linear and path != "lm_head":
            made, linear.weight.data = LAYOUTS[name](*linear.weight.shape)
            model.set_submodule(path, made)
    for part in model.modules():  # scales keep their types, as checkpoints have them
        for key, t in [*part._parameters.items(), *part._buffers.items()]:
            if t is not None and not key.startswith(SCALES):
                t.data = t.data.to("cuda", torch.bfloat16 if t.dtype == torch.float32 else t.dtype)
            elif t is not None:
                t.data = t.data.cuda()
        state = getattr(getattr(part, "weight", None), "quant_state", None)
        if state is not None:  # bitsandbytes keeps it beside its parameter
            moved = {key: t.cuda() for key, t in state.as_dict(packed=True).items()}
            part.weight.quant_state = SimpleNamespace(as_dict=lambda packed, moved=moved: moved)
    model.config.dtype = torch.bfloat16
    shapes = {key: t.shape for key, t in twin.state_dict().items()}
    same = {key: t.float() for key, t in model.state_dict().items() if shapes.get(key) == t.shape}
    twin.load_state_dict(same, strict=False)
    for path, linear in twin.named_modules():
        if type(linear) is torch.nn.Linear and path != "lm_head":
            linear.weight.data = quantized_weight(model.get_submodule(path), torch.float32).dequantize()  # type: ignore[union-attr]
    return model, twin.cuda()


def off(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("length", [1, 50, 200])
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_further_from_fp32_than_decoded_weights(name: str, length: int) -> None:
    model, twin = pair(name)
    ids = tiny.tokens(2, length).cuda()
    exact = twin(ids).logits
    plain = off(twin.bfloat16()(ids).logits, exact)
    state = {key: t.clone() for key, t in model.state_dict().items()}
    with ck.patch(model) as report:
        found = off(model(ids).logits, exact)
        assert report.patched["quantized"] == 14
        assert found <= 1.25 * plain, (found, plain)
    after = model.state_dict()
    assert all(torch.equal(after[key], t) and after[key].dtype == t.dtype for key, t in state.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_and_graphs(name: str) -> None:
    """Gradients of the embeddings, which pass through every projection, and logits of a compiled model."""
    model, twin = pair(name)
    ids = tiny.tokens(2, 50).cuda()
    twin(ids, labels=ids).loss.backward()
    exact = twin.model.embed_tokens.weight.grad.clone()
    logits = twin(ids).logits.detach()
    twin.bfloat16().zero_grad()
    twin(ids, labels=ids).loss.backward()
    plain, rounded = off(twin.model.embed_tokens.weight.grad, exact), off(twin(ids).logits, logits)
    with ck.patch(model):
        model(ids, labels=ids).loss.backward()
        assert off(model.model.embed_tokens.weight.grad, exact) <= 1.25 * plain
        compiled = torch.compile(model, fullgraph=True)
        with torch.no_grad():
            assert off(compiled(ids, use_cache=False).logits, logits) <= 1.25 * rounded


@pytest.mark.parametrize("name", LAYOUTS)
def test_memory(name: str) -> None:
    """A projection of 2048 x 2048 patched, called with and without a gradient, and unpatched: no second copy stays.

    The first projection brings what calls keep for good: workspaces of ours and of cuBLAS. The second one is measured.
    """
    grown_by(name)
    size, x_bytes, patched, after = grown_by(name)
    assert patched <= 0.25 * size + 3 * x_bytes, (patched, size)
    assert after <= 0.03 * size + 3 * x_bytes, (after, size)


def grown_by(name: str) -> tuple[int, int, int, int]:
    """Bytes of a packed weight and of its input, and by how many memory grows while patched and behind that."""
    model, _ = pair(name)
    projection, _ = LAYOUTS[name](2048, 2048)
    projection.cuda()
    model.model.layers[0].mlp.up_proj = projection
    packed = quantized_weight(projection)
    assert packed is not None
    size = sum(t.nbytes for t in (packed.packed, packed.scales, packed.zeros) if t is not None)
    x = torch.randn(48, 2048, device="cuda", dtype=torch.bfloat16)
    exact = x.double() @ packed.dequantize(torch.float32).double().t()
    del packed
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with ck.patch(model):
        assert off(projection(x), exact) < 5e-3
        given = x.clone().requires_grad_()
        projection(given).sum().backward()
        del given
        torch.cuda.synchronize()
        patched = torch.cuda.memory_allocated() - before
    torch.cuda.synchronize()
    return size, x.nbytes, patched, torch.cuda.memory_allocated() - before


def test_fp32_activations_are_multiplied_by_the_decoded_weight() -> None:
    """Activations of fp32 in a bf16 model: no kernel takes them, and nothing is rounded to bf16."""
    model, _ = pair("gptq")
    with ck.patch(model):
        projection = model.model.layers[0].mlp.up_proj
        x = torch.randn(3, 256, device="cuda")
        exact = x.double() @ projection.packed.dequantize(torch.float32).double().t()
        found = projection(x)
        assert found.dtype == torch.float32 and off(found, exact) < 1e-3

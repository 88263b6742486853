"""``compare``: how far a model's results are from fp32, patched and plain."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.integrations.transformers.patching import is_patched, patch, unpatch


@dataclass(frozen=True)
class Comparison:
    """Root-mean-square errors against fp32, relative to the fp32 result's own root mean square.

    Attributes:
        plain: of the model as transformers runs it, for ``"logits"``, and for each decoder layer where asked.
        patched: the same of the patched model.
        greedy: share of positions whose most likely token is the fp32 model's: plain, patched.
    """

    plain: dict[str, float]
    patched: dict[str, float]
    greedy: tuple[float, float]

    def __str__(self) -> str:
        rows = [f"{name:<24} {self.plain[name]:>10.2e} {self.patched[name]:>10.2e}" for name in self.plain]
        head = f"{'error against fp32':<24} {'plain':>10} {'patched':>10}"
        return "\n".join(
            [head, *rows, f"{'same most likely token':<24} {self.greedy[0]:>10.2%} {self.greedy[1]:>10.2%}"]
        )


def compare(model: torch.nn.Module, inputs: Tensor | Mapping[str, Tensor], *, layers: bool = False) -> Comparison:
    """Run a model patched, plain and in fp32 on the same inputs, and compare the results.

    The fp32 model is a copy, which takes twice the memory of a 16-bit model for as long as this runs. The model is left
    as it was, patched or not.

    Args:
        model: as :func:`patch` takes it.
        inputs: token ids ``(B, S)``, or the keyword arguments of the model's forward pass. Positions that
            ``attention_mask`` hides are not compared.
        layers: compare the results of each decoder layer too.

    Returns:
        A :class:`Comparison`, which prints as a table.

    Raises:
        UnsupportedProblem: what :func:`patch` raises; no inputs.
    """
    given = {"input_ids": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    if not given:
        raise UnsupportedProblem("compare needs inputs: token ids, or the keyword arguments of a forward pass")
    was_patched = is_patched(model)
    training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        if was_patched:
            unpatch(model)
        plain = _results(model, given, layers)
        exact = _results(copy.deepcopy(model).float(), given, layers)
        with patch(model):
            ours = _results(model, given, layers)
    finally:
        for module, mode in training:
            module.training = mode
        if was_patched and not is_patched(model):
            patch(model)
    seen = given.get("attention_mask")
    seen = (
        torch.ones(exact["logits"].shape[:2], dtype=torch.bool, device=exact["logits"].device)
        if seen is None
        else seen.bool()
    )
    best = [results["logits"].argmax(-1)[seen] for results in (exact, plain, ours)]
    return Comparison(
        {name: _error(plain[name][seen], exact[name][seen]) for name in exact},
        {name: _error(ours[name][seen], exact[name][seen]) for name in exact},
        (float((best[1] == best[0]).double().mean()), float((best[2] == best[0]).double().mean())),
    )


def _results(model: Any, given: dict[str, Any], layers: bool) -> dict[str, Tensor]:
    """Logits, and the results of the decoder's layers, ``(B, S, ...)``."""
    found: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[..., None]:
        def keep(module: Any, args: Any, result: Any) -> None:
            found[name] = (result[0] if isinstance(result, tuple) else result).detach()

        return keep

    handles = []
    if layers:
        handles = [x.register_forward_hook(keeper(f"layer {i}")) for i, x in enumerate(model.get_decoder().layers)]
    try:
        with torch.no_grad():
            found["logits"] = model(**given).logits
    finally:
        for handle in handles:
            handle.remove()
    return found


def _error(actual: Tensor, exact: Tensor) -> float:
    exact = exact.double()
    return float((actual.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-30))

"""Rotary embeddings from ``config.json`` alone, equal to those of transformers in every bit."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.shared.checks import check_number, quote

_TRAINED = "original_max_position_embeddings"
_TYPES = ("full_attention", "sliding_attention")
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _TRAINED),
    "yarn": ("factor", _TRAINED),
    "proportional": (),
}
KINDS = tuple(_NEEDED)  # their tables do not depend on the length


def read_ropes(raw: dict[str, Any], local: float | None) -> dict[str, Any]:
    """A config's rotary parameters, from the keys of every version of transformers.

    Args:
        raw: of ``config.json``, with ``rope_theta`` and ``max_position_embeddings`` in any case.
        local: the base of layers with a window, for a family whose layers differ: the result is then by type of layer.
    """
    scaling, parameters = _object(raw, "rope_scaling"), _object(raw, "rope_parameters")
    if local is None:
        return _complete(scaling or parameters, raw, raw["rope_theta"])
    full, window = (_object(parameters, kind) for kind in _TYPES)
    found = {
        "full_attention": _complete(full | scaling, raw, raw["rope_theta"]),
        "sliding_attention": _complete(window, raw, raw.get("rope_local_base_freq", local)),
    }
    for one in found.values():
        one.pop("truncate", None)  # transformers looks for it beside the types of layers alone
    return found


def _object(holder: dict[str, Any], name: str) -> dict[str, Any]:
    """A copy of an object in the config; empty where there is none."""
    found = holder.get(name)
    if found is not None and not isinstance(found, dict):
        raise UnsupportedProblem(f"{name} of config.json is an object; it is {quote(found)}: mend config.json")
    return dict(found or {})


def _complete(given: dict[str, Any], raw: dict[str, Any], theta: object) -> dict[str, Any]:
    """Parameters with all that their kind needs."""
    if {*_TYPES} & given.keys():
        raise UnsupportedProblem(
            "config.json has rotary embeddings by type of layer, as Gemma 3 alone has them: load it with transformers"
        )
    kind = given.get("rope_type", given.get("type", "default"))
    found: dict[str, Any] = {"rope_theta": theta} | given | {"rope_type": kind}
    if kind not in KINDS:
        return found  # for the decoder to refuse
    if (
        kind not in ("default", "proportional")
        and found.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0
    ):
        raise UnsupportedProblem(
            "load scales rotary embeddings of whole heads; this config.json has a partial_rotary_factor: generate with "
            "transformers itself"
        )
    if kind in ("llama3", "yarn"):
        longest = raw["max_position_embeddings"]
        found.setdefault(_TRAINED, longest)
        if _TRAINED in raw:
            found[_TRAINED] = raw[_TRAINED]
        if kind == "yarn" and found.get("factor", 0) is None and _positive(found, _TRAINED):
            found["factor"] = longest / found[_TRAINED]
    for name in ("rope_theta", *_NEEDED[kind]):
        if not _positive(found, name):
            raise UnsupportedProblem(
                f"rotary embeddings of type {kind} need {name}, a positive number; config.json has "
                f"{quote(found.get(name))}: mend config.json"
            )
    if kind == "proportional":
        check_number("config.json", "partial_rotary_factor", found.get("partial_rotary_factor", 1.0), 0.0, 1.0)
        check_number("config.json", "factor", found.get("factor", 1.0), 1e-30)
    if kind == "yarn" and found["rope_theta"] <= 1:
        raise UnsupportedProblem(f"rope_theta of yarn is above 1; config.json has {found['rope_theta']}: mend it")
    for name in ("attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"):
        if kind == "yarn" and found.get(name) is not None and not _positive(found, name):
            raise UnsupportedProblem(f"{name} of config.json is a positive number; it is {quote(found[name])}: mend it")
    return found


def _positive(found: dict[str, Any], name: str) -> bool:
    value = found.get(name)
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 2.0**64


def frequencies(parameters: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """``(D / 2,)`` in fp32 on the CPU, and the factor of cosines and sines.

    Each operation is transformers' own, in its order (``modeling_rope_utils.py``): another would round differently.
    """
    kind, base = parameters["rope_type"], parameters["rope_theta"]
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float, device="cpu") / head_dim
    own = 1.0 / (base**exponents)
    if kind == "default":
        return own, 1.0
    if kind == "proportional":  # channels that do not turn have angles of zero
        turning = int(parameters.get("partial_rotary_factor", 1.0) * head_dim // 2)
        still = torch.zeros(head_dim // 2 - turning, dtype=torch.float32, device="cpu")
        return torch.cat((1.0 / (base ** exponents[:turning]), still)) / parameters.get("factor", 1.0), 1.0
    factor = parameters["factor"]
    if kind == "linear":
        return own / factor, 1.0
    if kind == "yarn":
        return _yarn(parameters, base**exponents, head_dim)
    trained, low, high = (parameters[name] for name in (_TRAINED, "low_freq_factor", "high_freq_factor"))
    wavelengths = 2 * math.pi / own
    scaled = torch.where(wavelengths > trained / low, own / factor, own)
    smooth = (trained / wavelengths - low) / (high - low)
    between = ~(wavelengths < trained / high) * ~(wavelengths > trained / low)
    return torch.where(between, (1 - smooth) * scaled / factor + smooth * scaled, scaled), 1.0


def _yarn(parameters: dict[str, Any], powers: Tensor, head_dim: int) -> tuple[Tensor, float]:
    factor, trained, base = (parameters[name] for name in ("factor", _TRAINED, "rope_theta"))
    scale, whole = parameters.get("mscale"), parameters.get("mscale_all_dim")
    attention = parameters.get("attention_factor")
    if attention is None:
        attention = _magnitude(factor, scale) / _magnitude(factor, whole) if scale and whole else _magnitude(factor, 1)

    def channel(turns: float) -> float:
        """The channel that turns so often within the trained length."""
        return (head_dim * math.log(trained / (turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = channel(parameters.get("beta_fast") or 32), channel(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1)
    kept = 1 - ramp
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(attention)


def _magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

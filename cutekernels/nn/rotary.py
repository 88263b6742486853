"""``RotaryEmbedding``: the tables of cosines and sines, and the rotation of queries and keys by them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cutekernels.errors import UnsupportedProblem
from cutekernels.ops.rope.api import rope
from cutekernels.ops.shared.checks import check_flag, check_number, check_tensor, check_whole, quote

_KINDS = ("default", "linear", "llama3")
_KEYS = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings",
)  # fmt: skip
MOST_POSITIONS = 2**24  # fp32, in which angles are computed, holds no odd number beyond
_MOST_ROWS = 2**20  # of tables that grow; rows farther out are computed for each call


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by their positions, at the frequencies of Hugging Face's ``LlamaRotaryEmbedding``.

    Tables are built in fp32 at first use and grow with the positions that are known on the host; they cover at least
    ``max_positions``, the limit of positions in a tensor. The state dict is empty, as Hugging Face's.

    Args:
        head_dim: channels of a head.
        rope_theta: the base of the frequencies ``rope_theta ** (-2i / R)``; 10000 if neither this nor the dictionary
            has it.
        partial_rotary_factor: the share of channels that turn, ``R = int(head_dim * partial_rotary_factor)``; likewise
            1.
        rope_scaling: Hugging Face's dictionary, ``config.rope_parameters``; ``rope_type`` (or ``type``) is "default",
            "linear" (``factor``) or "llama3" (``factor, low_freq_factor, high_freq_factor,
            original_max_position_embeddings``).
        max_positions: rows of the tables, or more.
        interleaved: pairs of neighbours instead of halves.
        device: where the frequencies live.

    Raises:
        UnsupportedProblem: another ``rope_type``, a key that none of these has, an odd number of channels to turn, a
            value that is not positive, or one that the dictionary has otherwise.
    """

    inv_freq: Tensor

    def __init__(
        self,
        head_dim: int,
        *,
        rope_theta: float | None = None,
        partial_rotary_factor: float | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
        max_positions: int = 2048,
        interleaved: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_whole("RotaryEmbedding", "head_dim", head_dim, 2, 2**31 - 1)
        check_whole("RotaryEmbedding", "max_positions", max_positions, 1, MOST_POSITIONS)
        check_flag("RotaryEmbedding", "interleaved", interleaved)
        if rope_scaling is not None and not isinstance(rope_scaling, Mapping):
            raise UnsupportedProblem(
                f"RotaryEmbedding takes rope_scaling as a dictionary; got {quote(rope_scaling)}: pass "
                "config.rope_parameters"
            )
        self.rope_scaling = dict(rope_scaling or {})
        self._kind = self.rope_scaling.get("rope_type", self.rope_scaling.get("type", "default"))
        if self._kind not in _KINDS:
            raise UnsupportedProblem(
                f"rope_type is one of {', '.join(_KINDS)}; it is {self._kind!r}: build tables of your own and call rope"
            )
        unknown = sorted(map(str, self.rope_scaling.keys() - _KEYS))
        if unknown:
            raise UnsupportedProblem(
                f"rope_scaling has {', '.join(_KEYS)}; {', '.join(unknown)} is none of them: build tables of your own "
                "and call rope"
            )
        rope_theta = self._argument("rope_theta", rope_theta, 10000.0)
        partial_rotary_factor = self._argument("partial_rotary_factor", partial_rotary_factor, 1.0)
        check_number("RotaryEmbedding", "partial_rotary_factor", partial_rotary_factor, 0.0)
        self.head_dim, self.rotary = head_dim, int(head_dim * partial_rotary_factor)
        if self.rotary % 2 or not 0 < self.rotary <= head_dim:
            raise UnsupportedProblem(
                f"channels turn in pairs, 2 to head_dim of them; {partial_rotary_factor} of {head_dim} is "
                f"{self.rotary}: pass a partial_rotary_factor that makes it even"
            )
        if not 0 < rope_theta < 2**127:
            raise UnsupportedProblem(
                f"rope_theta is positive, and fp32 holds it; got {rope_theta}: pass config.rope_theta"
            )
        self.rope_theta, self.max_positions, self.interleaved = float(rope_theta), max_positions, interleaved
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._tables: tuple[Tensor, Tensor] | None = None

    def forward(
        self, q: Tensor, k: Tensor | None = None, positions: Tensor | int | None = None, *, inplace: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """:func:`cutekernels.rope` with these tables: q ``(B, S, Hq, D)``, k ``(B, S, Hkv, D)``."""
        check_tensor("RotaryEmbedding", "q", q)
        check_tensor("RotaryEmbedding", "k", k, optional=True)
        if q.dim() != 4 or (isinstance(positions, int) and positions < 0):
            raise UnsupportedProblem(
                f"RotaryEmbedding takes q of (B, S, Hq, D) and positions from 0; got {tuple(q.shape)} and "
                f"{quote(positions)}: transpose q, or leave positions out"
            )
        for name, t in (("q", q), ("k", k)):
            if t is not None and t.shape[-1:] != (self.head_dim,):
                raise UnsupportedProblem(
                    f"RotaryEmbedding({self.head_dim}) takes {name} with heads of {self.head_dim} channels; got "
                    f"{tuple(t.shape)}: pass its own part, or make a module of that head_dim"
                )
        length = q.shape[1]
        needed = length if positions is None else positions + length if isinstance(positions, int) else 0
        if isinstance(positions, int) and _MOST_ROWS < needed <= MOST_POSITIONS and needed > self.max_positions:
            cos, sin = self._rows(positions, length)
            positions = None
        else:
            cos, sin = self.tables(needed)
        return rope(q, k, cos, sin, interleaved=self.interleaved, positions=positions, inplace=inplace)

    def tables(self, positions: int = 0) -> tuple[Tensor, Tensor]:
        """Cosines and sines ``(T, R/2)`` in fp32, T at least ``positions`` and ``max_positions``."""
        check_whole("RotaryEmbedding.tables", "positions", positions, 0)
        if positions > MOST_POSITIONS:
            raise UnsupportedProblem(
                f"positions are below {MOST_POSITIONS}, which fp32 holds exactly; got {positions - 1}: compute cosines "
                "and sines in fp64 and pass them to cutekernels.rope"
            )
        if self._tables is None or self._tables[0].shape[0] < positions:
            rows = self.max_positions
            while rows < positions:
                rows *= 2
            found = self._rows(0, rows)
            if type(found[0]) is not Tensor:  # fakes, of an estimate under FakeTensorMode, say
                return found
            self._tables = found
        return self._tables

    def _rows(self, first: int, rows: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.no_grad():  # or gradients could not be taken through them later
            steps = torch.arange(first, first + rows, device=self.inv_freq.device, dtype=torch.float32)
            angles = torch.outer(steps, self.inv_freq)
            return angles.cos(), angles.sin()

    def extra_repr(self) -> str:
        scaling = f", rope_scaling={self.rope_scaling}" if self.rope_scaling else ""
        return f"{self.head_dim}, rotary={self.rotary}, rope_theta={self.rope_theta}{scaling}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        """Moves to another device, never to another type: frequencies in bf16 would be off by whole turns."""
        before = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.inv_freq.device  # of memory that to_empty leaves unfilled
        self.inv_freq = self._frequencies(device) if before.is_meta else before.to(device)
        self._tables = None
        return self

    def _frequencies(self, device: torch.device | str | None) -> Tensor:
        exponents = torch.arange(0, self.rotary, 2, device=device, dtype=torch.int64).float() / self.rotary
        frequencies = 1.0 / self.rope_theta**exponents
        if self._kind == "default":
            return frequencies
        factor = self._positive("factor")
        if self._kind == "linear":
            return frequencies / factor
        low, high = self._positive("low_freq_factor"), self._positive("high_freq_factor")
        trained = self._positive("original_max_position_embeddings")
        if not high > low:
            raise UnsupportedProblem(f"high_freq_factor is above low_freq_factor; got {high} and {low}: swap them")
        # Waves that turn often within the trained length stay, those that turn about once or less are stretched,
        # with a smooth transition between the two.
        turns = trained * frequencies / (2 * math.pi)
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - kept) * frequencies / factor + kept * frequencies

    def _argument(self, name: str, argument: float | None, default: float) -> float:
        """An argument that the dictionary may hold in its place."""
        found = self.rope_scaling.get(name)
        for value in (argument, found):
            if value is not None:
                check_number("RotaryEmbedding", name, value)
        if None not in (argument, found) and argument != found:
            raise UnsupportedProblem(f"RotaryEmbedding has {name}={argument} and rope_scaling {found}: pass one")
        return next((value for value in (argument, found) if value is not None), default)

    def _positive(self, name: str) -> float:
        value = self.rope_scaling.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UnsupportedProblem(f"this rope_scaling needs {name}, a positive number; it is {value!r}: add it")
        return float(value)

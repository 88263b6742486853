"""Softmax over keys, block by block: exponentials to base 2, relative to a row's reference score."""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, const_expr

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
NO_REFERENCE = -1e30  # below any score, and finite, so that no difference of two references is NaN
SINK_BITS = 24.0  # a row's reference begins so far below its sink: fp16 probabilities keep their digits


@dataclass(frozen=True)
class RowStates:
    """The state of a thread's rows, in registers: one number a row in each.

    The four threads that share an accumulator's row hold the same ``reference``; each has its own share of ``total``.
    """

    reference: cute.Tensor  # a score, base 2, that the row's exponentials are relative to
    total: cute.Tensor  # this thread's share of the sum of 2^(score - reference)
    shrink: cute.Tensor | None = None  # what accumulators are multiplied by where the reference moved last


@dataclass(frozen=True)
class OnlineSoftmax:
    """A row keeps a reference score and the total of ``2^(score - reference)``; accumulators share the reference.

    ``slack`` (base 2): the excess of a score over its row's reference above which the reference moves and accumulators
    are rescaled; the result is the same, since accumulators and totals share the reference. A warp in which no row
    needs it skips that work. With 0 every block rescales, without a branch. 16-bit probabilities grow up to
    ``2^slack``: 8 is far from where fp16 overflows. ``capped`` scores are ``cap * tanh(score / cap)``.

    A row that sees no key keeps ``NO_REFERENCE`` and a total of 0: hidden scores are -inf, so they neither move the
    reference nor add to the total. :meth:`finish` then gives 0, and -inf as log-sum-exp (its sink's, where it has one).
    """

    slack: float
    capped: bool
    sink_bits: float = SINK_BITS

    @cute.jit
    def start(self, rows: RowStates):
        rows.reference.fill(NO_REFERENCE)
        rows.total.fill(0.0)

    @cute.jit
    def start_with(self, row: int, sink: Float32, rows: RowStates):
        """Has row ``row`` begin with the natural logit ``sink`` of no value, in equal shares of four threads.

        ``-inf`` is no sink; NaN passes through.
        """
        logit = sink * LOG2_E
        if not logit <= NO_REFERENCE:
            rows.reference[row] = logit - self.sink_bits
            rows.total[row] = Float32(0.25 * 2.0**self.sink_bits)

    @cute.jit
    def cap(self, acc: cute.Tensor, inner: Float32, outer: Float32):
        """``acc = outer * tanh(inner * acc / 2)``; ``inner`` includes exp2's factor ``2 log2(e)``.

        MUFU.TANH's error of 2^-11 would be 0.02 of a score at a cap of 50; this one's is 2^-22.
        """
        # tanh(x / 2) = 1 - 2 / (e^x + 1)
        for i in cutlass.range_constexpr(cute.size(acc)):
            grown = cute.math.exp2(acc[i] * inner, fastmath=True)
            acc[i] = outer - 2.0 * outer * cute.arch.rcp_approx(grown + 1.0)

    @cute.jit
    def step(
        self,
        acc_s: cute.Tensor,
        acc_o: cute.Tensor,
        rows: RowStates,
        scale: Float32,
        inverses: cute.Tensor | None = None,
    ):
        """Turns scores ``acc_s`` into unnormalised probabilities, and rescales ``acc_o`` where references moved.

        ``acc_s`` ((2, 2), MMA_M, MMA_KV) and ``acc_o`` ((2, 2), MMA_M, MMA_D) are accumulators; ``scale`` (> 0) is the
        factor from ``acc_s`` to scores of base 2. Masked scores are -inf. ``inverses``: see :meth:`exponentials`.
        """
        scores = by_rows(acc_s)
        most = self.greatest(scores)
        moving = RowStates(rows.reference, rows.total, cute.make_fragment_like(most))
        if const_expr(self.slack > 0):
            # One branch for the warp: its votes agree, so the shuffles inside are taken by all lanes or by none.
            if self.exceeds(most, rows.reference, scale):
                self.move(most, moving, scale)
                self.rescale(acc_o, moving.shrink)
        else:
            self.move(most, moving, scale)
            self.rescale(acc_o, moving.shrink)
        self.exponentials(scores, rows, scale, inverses)

    @cute.jit
    def probabilities(self, acc_s: cute.Tensor, rows: RowStates, scale: Float32) -> Boolean:
        """A :meth:`step` for accumulators that a product still writes.

        Where it returns True, the caller rescales them by ``rows.shrink`` once that product is done.
        """
        scores = by_rows(acc_s)
        most = self.greatest(scores)
        moved = Boolean(True)
        if const_expr(self.slack > 0):
            moved = self.exceeds(most, rows.reference, scale)
            if moved:
                self.move(most, rows, scale)
        else:
            self.move(most, rows, scale)
        self.exponentials(scores, rows, scale)
        return moved

    @cute.jit
    def greatest(self, scores: cute.Tensor) -> cute.Tensor:
        """The greatest of this thread's scores in each of its rows."""
        most = cute.make_rmem_tensor(cute.size(scores, mode=[0]), Float32)
        # No shuffle yet: the four threads of a row compare theirs only where the reference moves.
        for r in cutlass.range_constexpr(cute.size(most)):
            high = scores[r, 0]
            for c in cutlass.range_constexpr(1, cute.size(scores, mode=[1])):
                high = cute.arch.fmax(high, scores[r, c])
            most[r] = high
        return most

    @cute.jit
    def exceeds(self, most: cute.Tensor, reference: cute.Tensor, scale: Float32) -> Boolean:
        """Whether a row of the warp exceeds its reference by more than the slack; the same answer in all lanes."""
        excess = most[0] * scale - reference[0]
        for r in cutlass.range_constexpr(1, cute.size(most)):
            excess = cute.arch.fmax(excess, most[r] * scale - reference[r])
        return cute.arch.vote_any_sync(excess > self.slack)

    @cute.jit
    def move(self, most: cute.Tensor, rows: RowStates, scale: Float32):
        """Raises the references to the rows' greatest scores so far, and says by what accumulators shrink."""
        # All four threads of a row get the same reference; accumulators of blocks before are relative to the old one.
        for r in cutlass.range_constexpr(cute.size(most)):
            raised = cute.arch.fmax(rows.reference[r], quad_max(most[r]) * scale)
            rows.shrink[r] = cute.math.exp2(rows.reference[r] - raised, fastmath=True)
            rows.reference[r] = raised
            rows.total[r] = rows.total[r] * rows.shrink[r]

    @cute.jit
    def rescale(self, acc_o: cute.Tensor, shrink: cute.Tensor):
        """Rows of ``acc_o`` times ``shrink``."""
        acc = by_rows(acc_o)
        for r in cutlass.range_constexpr(cute.size(shrink)):
            for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                acc[r, c] = acc[r, c] * shrink[r]

    @cute.jit
    def exponentials(self, scores: cute.Tensor, rows: RowStates, scale: Float32, inverses: cute.Tensor | None = None):
        """``2^(scale * score - reference)`` in place of scores, added to the totals.

        ``inverses``: factors of what is added, by column: those of probabilities that hold their value's scale.
        """
        # Totals stay shares of the four threads until finish().
        for r in cutlass.range_constexpr(cute.size(rows.reference)):
            added = Float32(0.0)
            for c in cutlass.range_constexpr(cute.size(scores, mode=[1])):
                p = cute.math.exp2(scores[r, c] * scale - rows.reference[r], fastmath=True)
                scores[r, c] = p
                if const_expr(inverses is not None):
                    added = p * inverses[c] + added
                else:
                    added = added + p
            rows.total[r] = rows.total[r] + added

    @cute.jit
    def finish(self, acc_o: cute.Tensor, rows: RowStates):
        """Divides by the totals, and puts each row's log-sum-exp (natural) into ``rows.reference``.

        A row that sees nothing has 0 and -inf; NaN passes through.
        """
        acc = by_rows(acc_o)
        for r in cutlass.range_constexpr(cute.size(rows.total)):
            # The row's threads hold shares of its total.
            whole = quad_sum(rows.total[r])
            inverse = Float32(0.0)
            lse = -Float32.inf
            if whole != 0.0:
                inverse = 1.0 / whole
                lse = (rows.reference[r] + cute.math.log2(whole)) * LN_2
            rows.reference[r] = lse
            for c in cutlass.range_constexpr(cute.size(acc, mode=[1])):
                acc[r, c] = acc[r, c] * inverse


def by_rows(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2), MMA_M, MMA_N) as a matrix ((2, MMA_M), (2, MMA_N)) of this thread's rows and columns."""
    shape, stride = acc.layout.shape, acc.layout.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((shape[0][1], shape[1]), (shape[0][0], shape[2])),
            stride=((stride[0][1], stride[1]), (stride[0][0], stride[2])),
        ),
    )


def as_operand(acc: cute.Tensor) -> cute.Tensor:
    """An accumulator ((2, 2), MMA_M, MMA_N) as the A operand ((2, 2, 2), MMA_M, MMA_N / 2) of the next product."""
    shape, stride = acc.layout.shape, acc.layout.stride
    return cute.make_tensor(
        acc.iterator,
        cute.make_layout(
            ((*shape[0], 2), shape[1], shape[2] // 2),
            stride=((*stride[0], stride[2]), stride[1], 2 * stride[2]),
        ),
    )


@cute.jit
def quad_max(x: Float32) -> Float32:
    """Maximum over the four threads that share an accumulator's row."""
    x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=2))
    return cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=1))


@cute.jit
def quad_sum(x: Float32) -> Float32:
    """Sum over the four threads that share an accumulator's row."""
    x = x + cute.arch.shuffle_sync_bfly(x, offset=2)
    return x + cute.arch.shuffle_sync_bfly(x, offset=1)

"""Token statistics and their gradients from hidden states, without ever holding all the logits.

N label positions, D hidden size, V vocabulary, K number tokens, n rows of a chunk, r rank.

The logits of a chunk of rows are computed, read, turned in place into the gradient of the loss with
respect to them, multiplied out into the gradients of the hidden states and of the output matrix,
and overwritten by the next chunk. So the gradients are taken while the loss is computed, each
chunk costs the three products with the output matrix that any head costs, and the memory is that
of one chunk. This works because a loss over tokens needs only three small results of a row (see
`losses.token_statistics`), whose gradients a caller can give chunk by chunk.

Nothing here waits for the device, and no shape depends on a value.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ntl_lightning.losses.token_statistics import add_at_single_tokens, at_labels

__all__ = [
    "OutputProjection",
    "ProjectionGradients",
    "SmallGradients",
    "attach_gradients",
    "default_rows_per_chunk",
    "projected_gradients",
    "projected_statistics",
]

SmallGradients = Callable[[slice, Tensor, Tensor, Tensor], tuple[Tensor | None, ...]]
"""From rows, cross entropy (n,), log partition (n,) and number logits (n, K) of a chunk, all
detached, to the gradients of the loss with respect to these three; None for zero. Called with
gradients enabled, once for each chunk, in order."""

_MOST_CHUNKS = 8
_FEWEST_ROWS = 256

# Elements worked on at a time where a copy in another dtype is needed, on a CPU and elsewhere. Few
# stay in the caches and are little memory; many are few steps, which counts on a GPU, and where
# other work takes a core and each step waits for it.
_FEWEST_ELEMENTS = 1 << 20
_MOST_ELEMENTS_ON_CPU = 4 << 20
_MOST_ELEMENTS_ELSEWHERE = 32 << 20


@dataclass(frozen=True)
class OutputProjection:
    """How a language model turns hidden states h into logits.

    logits = cap(scale * (h @ weight.T + bias + a @ b.T)), cap(x) = soft_cap * tanh(x / soft_cap).

    Raises:
        ValueError: If shapes disagree or a number is out of range.
    """

    weight: Tensor
    """(V, D), any floating-point dtype. `gathered` takes a DTensor."""
    bias: Tensor | None = None
    """(V,). -inf is allowed: such a token has the logit -inf, or with a soft cap `-soft_cap`."""
    scale: float = 1.0
    """Factor on the logits, as Granite and Cohere have it."""
    soft_cap: float | None = None
    """Bound on the logits' size, as Gemma 2 has it. None: no bound."""
    low_rank: tuple[Tensor, Tensor] | None = None
    """(a (N, r), b (V, r)): what a LoRA adapter on the head adds, a including its factor."""

    def __post_init__(self) -> None:
        if self.weight.ndim != 2:
            raise ValueError(
                f"the output matrix must be (V, D), got the shape {tuple(self.weight.shape)}"
            )
        width = len(self.weight)
        if self.bias is not None and self.bias.shape != (width,):
            raise ValueError(
                f"the output bias must be ({width},) as the output matrix has {width} rows, "
                f"got {tuple(self.bias.shape)}"
            )
        if self.low_rank is not None:
            a, b = self.low_rank
            if not (a.ndim == b.ndim == 2 and a.shape[1] == b.shape[1] and len(b) == width):
                raise ValueError(
                    f"low_rank must be (N, r) and ({width}, r), "
                    f"got {tuple(a.shape)} and {tuple(b.shape)}"
                )
        if not 0 < abs(self.scale) < float("inf"):
            raise ValueError(f"scale must be finite and not 0, got {self.scale}")
        if self.soft_cap is not None and not 0 < self.soft_cap < float("inf"):
            raise ValueError(f"soft_cap must be positive and finite or None, got {self.soft_cap}")

    def gathered(self) -> "OutputProjection":
        """The same with ordinary tensors in the place of DTensors, as the functions here need it.

        Every rank gets the whole of them, and a gradient is averaged over the mesh, as FSDP2 does
        it with those it reduces itself. All ranks must call this, and the backward pass too.
        """
        low_rank = self.low_rank
        return OutputProjection(
            weight=_gathered(self.weight),
            bias=None if self.bias is None else _gathered(self.bias),
            scale=self.scale,
            soft_cap=self.soft_cap,
            low_rank=None if low_rank is None else (_gathered(low_rank[0]), _gathered(low_rank[1])),
        )


@dataclass
class ProjectionGradients:
    """Gradients of a loss; None for what needs none.

    Each has the dtype of the tensor it belongs to. Only float16 is kept in float32, because the
    factor of a gradient scaler, without which most of it would round to zero, comes later.
    """

    hidden: Tensor | None
    """(N, D)."""
    weight: Tensor | None
    """(V, D)."""
    bias: Tensor | None
    """(V,)."""
    a: Tensor | None
    """(N, r) of the low-rank part."""
    b: Tensor | None
    """(V, r) of the low-rank part."""


def default_rows_per_chunk(num_rows: int) -> int:
    """Rows of a chunk where none are asked for: even chunks, 8 at most and of 256 rows at least.

    Fewer rows cost time, since each chunk reads the output matrix and its gradient anew; more
    chunks cost digits of a gradient that is summed in bfloat16.
    """
    num_chunks = max(1, min(_MOST_CHUNKS, num_rows // _FEWEST_ROWS))
    return max(1, -(-num_rows // num_chunks))


def projected_statistics(
    hidden: Tensor,
    projection: OutputProjection,
    label_ids: Tensor,
    number_ids: Tensor,
    *,
    rows_per_chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy, log partition and number logits of hidden states, without gradient.

    Args:
        hidden: (N, D) any floating-point dtype. N may be 0.
        projection: The head, of ordinary tensors.
        label_ids: (N,) int64 in [0, V).
        number_ids: (K,) int64 in [0, V), each once.
        rows_per_chunk: n. None: `default_rows_per_chunk(N)`.

    Returns:
        (N,), (N,) and (N, K), float32 (float64 where hidden states or weight are). The products
        are in autocast's dtype where autocast is on, else in the common one of hidden states and
        weight; everything after them is in the dtype of the results.

    Raises:
        ValueError: If shapes disagree or `rows_per_chunk` is not positive.
    """
    head = _Head(hidden, projection, label_ids, number_ids, rows_per_chunk, train=False)
    cross_entropy = hidden.new_empty(len(hidden), dtype=head.wide_dtype)
    log_partition = torch.empty_like(cross_entropy)
    number_logits = hidden.new_empty(len(hidden), len(number_ids), dtype=head.wide_dtype)
    with _plain_arithmetic(hidden.device):
        for rows in head.chunks:
            found = head.statistics(head.logits(rows), rows)
            cross_entropy[rows] = found.cross_entropy
            log_partition[rows] = found.log_partition
            number_logits[rows] = found.number_logits
    return cross_entropy, log_partition, number_logits


def projected_gradients(
    hidden: Tensor,
    projection: OutputProjection,
    label_ids: Tensor,
    number_ids: Tensor,
    small_gradients: SmallGradients,
    *,
    rows_per_chunk: int | None = None,
) -> ProjectionGradients:
    """Gradients of a loss over hidden states, given its gradients in the small statistics.

    With p the softmax of a row, the gradient in its logits is p * (g_ce + g_lse) -
    onehot(label) * g_ce, plus g_z in the number columns.

    A gradient is summed over the chunks in the dtype of the tensor it belongs to: float32 for a
    float32 weight under autocast, bfloat16 for a bfloat16 one, which rounds once for each chunk.

    Args:
        hidden: As for `projected_statistics`, like the other arguments; nothing of it is changed.
        projection: The head, of ordinary tensors.
        label_ids: (N,) int64 in [0, V).
        number_ids: (K,) int64 in [0, V), each once.
        small_gradients: See there. It is given the statistics that `projected_statistics` returns.
        rows_per_chunk: n. None: `default_rows_per_chunk(N)`. Beside the gradients, n * V logits
            are held, and little else.

    Returns:
        The gradients of what requires one, for `attach_gradients`.

    Raises:
        ValueError: If shapes disagree or `rows_per_chunk` is not positive.
    """
    head = _Head(hidden, projection, label_ids, number_ids, rows_per_chunk, train=True)
    with _plain_arithmetic(hidden.device):
        for rows in head.chunks:
            logits = head.logits(rows)
            found = head.statistics(logits, rows)
            with torch.enable_grad():
                incoming = small_gradients(
                    rows, found.cross_entropy, found.log_partition, found.number_logits
                )
            unit = head.to_gradient_(logits, rows, found, incoming)
            head.add_gradients(logits, rows, unit)
        return head.gradients()


def attach_gradients(
    loss: Tensor, gradients: ProjectionGradients, hidden: Tensor, projection: OutputProjection
) -> Tensor:
    """The loss, with a backward pass that hands out the gradients times the incoming one.

    They are multiplied in place and given away: there is one backward pass.

    Args:
        loss: () whose value counts; a graph behind it is cut off.
        gradients: From `projected_gradients`.
        hidden: (N, D) the tensor that was given there.
        projection: The one that was given there.

    Raises:
        RuntimeError: In a second backward pass.
    """
    a, b = (None, None) if projection.low_rank is None else projection.low_rank
    return _Attach.apply(  # type: ignore[no-untyped-call]
        loss.detach(), gradients, hidden, projection.weight, projection.bias, a, b
    )


class _Attach(torch.autograd.Function):
    """See `attach_gradients`."""

    @staticmethod
    def forward(
        ctx: Any, loss: Tensor, gradients: ProjectionGradients, *tensors: Tensor | None
    ) -> Tensor:
        ctx.gradients = [
            gradients.hidden,
            gradients.weight,
            gradients.bias,
            gradients.a,
            gradients.b,
        ]
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "a second backward pass through a loss from hidden states: its gradients were "
                "taken in the forward pass and given away in the first backward pass; compute the "
                "loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return (
            None,
            None,
            *(
                None if gradient is None else gradient.mul_(incoming).to(dtype)
                for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
            ),
        )


class _Statistics(NamedTuple):
    """What is known of n rows of logits before their gradient."""

    cross_entropy: Tensor
    """(n,)."""
    log_partition: Tensor
    """(n,)."""
    number_logits: Tensor
    """(n, K)."""
    peak: Tensor
    """(n,) largest logit."""
    total: Tensor
    """(n,) sum of exp(logit - peak) over the vocabulary, in [1, V]."""


class _Small(NamedTuple):
    """The loss's gradients in the statistics of n rows, the scale included, in units of `unit`."""

    softmax: Tensor
    """(n,) what exp(logit - peak) is to be multiplied by."""
    ce: Tensor | None
    """(n,)."""
    z: Tensor | None
    """(n, K)."""
    unit: Tensor | None
    """()."""


class _Part:
    """One summand left @ right.T of the logits, and the gradients of the two where needed."""

    def __init__(self, left: Tensor, right: Tensor, dtype: torch.dtype, *, train: bool) -> None:
        self.left = left.detach().to(dtype)
        self.right = right.detach()
        self.grad_left = _gradient_buffer(left) if train and left.requires_grad else None
        self.grad_right = _gradient_buffer(right) if train and right.requires_grad else None

    def casts(self, dtype: torch.dtype) -> bool:
        """Whether the large matrices differ from the dtype of the products."""
        return any(t is not None and t.dtype != dtype for t in (self.right, self.grad_right))


class _Head:
    """The steps of a chunk of rows, and the memory that all chunks share.

    `dtype` is that of the products and the logits, `wide_dtype` that of the statistics.
    """

    def __init__(
        self,
        hidden: Tensor,
        projection: OutputProjection,
        label_ids: Tensor,
        number_ids: Tensor,
        rows_per_chunk: int | None,
        *,
        train: bool,
    ) -> None:
        num_rows, width = len(hidden), len(projection.weight)
        if rows_per_chunk is None:
            rows_per_chunk = default_rows_per_chunk(num_rows)
        _check(hidden, projection, label_ids, rows_per_chunk)
        self.chunks = _slices(num_rows, rows_per_chunk)
        self.label_ids = label_ids
        self.number_ids = number_ids
        self.scale = projection.scale
        self.soft_cap = projection.soft_cap
        self.dtype = _product_dtype(hidden, projection.weight)
        self.wide_dtype = torch.promote_types(self.dtype, torch.float32)

        self.main = _Part(hidden, projection.weight, self.dtype, train=train)
        self.low_rank = None
        if projection.low_rank is not None:
            self.low_rank = _Part(*projection.low_rank, self.dtype, train=train)
        # The sum is rounded at each summand, so the largest one comes last.
        self.parts = [part for part in (self.low_rank, self.main) if part is not None]
        bias = projection.bias
        self.bias = None if bias is None else bias.detach().to(self.dtype)
        self.grad_bias: Tensor | None = None
        if bias is not None and train and bias.requires_grad:
            self.grad_bias = torch.zeros_like(bias, dtype=self.wide_dtype)
            self.bias_dtype = _gradient_dtype(bias)

        # Then the logits can be worked on where they are.
        self.in_place = self.dtype == self.wide_dtype and self.soft_cap is None
        self.chunk = hidden.new_empty(min(rows_per_chunk, num_rows), width, dtype=self.dtype)
        most = _MOST_ELEMENTS_ON_CPU if hidden.device.type == "cpu" else _MOST_ELEMENTS_ELSEWHERE
        size = min(most, max(_FEWEST_ELEMENTS, self.chunk.numel() // 16))
        # The slope of a soft cap is needed beside the probabilities.
        copies = 1 if self.soft_cap is None else 2
        self.rows_per_block = max(1, min(len(self.chunk), size // (copies * width)))
        block = 0 if self.in_place else copies * self.rows_per_block * width
        deepest = max(1, *(part.right.shape[1] for part in self.parts))
        self.tokens_per_slice = max(1, min(width, size // deepest))
        casts = any(part.casts(self.dtype) for part in self.parts)
        cast = self.tokens_per_slice * deepest if casts else 0
        self.wide = hidden.new_empty(max(block, cast), dtype=self.wide_dtype)
        self.narrow = hidden.new_empty(cast, dtype=self.dtype)

    def logits(self, rows: slice) -> Tensor:
        """(n, V) before the soft cap, in the memory of the chunk."""
        logits = self.chunk[: rows.stop - rows.start]
        beta = 0.0
        if self.bias is not None:
            logits.copy_(self.bias)
            beta = self.scale
        for part in self.parts:
            for tokens, right in self._slices_of(part.right):
                logits[:, tokens].addmm_(part.left[rows], right.t(), beta=beta, alpha=self.scale)
            beta = 1.0
        return logits

    def statistics(self, logits: Tensor, rows: slice) -> _Statistics:
        """Of the rows of a chunk. Where `in_place`, the logits become exp(logit - peak)."""
        label_logits = at_labels(logits, self.label_ids[rows]).to(self.wide_dtype)
        number_logits = logits.index_select(1, self.number_ids).to(self.wide_dtype)
        peak = logits.amax(1).to(self.wide_dtype)
        if self.soft_cap is not None:
            for some in (label_logits, number_logits, peak):
                some.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        if self.in_place:
            total = logits.sub_(peak.unsqueeze(1)).exp_().sum(1)
        else:
            total = torch.empty_like(peak)
            for block in _slices(len(logits), self.rows_per_block):
                scores = self._wide_copy(logits[block])
                if self.soft_cap is not None:
                    scores.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
                torch.sum(scores.sub_(peak[block, None]).exp_(), 1, out=total[block])
        # Not from the label's own probability, which may have underflowed.
        log_total = total.log()
        return _Statistics(
            cross_entropy=(peak - label_logits) + log_total,
            log_partition=peak + log_total,
            number_logits=number_logits,
            peak=peak,
            total=total,
        )

    def to_gradient_(
        self,
        logits: Tensor,
        rows: slice,
        found: _Statistics,
        small: tuple[Tensor | None, ...],
    ) -> Tensor | None:
        """Turn what `statistics` left of the logits into the gradient in h @ weight.T.

        Returns:
            () what the gradient is to be multiplied by; None for 1.
        """
        given = self._small(found, small)
        if self.in_place:
            self._finish(logits.mul_(given.softmax.unsqueeze(1)), rows, given, slice(None), None)
            return given.unit
        for block in _slices(len(logits), self.rows_per_block):
            grad = self._wide_copy(logits[block])
            slope = None
            if self.soft_cap is not None:
                grad.div_(self.soft_cap).tanh_()
                slope = _matrix(self.wide[grad.numel() :], grad.shape)
                torch.mul(grad, grad, out=slope).neg_().add_(1)
                grad.mul_(self.soft_cap)
            grad.sub_(found.peak[block, None]).exp_().mul_(given.softmax[block, None])
            # Before the rounding: the gradient of a confident row is a small difference.
            self._finish(grad, rows, given, block, slope)
            logits[block].copy_(grad)
        return given.unit

    def _small(self, found: _Statistics, small: tuple[Tensor | None, ...]) -> _Small:
        g_ce, g_lse, g_z = (None if g is None else g.detach() * self.scale for g in small)
        softmax = torch.zeros_like(found.total)
        for g in (g_ce, g_lse):
            softmax = softmax if g is None else softmax + g
        unit = None
        if self.dtype == torch.float16:
            # Else most of what a mean over many rows hands to each of them would round to zero.
            unit = _largest(softmax, g_ce, g_z)
            softmax = softmax / unit
            g_ce, g_z = (None if g is None else g / unit for g in (g_ce, g_z))
        return _Small(softmax / found.total, g_ce, g_z, unit)

    def _finish(
        self, grad: Tensor, rows: slice, given: _Small, block: slice, slope: Tensor | None
    ) -> None:
        """From the softmax's part of the gradient of a block of rows to the whole, in place."""
        g_ce, g_z = (None if g is None else g[block] for g in (given.ce, given.z))
        add_at_single_tokens(grad, self.label_ids[rows][block], self.number_ids, g_ce, g_z)
        if slope is not None:
            grad.mul_(slope)
        if self.grad_bias is not None:
            total = grad.sum(0)
            self.grad_bias.add_(total if given.unit is None else total * given.unit)

    def add_gradients(self, grad_logits: Tensor, rows: slice, unit: Tensor | None) -> None:
        """The share of a chunk in the gradients of the summands."""
        first = rows.start == 0
        for part in self.parts:
            if part.grad_left is not None:
                self._grad_left(grad_logits, part.right, unit, part.grad_left[rows])
            if part.grad_right is not None:
                self._add_grad_right(grad_logits, part.left[rows], unit, part.grad_right, first)

    def _grad_left(
        self, grad_logits: Tensor, right: Tensor, unit: Tensor | None, out: Tensor
    ) -> None:
        if right.dtype == self.dtype == out.dtype:
            torch.mm(grad_logits, right, out=out)
            return
        total = torch.zeros_like(out, dtype=self.wide_dtype)
        for tokens, some in self._slices_of(right):
            total.add_(torch.mm(grad_logits[:, tokens], some))
        out.copy_(total if unit is None else total.mul_(unit))

    def _add_grad_right(
        self, grad_logits: Tensor, left: Tensor, unit: Tensor | None, out: Tensor, first: bool
    ) -> None:
        if out.dtype == self.dtype:
            out.addmm_(grad_logits.t(), left, beta=0.0 if first else 1.0)
            return
        for tokens in _slices(len(out), self.tokens_per_slice):
            target = out[tokens]
            product = _matrix(self.narrow, target.shape)
            torch.mm(grad_logits[:, tokens].t(), left, out=product)
            product = self._wide_copy(product)
            if unit is not None:
                product.mul_(unit)
            if first:
                target.copy_(product)
            else:
                target.add_(product)

    def gradients(self) -> ProjectionGradients:
        """What the chunks have added up to."""
        if not self.chunks:
            for part in self.parts:
                if part.grad_right is not None:
                    part.grad_right.zero_()
        low_rank = self.low_rank
        return ProjectionGradients(
            hidden=self.main.grad_left,
            weight=self.main.grad_right,
            bias=None if self.grad_bias is None else self.grad_bias.to(self.bias_dtype),
            a=None if low_rank is None else low_rank.grad_left,
            b=None if low_rank is None else low_rank.grad_right,
        )

    def _wide_copy(self, rows: Tensor) -> Tensor:
        return _matrix(self.wide, rows.shape).copy_(rows)

    def _slices_of(self, right: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Tokens and their rows of a (V, D) matrix in `dtype`; all at once if it has that dtype."""
        if right.dtype == self.dtype:
            yield slice(None), right
            return
        for tokens in _slices(len(right), self.tokens_per_slice):
            yield tokens, _matrix(self.narrow, right[tokens].shape).copy_(right[tokens])


def _check(
    hidden: Tensor, projection: OutputProjection, label_ids: Tensor, rows_per_chunk: int
) -> None:
    depth = projection.weight.shape[1]
    if hidden.ndim != 2 or hidden.shape[1] != depth:
        raise ValueError(
            f"the hidden states must be (N, {depth}) as the output matrix is "
            f"{tuple(projection.weight.shape)}, got {tuple(hidden.shape)}"
        )
    if label_ids.shape != hidden.shape[:1]:
        raise ValueError(
            f"label_ids must be ({len(hidden)},), one for each hidden state, "
            f"got {tuple(label_ids.shape)}"
        )
    if projection.low_rank is not None and len(projection.low_rank[0]) != len(hidden):
        raise ValueError(
            f"low_rank must begin with ({len(hidden)}, r), one row for each hidden state, "
            f"got {tuple(projection.low_rank[0].shape)}"
        )
    if rows_per_chunk < 1:
        raise ValueError(f"rows_per_chunk must be 1 or more, got {rows_per_chunk}")


def _product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return dtype


@contextmanager
def _plain_arithmetic(device: torch.device) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _largest(*gradients: Tensor | None) -> Tensor:
    """() largest size of an element, not 0."""
    sizes = [g.abs().amax() for g in gradients if g is not None and g.numel()]
    return torch.stack(sizes).amax().clamp_min(torch.finfo(torch.float32).tiny)


def _gradient_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype == torch.float16 else tensor.dtype


def _gradient_buffer(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, dtype=_gradient_dtype(tensor))


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def _matrix(memory: Tensor, shape: torch.Size) -> Tensor:
    """The beginning of some memory as a matrix."""
    return memory[: shape.numel()].view(shape)


def _gathered(tensor: Tensor) -> Tensor:
    # Where there is a DTensor its module has been loaded, which takes seconds.
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(tensor, DTensor)
    return tensor.full_tensor(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)

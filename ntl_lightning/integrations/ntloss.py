"""`NTLoss`, `NTLossDotProduct` and `NumberLevelLoss` for those who used the PyPI package `ntloss`.

Arguments, defaults and meaning of the three are as in version 0.3.2, so that changing the import
is all:

    from ntl_lightning.integrations.ntloss import NTLoss

Nothing else of the package is here: no `NumberLevelLossLooped`, and of the losses' attributes only
the arguments, not the tables `number_values`, `is_number_token` or `dist_lookup`.

Values and gradients are the package's, except where these go wrong:

- The tokenizer is never changed; the package adds digits to it as tokens, after which it cuts and
  decodes text differently. To train on single digits, cut the data with
  `ntl_lightning.numbers.digit_level_copy(tokenizer)`.
- A digit with a space mark (`▁5`, `Ġ5`) or WordPiece's continuing prefix (`##5`) is a number token
  too. With the tokenizer left as it is there are such labels, and the package would not see them.
  What only `float` takes for a number (`1_000`, `1e5`, digits of other scripts) is none.
- Logits may be wider than the tokenizer, as those of T5 and Qwen are.
- Without a number in the labels the loss is 0 and connected to the graph: `backward` works.
- Results are float32 for bfloat16 and float16 logits, computed in float32: token values beyond 256
  keep their worth.
- A vocabulary of nothing but numbers is allowed.

B batch, T positions, V vocabulary, K number tokens, N positions whose label is a number token.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from ntl_lightning.losses import (
    IGNORE_INDEX,
    ExpectedValue,
    LossTerm,
    TokenStatistics,
    Wasserstein,
    token_statistics,
)
from ntl_lightning.numbers import NumberVocabulary
from ntl_lightning.numbers.runs import Role

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["NTLoss", "NTLossDotProduct", "NumberLevelLoss", "Reduction"]

Reduction = Literal["mean", "sum", "none"]


class _NumberTokenLoss(ABC):
    """What the three losses share: number tokens, checks, weights and reduction."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        vocab_size: int | None = None,
        digit_level: bool = True,
        reweigh: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.digit_level = digit_level
        self.reweigh = reweigh
        self.vocabulary = NumberVocabulary.from_tokenizer(
            tokenizer,
            width=vocab_size,
            kind="digits" if digit_level else "numbers",
            largest=None,
        )
        missing = set(range(10)) - set(self.vocabulary.values)
        if digit_level and missing:
            raise ValueError(
                f"digit_level=True needs the ten digits as tokens, but the tokenizer lacks "
                f"{', '.join(map(str, sorted(missing)))}; use digit_level=False or another one"
            )
        self._tables: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def _numbers(self, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Ids (K,) of the number tokens and values (V,) of all, moved to a device once."""
        key = (width, device)
        if key not in self._tables:
            values = self.vocabulary.value_table().to(torch.float32)
            padding = torch.full((max(width - len(values), 0),), math.nan)
            self._tables[key] = (
                torch.tensor(self.vocabulary.token_ids, device=device),
                torch.cat([values, padding])[:width].to(device),
            )
        return self._tables[key]

    @abstractmethod
    def _losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Losses (n,) and the indices (n,) of their positions among the B * T."""

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        loss_weights: Tensor | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
    ) -> Tensor:
        """The loss of labels that are aligned with the logits; nothing is shifted here.

        Args:
            logits: (B, T, V) floats.
            labels: (B, T) int64.
            loss_weights: (B, T), not negative: factors on the losses. With `mean` the weighted sum
                is divided by the sum of the weights of the numbers.
            reduction: `mean` over the numbers, `sum`, or `none`.
            ignore_index: Label of positions that are no target.

        Returns:
            () for `mean` and `sum`, (B, T) for `none` with 0 where there is no number; float32,
            float64 for float64 logits. 0, connected to the graph, if there is no number.

        Raises:
            ValueError: If shapes disagree, the logits are not as wide as `vocab_size` or too narrow
                for the number tokens, a weight is negative or the reduction unknown.
            TypeError: If the logits are not floats or the labels not int64.
        """
        self._check(logits, labels, loss_weights)
        if reduction not in get_args(Reduction):
            raise ValueError(
                f"reduction must be one of {', '.join(get_args(Reduction))}, got {reduction!r}"
            )
        labels = labels.masked_fill(labels == ignore_index, IGNORE_INDEX)
        losses, positions = self._losses(logits, labels)
        weights = torch.ones_like(losses)
        if loss_weights is not None:
            weights = loss_weights.to(losses).reshape(-1).index_select(0, positions)
        losses = losses * weights
        if reduction == "none":
            nothing = losses.new_zeros(labels.numel())
            return nothing.index_copy(0, positions, losses).view(labels.shape)
        if reduction == "sum":
            return losses.sum()
        return losses.sum() / weights.sum().clamp(min=torch.finfo(losses.dtype).eps)

    def forward(
        self,
        logits: Tensor,
        labels: Tensor,
        loss_weights: Tensor | None = None,
        reduction: Reduction = "mean",
        ignore_index: int = IGNORE_INDEX,
    ) -> Tensor:
        """The same as calling the loss."""
        return self(logits, labels, loss_weights, reduction, ignore_index)

    def _check(
        self, logits: Tensor, labels: Tensor | None = None, loss_weights: Tensor | None = None
    ) -> None:
        if logits.dim() != 3 or not logits.numel():
            raise ValueError(f"logits must be (B, T, V) and not empty, got {tuple(logits.shape)}")
        if not logits.is_floating_point():
            raise TypeError(f"logits must be floats, got {logits.dtype}")
        width, largest = logits.shape[-1], self.vocabulary.token_ids[-1]
        if self.vocab_size is not None and width != self.vocab_size:
            raise ValueError(
                f"the logits are {width} wide, but vocab_size is {self.vocab_size}; leave it out"
            )
        if width <= largest:
            raise ValueError(
                f"the logits are {width} wide, but the tokenizer has a number token with id "
                f"{largest}; give the tokenizer of this model"
            )
        if labels is None:
            return
        if labels.dtype != torch.long:
            raise TypeError(f"labels must be int64, got {labels.dtype}")
        for name, tensor in (("labels", labels), ("loss_weights", loss_weights)):
            if tensor is not None and tensor.shape != logits.shape[:-1]:
                raise ValueError(
                    f"{name} must be (B, T) = {tuple(logits.shape[:-1])}, got {tuple(tensor.shape)}"
                )
        if loss_weights is not None and (loss_weights < 0).any():
            raise ValueError("loss_weights must not be negative")

    def _statistics(self, logits: Tensor, labels: Tensor) -> tuple[TokenStatistics, Tensor]:
        """Statistics of the N positions with a number label, and their indices (N,)."""
        width = logits.shape[-1]
        number_ids, value_table = self._numbers(width, logits.device)
        rows, labels = logits.reshape(-1, width), labels.reshape(-1)
        positions = torch.isin(labels, number_ids).nonzero().squeeze(-1)
        labels = labels.index_select(0, positions)
        if not self.reweigh:
            # Text tokens play no part: the number tokens alone are as good as a vocabulary.
            rows = rows.index_select(1, number_ids)
            labels = torch.searchsorted(number_ids, labels)
            value_table = value_table.index_select(0, number_ids)
            number_ids = torch.arange(len(number_ids), device=logits.device)
        rows = rows.index_select(0, positions)
        return token_statistics(rows, labels, number_ids, value_table), positions


class NTLoss(_NumberTokenLoss):
    """NTL-WAS as `ntloss.NTLoss`: `sum_k q_k |v_k - y|` over the number tokens, see `Wasserstein`.

    With m the share of the whole softmax on number tokens and D the largest distance, `reweigh`
    makes it `m * loss + (1 - m) * 1.01 * D`. Source: arXiv 2411.02083, and the package.

    Args:
        tokenizer: A tokenizer of transformers; it is not changed.
        vocab_size: Width of the logits, to be checked. None: any that holds the number tokens.
        digit_level: Only single digits are number tokens. False: every token that is an ASCII
            number, also with sign and point.
        reweigh: Make mass on text tokens cost 1.01 times the largest distance. The paper does not,
            the package does.
        squash_factor: See `Wasserstein`; the package refuses 1.

    Raises:
        ValueError: If the tokenizer has no number token or, at digit level, not all ten digits, if
            one is beyond `vocab_size`, or `squash_factor` is below 1.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        vocab_size: int | None = None,
        digit_level: bool = True,
        reweigh: bool = True,
        squash_factor: float | None = None,
    ) -> None:
        super().__init__(tokenizer, vocab_size, digit_level, reweigh)
        self.squash_factor = squash_factor
        self._term = Wasserstein(reweigh=reweigh, squash_factor=squash_factor)

    def _losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        statistics, positions = self._statistics(logits, labels)
        return self._term.per_position(statistics), positions


@dataclass(frozen=True)
class _ErrorOfExpectedValue(LossTerm):
    """A function of the expected value and the label's value."""

    function: Callable[..., Tensor] = functional.mse_loss
    reweigh: bool = False

    def per_position(self, statistics: TokenStatistics) -> Tensor:
        """The function at each position, (N,)."""
        loss = self.function(statistics.expected_value(), statistics.label_values, reduction="none")
        if not self.reweigh:
            return loss
        least, most = statistics.number_values.aminmax()
        worst = torch.maximum(self.function(least, most).abs(), self.function(most, least).abs())
        mass = statistics.number_mass
        return mass * loss + (1 - mass) * 1.01 * worst


# Power and delta where a term has the same function. It takes the mean of the errors, not the error
# of the mean, which is exactly 0 for a sure answer.
_AS_TERM: dict[Callable[..., Tensor], tuple[float, float | None]] = {
    functional.mse_loss: (2.0, None),
    functional.l1_loss: (1.0, None),
    functional.huber_loss: (2.0, 1.0),
    functional.smooth_l1_loss: (2.0, 1.0),
}


class NTLossDotProduct(_NumberTokenLoss):
    """NTL-L_p as `ntloss.NTLossDotProduct`: an error of the expected value `sum_k q_k v_k`.

    `reweigh` is as in `NTLoss`, with the largest error of two number tokens in place of the largest
    distance. Source: arXiv 2411.02083, and the package. Mind that half of the mass on 4 and half on
    6 costs nothing for the label 5.

    Args:
        tokenizer: See `NTLoss`.
        vocab_size: See `NTLoss`.
        digit_level: See `NTLoss`.
        reweigh: See `NTLoss`.
        loss_function: Called with expected and true values (N,) and `reduction="none"`, gives the
            losses (N,): `torch.nn.functional.mse_loss`, `l1_loss`, `huber_loss` or your own.

    Raises:
        ValueError: See `NTLoss`.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        vocab_size: int | None = None,
        digit_level: bool = True,
        reweigh: bool = True,
        loss_function: Callable[..., Tensor] = functional.mse_loss,
    ) -> None:
        super().__init__(tokenizer, vocab_size, digit_level, reweigh)
        self.loss_function = loss_function
        self._term: LossTerm = _ErrorOfExpectedValue(function=loss_function, reweigh=reweigh)
        if loss_function in _AS_TERM:
            power, delta = _AS_TERM[loss_function]
            self._term = ExpectedValue(power=power, huber_delta=delta, reweigh=reweigh)

    def _losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        statistics, positions = self._statistics(logits, labels)
        return self._term.per_position(statistics), positions

    def predict_numbers(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Expected value, and share of the whole softmax on number tokens, at every position.

        Args:
            logits: (B, T, V) floats.

        Returns:
            Both (B, T), float32 or (for float64 logits) float64.

        Raises:
            ValueError: If the logits do not fit the tokenizer, see `NTLoss`.
            TypeError: If they are not floats.
        """
        self._check(logits)
        number_ids, value_table = self._numbers(logits.shape[-1], logits.device)
        any_number = number_ids[0].expand(logits.shape[:-1])
        statistics = token_statistics(logits, any_number, number_ids, value_table)
        shape = logits.shape[:-1]
        return statistics.expected_value().view(shape), statistics.number_mass.view(shape)


class NumberLevelLoss(NTLossDotProduct):
    """The error of whole numbers as `ntloss.NumberLevelLoss`, in [0, 1].

    A number is a run of adjacent digit labels; a digit with a space mark begins a new one. With x
    the number that the digits' expected values make up and y the true one:
    `|x - y| / (|x| + |y| + eps)`, counted once, at the number's first digit. Signs are passed over,
    and a point is never one: 12.34 is 12 and 34, or with `float_level` 1234. `reweigh` takes the
    mass at the first digit, and the largest error is 1. `ntl_lightning.losses.NumberLevel` reads
    points and thousands marks, and also learns numbers that are 0.

    Numbers of any length are exact; from its 21st digit on the package gives all leading digits
    the same power of ten.

    Args:
        tokenizer: See `NTLoss`.
        vocab_size: See `NTLoss`.
        float_level: A single point between two digits does not end a number.
        reweigh: See `NTLoss`.
        max_number_length: Without effect; the package prepares that many powers of ten.

    Raises:
        ValueError: See `NTLoss`.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        vocab_size: int | None = None,
        float_level: bool = False,
        reweigh: bool = True,
        max_number_length: int = 20,
    ) -> None:
        super().__init__(tokenizer, vocab_size, digit_level=True, reweigh=reweigh)
        self.float_level = float_level
        self.max_number_length = max_number_length
        self._forms: dict[torch.device, Tensor] = {}

    def _losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        statistics, positions = self._statistics(logits, labels)
        is_first = self._is_first(labels).reshape(-1).index_select(0, positions)
        number = is_first.cumsum(0) - 1
        firsts = is_first.nonzero().squeeze(-1)
        num_digits = torch.bincount(number)
        # In units of the leading digit, so that numbers of any length stay in range.
        behind = torch.arange(len(number), device=number.device) - firsts.index_select(0, number)
        power = 10.0 ** -behind.to(statistics.label_values.dtype)
        nothing = statistics.label_values.new_zeros(len(firsts))
        predicted = nothing.index_add(0, number, statistics.expected_value() * power)
        true = nothing.index_add(0, number, statistics.label_values * power)
        eps = torch.finfo(torch.float32).eps * 10.0 ** -(num_digits - 1).to(power.dtype)
        size = predicted.abs() + true.abs() + eps
        loss = (predicted - true).abs() / size.clamp(min=torch.finfo(size.dtype).tiny)
        if self.reweigh:
            mass = statistics.number_mass.index_select(0, firsts)
            loss = mass * loss + (1 - mass) * 1.01
        return loss, positions.index_select(0, firsts)

    def _is_first(self, labels: Tensor) -> Tensor:
        """(B, T) bool, for digit labels: does a number begin here?"""
        number_ids, _ = self._numbers(self.vocabulary.width, labels.device)
        if labels.device not in self._forms:
            self._forms[labels.device] = self.vocabulary.forms_table().to(labels.device)
        forms = self._forms[labels.device]
        is_digit = torch.isin(labels, number_ids)
        known = labels.clamp(0, len(forms) - 1)
        starts_word = forms[:, 2].bool()[known]
        follows = _shifted(is_digit)
        if self.float_level:
            point = (forms[:, 0] == Role.POINT)[known] & ~starts_word & (labels == known)
            follows = follows | _shifted(point & _shifted(is_digit))
        return ~follows | starts_word


def _shifted(mask: Tensor) -> Tensor:
    """(B, T) the mask one position to the right, false at the beginning of each row."""
    return functional.pad(mask, (1, 0))[..., :-1]

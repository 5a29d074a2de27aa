import pytest
import torch
from torch import Tensor

from ntl_lightning.losses import LossTerm, Objective
from ntl_lightning.numbers.vocabulary import NumberVocabulary


@pytest.fixture
def v15():
    """Ids 0 `<pad>`, 1 `a`, 2 `b`, 3 `c`, 4 `.`, 5..14 = `0`..`9`."""
    return NumberVocabulary.from_values({i + 5: float(i) for i in range(10)}, width=15)


@pytest.fixture
def v15d():
    """Ids 0..9 = `0`..`9`, then `<pad>`, `a`, `b`, `c`, `.`."""
    return NumberVocabulary.from_values({i: float(i) for i in range(10)}, width=15)


@pytest.fixture
def v1005():
    """Ids 0..4 text, 5..1004 = `0`..`999`."""
    return NumberVocabulary.from_values({i + 5: float(i) for i in range(1000)}, width=1005)


def assert_hidden_states_give_what_logits_give(
    term: LossTerm, vocabulary: NumberVocabulary, labels: Tensor, rows_per_chunk: int
) -> None:
    """One term's value and gradients, by both ways through an objective, in float64."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*labels.shape, 4, dtype=torch.float64, generator=generator)
    weight = torch.randn(vocabulary.width, 4, dtype=torch.float64, generator=generator)
    objective = Objective([term], vocabulary)
    answers = []
    for from_hidden in (False, True):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        result = (
            objective.from_hidden(h, w, labels, rows_per_chunk=rows_per_chunk)
            if from_hidden
            else objective(h @ w.T, labels)
        )
        result.loss.backward()
        answers.append((result.loss.detach(), h.grad, w.grad))
    for ours, want in zip(*answers, strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-9, atol=1e-12)

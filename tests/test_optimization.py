import math

import pytest
import torch
from torch import nn

from ntl_lightning.optimization import (
    Adafactor,
    AdamW,
    ConstantLR,
    CosineLR,
    InverseSquareRootLR,
)


def factors(schedule, num_steps, total):
    """The learning rate of each optimizer step, for a peak of 1."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = schedule.build(optimizer, total)
    seen = []
    for _ in range(num_steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_cosine_rises_to_the_peak_and_falls_to_the_final_factor():
    got = factors(CosineLR(warmup=0.1, final_factor=0.1), 100, 100)
    assert got[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    for step in (10, 33, 55, 99):
        cosine = (1 + math.cos(math.pi * (step - 9) / 90)) / 2
        assert got[step] == pytest.approx(0.1 + 0.9 * cosine)
    assert got[99] == pytest.approx(0.1)


def test_a_run_of_one_step_moves_the_weights():
    for schedule in (CosineLR(), ConstantLR(warmup=10), InverseSquareRootLR(warmup=10)):
        assert factors(schedule, 1, 1)[0] > 0


def test_warmup_may_be_in_steps_or_a_share_of_the_run():
    assert factors(CosineLR(warmup=5), 20, 50) == factors(CosineLR(warmup=0.1), 20, 50)


def test_inverse_square_root_falls_with_the_root_of_the_steps():
    got = factors(InverseSquareRootLR(warmup=4), 17, None)
    assert got[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, math.sqrt(4 / 5)])
    assert got[15] == pytest.approx(0.5)


def test_constant_stays_at_the_peak():
    assert factors(ConstantLR(warmup=2), 5, None) == pytest.approx([0.5, 1, 1, 1, 1])
    assert factors(ConstantLR(), 2, None) == pytest.approx([1, 1])


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


@pytest.mark.parametrize("spec", [AdamW(weight_decay=0.5), Adafactor(weight_decay=0.5)])
def test_matrices_decay_and_biases_and_norms_do_not(spec):
    model = Small()
    groups = spec.build(model).param_groups
    decay = {id(p): g["weight_decay"] for g in groups for p in g["params"]}
    assert decay == {
        id(model.linear.weight): 0.5,
        id(model.linear.bias): 0.0,
        id(model.norm.weight): 0.0,
        id(model.norm.bias): 0.0,
    }


def test_adamw_takes_one_step_as_torch_does():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    theirs.load_state_dict(ours.state_dict())
    one = AdamW(lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3).build(ours)
    other = torch.optim.AdamW(
        theirs.parameters(), lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3
    )
    for model, optimizer in ((ours, one), (theirs, other)):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AdamW(lr=0.0), "AdamW.lr must be a positive number, got 0.0"),
        (lambda: Adafactor(lr=math.nan), "Adafactor.lr must be a positive number, got nan"),
        (lambda: CosineLR(warmup=-1), "CosineLR.warmup must be a share of the run"),
        (lambda: CosineLR(warmup=2.5), "CosineLR.warmup must be .* got 2.5"),
        (lambda: CosineLR(final_factor=1.5), "final_factor must be 0 to 1, got 1.5"),
        (lambda: InverseSquareRootLR(warmup=0), "warmup must be above 0"),
        (lambda: ConstantLR(warmup=math.inf), "ConstantLR.warmup"),
        (lambda: factors(CosineLR(), 1, None), "the run has none; set trainer.max_steps"),
        (lambda: factors(ConstantLR(warmup=0.5), 1, None), "warmup=0.5 is a share of the run"),
    ],
)
def test_settings_that_cannot_work_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""Number-aware loss functions; usable without Lightning."""

from ntl_lightning.losses.objective import Objective, ObjectiveResult
from ntl_lightning.losses.schedules import (
    Constant,
    Cosine,
    LinearWarmup,
    StepRange,
    WeightSchedule,
)
from ntl_lightning.losses.terms import (
    CrossEntropy,
    ExpectedValue,
    LossTerm,
    Positions,
    Wasserstein,
)
from ntl_lightning.losses.token_statistics import (
    IGNORE_INDEX,
    TokenStatistics,
    token_statistics,
)

__all__ = [
    "IGNORE_INDEX",
    "Constant",
    "Cosine",
    "CrossEntropy",
    "ExpectedValue",
    "LinearWarmup",
    "LossTerm",
    "Objective",
    "ObjectiveResult",
    "Positions",
    "StepRange",
    "TokenStatistics",
    "Wasserstein",
    "WeightSchedule",
    "token_statistics",
]

"""Number-aware loss functions; usable without Lightning."""

from ntl_lightning.losses.distributions import gaussian_target, wasserstein_distance
from ntl_lightning.losses.objective import Objective, ObjectiveResult
from ntl_lightning.losses.schedules import (
    Constant,
    Cosine,
    LinearWarmup,
    StepRange,
    WeightSchedule,
)
from ntl_lightning.losses.soft_targets import (
    DiscretizedDistance,
    HLGauss,
    SmoothedCrossEntropy,
    hl_gauss_target,
)
from ntl_lightning.losses.terms import (
    CrossEntropy,
    ExpectedValue,
    LossTerm,
    NumberMass,
    Positions,
    RegressionAware,
    Wasserstein,
)
from ntl_lightning.losses.token_statistics import (
    IGNORE_INDEX,
    TokenStatistics,
    token_statistics,
)
from ntl_lightning.losses.whole_numbers import DigitEntropy, EarthMoverPlace, NumberLevel

__all__ = [
    "IGNORE_INDEX",
    "Constant",
    "Cosine",
    "CrossEntropy",
    "DigitEntropy",
    "DiscretizedDistance",
    "EarthMoverPlace",
    "ExpectedValue",
    "HLGauss",
    "LinearWarmup",
    "LossTerm",
    "NumberLevel",
    "NumberMass",
    "Objective",
    "ObjectiveResult",
    "Positions",
    "RegressionAware",
    "SmoothedCrossEntropy",
    "StepRange",
    "TokenStatistics",
    "Wasserstein",
    "WeightSchedule",
    "gaussian_target",
    "hl_gauss_target",
    "token_statistics",
    "wasserstein_distance",
]

"""Experiments: arms x seeds -> results, table, plot, and a claim that is code; see ``experiments/_template.py``."""

from jaxrl_llm.experiment.arms import Times
from jaxrl_llm.experiment.claims import (
    Claim,
    Part,
    above,
    below,
    close,
    conclude,
    exceeds_own,
    gains_more,
    greater,
    greater_than_share,
    grows_more,
    keeps,
    smaller,
    smaller_than_share,
    steadier,
)
from jaxrl_llm.experiment.cli import main
from jaxrl_llm.experiment.evidence.along import at, up_to
from jaxrl_llm.experiment.evidence.beds import Bed
from jaxrl_llm.experiment.results import ArmResult, Results
from jaxrl_llm.train.plan import Plan, Stage

__all__ = [
    "ArmResult", "Bed", "Claim", "Part", "Plan", "Results", "Stage", "Times", "above", "at", "below", "close",
    "conclude", "exceeds_own", "gains_more", "greater", "greater_than_share", "grows_more", "keeps", "main", "smaller",
    "smaller_than_share", "steadier", "up_to",
]  # fmt: skip

"""Shorter reasoning."""

# what ``python -m jaxrl_llm.experiment compare`` sets for this family: responses must have something to leave out
COMPARE = {"baseline": "thinkprune:unlimited", "bed": "long_reasoning"}

"""Shorter reasoning."""

# what ``python -m jaxrl_llm.experiment compare`` sets for this family: responses must have something to leave out
COMPARE = {"baseline": "thinkprune:unlimited", "data": "chain", "levels": (2, 3, 4), "max_new_tokens": 48}

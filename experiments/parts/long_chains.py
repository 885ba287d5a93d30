"""Composed reasoning of free length as a preset, for every paper whose claim can show there.

The bundled models have read chains of at most five operations. Of six they leave operations out and stop early: 28
tokens in the place of 38. Right answers have to be worked out in full, so that learning lengthens the responses. A base
of one right answer in five, where a constant guess gets one in six; 60 updates take it to seven in ten, less than a
tenth of the gain before the first of ten evaluations. One seed of sixteen never leaves the start, where most right
answers are guesses, and two of sixteen with half of the problems a step: the bed is not certified for that
(`results/beds/long_reasoning.certificate.json`).
"""

EMBEDDED = {
    "data": "chain", "levels": (6,), "train_problems": 2048, "steps": 60, "eval_every": 6, "prompts_per_step": 16,
    "group_size": 8, "max_new_tokens": 64, "learning_rate": 3e-4, "eval_problems": 192,
}  # fmt: skip

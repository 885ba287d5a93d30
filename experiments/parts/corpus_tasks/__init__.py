"""Tasks of the pre-training text of the embedded base models that nothing else trains on."""

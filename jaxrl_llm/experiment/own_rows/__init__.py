"""Experiments that are written for an embedded world, on a model and rows of one's own."""

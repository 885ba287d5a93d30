"""Learning from a table of responses that nobody adds to."""

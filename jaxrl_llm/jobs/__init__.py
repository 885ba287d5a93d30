"""Commands of the front door that train: each an experiment with one arm, so that every option of a run is theirs."""

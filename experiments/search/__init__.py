"""Better answers from the same model by more work when it is asked."""

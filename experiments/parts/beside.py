"""A second model beside the policy that reads and writes the same tokens."""

from jaxrl_llm.data.pieces import same_vocabulary
from jaxrl_llm.errors import UserError
from jaxrl_llm.run import parts as job


def load_beside(flag: str, name: str, model: job.Model, *, tokens: int) -> job.Model:
    """The model ``name`` of the command line's ``flag``, on the mesh of ``model``.

    Args:
      tokens: that it must be able to read and write in one row.

    Raises:
      UserError: for a folder that holds no model, one of another vocabulary, or one of too few positions.
    """
    try:
        by = job.load_model(name, mesh=model.mesh)
    except UserError as error:
        raise UserError(f"{flag} {name}: {str(error).removeprefix(f'--model {name}: ')}") from error
    if not same_vocabulary(by.tokenizer, model.tokenizer):
        raise UserError(f"{flag} {name} has another vocabulary than --model; give one of its family")
    if tokens > by.config.max_positions:
        raise UserError(
            f"{flag} {name} has {by.config.max_positions} positions, and a row takes up to {tokens}; lower "
            "--max-new-tokens, or give another model"
        )
    return by

"""The one exception for mistakes of the user: one clear line with the remedy, exit code 2 on a command line."""


class UserError(ValueError):
    """Bad input: the message names the argument, the value and the remedy."""


class DataError(UserError):
    """A malformed data file: the message names the file and the line."""

"""The one exception a user is meant to read."""


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, what was expected, what to do.

    The command line prints it without a traceback and exits with a status other than 0.
    """

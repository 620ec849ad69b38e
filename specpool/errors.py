"""Exceptions that more than one module raises; everything else raises Python's own."""


class UnsupportedAccess(NotImplementedError):
    """A pool was asked for something its storage cannot serve; the message names what to call.

    It is a ``NotImplementedError``, so that code written for engines that raise that keeps working.
    """

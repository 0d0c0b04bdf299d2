"""Texts in few characters, to be compared between processes."""

import hashlib


def digest(text: str) -> str:
    """16 hex digits that are equal where the text is.

    Example:
        >>> digest("transfer")
        'edfdd1996efb92c5'
    """
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

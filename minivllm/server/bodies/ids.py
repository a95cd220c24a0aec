"""Names of answers and of their parts."""

import secrets


def new_id(prefix: str) -> str:
    """A name for an answer, unguessable and never a client's own."""
    return f"{prefix}-{secrets.token_hex(16)}"

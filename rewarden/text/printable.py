"""Text made safe to show: a terminal acts on control characters, and some others cannot be seen."""


def printable(text: str, *, kept: str = "\n\t") -> str:
    """The text with each character that cannot be printed written as Python's escape, such as \\x1b; those in `kept` stay."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)

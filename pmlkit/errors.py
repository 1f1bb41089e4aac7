"""The one exception that stands for bad input: its message names the value, the place and the remedy."""


class PmlkitError(Exception):
    """Bad input or an impossible request. The command line prints the message and exits with status 2."""


def nearest(word: str, known: list[str]) -> str:
    """Return a remedy for an unknown word: one it begins, else the closest known one, else the whole list."""
    import difflib

    longer = [name for name in known if word and name.startswith(word)]
    close = longer or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known: " + (", ".join(sorted(known)) or "none")

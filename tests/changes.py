"""Changes of an artifact's files, by which tests break it."""

from __future__ import annotations

from collections.abc import Callable

Files = dict[str, bytes]
Change = Callable[[Files], None]


def put(name: str, data: bytes | Callable[[], bytes]) -> Change:
    """A change that replaces one file."""
    return lambda files: files.update({name: data() if callable(data) else data})


def swap(name: str, old: bytes, new: bytes) -> Change:
    """A change that replaces text in one file."""

    def change(files: Files) -> None:
        assert old in files[name], f"{old!r} is not in {name}: the test would break nothing"
        files[name] = files[name].replace(old, new)

    return change


def drop(name: str) -> Change:
    """A change that takes one file away."""

    def change(files: Files) -> None:
        del files[name]

    return change

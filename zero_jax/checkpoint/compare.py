"""Whether a checkpoint is of the state that it is to be read into, before anything is read."""

from collections.abc import Collection

from .arrays import Filed
from .subject import Subject

SHOWN = 5
"""Leaves that a letter lists of each kind."""


def sources(
    there: dict[str, Filed], subject: Subject, partial: Collection[str] | None
) -> dict[str, str]:
    """Name of a leaf that is read -> its name in the checkpoint.

    They differ where a state has master copies and the checkpoint has none: its parameters are
    read, then.
    """
    found = {}
    for name in subject.names:
        own = name.removeprefix(subject.prefix)
        tree, _, path = own.partition("/")
        wide, narrow = (f"{subject.prefix}{t}/{path}" for t in ("master", "params"))
        if partial is None:
            found[name] = name
        elif tree == "master" and _begins(f"params/{path}", partial):
            found[name] = wide if wide in there else narrow
        elif _begins(own, partial):
            found[name] = wide if tree == "params" and wide in there else name
    return found


def check_same(
    there: dict[str, Filed], subject: Subject, partial: Collection[str] | None = None
) -> None:
    """Check names, shapes and dtypes.

    Raises:
      ValueError: they differ; the letter lists the leaves.
    """
    expected, found = subject.index, sources(there, subject, partial)
    if partial is not None and not found:
        trees = {name.removeprefix(subject.prefix).split("/")[0] for name in expected}
        raise ValueError(
            f"partial={sorted(partial)}: no leaf's name begins so; they begin with "
            f"{', '.join(sorted(trees))}."
        )
    missing = [name for name, source in found.items() if source not in there]
    extra = [] if partial is not None else [n for n in _own(there, subject) if n not in expected]
    shapes, dtypes = [], []
    for name, source in found.items():
        if source not in there:
            continue
        ours, theirs = expected[name], there[source]
        if ours.shape != theirs.shape or ours.key != theirs.key:
            shapes.append(f"{name} is {_text(theirs)}, expected {_text(ours)}")
        elif ours.dtype != theirs.dtype and partial is None:
            dtypes.append(f"{name} is {_text(theirs)}, expected {_text(ours)}")
    kinds = {
        "it has not": missing,
        "it has, and the state has not": extra,
        "of another shape": shapes,
        "of another dtype": dtypes,
    }
    said = [f"  {kind}: {_listed(names)}" for kind, names in kinds.items() if names]
    if said:
        raise ValueError(
            "checkpoint: it is of another model, optimizer or precision:\n"
            + "\n".join(said)
            + "\nLay the state out as the run did that saved it, or read a part: "
            'partial={"params"}.'
        )


def _own(there: dict[str, Filed], subject: Subject) -> list[str]:
    return [name for name in there if name.startswith(subject.prefix)]


def _begins(name: str, partial: Collection[str]) -> bool:
    return any(name == p or name.startswith(f"{p.rstrip('/')}/") for p in partial)


def _listed(names: list[str]) -> str:
    more = f"; and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return "; ".join(names[:SHOWN]) + more


def _text(filed: Filed) -> str:
    return f"{filed.dtype.name}{list(filed.shape)}{f' of {filed.key} keys' if filed.key else ''}"

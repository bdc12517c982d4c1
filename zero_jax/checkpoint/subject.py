"""A training state as a checkpoint sees it: named leaves and where each lies; and one made of them.

A container of states (a GAN's two) has the names of each under its key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from ..anatomy import Anatomy, is_container, map_states, open_in_step
from ..layout import Layout
from ..offload.disk_array import DiskArray
from ..offload.disk_state import settle
from ..offload_policy import Nvme
from ..placement import Placement
from ..train_state import layout_of
from .arrays import Filed
from .leaves import filed_of, names_of, places_of

Make = Callable[[list[str], list[Placement]], list[Any]]


@dataclass(frozen=True)
class Subject:
    """One training state.

    Attributes:
      anatomy: the state, taken apart; arrays or `ShapeDtypeStruct`s.
      layout: of it.
      prefix: of the names of its leaves.
    """

    anatomy: Anatomy
    layout: Layout
    prefix: str = ""

    @property
    def names(self) -> list[str]:
        """Of all leaves, in the order params, opt_state, other."""
        return [self.prefix + name for name in names_of(self.layout)]

    @property
    def places(self) -> list[Placement]:
        """Of all leaves."""
        return places_of(self.layout)

    @property
    def leaves(self) -> list[Any]:
        """All leaves."""
        return jax.tree.leaves((self.anatomy.params, self.anatomy.opt_state, self.anatomy.other))

    @property
    def index(self) -> dict[str, Filed]:
        """Name -> how the leaf looks in files.

        Raises:
          ValueError: two leaves have one name.
        """
        found: dict[str, Filed] = {}
        for name, place in zip(self.names, self.places, strict=True):
            if name in found:
                raise ValueError(
                    f"state: two leaves are called {name}, which is their name in a checkpoint; "
                    "give one of them a key without '/'."
                )
            found[name] = filed_of(place)
        return found

    def made(self, make: Make) -> Any:
        """The state, of leaves that `make` returns for names and places, at rest."""
        names, places = self.names, self.places
        trees = self.anatomy.params, self.anatomy.opt_state, self.anatomy.other
        structure = jax.tree.structure(trees)

        def some(which: list[int]) -> list[Any]:
            return make([names[at] for at in which], [places[at] for at in which])

        if isinstance(self.layout.offload, Nvme):
            for x in self.leaves:
                if isinstance(x, DiskArray):
                    x.disk.close()
            made = settle(self.layout, self.anatomy.tx, some, existing="replace")
        else:
            made = some([*range(len(names))])
        return self.anatomy.close(*structure.unflatten(made))


def subjects_of(state: Any, tx: Any) -> list[Subject]:
    """The training states that a state is: itself, or each of a container."""
    found: list[Subject] = []
    for_each(state, tx, found.append)
    return found


def for_each(state: Any, tx: Any, function: Callable[[Subject], Any]) -> Any:
    """`function` of each training state; a container's results in a container of its type."""
    if not is_container(state):
        return function(_subject(state, tx))
    keys = iter(state if isinstance(state, Mapping) else range(len(state)))

    def one(member: Any, its_tx: Any) -> Any:
        return function(replace(_subject(member, its_tx), prefix=f"{next(keys)}/"))

    return map_states(one, state, tx)


def _subject(state: Any, tx: Any) -> Subject:
    layout = layout_of(state if tx is None else tx)
    return Subject(open_in_step(state, tx), layout)

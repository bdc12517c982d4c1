"""The stages of ZeRO: which of the three model states are partitioned.

ZeRO (Rajbhandari et al., 2020, arXiv 1910.02054), section 5: stage 1 is P_os, stage 2 is P_os+g,
stage 3 is P_os+g+p; stage 0 is plain data parallelism. A stage is three yes-or-no answers and
nothing else; `layout` and `optimizer` ask them, no other room does.
"""

import enum


class Stage(enum.IntEnum):
    """How far the model states are partitioned over the data axis."""

    REPLICATED = 0
    OPTIMIZER = 1
    GRADIENTS = 2
    PARAMETERS = 3

    @property
    def partitions_optimizer(self) -> bool:
        """Whether each device holds 1/N of the optimizer state (P_os)."""
        return self >= Stage.OPTIMIZER

    @property
    def partitions_gradients(self) -> bool:
        """Whether each device keeps 1/N of the gradients (P_g)."""
        return self >= Stage.GRADIENTS

    @property
    def partitions_parameters(self) -> bool:
        """Whether each device holds 1/N of the parameters at rest (P_p)."""
        return self >= Stage.PARAMETERS


def parse_stage(stage: object) -> Stage:
    """Read a stage from what a user passed.

    Args:
      stage: an integer 0 to 3, or a `Stage`.

    Raises:
      TypeError: `stage` is not an integer (a bool or a string is not one).
      ValueError: `stage` is an integer outside 0 to 3.

    >>> parse_stage(2)
    <Stage.GRADIENTS: 2>
    """
    if isinstance(stage, bool) or not isinstance(stage, int):
        raise TypeError(
            f"stage={stage!r} is a {type(stage).__name__}; expected the integer 0, 1, 2 or 3."
        )
    if stage not in tuple(Stage):
        raise ValueError(
            f"stage={stage} does not exist; expected 0 (replicated), 1 (optimizer state "
            "partitioned), 2 (and gradients) or 3 (and parameters)."
        )
    return Stage(stage)

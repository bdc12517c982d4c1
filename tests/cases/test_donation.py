"""Donation is really used: the state's own buffers become the next state."""

import jax
import pytest
from cases import table


@pytest.mark.parametrize("stage", [1, 2, 3])
@table.programs("c01", "c03", "c05")
def test_the_state_is_aliased(name, stage):
    """That no donated buffer was unusable would be a warning, and warnings are errors here."""
    run = table.run(name, stage)
    kept = [x for x in jax.tree.leaves(run.opened.state) if not x.is_deleted()]
    assert all(x.shape == (1,) for x in kept)  # adafactor's placeholders, which no step reads
    batch = run.opened.place(run.opened.built["batch"](0))
    memory = run.step.lower(run.state, batch).compile().memory_analysis()
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(run.state))
    assert memory.alias_size_in_bytes >= 0.95 * held

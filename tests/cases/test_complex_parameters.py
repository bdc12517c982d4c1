"""Complex parameters: their moments keep the dtypes that optax gives them, and both parts train."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import table
from cases.measures import relative_error


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_first_moment_is_complex_and_the_second_as_optax_makes_it(stage):
    run, reference = table.run("c11", stage), table.run("c11", None)
    params, opt_state = run.opened.read(run.state)
    adam, plain = opt_state[0], reference.opened.read(reference.state)[1][0]
    for moment in ("mu", "nu"):
        found, expected = (jax.tree.leaves(getattr(s, moment)) for s in (adam, plain))
        assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert adam.mu["phase"].dtype == jnp.complex64
    assert params["phase"].shape == adam.mu["phase"].shape == ()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_imaginary_parts_train(stage):
    run, reference = table.run("c11", stage), table.run("c11", None)
    imaginary = [jax.tree.map(np.imag, r.end) for r in (run, reference)]
    assert relative_error(*imaginary) <= 2e-5
    assert run.end["phase"].imag != run.start["phase"].imag

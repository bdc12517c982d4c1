"""A GAN: two models, two optimizers, one step through both."""

import jax
from cases import table
from cases.measures import change_error, copy


def test_the_generators_half_step_reads_the_discriminator_and_leaves_it_alone():
    """At stage 3 it differentiates through parameters that lie in parts."""

    def half(stage):
        opened = table.opened("c10", stage)
        before = copy(opened.state)
        batch = opened.place(opened.built["batch"](0))
        state, loss = jax.jit(opened.built["gen_half"])(opened.state, batch)
        return before, copy(state), float(loss)

    before, after, loss = half(3)
    plain_before, plain_after, plain_loss = half(None)
    for field in ("params", "opt"):
        pairs = zip(*(jax.tree.leaves(s[field]["disc"]) for s in (before, after)), strict=True)
        assert all(b.tobytes() == a.tobytes() for b, a in pairs)
    assert abs(loss - plain_loss) <= 5e-6 * plain_loss
    start, end = (s["params"]["gen"] for s in (plain_before, plain_after))
    assert change_error(start, after["params"]["gen"], end) <= 2e-5


def test_the_last_bias_of_one_element_trains():
    for stage in (1, 2, 3):
        run, reference = table.run("c10", stage), table.run("c10", None)
        biases = [r.end["disc"]["Dense_0"]["bias"] for r in (run, reference)]
        assert biases[0].shape == (1,) and biases[0] != run.start["disc"]["Dense_0"]["bias"]
        assert abs(biases[0] - biases[1]) <= 2e-5 * abs(biases[1])

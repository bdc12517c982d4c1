"""The walk's peaks of explicit steps, each rule on a step that has little but it.

Names of sizes: R rows of a device, D and H widths, K a large width, L layers; `F` bytes of a float.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from zero_jax.planning.liveness import temporaries_bytes
from zero_jax.planning.traced import trace

MESH = Mesh(np.array(jax.devices()), ("data",))
PLATFORMS = ("cpu", "cuda", "tpu")
R, D, H, K, L, F = 4, 8, 32, 64, 3, 4


def array(*shape, spec=(), dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, P(*spec)))


def constrain(x, *spec):
    return lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def explicit_peak(platform, f, state, specs, out):
    """The peak of a step whose batch, R rows a device, goes into a `shard_map` of `f`."""
    batch = array(8 * R, D, spec=("data",))

    def step(state, batch):
        specs_in = (specs, P("data"))
        mapped = jax.shard_map(f, mesh=MESH, in_specs=specs_in, out_specs=out, check_vma=False)
        return mapped(state, batch)

    region = trace(step, state, batch)
    assert region.is_explicit
    return temporaries_bytes(region, platform)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_is_gathered_is_a_buffer(platform):
    """Beside the product that reads it, with the shapes of one device."""

    def f(w, x):
        return (x @ lax.all_gather(w, "data", axis=1, tiled=True)).sum()

    whole, product = D * K * F, R * K * F
    found = explicit_peak(platform, f, array(D, K, spec=(None, "data")), P(None, "data"), P())
    assert found == whole + product


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_gradient_is_whole_until_it_is_scattered(platform):
    """(D, K) in another dtype than its product: converted, then an eighth of it is kept."""

    def f(w, x):
        g = (x.T @ (x @ w)).astype(jnp.float16)
        return lax.psum_scatter(g, "data", scatter_dimension=1, tiled=True)

    product, gradient, wire, piece = R * K * F, D * K * F, D * K * 2, D * K // 8 * 2
    wide = 2 if platform == "cpu" else 1  # no product makes halves here, but they count as such
    most = max(product + gradient, gradient + wire, wire + piece)
    found = explicit_peak(platform, f, array(D, K), P(), P(None, "data"))
    assert most <= found <= gradient + wide * (wire + piece)


def test_on_gpu_the_first_recomputation_begins_before_the_loss_ends():
    """A loop that scatters, and makes (R, H) from what was kept, without its carry.

    Between the stack and the loop there is a product of many columns, by itself.
    """

    def f(state, x):
        layers, large = state
        kept = jnp.stack([x @ w for w in layers])

        def body(carry, xs):
            w, x = xs
            hidden = jnp.tanh(x @ jnp.tile(w, (1, H // D)))
            g = carry.T @ hidden
            return carry * hidden[:, :D], lax.psum_scatter(g, "data", tiled=True)

        start = x * jnp.sin(kept[0] @ large).sum()
        last, grads = lax.scan(body, start, (layers, kept))
        return last.sum() + grads.sum()

    state = array(L, D, D), array(D, 100 * K)
    on_gpu, on_tpu = (explicit_peak(p, f, state, (P(), P()), P()) for p in ("cuda", "tpu"))
    assert on_gpu == on_tpu + R * H * F


def test_on_cpu_a_barrier_does_not_keep_a_product_for_later():
    """The second product is wanted after the loss only, and waits for no scatter."""

    def f(state, x):
        large, small, back = state
        loss = jnp.zeros((R, 100 * K)).at[jnp.arange(R)].add(x @ large).max()
        x, loss = lax.optimization_barrier((x, loss))
        return ((x @ small) * loss) @ back

    state = array(D, 100 * K), array(D, H), array(H, D)
    specs = (P(), P(), P())
    on_cpu, on_gpu = (explicit_peak(p, f, state, specs, P("data")) for p in ("cpu", "cuda"))
    assert on_cpu == on_gpu + R * H * F


@pytest.mark.parametrize(("platform", "copied"), [("cpu", 1), ("cuda", 0), ("tpu", 0)])
def test_on_cpu_moments_that_may_stay_are_copied(platform, copied):
    """The new moment is read by the parameter too; the new parameter by nobody else."""

    def f(state, x):
        return (x.sum() + state[0]).sum()

    def step(state, batch):
        mapped = jax.shard_map(
            f, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )
        keep = mapped(state, batch) > 0
        w, moment = (constrain(s) for s in state)
        new = moment * 0.9 + w
        return jnp.where(keep, w - new, w), jnp.where(keep, new, moment)

    size = 1024
    region = trace(step, (array(size), array(size)), array(8 * R, D, spec=("data",)))
    assert region.is_explicit
    found = temporaries_bytes(region, platform)
    assert copied * size * F <= found < (copied + 1) * size * F

"""What a schedule hides, on events written out and on schedules that compilers made.

The accelerator of these tests multiplies at 1 GFLOP/s and sends 1 MB/s inside a node and 0.1 MB/s
outside, so that numbers stay short.
"""

from types import SimpleNamespace

import pytest
from reporting.hlo.texts import BF16, read, versions

from zero_jax.reporting import hlo
from zero_jax.reporting.schedule import (
    Done,
    Loop,
    Matmul,
    Start,
    Timing,
    covered_seconds,
    scheduled_flops,
    total_flops,
    transfer_seconds,
)

SLOW = SimpleNamespace(matmul_flops=1e9, link_bandwidth=1e6, network_bandwidth=1e5)


def test_flops_between_start_and_done():
    events = [
        Matmul(1),
        Start(0),
        Matmul(10),
        Start(1),
        Loop(3, [Start(2), Matmul(100), Done(2), Matmul(1000)]),
        Done(0),
        Matmul(10_000),
        Done(1),
    ]
    loop = 3 * (100 + 1000)
    assert scheduled_flops(events) == {0: 10 + loop, 1: loop + 10_000, 2: 100}
    assert total_flops(events) == 1 + 10 + loop + 10_000


def test_a_synchronous_transfer_is_not_covered():
    assert covered_seconds([Matmul(5), Start(0), Done(0), Matmul(5)], {0: 2.0}, 1) == {0: 0.0}


def test_each_product_covers_one_transfer_at_a_time():
    """Two transfers of 3 s and 2 s in flight over one product of 4 s: the first takes 3 of it."""
    events = [Start(0), Start(1), Matmul(4), Done(0), Done(1)]
    assert covered_seconds(events, {0: 3.0, 1: 2.0}, 1) == {0: 3.0, 1: 1.0}
    both = [Start(0), Start(1), Matmul(4), Done(0), Matmul(4), Done(1)]
    assert covered_seconds(both, {0: 3.0, 1: 2.0}, 1) == {0: 3.0, 1: 2.0}


def test_more_product_than_transfer_covers_no_more_than_the_transfer():
    covered = covered_seconds([Start(0), Matmul(9), Done(0)], {0: 3.0}, 1)
    assert Timing(3.0, covered[0]).exposed_seconds == 0


def test_a_loop_leaves_to_transfers_outside_what_its_own_did_not_use():
    """Each of 5 trips multiplies 3 s and hides 2 s of its own transfer: 5 s are left over."""
    inner = [Start(1), Matmul(3), Done(1)]
    events = [Start(0), Loop(5, inner), Done(0)]
    assert covered_seconds(events, {0: 50.0, 1: 2.0}, 1) == {0: 5.0, 1: 2.0}


@pytest.mark.parametrize(
    ("kind", "groups", "per_node", "seconds"),
    [
        ("all-gather", [range(8)], None, 8.0),  # 8 MB at 1 MB/s
        ("all-gather", [range(8)], 8, 8.0),
        ("all-gather", [range(8)], 4, 8 / 4 / 0.1),  # 4 ports of a node share the ring's edge
        ("all-gather", [[0, 4], [1, 5], [2, 6], [3, 7]], 4, 8 / 0.1),  # each group has one port
        ("all-gather", [[0, 1], [2, 3]], 4, 8.0),
        ("all-to-all", [range(8)], 4, 8 * 4 / 7 / 0.1),  # 4 of 7 parts are for the other node
        ("collective-permute", [(0, 1), (1, 2)], 4, 8.0),
        ("collective-permute", [(3, 4)], 4, 8 / 0.1),
    ],
)
def test_transfers_inside_a_node_and_between(kind, groups, per_node, seconds):
    found = transfer_seconds(kind, 8_000_000, [tuple(g) for g in groups], SLOW, per_node)
    assert found == pytest.approx(seconds)


@versions("h100_prefetch", "v5e_prefetch", "tpu7x_prefetch")
def test_a_gather_that_is_prefetched_is_covered(name):
    """Of 7 gathers 6 run beside the product of the layer before; the first has to be waited for."""
    n = 16 if name.startswith("v5e") else 8
    product = 2 * 1024 * 4096 * 4096
    sent = 4096 * 4096 * BF16 * (n - 1) // n
    audit = hlo.audit(read(name), accelerator=SLOW)
    first, others = audit.collectives
    assert (first.trips, first.matmul_flops) == (1, 0)
    assert (others.trips, others.matmul_flops, others.is_async) == (6, product, True)
    assert audit.matmul_flops == 7 * product
    # 34 s of product cover 29 s or 31 s of transfer: sent / 1e6 < product / 1e9.
    assert audit.transfer_seconds == pytest.approx(7 * sent / 1e6)
    assert audit.exposed_seconds == pytest.approx(sent / 1e6)
    fast = SimpleNamespace(matmul_flops=4e9, link_bandwidth=1e6, network_bandwidth=1e5)
    exposed = sent / 1e6 + 6 * (sent / 1e6 - product / 4e9)
    assert hlo.audit(read(name), accelerator=fast).exposed_seconds == pytest.approx(exposed)
    assert "of them exposed" in str(audit)


@versions("h100_loops", "cpu_loops", "v5p_loops", "tpu7x_loops")
def test_a_gather_in_the_loop_that_uses_it_is_exposed(name):
    audit = hlo.audit(read(name), accelerator=SLOW)
    assert not any(c.matmul_flops for c in audit.collectives)
    assert audit.exposed_seconds == audit.transfer_seconds
    assert audit.transfer_seconds == pytest.approx(audit.bytes_on_wire / 1e6)
    assert audit.matmul_flops == 3 * 5 * (2 * 256 * 1024 * 1024)


def test_nothing_is_covered_without_a_schedule():
    """Instructions that are not scheduled are printed in an order that says nothing."""
    text = read("h100_prefetch_0.12")
    unscheduled = text.replace("is_scheduled=true, ", "")
    assert unscheduled != text
    audit = hlo.audit(unscheduled, accelerator=SLOW)
    assert audit.exposed_seconds == audit.transfer_seconds
    assert not any(c.matmul_flops for c in audit.collectives)


def test_a_start_that_waits_covers_nothing():
    text = read("h100_prefetch_0.12")
    waiting = text.replace('"is_sync":false', '"is_sync":true')
    assert waiting != text
    audit = hlo.audit(waiting, accelerator=SLOW)
    assert not any(c.is_async or c.matmul_flops for c in audit.collectives)
    assert audit.exposed_seconds == audit.transfer_seconds


@versions("v5e_gathered_product")
def test_a_ring_beside_its_products(name):
    """8192 x 8192 by 8192 x 512 in 4 trips: the compiler puts both products of a trip beside the
    second pair of its permutes, so that the first pair and the permute before the loop show."""
    product = 2 * 8192 * 8192 * 512
    piece = 8192 * 512 * BF16
    assert product // 4 / 1e9 > 2 * piece / 1e6
    audit = hlo.audit(read(name), accelerator=SLOW)
    assert audit.matmul_flops == product
    assert [c.matmul_flops for c in audit.collectives] == [0, 0, 0] + [product // 4] * 2
    assert audit.transfer_seconds == pytest.approx((1 + 4 * 4) * piece / 1e6)
    assert audit.exposed_seconds == pytest.approx((1 + 4 * 2) * piece / 1e6)


@versions("cpu_products", "h100_products", "v5p_products")
def test_products_are_the_same_on_all_targets(name):
    """As dot, as cuBLAS call (Triton switched off), and as convolutions with dilated windows."""
    scores = values = 4 * 3 * (2 * 256 * 256 * 128)
    projection = 2 * (4 * 256) * (3 * 128) * 512
    assert hlo.audit(read(name)).matmul_flops == scores + values + projection


@versions("cpu_constraints", "h100_constraints", "v5p_constraints", "v5e_constraints")
def test_products_of_three_microbatches(name):
    """Each device multiplies (2048, 512) by (512, 1024), in whatever pieces."""
    assert hlo.audit(read(name)).matmul_flops == 3 * 2 * 2048 * 512 * 1024

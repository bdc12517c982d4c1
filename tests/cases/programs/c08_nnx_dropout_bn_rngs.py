"""C08: NNX image model with BatchNorm, Dropout (typed PRNG keys and uint32 counters live in
the module) and nnx.Optimizer(wrt=nnx.Param).  rate=0 makes it deterministic for parity runs.
"""

import numpy as np
import optax
from flax import nnx

CASE = "C08"
B = 16


class Net(nnx.Module):
    def __init__(self, rate, rngs):
        self.conv = nnx.Conv(3, 14, (3, 3), rngs=rngs)
        self.bn = nnx.BatchNorm(14, momentum=0.9, rngs=rngs)
        self.fc1 = nnx.Linear(14 * 16, 50, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.fc2 = nnx.Linear(50, 7, rngs=rngs)

    def hidden(self, x):
        x = nnx.relu(self.bn(self.conv(x)))
        x = nnx.avg_pool(x, (2, 2), (2, 2)).reshape(x.shape[0], -1)
        return nnx.relu(self.fc1(x))

    def __call__(self, x):
        return self.fc2(self.drop(self.hidden(x)))


def loss_fn(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def step_of(gdef):
    def step(state, batch):
        m, o = nnx.merge(gdef, state)
        loss, g = nnx.value_and_grad(loss_fn, argnums=nnx.DiffState(0, nnx.Param))(m, batch)
        o.update(m, g)
        return nnx.state((m, o)), loss

    return step


def build(seed=0, wrap_tx=lambda tx: tx, rate=0.25):
    model = Net(rate, nnx.Rngs(params=seed, dropout=seed + 1))
    model.train()
    tx = wrap_tx(optax.adamw(2e-3, weight_decay=0.01))
    opt = nnx.Optimizer(model, tx, wrt=nnx.Param)
    gdef, state = nnx.split((model, opt))

    def batch(i):
        r = np.random.default_rng(8000 + i)
        y = np.arange(B) % 7
        x = r.normal(size=(B, 8, 8, 3)) * (0.4 + 0.1 * (np.arange(B) // 2))[:, None, None, None]
        x[..., 0] += 0.3 * y[:, None, None]
        return {"x": x.astype(np.float32), "y": y.astype(np.int32)}

    return dict(
        state=state,
        step_of=step_of,
        batch=batch,
        model=model,
        optimizer=opt,
        tx=tx,
        wrt=nnx.Param,
        loss_fn=loss_fn,
        graphdef=gdef,
        params=nnx.to_pure_dict(nnx.state(model, nnx.Param)),
    )

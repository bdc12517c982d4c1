"""Train a byte-level GPT in Flax linen, its state partitioned by ZeRO.

    python examples/train_lm.py configs/lm_tiny.toml
    python examples/train_lm.py configs/lm_tiny.toml --stage 3 --steps 100 --set optimizer.name=lion
    python examples/train_lm.py configs/lm_tiny.toml --stage 1 --resume runs/lm_tiny-001

All that ZeRO asks of a training script is here to see: a `Checkpointer`, which makes the state by
the function that creates it or goes on from the last checkpoint, at whatever stage; `shard_batch`
around each batch; and a step (`lm/step.py`): the ordinary one, or with
`--set step.executor=explicit` the library's, which writes its collectives out.

Without an accelerator, 8 virtual CPU devices stand in for real ones.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import tyro
from devices import make_virtual_devices
from flax.training.train_state import TrainState
from lm.arguments import Arguments
from lm.data import load_corpus
from lm.loss import make_validation
from lm.model import GPT
from lm.optimizer import make_optimizer
from lm.partitioning import layouts_by_stage, zero_options
from lm.run import Run
from lm.sampling import continue_text
from lm.schema import LanguageModelRun
from lm.step import make_step, update_traffic

import zero_jax
from zero_jax.checkpoint import Checkpointer


def make_create(cfg: LanguageModelRun, model: GPT) -> Callable[[jax.Array], TrainState]:
    """Make `create(key)`, which builds the whole training state, as without ZeRO."""
    tx = make_optimizer(cfg)

    def create(key: jax.Array) -> TrainState:
        tokens = jnp.zeros((1, cfg.model.sequence_length), jnp.int32)
        params = model.init(key, tokens)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    return create


def main(arguments: Arguments) -> None:
    """Train, validate, sample, report."""
    cfg = arguments.load()
    make_virtual_devices()
    corpus = load_corpus(cfg.data, cfg.model.sequence_length)
    model = GPT(cfg.model)
    create = make_create(cfg, model)

    run = Run(arguments.config.stem, cfg)
    checkpointer = Checkpointer(run.folder / "checkpoints", **vars(cfg.checkpoint))
    key = jax.random.key(cfg.run.seed)
    state, start, _ = checkpointer.restore_or_init(create, key, **zero_options(cfg))
    tx = state.tx

    def apply(params, tokens: jax.Array):
        params = zero_jax.gather_at_use(params, tx)
        return model.apply({"params": params}, tokens)

    train_step = make_step(cfg)
    if cfg.step.executor == "annotated":  # the library's step is jitted already
        train_step = jax.jit(train_step, donate_argnums=0)
    validation_loss = make_validation(apply, corpus, cfg.run.eval_batches)

    with checkpointer, run.begin(zero_jax.layout_of(state), start):
        for step in range(start + 1, cfg.run.steps + 1):
            started = time.perf_counter()
            batch = zero_jax.shard_batch(corpus.train[step - 1], state)
            state, loss = train_step(state, batch)
            # float() waits for the step. Virtual CPU devices need that: steps that queue up there
            # can keep each other's collectives from ever meeting.
            loss, seconds = float(loss), time.perf_counter() - started
            due = step % cfg.run.eval_every == 0 or step == cfg.run.steps
            run.log(step, loss, seconds, validation_loss(state.params, state) if due else None)
            run.checkpoint(checkpointer, step, state)

        state, moved = update_traffic(state, train_step, cfg)
        run.say_moved(moved)

    prompt = corpus.validation_prompt
    text = continue_text(apply, state.params, prompt, cfg.run)
    run.finish(prompt, text, layouts_by_stage(create, cfg))


if __name__ == "__main__":
    main(tyro.cli(Arguments))

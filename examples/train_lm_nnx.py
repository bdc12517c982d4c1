"""Train the same GPT on the same data in Flax NNX, its state partitioned by ZeRO.

    python examples/train_lm_nnx.py configs/lm_tiny.toml --stage 3

The twin of `train_lm.py`: the state is a model and an `nnx.Optimizer`, and a step updates both in
place. It is an `nnx.jit`, or with `--set step.executor=explicit` the library's.
"""

import time
from collections.abc import Callable

import jax
import tyro
from devices import make_virtual_devices
from flax import nnx
from lm.arguments import Arguments
from lm.data import Batch, load_corpus
from lm.loss import make_validation, mean_loss
from lm.model_nnx import GPT
from lm.optimizer import make_optimizer
from lm.partitioning import layouts_by_stage, zero_options
from lm.run import Run
from lm.sampling import continue_text
from lm.schema import LanguageModelRun

import zero_jax
from zero_jax.checkpoint import Checkpointer


def loss_fn(model: GPT, batch: Batch) -> jax.Array:
    """Mean loss of inputs and targets (B, T), in nats a byte."""
    return mean_loss(model(batch["inputs"]), batch["targets"])


def make_step(cfg: LanguageModelRun) -> Callable[[tuple[GPT, nnx.Optimizer], Batch], jax.Array]:
    """Make one optimizer step, which updates model and optimizer and returns the loss."""
    if cfg.step.executor == "explicit":
        step = zero_jax.make_train_step(
            loss_fn, microbatches=cfg.step.microbatches, clip_norm=cfg.optimizer.clip_norm
        )
        return lambda state, batch: step(state, batch)[1].loss

    @nnx.jit(donate_argnums=(0, 1))
    def train_step(model: GPT, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    return lambda state, batch: train_step(*state, batch)


def main(arguments: Arguments) -> None:
    """Train, validate, sample, report."""
    cfg = arguments.load()
    if cfg.step.microbatches > 1 and cfg.step.executor == "annotated":
        raise SystemExit("step.microbatches: this step computes a batch at once; expected 1.")
    if cfg.zero.model_parallel > 1:
        raise SystemExit("zero.model_parallel: this model names no dims to cut; expected 1.")
    make_virtual_devices()
    corpus = load_corpus(cfg.data, cfg.model.sequence_length)
    tx = make_optimizer(cfg)

    def create(key: jax.Array) -> tuple[GPT, nnx.Optimizer]:
        model = GPT(cfg.model, nnx.Rngs(key), prefetch=cfg.step.layer_loop == "prefetch")
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    run = Run(arguments.config.stem, cfg)
    checkpointer = Checkpointer(run.folder / "checkpoints", **vars(cfg.checkpoint))
    key = jax.random.key(cfg.run.seed)
    state, start, _ = checkpointer.restore_or_init(create, key, **zero_options(cfg))
    train_step = make_step(cfg)
    graph, wrapped = nnx.graphdef(state[0]), state[1].tx

    def arrays():
        return nnx.as_pure(nnx.state(state[0]))

    def apply(params, tokens: jax.Array):
        return nnx.merge(graph, zero_jax.gather_params(params, wrapped))(tokens)

    validation_loss = make_validation(apply, corpus, cfg.run.eval_batches)

    with checkpointer, run.begin(zero_jax.layout_of(state), start):
        for step in range(start + 1, cfg.run.steps + 1):
            started = time.perf_counter()
            batch = zero_jax.shard_batch(corpus.train[step - 1], state)
            # float() waits for the step; see train_lm.py.
            loss = float(train_step(state, batch))
            seconds = time.perf_counter() - started
            due = step % cfg.run.eval_every == 0 or step == cfg.run.steps
            run.log(step, loss, seconds, validation_loss(arrays(), state) if due else None)
            run.checkpoint(checkpointer, step, state)

    prompt = corpus.validation_prompt
    text = continue_text(apply, arrays(), prompt, cfg.run)
    run.finish(prompt, text, layouts_by_stage(create, cfg))


if __name__ == "__main__":
    main(tyro.cli(Arguments))

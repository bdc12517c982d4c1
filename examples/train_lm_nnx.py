"""Train the same GPT on the same data in Flax NNX, its state partitioned by ZeRO.

    python examples/train_lm_nnx.py configs/lm_tiny.toml --stage 3

The twin of `train_lm.py`: the state is a model and an `nnx.Optimizer`, the step is an `nnx.jit`
that updates both in place. `init_train_state` takes and returns the pair.
"""

import time

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

import zero_jax


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: GPT, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """One optimizer step on inputs and targets (B, T); the mean loss in nats a byte."""

    def loss_fn(model):
        return mean_loss(model(batch["inputs"]), batch["targets"])

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def main(arguments: Arguments) -> None:
    """Train, validate, sample, report."""
    cfg = arguments.load()
    if cfg.step.microbatches > 1:
        raise SystemExit("step.microbatches: this script computes a batch at once; expected 1.")
    if cfg.zero.model_parallel > 1:
        raise SystemExit("zero.model_parallel: this model names no dims to cut; expected 1.")
    make_virtual_devices()
    corpus = load_corpus(cfg.data, cfg.model.sequence_length)
    tx = make_optimizer(cfg.optimizer, cfg.run.steps)

    def create(key: jax.Array) -> tuple[GPT, nnx.Optimizer]:
        model = GPT(cfg.model, nnx.Rngs(key))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    options = zero_options(cfg)
    state = zero_jax.init_train_state(create, jax.random.key(cfg.run.seed), **options)
    model, optimizer = state
    graph = nnx.graphdef(model)

    def arrays():
        return nnx.as_pure(nnx.state(model))

    def apply(params, tokens: jax.Array):
        return nnx.merge(graph, params)(tokens)

    validation_loss = make_validation(apply, corpus, cfg.run.eval_batches)

    with Run(arguments.config.stem, cfg, zero_jax.layout_of(state)) as run:
        for step in range(1, cfg.run.steps + 1):
            started = time.perf_counter()
            batch = zero_jax.shard_batch(corpus.train[step - 1], state)
            # float() waits for the step; see train_lm.py.
            loss = float(train_step(model, optimizer, batch))
            seconds = time.perf_counter() - started
            due = step % cfg.run.eval_every == 0 or step == cfg.run.steps
            run.log(step, loss, seconds, validation_loss(arrays(), state) if due else None)

    prompt = corpus.validation_prompt
    text = continue_text(apply, arrays(), prompt, cfg.run)
    run.finish(prompt, text, layouts_by_stage(create, cfg))


if __name__ == "__main__":
    main(tyro.cli(Arguments))

"""What a TOML file of a language-model run may say: a dataclass for each section.

`zero_jax.config` reads a file into these strictly; the types and checks here are all it knows. The
files themselves are in `configs/`.
"""

from dataclasses import dataclass
from typing import Literal


def _at_least(section: object, **bounds: int) -> None:
    for name, bound in bounds.items():
        if not getattr(section, name) >= bound:
            raise ValueError(f"{name}={getattr(section, name)}; expected at least {bound}.")


@dataclass(frozen=True)
class Model:
    """A GPT: pre-norm decoder blocks, learned positions.

    Attributes:
      vocab_size: rows of the embedding; tokens are bytes, so at least 256.
      layers, hidden, heads: depth, width, attention heads (`heads` divides `hidden`).
      sequence_length: tokens a row of the batch; also the number of learned positions.
      tied_head, remat: the embedding is the output head; blocks are recomputed backward.
      dtype: dtype of parameters at rest and of the matmuls. With bfloat16 the optimizer state holds
        a float32 master copy (`zero_jax.Precision.bf16`).
    """

    vocab_size: int = 256
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    sequence_length: int = 128
    tied_head: bool = True
    remat: bool = False
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        _at_least(self, vocab_size=256, layers=1, hidden=1, heads=1, sequence_length=1)
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}.")


@dataclass(frozen=True)
class Data:
    """Files read as bytes.

    Attributes:
      folder: where the text is; left out, the running interpreter's own standard library.
      pattern: which files of `folder`, at any depth.
      batch_size: rows a step, over all devices; a multiple of the number of devices.
      seed, val_fraction: of the order of the rows; share of the files kept for validation.
    """

    folder: str | None = None
    pattern: str = "*.py"
    batch_size: int = 32
    seed: int = 0
    val_fraction: float = 0.05

    def __post_init__(self) -> None:
        _at_least(self, batch_size=1, seed=0)
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction={self.val_fraction}; expected one between 0 and 1.")


@dataclass(frozen=True)
class Optimizer:
    """An optax optimizer under a linear warm-up and a cosine decay.

    Attributes:
      name: which of optax's.
      learning_rate, final_fraction: at the top of the schedule; what the last step has of it.
      warmup_steps: steps of the linear warm-up from 0.
      weight_decay: decoupled, on every parameter. Adafactor's, which follows no schedule, is
        `learning_rate * weight_decay` in every step.
      clip_norm: global norm that gradients are clipped to; left out, they are not.
      b1, b2: decay of the moments (adafactor has its own).
    """

    name: Literal["adamw", "lion", "lamb", "adafactor"] = "adamw"
    learning_rate: float = 3e-3
    final_fraction: float = 0.02
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float | None = None
    b1: float = 0.9
    b2: float = 0.95

    def __post_init__(self) -> None:
        _at_least(self, learning_rate=0, final_fraction=0, warmup_steps=0, weight_decay=0)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm}; expected a positive number, or no key.")


@dataclass(frozen=True)
class Step:
    """How a step is computed.

    Attributes:
      executor: "annotated", the script's own step, in which the compiler places collectives;
        "explicit", `zero_jax.make_train_step`, in which they are written out.
      layer_loop: "scan", Flax's loop over the layers; "prefetch", `zero_jax.scan_layers`, which
        gathers the next layer while one computes. The latter is for the explicit executor and
        recomputes layers (`model.remat`).
      microbatches: parts that a batch is computed in, one after the other; their gradients are
        summed in float32. Divides the rows that a device has of a batch.
      reduce_dtype: dtype that gradients are reduced in, and wait for the update; bfloat16 is for
        the explicit executor.
    """

    executor: Literal["annotated", "explicit"] = "annotated"
    layer_loop: Literal["scan", "prefetch"] = "scan"
    microbatches: int = 1
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        _at_least(self, microbatches=1)
        if self.layer_loop == "prefetch" and self.executor != "explicit":
            raise ValueError('layer_loop="prefetch" needs executor="explicit".')
        if self.reduce_dtype != "float32" and self.executor != "explicit":
            raise ValueError(f'reduce_dtype="{self.reduce_dtype}" needs executor="explicit".')


@dataclass(frozen=True)
class Zero:
    """How the training state is partitioned.

    Attributes:
      stage, axis, min_size: as in `zero_jax.init_train_state`.
      model_parallel: devices that share each layer's matrices (tensor parallelism, the degree MP
        of the ZeRO paper); the other devices are the data axis.
    """

    stage: Literal[0, 1, 2, 3] = 2
    axis: str = "data"
    min_size: int = 8
    model_parallel: int = 1

    def __post_init__(self) -> None:
        _at_least(self, min_size=0, model_parallel=1)


@dataclass(frozen=True)
class Offload:
    """What lies in host memory or in files between steps; see `zero_jax.HostMemory` and `Nvme`.

    Attributes:
      optimizer: the optimizer state, master copies included, in host memory.
      folder: a directory on a local disk that it lies in instead; for the explicit executor.
      existing: what to do with a training state that is there.
      params: the matrices of the layers, in host memory; for the explicit executor.
      gradients: where those of the layers wait for the update.
      update_on, delayed: who computes the update from host memory, and whether a step later.
      chunk_mib: how much of the state is moved at a time, in MiB; of files, in host memory.
    """

    optimizer: bool = False
    folder: str | None = None
    existing: Literal["refuse", "resume", "replace"] = "refuse"
    params: bool = False
    gradients: Literal["auto", "host", "device"] = "auto"
    update_on: Literal["device", "host"] = "device"
    delayed: bool = False
    chunk_mib: int = 256

    def __post_init__(self) -> None:
        _at_least(self, chunk_mib=1)
        for key in ("folder", "params", "delayed"):
            if getattr(self, key) and not self.optimizer:
                raise ValueError(f"{key}={getattr(self, key)!r} needs optimizer=true.")
        if self.delayed and self.update_on != "host":
            raise ValueError('delayed=true needs update_on="host".')
        if self.folder and (self.delayed or self.update_on == "host"):
            raise ValueError("folder: updates of files are the device's, and in their own step.")


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints, in the folder `checkpoints` of the run; one more follows the last step.

    Attributes:
      every: steps between two.
      keep: how many of the last ones stay.
    """

    every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        _at_least(self, every=1, keep=1)


@dataclass(frozen=True)
class Run:
    """How long, how often, and where to.

    Attributes:
      steps, seed: optimizer steps; seed of the initial parameters and of the sampled text.
      eval_every: steps between validations; one more follows the last step.
      eval_batches: validation batches each time, the same ones.
      sample_bytes, temperature: bytes to write at the end, 0 for none; of their sampling.
      folder: where results go; left out, a new folder under `runs/`, named after the config.
    """

    steps: int = 500
    seed: int = 0
    eval_every: int = 100
    eval_batches: int = 16
    sample_bytes: int = 256
    temperature: float = 0.7
    folder: str | None = None

    def __post_init__(self) -> None:
        _at_least(self, steps=1, seed=0, eval_every=1, eval_batches=1, sample_bytes=0)
        if not self.temperature > 0:
            raise ValueError(f"temperature={self.temperature}; expected a positive number.")


@dataclass(frozen=True)
class LanguageModelRun:
    """The whole file: one field for each section.

    Attributes:
      program: file and function that build this run for `zero-jax plan`, the file as seen from the
        folder of the configuration; left out, there is nothing to plan.
    """

    program: str | None = None
    model: Model = Model()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    step: Step = Step()
    zero: Zero = Zero()
    offload: Offload = Offload()
    checkpoint: Checkpoint = Checkpoint()
    run: Run = Run()

    def __post_init__(self) -> None:
        if self.step.layer_loop == "prefetch" and not self.model.remat:
            raise ValueError('step.layer_loop="prefetch" recomputes layers; set model.remat=true.')

"""zero_jax: ZeRO for JAX.

ZeRO (Rajbhandari et al., 2020, arXiv 1910.02054) partitions the model states of data-parallel
training over the devices that would otherwise each hold all of them: the optimizer state (stage 1),
the gradients (2), the parameters (3). Here any Flax training state becomes one of them in one call:

    state = zero_jax.shard_train_state(state, stage=2)

and the user's own jitted step goes on working.

The rooms, from the ground up; each imports only its own floor and lower ones:

  words        stage  mesh  partition  rules  precision  reporting.tables (text only)
  the paper    placement  cuts  layout  shortfall  collectives  master_weights  optimizer
  residence    residence
  the state    flax_linen  flax_nnx  options  anatomy  train_state  batch
               gather_at_use
  beside, reads only
    planning   closed forms: memory  activations  communication
               machines:     hardware  gpu_target  topology  doctor
               forecasts:    program  traced  propagation  liveness  compiler  forecast  fit
    reporting  the audit:    hlo  hlo_text  hlo_walk  flights  rings  wire  replica_groups
                             loop_trips  matmul_flops  schedule  audit_table
               for people:   plan_table  plan_words  plan_svg  page  plots  doctor_table
  roof         config  cli  __main__

A training state goes through them in this order: `anatomy` takes it apart, `layout` decides where
every leaf lies, `residence` puts it there, `optimizer` computes the stage inside the user's step.
"""

from .batch import shard_batch as shard_batch
from .gather_at_use import gather_at_use as gather_at_use
from .layout import Layout as Layout
from .layout import LeafReport as LeafReport
from .master_weights import MasterWeights as MasterWeights
from .optimizer import PartitionedOptimizer as PartitionedOptimizer
from .optimizer import partition_optimizer as partition_optimizer
from .precision import Precision as Precision
from .shortfall import ZeroWarning as ZeroWarning
from .stage import Stage as Stage
from .train_state import init_train_state as init_train_state
from .train_state import layout_of as layout_of
from .train_state import lower_init_train_state as lower_init_train_state
from .train_state import shard_train_state as shard_train_state
from .train_state import unshard_train_state as unshard_train_state

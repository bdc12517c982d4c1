"""zero_jax: ZeRO for JAX.

ZeRO (Rajbhandari et al., 2020, arXiv 1910.02054) partitions the model states of data-parallel
training over the devices that would otherwise each hold all of them: the optimizer state (stage 1),
the gradients (2), the parameters (3). Here any Flax training state becomes one of them in one call:

    state = zero_jax.shard_train_state(state, stage=2)

and the user's own jitted step goes on working.

The rooms, from the ground up; each imports only its own floor and lower ones:

  words        stage  mesh  partition  rules  loss_scale  precision  offload_policy
               remat  compiler_options  choices  compat  memories
               reporting.tables (text only)
  the paper    placement  typed_keys  cuts  layout  shortfall  collectives
               master_weights  delayed  extended_state
               optimizer  update  array_like  at_use  readings
               beyond the device: offload.dataflow  offload.boxes  offload.grouping
                                  offload.streams  offload.on_host
               in files: offload.disk  offload.disk_claim  offload.disk_array
                         offload.disk_passes  offload.disk_update  offload.disk_state
               the layer loop: layers  layer_loop  layer_store  layer_forward
                               layer_backward  layer_derivative
  residence    residence
  the state    flax_linen  flax_nnx  options  anatomy  train_state  batch
               gather_at_use  at_use_nnx  layers_linen  layers_nnx  offload.described
  the step     step_options  faults  joining  subject  subject_linen  subject_nnx  wires
               local_gradients  alike  rehearsal  gradients  explicit_step  update_report  disk_step
               train_step
  beside, reads only
    planning   closed forms: memory  activations  communication  traffic
               machines:     hardware  gpu_target  topology  doctor
               forecasts:    program  operations  traced  traced_traffic  host_link
                             propagation  buffers  liveness  compiler  forecast  fit
    reporting  the audit:    hlo  hlo_text  hlo_walk  flights  rings  wire  replica_groups
                             loop_trips  matmul_flops  schedule  audit_table
               for people:   plan_table  plan_words  plan_svg  page  plots  doctor_table
  neighbours
    checkpoint files:        arrays  leaves  subject  compare  reading
               on Orbax:     claim  handler  manager
               by itself:    opened  difference  safetensors  reporting.checkpoint_table
  roof         config  cli  __main__

A training state goes through them in this order: `anatomy` takes it apart, `layout` decides where
every leaf lies, `residence` puts it there, `optimizer` computes the stage inside the user's step.
Or the step is the library's, `make_train_step`, with every collective written out: `explicit_step`
has its order of events, `wires` its communication.
"""

from .batch import shard_batch as shard_batch
from .collectives import mean_over_batch as mean_over_batch
from .explicit_step import Metrics as Metrics
from .gather_at_use import gather_at_use as gather_at_use
from .gather_at_use import gather_params as gather_params
from .layers import scan_layers as scan_layers
from .layers_linen import ScanLayers as ScanLayers
from .layers_nnx import scan_layers_nnx as scan_layers_nnx
from .layout import Layout as Layout
from .layout import LeafReport as LeafReport
from .loss_scale import DynamicScale as DynamicScale
from .loss_scale import StaticScale as StaticScale
from .master_weights import MasterWeights as MasterWeights
from .offload.disk_array import DiskArray as DiskArray
from .offload_policy import HostMemory as HostMemory
from .offload_policy import Nvme as Nvme
from .optimizer import PartitionedOptimizer as PartitionedOptimizer
from .optimizer import partition_optimizer as partition_optimizer
from .precision import Precision as Precision
from .remat import Remat as Remat
from .remat import regather as regather
from .remat import regather_policy as regather_policy
from .shortfall import ZeroWarning as ZeroWarning
from .stage import Stage as Stage
from .train_state import init_train_state as init_train_state
from .train_state import layout_of as layout_of
from .train_state import lower_init_train_state as lower_init_train_state
from .train_state import shard_train_state as shard_train_state
from .train_state import unshard_train_state as unshard_train_state
from .train_step import TrainStep as TrainStep
from .train_step import make_train_step as make_train_step
from .train_step import step_compiler_options as step_compiler_options
from .update_report import UpdateTraffic as UpdateTraffic
from .update_report import measure_update as measure_update

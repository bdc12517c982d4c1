"""Checkpoints that fit any cluster: logical arrays, on Orbax.

Training survives a change of stage, mesh, device count or offload, a killed process, a disk that
loses a byte. The room, from the ground up:

  arrays    logical arrays in files      leaves   names, parts of the devices and back
  subject   a state as named leaves      compare  whether a checkpoint is of that state
  reading   a state out of its arrays    claim    who has the folder, and the signal that ends a run
  handler   an item of Orbax's           manager  the face: `Checkpointer`
  opened    a checkpoint without a state, for `difference` and `safetensors`

Only this room imports Orbax.
"""

from .claim import PREEMPTED as PREEMPTED
from .manager import Checkpointer as Checkpointer
from .opened import Opened as Opened
from .opened import open_checkpoint as open_checkpoint
from .reading import Restored as Restored
from .safetensors import export as export
from .safetensors import import_safetensors as import_safetensors

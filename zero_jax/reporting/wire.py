"""What one collective sends: the kind, the devices that meet, and the bytes of one device.

Bytes are those that ONE device sends in ONE execution over a ring of n devices, which is also the
least that any algorithm needs (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms
for clusters of workstations"; the convention of ZeRO, arXiv 1910.02054, section 7):

  all-gather            (n-1)/n of the gathered array
  reduce-scatter        (n-1)/n of the array before it is scattered
  all-reduce            twice that: a reduce-scatter and an all-gather
  all-to-all            (n-1)/n of what the device holds
  collective-broadcast  (n-1)/n of the array, the mean over the devices of a chain
  collective-permute    what the device holds, times the share of devices that send; for a ragged
                        all-to-all what it holds is the most that it can send

All are read off the operands, so that it does not matter what an asynchronous start returns. The
element type is the one that the text has: the CPU compiler widens bf16 to f32, and that is counted.
Not counted: padding to TPU tiles, protocol headers, what NCCL or a TPU emitter does instead of a
ring.
"""

from dataclasses import dataclass

from .hlo_text import Array, Computation, Instruction, Module
from .replica_groups import Groups, linked_size, replica_groups, source_target_pairs

KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "ragged-all-to-all",
    "collective-broadcast",
    "collective-permute",
)


@dataclass(frozen=True)
class Sent:
    """One execution of a collective.

    Attributes:
      bytes: bytes that one device sends.
      group_size: devices in a group; of a permute, in its longest ring or chain.
      groups: positions of the devices in each group; of a permute, its (source, target) pairs.
      dtype: element types, joined with "+" where several arrays travel together.
      is_permute: whether `groups` are pairs.
    """

    bytes: int
    group_size: int
    groups: Groups
    dtype: str
    is_permute: bool = False


def collective_kind(opcode: str) -> str | None:
    """Which collective an opcode or its start is, None for any other."""
    kind = opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def sent(instruction: Instruction, kind: str, computation: Computation, module: Module) -> Sent:
    """What `instruction` sends.

    Args:
      instruction: a collective.
      kind: what it stands for, which may be another collective than its opcode says: an all-reduce
        of which only a slice is kept, a permute that is one step of a ring.
      computation, module: where it stands.
    """
    arrays = _payload(instruction, computation)
    held = sum(array.bytes for array in arrays)
    dtype = "+".join(dict.fromkeys(array.dtype for array in arrays))
    if collective_kind(instruction.opcode) == "collective-permute":
        pairs = source_target_pairs(instruction)
        senders = len({source for source, _ in pairs})
        share = _rounded(held * senders, module.devices)
        return Sent(share, linked_size(pairs), pairs, dtype, is_permute=True)
    groups = replica_groups(instruction, module)
    n = max(map(len, groups))
    if kind == "all-gather":
        return Sent(held * (n - 1), n, groups, dtype)
    times = 2 if kind == "all-reduce" else 1
    return Sent(_rounded(times * held * (n - 1), n), n, groups, dtype)


def _payload(instruction: Instruction, computation: Computation) -> tuple[Array, ...]:
    """The arrays that travel: all operands, of a ragged all-to-all only the first."""
    arrays = computation.operand_arrays(instruction)
    return arrays[:1] if instruction.opcode.startswith("ragged") else arrays


def _rounded(numerator: int, denominator: int) -> int:
    return (numerator + denominator // 2) // denominator

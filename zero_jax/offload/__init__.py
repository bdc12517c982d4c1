"""Residence beyond the device: host memory.

  dataflow   an update taken apart, leaf by leaf
  boxes      a pass over one leaf, box by box, in place
  grouping   which leaves pass together, and in what pieces
  streams    the update of a state on the host, stream after stream
  described  memories of machines that are only compiled for

What goes there is a policy, `offload_policy`, and the layout says of which leaf.
"""

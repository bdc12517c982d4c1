"""Residence beyond the device: host memory, and files on a local disk.

  dataflow     an update taken apart, leaf by leaf
  boxes        a pass over one leaf, box by box, in place
  grouping     which leaves pass together
  streams      the update of a state in host memory, stream after stream, on the device
  on_host      the same, on the host
  described    memories of machines that are only compiled for
  disk         a process's directory: two copies, asynchronous files
  disk_claim   whose it is
  disk_array   a leaf in files
  disk_passes  in what pieces streams pass
  disk_update  the update of a state in files, piece after piece
  disk_state   a state on its way there, or back

What goes there is a policy, `offload_policy`, and the layout says of which leaf.
"""

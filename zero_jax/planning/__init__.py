"""What a run will need, before it runs.

  closed forms   `memory`, `activations`, `communication`: the papers' arithmetic, and the exact
                 count of a layout; `traffic` has what rings send
  machines       `topology` has devices of machines nobody here owns, for compiling only; `hardware`
                 what they can do, `gpu_target` what the GPU compiler has to be told
  forecasts      `program` is the user's own step; `forecast` predicts it from a trace (`traced`,
                 `operations`, `propagation`, `buffers`, `liveness`, `traced_traffic`,
                 `host_link`), `compiler` asks the real one; `fit` finds what fits

Planning imports no step: it is given one.
"""

"""`mambaslots run`: a script of megatron-core, on the drop-in."""

TEXT = "Run a script of megatron-core on the drop-in; see `mambaslots run --help`."

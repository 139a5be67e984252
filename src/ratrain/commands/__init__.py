"""The commands of `ratrain`, one file each: read arguments, call the packages, print. No logic of their own
that another program might want; heavy imports inside functions, so that `--help` answers at once."""

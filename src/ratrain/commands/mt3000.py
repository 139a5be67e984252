"""`ratrain mt3000`: the operator model of the chip, which brings its own arguments."""

from ratrain.machine.mt3000.command import register, run

__all__ = ["register", "run"]

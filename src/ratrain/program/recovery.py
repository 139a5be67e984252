"""How early a block may be recovered: the rule that dependencies state and the memory bound counts with."""

from __future__ import annotations

from ratrain.program.action import Action, Kind
from ratrain.program.program import Program


def recovery_gates(program: Program, stage: int) -> dict[tuple[str, int], Action]:
    """Per (block, micro-batch) what a RECOVER follows besides its own forward, where there is such a thing.

    Backwards are counted in turns of as many as the stage has blocks: outside grouped ends that is one
    micro-batch. At most `ahead` turns besides the one in backward hold recovered blocks; with none ahead, each
    block is recovered when the backward before its own is over.
    """
    blocks = program.layout.stages[stage]
    backwards = [a for a in program.lane(stage)["compute"] if a.kind is Kind.BACKWARD]
    gates = {}
    for n, action in enumerate(backwards):
        assert action.unit is not None and action.microbatch is not None
        key = (action.unit, action.microbatch)
        if program.ahead > 0:
            begun = n // len(blocks) - program.ahead
            if begun > 0:
                gates[key] = backwards[begun * len(blocks) - 1]
        elif n > 0:
            before = backwards[n - 1]
            released = Action(Kind.RELEASE, stage, before.unit, before.microbatch, "act")
            gates[key] = before if action.unit == blocks[-1] else released
    return gates

"""The forecast of a step for people and reports: its whole timeline, memory, and the bound under it."""

from __future__ import annotations

from dataclasses import dataclass

from ratrain.config import Config
from ratrain.model.spec import ModelSpec
from ratrain.plan.costs import Costs
from ratrain.plan.memory import footprints
from ratrain.plan.plan import Plan
from ratrain.plan.request import read_request
from ratrain.plan.resolve import compute_of
from ratrain.program.action import Action, Kind
from ratrain.simulate.bound import lower_bound
from ratrain.simulate.simulator import Simulation, simulate


@dataclass(frozen=True)
class StepForecast:
    """simulation  the steady step, several times in a row
    bound       seconds that no program of the layout can beat
    basis       where the costs are from
    """

    simulation: Simulation
    bound: float
    basis: str


def action_seconds(plan: Plan, spec: ModelSpec, config: Config) -> dict[str, float]:
    """Seconds of every computing action by "KIND unit", as an emulated device waits for them: what tensor ranks send
    each other is not in them, since it is sent."""
    costs = Costs(spec, plan, compute_of(read_request(config, spec, plan.devices)), joined=False)
    layout = plan.layout()
    table = {}
    for stage, blocks in enumerate(layout.stages):
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.RECOVER):
            for block in blocks:
                table[f"{kind.value} {block}"] = costs(Action(kind, stage, block, 0)).seconds
        for unit in layout.units[stage]:
            update = Action(Kind.UPDATE_SHARD, stage, unit.name)
            table[f"{Kind.UPDATE_SHARD.value} {unit.name}"] = costs(update).seconds
    return table


def forecast_step(plan: Plan, spec: ModelSpec, config: Config) -> StepForecast:
    """Simulates the plan's own program under the costs of the machine that `config` names. UserError where
    there is nothing to take costs from."""
    compute = compute_of(read_request(config, spec, plan.devices))
    costs = Costs(spec, plan, compute)
    simulation = simulate(plan.program("steady"), costs, costs.ports, footprints=footprints(spec, plan))
    return StepForecast(simulation, lower_bound(plan.layout(), costs, costs.ports), compute.basis)

"""Random layouts and programs for property-based tests."""

from hypothesis import strategies as st

from ratrain.program.layout import RUNGS, Layout, place
from ratrain.program.passes import PASSES, build
from ratrain.program.program import FORMS, Program

pass_sets = st.sets(st.sampled_from(sorted(PASSES)))


@st.composite
def layouts(draw: st.DrawFn, max_pipeline: int = 5, max_layers: int = 3, max_microbatches: int = 9) -> Layout:
    """Uneven placements, empty ends, every ZeRO level, tied or not, any rung for any block."""
    pipeline = draw(st.integers(1, max_pipeline))
    counts = [draw(st.integers(0 if s in (0, pipeline - 1) else 1, max_layers)) for s in range(pipeline)]
    stages = place(tuple(counts))
    one_rung = draw(st.sampled_from([*RUNGS, None]))
    rungs = tuple(tuple(one_rung or draw(st.sampled_from(RUNGS)) for _ in blocks) for blocks in stages)
    layout = Layout(
        stages,
        replicas=draw(st.sampled_from([1, 2, 4])),
        microbatches=draw(st.one_of(st.just(1), st.just(pipeline), st.integers(1, max_microbatches))),
        zero=draw(st.integers(0, 3)),
        tied=draw(st.booleans()),
        rungs=rungs,
        ahead=draw(st.integers(0, 3)),
        elide=draw(st.booleans()),
        gated=draw(st.booleans()),
    )
    return layout if layout.ungroupable else layout.with_(grouped=draw(st.sampled_from([1, 1, 2, 3, 99])))


@st.composite
def programs(draw: st.DrawFn, forms: tuple[str, ...] = FORMS, **limits: int) -> Program:
    """Any form of any layout under any set of passes."""
    return build(draw(layouts(**limits)), draw(st.sampled_from(forms)), draw(pass_sets))

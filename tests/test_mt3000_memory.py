"""The memory hierarchy refuses what the chip could not do, and chip files are read strictly."""

from pathlib import Path

import numpy as np
import pytest

from ratrain.errors import UserError
from ratrain.machine.mt3000.chip import CHIPS, load_chip
from ratrain.machine.mt3000.memory import Arena, MemoryFault


def test_blocks_are_aligned_poisoned_and_reused() -> None:
    arena = Arena("am", 1024, 128)
    first = arena.allocate("first", 100)
    assert np.isnan(first.view(np.float32)).all()
    arena.allocate("second", 128)
    arena.free("first")
    arena.allocate("third", 128)
    assert arena.blocks["third"] == (0, 128)
    assert arena.peak == 256


def test_overflow_leak_and_double_use_name_the_buffer() -> None:
    arena = Arena("sm", 512, 128)
    arena.allocate("a", 300)
    with pytest.raises(MemoryFault, match=r"b: overflow, 256 bytes do not fit sm \(384 of 512 bytes held\)"):
        arena.allocate("b", 200)
    with pytest.raises(MemoryFault, match="a: already allocated"):
        arena.allocate("a", 8)
    with pytest.raises(MemoryFault, match=r"a \(384 bytes\): leaked in sm"):
        arena.close()
    with pytest.raises(MemoryFault, match="b: not allocated"):
        arena.free("b")


def test_shipped_chips_have_the_published_peaks() -> None:
    assert load_chip("mt3000").peak("fp16") == pytest.approx(8.1e12, rel=1e-3)
    assert load_chip("ft_m7032").peak("fp64", 1) == pytest.approx(172.8e9)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("cores = { value = 24", "cores = { value = 0", "cores is 0"),
        ("cores = { value = 24", 'cores = { value = "many"', "cores is 'many'"),
        ("channels =", "chanels =", "channels is missing"),
        ("[cluster]", "[cluster]\ncolour = { value = 3 }", "colour is not a chip parameter"),
        ("[cluster]", "[cluster", "not a TOML file"),
    ],
)
def test_bad_chip_files_are_refused_in_one_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "chip.toml"
    path.write_text((CHIPS / "mt3000.toml").read_text().replace(old, new, 1))
    with pytest.raises(UserError, match=says) as caught:
        load_chip(str(path))
    assert "\n" not in str(caught.value)


def test_unknown_chip_lists_the_known() -> None:
    with pytest.raises(UserError, match="ft_m7032, mt3000"):
        load_chip("cray-1")

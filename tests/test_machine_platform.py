"""Platform files: what is shipped loads, every number has a source, and bad files are refused by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ratrain.errors import UserError
from ratrain.machine.gpu_operators import GpuOperators
from ratrain.machine.platform import SHIPPED, load_platform, shipped_platforms


def changed(tmp_path: Path, old: str, new: str, base: str = "a100-8x") -> Path:
    text = (SHIPPED / f"{base}.toml").read_text()
    assert old in text
    path = tmp_path / "machine.toml"
    path.write_text(text.replace(old, new, 1))
    return path


@pytest.mark.parametrize("name", shipped_platforms())
def test_shipped_platforms_load_and_every_value_has_a_source(name: str) -> None:
    platform = load_platform(name)
    assert platform.name == name
    written = (SHIPPED / f"{name}.toml").read_text().count("{ value =")
    assert len(platform.provenance) == written
    assert all(p.source and p.confidence for p in platform.provenance.values())


def test_mt3000_has_the_published_numbers_in_base_units() -> None:
    platform = load_platform("mt3000")
    assert platform.device.memory == 20e9  # a power of ten, as the file says
    assert platform.between_nodes.bandwidth == 3.7e9
    assert platform.between_nodes.latency == pytest.approx(10e-6)
    assert platform.device.operator_model.name == "mt3000"
    assert [platform.node_of(rank) for rank in (0, 3, 4)] == [0, 0, 1]


def test_units_of_two_and_of_ten_differ(tmp_path: Path) -> None:
    assert load_platform("ethernet-24gb").device.memory == 24 * 2**30
    path = changed(tmp_path, "memory_gib = { value = 24,", "memory_gb = { value = 24,", base="ethernet-24gb")
    assert load_platform(path).device.memory == 24e9
    assert load_platform("ethernet-24gb").between_nodes.total_bandwidth == pytest.approx(9.4e9 / 8)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("memory_gib", "memroy_gib", ["device.memory is missing", "memroy_gib"]),
        ("latency_us", "latency", ["link.within_node.latency", "latency_us"]),
        ('duplex = { value = "full"', 'duplex = { value = "fulll"', ["duplex", "full, half"]),
        (
            "links_per_device = { value = 12",
            "links_per_device = { value = 0",
            ["links_per_device", "at least 1"],
        ),
        ('confidence = "fit"', 'confidence = "sure"', ["confidence 'sure'"]),
        ("schema = 1", "schema = 9", ["schema 9"]),
        ("schema = 1", "schema = 1\ncolour = 2", ["colour", "unknown key"]),
        ("schema = 1", "schema == 1", ["not TOML"]),
        ("value = 2.64", "value = -2.64", ["between_nodes.latency", "at least 0"]),
        ("memory_gib = { value = 80", "memory_gib = { value = nan", ["memory_gib", "finite"]),
        (', source = "InfiniBand"', "", ["duplex", "source = ..."]),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_the_key(
    tmp_path: Path, old: str, new: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        load_platform(changed(tmp_path, old, new))
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_an_extra_unit_for_the_same_value_is_refused(tmp_path: Path) -> None:
    extra = 'memory_gb = { value = 80, source = "x", confidence = "L" }\nmemory_gib'
    with pytest.raises(UserError, match="exactly one of"):
        load_platform(changed(tmp_path, "memory_gib", extra))


def test_a_misspelt_name_gets_the_nearest_one() -> None:
    with pytest.raises(UserError, match="did you mean 'mt3000'"):
        load_platform("mt300")
    with pytest.raises(UserError, match="No such file"):
        load_platform("/nowhere/machine.toml")


def test_operator_model_refuses_strange_parameters_and_wrong_owner(tmp_path: Path) -> None:
    path = changed(tmp_path, "layer_pass_launch_us", "layer_pas_launch_us")
    with pytest.raises(UserError, match="did you mean 'layer_pass_launch_us'"):
        GpuOperators.of(load_platform(path).device, "fp16")
    with pytest.raises(UserError, match="'mt3000', not by 'roofline'"):
        GpuOperators.of(load_platform("mt3000").device, "fp16")
    with pytest.raises(UserError, match="no rate for matmul in fp64"):
        GpuOperators.of(load_platform("a100-8x").device, "fp64")


def test_platforms_load_without_torch() -> None:
    code = (
        "import sys; from ratrain.machine.platform import load_platform; import ratrain.machine.collectives; "
        "import ratrain.machine.profile; load_platform('mt3000'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

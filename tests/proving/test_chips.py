"""Chips: every number with its source, per JAX device."""

import pytest

from shardax.errors import TargetError
from shardax.proving.chips import chip, chips, gpu_target_config


@pytest.mark.parametrize("name", sorted(chips()))
def test_every_number_has_its_source_and_is_sane(name):
    found = chip(name)
    for fact in ("bf16", "hbm", "hbm_usable", "hbm_bandwidth", "link_bandwidth", "network_bandwidth"):
        assert found.sources[fact], fact
    assert 1e13 < found.peak_flops["bf16"] < 1e16
    assert 0.85 * found.hbm < found.hbm_usable <= 1.08 * found.hbm
    assert found.dcn_bandwidth < found.link_bandwidth < found.hbm_bandwidth
    assert f"{found.name} ({found.device_kind})" in str(found)


def test_a_7x_device_is_half_a_chip():
    assert chip("tpu7x").devices_per_chip == 2
    assert chip("tpu7x").peak_flops["bf16"] * 2 == 2307e12
    assert chip("tpu7x").hbm_bandwidth * 2 == 7380e9


def test_a_torus_axis_is_two_links():
    assert chip("v5p").link_bandwidth == 2 * 90e9
    assert chip("h100").link_bandwidth == 450e9


def test_unknown_chips_are_told_the_known():
    with pytest.raises(TargetError, match="did you mean 'h100'"):
        chip("h1000", "gpu")


def test_gpu_descriptions_hold_what_the_compiler_divides_by():
    text = gpu_target_config(chip("b200"))
    assert "threads_per_warp: 32" in text and "block_dim_limit_x: 2147483647" in text
    assert "major: 10" in text and f"device_memory_size: {chip('b200').hbm_usable}" in text

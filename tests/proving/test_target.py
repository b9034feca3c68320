"""Targets: what their text means, what is refused and with which near miss."""

import pytest

import shardax as sx
from shardax.errors import MeshError, TargetError
from shardax.proving.installed import compiler_version, missing
from shardax.proving.target import tpu_shapes

READ = [
    # text, canonical text, devices, platform
    ("cpu:8", "cpu:8", 8, "cpu"),
    ("cpu:2048", "cpu:2048", 2048, "cpu"),
    ("tpu:v5p:4x4x4", "tpu:v5p:4x4x4", 64, "tpu"),
    (" TPU:V5P:4x4x4 ", "tpu:v5p:4x4x4", 64, "tpu"),
    ("tpu:v4:2x2x1", "tpu:v4:2x2x1", 4, "tpu"),
    ("tpu:v5e:16x16*4", "tpu:v5e:16x16*4", 1024, "tpu"),
    ("tpu:v5litepod:2x4", "tpu:v5e:2x4", 8, "tpu"),
    ("tpu:v6e:16x16", "tpu:v6e:16x16", 256, "tpu"),
    ("tpu:tpu7x:4x4x4", "tpu:tpu7x:4x4x4", 128, "tpu"),  # two devices per chip
    ("tpu:ironwood:2x2x1", "tpu:tpu7x:2x2x1", 8, "tpu"),
    ("gpu:h100:8", "gpu:h100:1x8", 8, "gpu"),
    ("gpu:h200:8x8", "gpu:h200:8x8", 64, "gpu"),
    ("gpu:b200:64", "gpu:b200:8x8", 64, "gpu"),
    ("gpu:local:8", "gpu:local:1x8", 8, "gpu"),
    ("cuda:a100:2", "gpu:a100:1x2", 2, "gpu"),
]


@pytest.mark.parametrize(("text", "canonical", "devices", "platform"), READ)
def test_reads(text, canonical, devices, platform):
    target = sx.Target.of(text)
    assert (str(target), target.devices, target.platform) == (canonical, devices, platform)
    assert sx.Target.of(target) is target
    assert sx.Target.of(str(target)) == target


REFUSED = [
    ("tpu:v5e:16x32", 'nearest: 8x16, 16x16; several slices: "16x16*2"'),
    ("tpu:v5p:8x4x4", "nearest: 4x4x8"),
    ("tpu:v5p:4x4", "is no v5p slice"),
    ("tpu:v5p:64", "nearest: 4x4x4"),
    ("tpu:v5p-8", "name the chip and its topology apart"),
    ("tpu:v5p", "v5p has 2x2x1, 2x2x2"),
    ("tpu:v5e:4x4*0", "number of slices"),
    ("tpu:v9:2x2", "is not one of tpu7x, v4, v5e, v5p, v6e"),
    ("tpu:v5pp:4x4x4", "did you mean 'v5p'"),
    ("gpu:h10:8", "did you mean 'h100'"),
    ("gpu:h100:12", 'nearest: "gpu:h100:2x8"'),
    ("gpu:h100:8x9", "a host has up to 8 GPUs"),
    ("gpu:h100", "is neither a number of GPUs nor hosts"),
    ("cpu:0", "takes 1 to 2048 devices"),
    ("cpu:2049", "takes 1 to 2048 devices"),
    ("cpu", "takes 1 to 2048 devices"),
    ("cpu:²", "takes 1 to 2048 devices"),  # a digit to Python, and no number
    ("gpu:h100:²", "is neither a number of GPUs nor hosts"),
    ("tpuu:v5p:4x4x4", "did you mean 'tpu'"),
    (8, "not a target: 8"),
    ("h100:8", "did you mean 'gpu:h100:8'?"),
    ("v5e-8", 'for example "tpu:v5e:2x2", "tpu:v5e:2x4"'),
    ("gpu:8", 'a target names the chip and how many: "gpu:h100:8"'),
    ("tpu", "(nothing): is not one of tpu7x, v4"),
    ("v5e:2x4", "did you mean 'tpu:v5e:2x4'?"),
    ("tpu:v5p-128", 'for example "tpu:v5p:2x4x4", "tpu:v5p:4x4x4"'),  # Cloud counts cores: 64 chips
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refuses_and_names_what_is_near(text, message):
    with pytest.raises(TargetError) as failure:
        sx.Target.of(text)
    assert message in str(failure.value)
    assert len(str(failure.value)) < 1000


def test_mesh_takes_every_device_or_says_what_would():
    target = sx.Target.of("tpu:v5p:4x4x4")
    assert str(target.mesh("fsdp=-1,tp=4")) == "fsdp=16,tp=4"
    with pytest.raises(TargetError, match=r"mesh fsdp=8,tp=4 has 32 devices, target tpu:v5p:4x4x4 has 64") as failure:
        target.mesh("fsdp=8,tp=4")
    assert 'target="tpu:v5p:2x4x4"' in str(failure.value)
    assert 'mesh="fsdp=16,tp=4"' in str(failure.value)
    with pytest.raises(TargetError) as failure:
        sx.Target.of("gpu:h100:8").mesh("x=8192")
    assert "gpu:h100:8192" not in str(failure.value)  # no such target
    with pytest.raises(MeshError, match="does not divide"):
        target.mesh("fsdp=-1,tp=3")


def test_wraps_as_the_pods_do():
    def wrap(text):
        return sx.Target.of(text).wrap

    assert wrap("tpu:v4:4x4x4") == (True, True, True)
    assert wrap("tpu:v5p:2x4x4") == (False, False, False)
    assert wrap("tpu:v6e:16x16") == (True, True)
    assert wrap("tpu:v5e:8x16") == (False, True)
    assert wrap("gpu:h100:8") == ()


def test_topologies_are_what_the_compiler_wants():
    assert sx.Target.of("tpu:v4:4x4x4").topology["options"]["chip_config_name"] == "megacore"
    assert sx.Target.of("tpu:v5e:16x16*4").topology["options"] == {"wrap": (True, True, False), "num_slices": 4}
    assert sx.Target.of("tpu:v5e:2x4").topology["options"]["chips_per_host_bounds"] == (2, 4, 1)
    assert sx.Target.of("gpu:h200:2x8").topology["options"]["topology"] == "1x2x8"
    assert "target_config" not in sx.Target.of("gpu:local:8").topology["options"]


def test_shapes_are_those_of_real_slices():
    assert (4, 4, 4) in tpu_shapes("v5p") and (16, 16, 16) in tpu_shapes("v4")
    assert (24, 24, 24) not in tpu_shapes("v5p")  # the compiler would take it; no pod has it
    host, *larger = tpu_shapes("tpu7x")
    assert host == (2, 2, 1)  # one host: four chips in a plane
    assert all(a <= b <= c for a, b, c in larger)


def test_what_is_here_and_what_is_missing(monkeypatch):
    table = sx.targets()
    listed = {row[0]: row[-1] for row in table.rows}
    assert listed["cpu:1 … cpu:2048"] == "ready"
    assert {"tpu:v5p", "gpu:h100", "gpu:local"} <= set(listed)
    monkeypatch.setattr("shardax.proving.installed.package_version", lambda name: None)
    assert missing("tpu") == "libtpu is not installed"
    target = sx.Target.of("tpu:v5p:4x4x4")
    assert "shardax[tpu]" in target.install_hint
    with pytest.raises(sx.CompilerMissingError, match=r'pip install "shardax\[tpu\]"'):
        target.require()
    monkeypatch.setattr("shardax.proving.installed.package_version", lambda name: "0.0.17")
    assert "0.0.17 is too old" in missing("tpu")
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert "Linux x86-64 only" in missing("gpu")
    assert missing("cpu") is None


def test_versions_name_the_compiler():
    assert {"jax", "jaxlib"} <= set(compiler_version("cpu"))

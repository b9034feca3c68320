"""Meshes: every spelling, every bad size, every context, and what eformer got wrong."""

import pickle
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardax as sx
from shardax.names.mesh import factorizations, same_mesh

AUTO2 = (AxisType.Auto,) * 2


def mesh_of(sizes=(2, 4), names=("dp", "tp"), kind=AxisType.Auto, devices=None):
    devices = np.array(jax.devices() if devices is None else devices)
    return Mesh(devices.reshape(sizes), names, axis_types=(kind,) * len(names))


# ---- MeshSpec -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling", ["dp=2,tp=4", "dp:2, tp:4", {"dp": 2, "tp": 4}, ((2, 4), ("dp", "tp")), ([2, 4], ["dp", "tp"])]
)
def test_every_spelling_is_one_value(spelling):
    assert sx.MeshSpec.of(spelling) == sx.MeshSpec(("dp", "tp"), (2, 4))


def test_meshes_are_spellings_too():
    spec = sx.MeshSpec.of("dp=2,tp=4")
    assert sx.MeshSpec.of(mesh_of()) == sx.MeshSpec.of(spec.abstract()) == spec
    assert hash(sx.MeshSpec.of(mesh_of())) == hash(spec)


@pytest.mark.parametrize(
    "bad, words",
    [
        ("dp=0,tp=4", ["dp: size 0 is not positive"]),
        ("dp=-2", ["dp: size -2 is not positive"]),
        ("dp=-1,tp=-1", ["dp, tp: only one size may be -1"]),
        ("dp=2,dp=4", ["the axis is named 2 times"]),
        ("dp", ["'dp': has no size"]),
        ("dp=x,tp=", ["'dp=x': size 'x' is not a number", "'tp=': size '' is not a number"]),
        ("", ["it has no axes"]),
        ("=4", ["an axis name is a non-empty string"]),
        ({"dp": 2.5}, ["size 2.5 is not an integer"]),
        (((2,), ("dp", "tp")), ["2 names ('dp', 'tp'), 1 sizes (2,)"]),
        (7, ["not a mesh: 7 (int)"]),
    ],
)
def test_a_mesh_that_cannot_be_lists_what_is_wrong(bad, words):
    with pytest.raises(sx.MeshError) as error:
        sx.MeshSpec.of(bad)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("kinds", [None, "explicit", ("auto", "explicit")])
def test_a_mesh_spec_prints_as_the_call_that_makes_it(kinds):
    spec = sx.MeshSpec("dp=2,fsdp=-1", axis_types=kinds)
    assert eval(repr(spec), {"MeshSpec": sx.MeshSpec}) == spec == pickle.loads(pickle.dumps(spec))
    assert spec == sx.MeshSpec(["dp", "fsdp"], [2, np.int64(-1)], kinds) and len({spec, sx.MeshSpec.of(spec)}) == 1
    with pytest.raises(sx.MeshError, match="the sizes of a mesh are a sequence, not 8"):
        sx.MeshSpec(("dp",), 8)


def test_all_problems_of_a_mesh_are_listed_at_once():
    with pytest.raises(sx.MeshError) as error:
        sx.MeshSpec.of("dp=0,tp=-3,dp=1")
    assert len(error.value.offences) == 3


def test_resolve_infers_and_lists_factorizations():
    assert str(sx.MeshSpec.of("dp=2,fsdp=-1").resolve(8)) == "dp=2,fsdp=4"
    with pytest.raises(sx.MeshError, match=r"it needs 16 devices, there are 8\n.*would work: dp=2,tp=4; dp=4,tp=2"):
        sx.MeshSpec.of("dp=4,tp=4").resolve(8)


@given(st.integers(1, 64), st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4))
def test_factorizations_multiply_to_the_devices(devices, pattern):
    found = factorizations(devices, tuple(pattern))
    assert found and all(np.prod(sizes) == devices for sizes in found)


def test_abstract_meshes_of_any_size_need_no_devices():
    mesh = sx.MeshSpec.of("dp=64,tp=64").abstract()
    assert mesh.size == 4096 and mesh.axis_types == AUTO2


@pytest.mark.parametrize(
    "kinds, expected",
    [
        ("explicit", [AxisType.Explicit] * 2),
        ({"tp": "manual"}, [AxisType.Auto, AxisType.Manual]),
        (("auto", AxisType.Explicit), [AxisType.Auto, AxisType.Explicit]),
    ],
)
def test_axis_types(kinds, expected):
    assert list(sx.make_mesh("dp=2,tp=4", axis_types=kinds).axis_types) == expected


def test_bad_axis_types_are_named():
    with pytest.raises(sx.MeshError, match="unknown axis type 'automatic'"):
        sx.make_mesh("dp=2,tp=4", axis_types="automatic")
    with pytest.raises(sx.MeshError, match="pt: is not an axis of the mesh"):
        sx.make_mesh("dp=2,tp=4", axis_types={"pt": "auto"})
    with pytest.raises(sx.MeshError, match="3 axis types"):
        sx.make_mesh("dp=2,tp=4", axis_types=("auto",) * 3)


# ---- make_mesh ------------------------------------------------------------------------------------------------------


def test_make_mesh_infers_and_takes_fewer_devices():
    assert dict(sx.make_mesh("dp=2,fsdp=-1,tp=2").shape) == {"dp": 2, "fsdp": 2, "tp": 2}
    assert sx.make_mesh("tp=4").devices.flatten().tolist() == jax.devices()[:4]
    assert sx.make_mesh({"a": 2}, devices=jax.devices()[4:]).devices.flatten().tolist() == jax.devices()[4:6]


def test_make_mesh_keeps_the_axis_types_of_a_spec():
    spec = sx.MeshSpec.of("dp=2,tp=4", "explicit")
    assert sx.make_mesh(spec).axis_types == (AxisType.Explicit,) * 2
    assert sx.make_mesh(sx.make_mesh(spec)).axis_types == sx.make_mesh(spec.abstract()).axis_types == spec.axis_types


def test_dcn_errors_list_every_problem():
    with pytest.raises(sx.MeshError, match="dcn names axes that are not there"):
        sx.make_mesh("dp=2,tp=4", dcn={"pp": 2})
    with pytest.raises(sx.MeshError) as error:
        sx.make_mesh("dp=2,tp=4", dcn={"dp": 2, "tp": 3})
    assert "size 4 does not divide over 3" in str(error.value) and "there are 1" in str(error.value)
    with pytest.raises(sx.MeshError, match="size 1.5 is not an integer"):
        sx.make_mesh("dp=2,tp=4", dcn={"dp": 1.5})
    with pytest.raises(sx.MeshError, match="asks for 2 slices or hosts, there are 1"):  # jax.make_mesh knows no dcn
        sx.create_mesh((2, 4), ("dp", "tp"), (2, 1), use_jax=True)
    assert sx.make_mesh("dp=2,tp=4", dcn="dp=1") == sx.make_mesh("dp=2,tp=4", dcn={}) == sx.make_mesh("dp=2,tp=4")


TPU_PROBE = """
import os
os.environ.update(JAX_PLATFORMS="cpu", TPU_ACCELERATOR_TYPE="v5litepod-8", TPU_WORKER_HOSTNAMES="localhost",
                  ALLOW_MULTIPLE_LIBTPU_LOAD="1", TPU_SKIP_MDS_QUERY="1")
import numpy as np
from jax.experimental import topologies
import shardax as sx
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4", num_slices=2).devices
mesh = sx.make_mesh("dp=2,fsdp=4,tp=4", devices=devices)
print([sorted({d.slice_index for d in mesh.devices[i].flat}) for i in range(2)])
print(sx.describe(mesh))
mesh = sx.make_mesh("tp=4,dp=8", devices=devices, dcn={"dp": 2})
print(sorted({d.slice_index for d in mesh.devices[:, 0].flat}), mesh.devices[0, 0].slice_index, mesh.devices[0, 4].slice_index)
"""


def test_slices_of_a_real_tpu_topology_stay_whole_under_the_leading_axis():
    pytest.importorskip("libtpu", reason="libtpu (the TPU compiler) is not installed")
    done = subprocess.run([sys.executable, "-c", TPU_PROBE], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "[[0], [1]]"
    assert "slices" in next(line for line in lines if line.startswith("dp"))
    assert "slices" not in next(line for line in lines if line.startswith("tp"))
    assert lines[-1] == "[0] 0 1"


# ---- eformer's spellings --------------------------------------------------------------------------------------------


def test_create_mesh_defaults_and_kinds():
    assert dict(sx.create_mesh().shape) == {"dp": 1, "fsdp": 8, "ep": 1, "tp": 1, "sp": 1}
    for use_jax in (False, True):
        mesh = sx.create_mesh((2, -1), ("dp", "tp"), use_jax=use_jax, axis_types="explicit", backend="cpu")
        assert mesh.shape_tuple == (("dp", 2), ("tp", 4)) and mesh.axis_types == (AxisType.Explicit,) * 2
    assert sx.create_mesh((2, 4), ("dp", "tp"), (1, 1), should_sort_granules_by_key=False).size == 8


def test_create_cpu_mesh_has_the_same_defaults_and_lists_what_would_work():
    mesh = sx.create_cpu_mesh()
    assert mesh == sx.create_mesh(backend="cpu") and {device.platform for device in mesh.devices.flat} == {"cpu"}
    with pytest.raises(sx.MeshError, match="it needs 15 devices, there are 8"):
        sx.create_cpu_mesh((3, 5), ("dp", "tp"))


@pytest.mark.parametrize("text", ["dp:2,tp:4", "2,4", "dp=2,tp=4"])
def test_parse_mesh_from_string(text):
    assert sx.parse_mesh_from_string(text, ["dp", "tp"]).shape_tuple == (("dp", 2), ("tp", 4))


@pytest.mark.parametrize(
    "text, words",
    [
        ("dp:2,pt:4", "pt: is not expected"),
        ("dp:8", "tp: is missing in the text"),
        ("2,x", "does not parse"),
        ("8", "1 sizes"),
    ],
)
def test_parse_mesh_from_string_says_what_is_wrong(text, words):
    with pytest.raises(ValueError) as error:
        sx.parse_mesh_from_string(text, ["dp", "tp"])
    assert words in str(error.value)


# ---- the mesh in force ----------------------------------------------------------------------------------------------


def test_current_mesh_honours_every_context():
    mesh = mesh_of()
    assert sx.current_mesh() is None
    assert sx.current_mesh(mesh) is mesh
    with mesh:
        assert sx.current_mesh() == mesh
    with jax.set_mesh(mesh):
        assert sx.current_mesh() == mesh
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert same_mesh(sx.current_mesh(), mesh)


def test_set_mesh_is_not_a_silent_no_op():  # Better: "Under jax.set_mesh the original does nothing and says nothing"
    with jax.set_mesh(mesh_of()):
        assert sx.get_mesh_axis_names() == ["dp", "tp"]


def test_current_mesh_works_in_traced_code():
    mesh, seen = mesh_of(), []
    look = jax.jit(lambda x: (seen.append(sx.current_mesh()), x)[1])
    with jax.set_mesh(mesh):
        look(1.0)
    with mesh:
        look(2)
    assert isinstance(seen[0], AbstractMesh) and same_mesh(seen[0], mesh) and seen[1] == mesh

    def inside(x):
        seen.append(sx.current_mesh())
        return x

    jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")))(np.ones(8))
    assert same_mesh(seen[2], mesh) and AxisType.Manual in seen[2].axis_types


def test_two_meshes_that_disagree_are_an_error_naming_both():
    mesh, other = mesh_of(), mesh_of((8,), ("zz",))
    with mesh, jax.set_mesh(other), pytest.raises(sx.MeshConflictError) as error:
        sx.current_mesh()
    assert "dp=2,tp=4" in str(error.value) and "zz=8" in str(error.value)
    with jax.set_mesh(other), pytest.raises(sx.MeshConflictError, match="the mesh argument"):
        sx.current_mesh(mesh)
    reversed_devices = mesh_of(devices=jax.devices()[::-1])
    with mesh, jax.set_mesh(reversed_devices), pytest.raises(sx.MeshConflictError):
        sx.current_mesh()


def test_the_same_mesh_twice_is_no_conflict():
    mesh = mesh_of()
    with mesh, jax.set_mesh(mesh_of(kind=AxisType.Explicit)):
        assert same_mesh(sx.current_mesh(), mesh)
        assert sx.current_mesh(mesh) is mesh


@pytest.mark.parametrize("argument", ["dp=2,tp=4", {"dp": 2, "tp": 4}, sx.MeshSpec("dp=2,tp=4").abstract()], ids=str)
def test_an_argument_without_devices_means_the_mesh_in_force(argument):
    mesh = mesh_of(kind=AxisType.Explicit)
    for context in (mesh, jax.set_mesh(mesh)):
        with context:
            assert sx.current_mesh(argument) is mesh
            with pytest.raises(sx.MeshConflictError):
                sx.current_mesh("dp=4,tp=2")
    assert isinstance(sx.current_mesh(argument), AbstractMesh)


def test_set_mesh_is_thread_local_and_we_say_so_by_none():
    seen = []
    with jax.set_mesh(mesh_of()):
        thread = threading.Thread(target=lambda: seen.append(sx.current_mesh()))
        thread.start()
        thread.join(60)
    assert seen == [None]


def test_get_incontext_mesh():
    with pytest.raises(AssertionError, match="enter `with jax.set_mesh"):
        sx.get_incontext_mesh()
    empty = sx.get_incontext_mesh(raise_error=False)
    assert isinstance(empty, Mesh) and empty.empty
    with mesh_of() as mesh:
        assert sx.get_incontext_mesh() == mesh


def test_small_questions():
    mesh = mesh_of()
    assert sx.get_mesh_axis_names(mesh) == ["dp", "tp"]
    assert sx.get_axes_size_in_mesh(None) == 1
    assert sx.get_axes_size_in_mesh("tp", mesh) == 4 and sx.get_axes_size_in_mesh(("dp", "tp"), mesh) == 8
    with pytest.raises(KeyError, match="'pt'.*did you mean 'tp'"):
        sx.get_axes_size_in_mesh(("dp", "pt"), mesh)
    with pytest.raises(TypeError, match="axis names are a string"):
        sx.get_axes_size_in_mesh(3, mesh)
    assert not sx.names_in_current_mesh("dp")
    with mesh:
        assert sx.names_in_current_mesh("dp", "tp") and not sx.names_in_current_mesh("dp", "ep")
        assert sx.get_axes_size_in_mesh("dp") == 2


def test_sizes_and_indices_inside_shard_map():
    mesh = mesh_of()

    def body(x):
        size = (
            sx.get_mesh_axis_size(("dp", "tp")) + 100 * sx.get_mesh_axis_size("tp") + 1000 * sx.get_mesh_axis_size(())
        )
        return (
            x * 0 + sx.get_submesh_device_index(("dp", "tp")),
            x * 0 + sx.get_submesh_device_index(("tp", "dp")),
            x * 0 + size,
        )

    spec = P(("dp", "tp"))
    major, minor, size = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))(np.zeros(8, np.int32))
    assert major.tolist() == list(range(8))
    assert minor.tolist() == [tp * 2 + dp for dp in range(2) for tp in range(4)]
    assert size.tolist() == [1408] * 8
    assert sx.get_submesh_device_index(()) == 0
    for question in (sx.get_mesh_axis_size, sx.get_submesh_device_index):
        with pytest.raises(TypeError, match="axis names are a string"):
            question((1, 2))
        with pytest.raises(TypeError):
            question(3)


@pytest.mark.parametrize("mesh", ["dp=64,tp=64", sx.MeshSpec("dp=64,tp=64"), sx.MeshSpec("dp=64,tp=64").abstract()])
def test_describe_an_abstract_mesh(mesh):
    text = str(sx.describe(mesh))
    assert "unknown (abstract mesh)" in text and "4,096 abstract devices" in text


def test_a_device_twice_and_a_bare_dcn_are_errors():
    with pytest.raises(sx.MeshError, match="1 device listed more than once"):
        sx.make_mesh("dp=2", devices=[jax.devices()[0]] * 2)
    with pytest.raises(sx.MeshError, match="dcn is 2"):
        sx.make_mesh("dp=2,tp=4", dcn=2)

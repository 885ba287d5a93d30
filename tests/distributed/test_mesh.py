from types import SimpleNamespace

import jax
import pytest

from jaxrl_llm.distributed import mesh as meshes


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("", (1, 1, 1, 1, 1)),
        ("data=8", (8, 1, 1, 1, 1)),
        ("tensor=2,data=2", (2, 1, 1, 1, 2)),
        ("data=2,fsdp=2,tensor=2", (2, 2, 1, 1, 2)),
        ("expert=2,context=4", (1, 1, 2, 4, 1)),
        (" fsdp = 4 ", (1, 4, 1, 1, 1)),
    ],
)
def test_sizes_by_name(spec, shape):
    mesh = meshes.parse_mesh(spec)
    assert mesh.axis_names == meshes.AXES and mesh.devices.shape == shape


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rows=2", "unknown axis 'rows'; the axes are data, fsdp, expert, context, tensor"),
        ("data", "data='' is not a positive number"),
        ("data=0", "data='0' is not a positive number"),
        ("data=-2", "data='-2' is not a positive number"),
        ("data=two", "data='two' is not a positive number"),
        ("data=2,data=4", "axis data is given twice"),
        ("data=3", "needs 3 devices, which does not divide the 8 there are"),
        ("data=4,fsdp=4", "needs 16 devices, which does not divide the 8 there are"),
    ],
)
def test_errors_name_the_part(spec, message):
    with pytest.raises(ValueError, match=message):
        meshes.parse_mesh(spec)


def test_given_devices_are_the_ones_used():
    devices = jax.devices()[4:6]
    assert list(meshes.parse_mesh("fsdp=2", devices).devices.flat) == devices


def test_no_process_is_left_without_a_device(monkeypatch):
    """It would run no program, and the others would wait for it."""
    devices = [SimpleNamespace(process_index=k // 4, platform="tpu") for k in range(8)]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="--mesh data=4 has none of the devices of process 1: give sizes for all 8"):
        meshes.parse_mesh("data=4", devices)


def test_rows_must_divide():
    mesh = meshes.parse_mesh("data=2,expert=2,tensor=2")
    meshes.check_rows(mesh, 8, "--prompts-per-step")
    with pytest.raises(ValueError, match="--prompts-per-step=6 does not divide over data x fsdp x expert = 4 devices"):
        meshes.check_rows(mesh, 6, "--prompts-per-step")

"""Where a process finds its place: arguments, our launcher, jax's detection; and what it says when it cannot."""

import pytest

from shardax.cluster.detect import Place, find_place
from shardax.errors import ClusterError

OURS = {"SHARDAX_COORDINATOR": "127.0.0.1:9", "SHARDAX_PROCESSES": "4", "SHARDAX_RANK": "3", "SHARDAX_JOB": "j"}


def test_nothing_at_all_means_alone():
    assert find_place(environment={}) is None


def test_a_process_can_be_told_that_it_is_alone():
    assert find_place(environment={"WORLD_SIZE": "4", "RANK": "1"}, method="deactivate") is None


def test_our_launcher_and_arguments():
    assert find_place(environment=OURS) == Place("127.0.0.1:9", 4, 3, job="j")
    assert find_place("h:1", 2, 0, environment=OURS, method="deactivate") == Place("h:1", 2, 0, job="j")


def test_slurm_and_open_mpi_are_left_to_jax(monkeypatch):
    slurm = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "n[3-5]",
        "SLURM_NTASKS": "6",
        "SLURM_PROCID": "4",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_ID": "2",
    }
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    place = find_place()
    assert place is not None
    assert (place.host, place.size, place.rank, place.local_device_ids, place.job) == ("n3", 6, 4, (1,), "slurm 77.2")


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        ((), {"WORLD_SIZE": "4", "RANK": "1"}, ["does not know its place", "torchrun", 'int(os.environ[\'WORLD_SIZE\'])']),
        ((), {"PMI_SIZE": "4", "PMI_RANK": "1"}, ["an MPI launcher (PMI)"]),
        ((), {"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, ["SLURM says 4 tasks", "start it with srun"]),
        (("h:1",), {}, ["num_processes: is not given", "process_id: is not given", "srun"]),
        (("h:1", 4, 4), {}, ["rank 4 cannot be", "outside 0..3"]),
        (("h:1", 4, -1), {}, ["rank -1", "outside 0..3"]),
        (("h:1", 0, 0), {}, ["num_processes is 0"]),
        (("h", 2, 0), {}, ["'h'", "host:port"]),
        (("h:70000", 2, 0), {}, ["'h:70000'", "host:port"]),
        ((9, 2, 0), {}, ["coordinator_address is 9"]),
        (("h:1", "2", 0), {}, ["num_processes is '2'", "a whole number"]),
        (("h:1", 2, "0"), {}, ["process_id is '0'"]),
        ((), {"SHARDAX_RANK": "1"}, ["belong together"]),
    ],
)  # fmt: skip
def test_what_cannot_be_is_explained(arguments, environment, says):
    with pytest.raises(ClusterError) as caught:
        find_place(*arguments, environment=environment, method="deactivate" if len(arguments) == 3 else None)
    for text in says:
        assert text in str(caught.value)


def test_a_cluster_that_is_asked_for_must_be_there():
    """Otherwise every process of the job would go on alone."""
    with pytest.raises(ClusterError, match=r"cluster_detection_method 'slrum'; did you mean 'slurm'[\s\S]*'ompi'"):
        find_place(method="slrum", environment={})
    with pytest.raises(ClusterError, match=r"'slurm', and this process is not in one"):
        find_place(method="slurm", environment={})


@pytest.mark.parametrize(
    ("coordinator", "bind"),
    [("127.0.0.1:5", "127.0.0.1:5"), ("localhost:5", "127.0.0.1:5"), ("[::1]:5", "[::1]:5"), ("n3:5", "[::]:5")],
)
def test_a_local_coordinator_listens_on_this_host_only(coordinator, bind):
    assert Place(coordinator, 2, 0).bind == bind

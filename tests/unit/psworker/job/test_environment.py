"""A worker's settings from its environment."""

import logging

import pytest

from pscore.errors import ConfigError
from psworker.job.environment import Environment

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "run7",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
DMLC = {
    "DMLC_ROLE": "worker",
    "DMLC_PS_ROOT_URI": "10.0.0.9",
    "DMLC_PS_ROOT_PORT": "9090",
    "DMLC_NUM_SERVER": "2",
    "DMLC_NUM_WORKER": "3",
    "DMLC_WORKER_ID": "2",
}


def test_an_empty_environment_is_one_worker_without_servers() -> None:
    found = Environment.read({})
    assert (found.servers, found.rank, found.num_workers) == ((), 0, 1)
    assert (found.local_rank, found.local_workers) == (0, 1)
    assert (found.job, found.restart, found.run_id) == ("default", 0, "")


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("PACELINE_RNAK", "PACELINE_RANK"),
        ("PACELINE_SERVER", "PACELINE_SERVERS"),
        ("PACELINE_WORKERS", "PACELINE_NUM_WORKERS"),
        ("PACELINE_TLS_CERTS", "PACELINE_TLS_CERT"),
        ("PACELINE_STATEDIR", "PACELINE_STATE_DIR"),
        ("PACLINE_SERVERS", "PACELINE_SERVERS"),
        ("PACELINES_RANK", "PACELINE_RANK"),
        ("PACELINE_RUNID", "PACELINE_RUN_ID"),
    ],
)
def test_a_misspelt_variable_is_refused_and_the_one_that_was_meant_is_named(
    misspelt: str, meant: str
) -> None:
    with pytest.raises(ConfigError, match=f"{misspelt} is set, .* {meant} was probably meant"):
        Environment.read({misspelt: "1"})


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("PACELINE_MODE", "mode is an argument of psworker.DistributedOptimizer"),
        ("PACELINE_NODE_RANK", "node_rank is an option of psworker run"),
    ],
)
def test_a_name_that_means_something_elsewhere_is_refused(name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is set, .*: {what}; unset the variable"):
        Environment.read({name: "1"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a:1,b:2\r", r"PACELINE_SERVERS ends with a carriage return: .* \(CRLF\); save"),
        ('"a:1,b:2"', 'PACELINE_SERVERS is "a:1,b:2", with quotation marks that are part of the'),
        ("'a:1'", "PACELINE_SERVERS is 'a:1', with quotation marks that are part of the value"),
    ],
)
def test_marks_of_the_file_that_set_a_variable_are_named(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Environment.read({"PACELINE_SERVERS": value})


def test_a_blank_at_an_end_of_a_jobs_name_is_refused() -> None:
    for given in ({"PACELINE_JOB": " night"}, {"PACELINE_JOB": "night\n"}, {"PACELINE_JOB": " "}):
        with pytest.raises(ConfigError, match=r"the name of the job is .* with a blank"):
            Environment.read(given)
    assert Environment.read({"PACELINE_JOB": "last night"}).job == "last night"


def test_variables_of_the_user_and_those_of_a_service_of_kubernetes_are_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = {
        "PACELINE_SERVICE_HOST": "10.0.0.1",
        "PACELINE_SERVICE_PORT": "7070",
        "PACELINE_SERVICE_PORT_METRICS": "8070",
        "PACELINE_PORT": "tcp://10.0.0.1:7070",
        "PACELINE_PORT_7070_TCP_PORT": "7070",
        "PACELINE_SHARD_PORT": "tcp://10.0.0.2:7070",
        "PACELINE_SHARD_SERVICE_PORT": "7070",
    }
    own = {"PACELINE_FOLDER": "/jobs/7", "PACELINE_VERSION": "3", "MY_PACELINE_RNAK": "1"}
    own |= {
        "PACELINE": "1",
        "PIPELINE_RANK": "1",
        "MACHINE_PORT": "1",
        "PACLINE_FOLDER": "1",
        "RANK_": "1",
    }
    assert Environment.read(service | own) == Environment.read({})
    assert caplog.messages == [
        f"{name} is set, which is no variable of Paceline: it is ignored" for name in list(own)[:2]
    ]


def test_torchruns_variables_are_read() -> None:
    found = Environment.read(TORCHRUN)
    assert (found.rank, found.num_workers) == (3, 4)
    assert (found.local_rank, found.local_workers) == (1, 2)
    assert (found.job, found.restart) == ("run7", 2)
    assert found.servers == ()


def test_torchruns_name_for_no_name_is_none() -> None:
    assert Environment.read({"TORCHELASTIC_RUN_ID": "none"}).job == "default"


def test_ours_win_over_torchruns_and_those_over_dmlcs() -> None:
    ours = {"PACELINE_RANK": "1", "PACELINE_NUM_WORKERS": "2", "PACELINE_JOB": "mine"}
    found = Environment.read(DMLC | TORCHRUN | ours)
    assert (found.rank, found.num_workers, found.job) == (1, 2, "mine")
    assert Environment.read(TORCHRUN).run_id == ""  # Often the same for the next launch.
    assert Environment.read({"PACELINE_RUN_ID": "uid"}).run_id == "uid"
    found = Environment.read(DMLC | TORCHRUN)
    assert (found.rank, found.num_workers) == (3, 4)


def test_dmlcs_variables_are_aliases_and_the_mapping_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="paceline"):
        found = Environment.read(DMLC)
    assert found.servers == ("10.0.0.9:9090", "10.0.0.9:9091")
    assert (found.rank, found.num_workers) == (2, 3)
    assert "using DMLC_WORKER_ID=2 as PACELINE_RANK" in caplog.text
    assert "PACELINE_SERVERS=10.0.0.9:9090,10.0.0.9:9091" in caplog.text


def test_our_servers_win_over_dmlcs() -> None:
    assert Environment.read(DMLC | {"PACELINE_SERVERS": "a:1,b:2"}).servers == ("a:1", "b:2")


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_another_role_than_a_workers_is_refused(role: str) -> None:
    with pytest.raises(ConfigError, match=f"DMLC_ROLE is '{role}'.*psserver start"):
        Environment.read(DMLC | {"DMLC_ROLE": role})


def test_the_shards_may_choose_the_rank() -> None:
    assert Environment.read({"WORLD_SIZE": "4"}).rank == -1


def test_an_empty_variable_counts_as_none() -> None:
    found = Environment.read({"RANK": "", "WORLD_SIZE": "", "PACELINE_JOB": "", "DMLC_ROLE": ""})
    assert (found.rank, found.num_workers, found.job) == (0, 1, "default")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "first"}, "RANK is 'first', must be a whole number"),
        ({"WORLD_SIZE": "2.5"}, "WORLD_SIZE is '2.5'"),
        ({"WORLD_SIZE": "0"}, r"WORLD_SIZE is '0', must be a whole number in 1\.\."),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "rank 2 of 2 workers"),
        ({"PACELINE_RANK": "1"}, "rank 1 of 1 workers, .*; PACELINE_NUM_WORKERS is"),
        ({"WORLD_SIZE": "2", "RANK": "-2"}, r"RANK is '-2', must be a whole number in -1\.\."),
        ({"PACELINE_RANK": "--1"}, "PACELINE_RANK is '--1'"),
        ({"PACELINE_NUM_WORKERS": "9" * 5000}, "PACELINE_NUM_WORKERS is '9{40}"),
        ({"PACELINE_LOCAL_RANK": "-1"}, "PACELINE_LOCAL_RANK is '-1'"),
        ({"PACELINE_LOCAL_WORKERS": "0"}, "PACELINE_LOCAL_WORKERS is '0'"),
        ({"PACELINE_MIN_WORKERS": "0"}, "PACELINE_MIN_WORKERS is '0'"),
        ({"PACELINE_GROUP": "-5"}, "PACELINE_GROUP is '-5'"),
        ({"PACELINE_NUM_GROUPS": "0"}, "PACELINE_NUM_GROUPS is '0'"),
        ({"PACELINE_TIMEOUT_S": "-1"}, r"timeout_s \(PACELINE_TIMEOUT_S\) is -1.0, must be in 0"),
        ({"PACELINE_SERVERS": " "}, "servers is ' ', which names no address"),
        ({"PACELINE_SERVERS": ","}, "servers is ',', which names no address"),
        ({"PACELINE_SERVERS": f"a:{'9' * 5000}"}, "ports are 1 to 65535"),
        ({"PACELINE_TIMELINE": "/no/such/trace.json"}, "/no/such is no folder"),
        ({"PACELINE_SERVERS": "here"}, "'here' must look like host:port"),
        ({"DMLC_PS_ROOT_URI": "h", "DMLC_PS_ROOT_PORT": "p"}, "DMLC_PS_ROOT_PORT is 'p'"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Environment.read(variables)


# ----- elastic jobs


def test_the_least_and_most_workers_make_a_job_elastic() -> None:
    found = Environment.read({"PACELINE_MIN_WORKERS": "2", "PACELINE_MAX_WORKERS": "5"})
    assert (found.min_workers, found.num_workers, found.rank) == (2, 5, -1)
    found = Environment.read({"PACELINE_MAX_WORKERS": "5", "PACELINE_RANK": "4"})
    assert (found.min_workers, found.num_workers, found.rank) == (1, 5, 4)
    found = Environment.read({"PACELINE_MIN_WORKERS": "3"} | TORCHRUN)
    assert (found.min_workers, found.num_workers, found.rank) == (3, 4, 3)
    assert Environment.read(TORCHRUN).min_workers == 0


def test_a_least_number_of_workers_beyond_the_most_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"min_workers is 6, must be in 1\.\.5"):
        Environment.read({"PACELINE_MIN_WORKERS": "6", "PACELINE_MAX_WORKERS": "5"})


SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
}


def test_a_task_of_srun_knows_its_place() -> None:
    read = Environment.read(SLURM)
    assert (read.rank, read.num_workers, read.local_rank, read.job) == (3, 4, 1, "slurm-77")


def test_torchruns_variables_win_over_slurms() -> None:
    read = Environment.read({**SLURM, "RANK": "0", "WORLD_SIZE": "2"})
    assert (read.rank, read.num_workers, read.job) == (0, 2, "default")
    assert Environment.read({**SLURM, "PACELINE_JOB": "mine"}).job == "mine"


def test_a_batch_script_is_one_worker() -> None:
    """It has the variables of the allocation, but is no step with several tasks."""
    read = Environment.read({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "77"})
    assert (read.rank, read.num_workers, read.job) == (0, 1, "default")


def test_an_elastic_job_under_slurm_takes_its_ranks_from_the_shards() -> None:
    assert Environment.read({**SLURM, "PACELINE_MAX_WORKERS": "8"}).rank == -1


def test_a_worker_listens_for_others_at_an_address_and_at_ports_that_are_given() -> None:
    assert (Environment.read({}).peer_host, Environment.read({}).peer_ports) == ("", range(1))
    given = {"PACELINE_PEER_HOST": "[fd00::1]", "PACELINE_PEER_PORTS": "7100-7107"}
    found = Environment.read(given)
    assert (found.peer_host, found.peer_ports) == ("fd00::1", range(7100, 7108))
    assert Environment.read({"PACELINE_PEER_PORTS": "7100"}).peer_ports == range(7100, 7101)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PACELINE_PEER_HOST", "0.0.0.0"),
        *(("PACELINE_PEER_PORTS", text) for text in ("0", "a", "9-", "9-8", "-5", "1-65536")),
    ],
)
def test_an_address_or_port_that_no_other_worker_could_use_is_refused(
    name: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{value}', must be"):
        Environment.read({name: value})

"""Every error in one screen: its exit code, its words, and the same as data."""

import re

import pytest

USAGE = [
    (["layout", "nowhere.py"], "there is no file nowhere.py"),
    (["layout", "mpl.py"], "there is no file mpl.py; did you mean 'mlp.py'"),
    (["layout", "nowhere.train"], "there is no module 'nowhere.train'"),
    (["layout", "mlp.py:cas"], "mlp.py has no 'cas'; did you mean 'case'"),
    (["layout", ":case"], "':case' names no module"),
    (["layout", ""], "'' names no module"),
    (["layout", "."], ". is a folder"),
    (["layout", "./"], ". is a folder"),
    (["layout", "mlp.py:later"], "mlp.py:later is async"),
    (["layout", "mlp.py:needs"], "mlp.py:needs needs arguments: width"),
    (["layout", "mlp.py:number"], "mlp.py:number gives int, not a Case"),
    (["layout", "leaves.py"], "leaves.py exits when it is imported (code 3)"),
    (["layout", "mlp.py", "--mesh", "dp=x"], "mesh 'dp=x' does not parse"),
    (["layout", "mlp.py", "--mesh", "dp=3,fsdp=-1"], "mesh dp=3,fsdp=-1 does not fit 8 devices"),
    (["layout", "mlp.py", "--explain", "pu"], "no array of this layout has 'pu' in its path; did you mean 'up'?"),
    (
        ["layout", "mlp.py", "--on-misfit", "adpt"],
        "--on-misfit is error or warn or adapt, not 'adpt'; did you mean 'adapt'?",
    ),
    (["prove", "mlp.py", "-t", "tpu:v5e:2x5"], "unknown target 'tpu:v5e:2x5'"),
    (["prove", "mlp.py", "-t", "tpu:v5f:2x4"], "unknown tpu chip 'v5f'"),
    (["prove", "mlp.py", "-t", "cpu:8", "-m", "dp=4"], "mesh dp=4 has 4 devices, target cpu:8 has 8"),
    (["prove", "mlp.py", "-t", "cpu:4", "-t", "cpu:8", "-m", "dp=-1", "--save", "p.json"], "--save keeps one proof"),
    (["verify", "nothing.lock"], "there is no sharding lock nothing.lock"),
    (
        ["verify", "mlp.py"],
        "mlp.py is not JSON mlp.py: Extra data: line 1 column 3 (char 2) write one: shardax lock MODULE:FN -o sha",
    ),
    (["verify", "."], ". is a folder the lock in it: sharding.lock"),
    (["layout", "mlp.py", "--save", "."], "cannot write . .: is a folder"),
    (["prove", "mlp.py", "--save", "mlp.py/p.json"], "cannot write mlp.py/p.json mlp.py/p.json: "),
    (["prove", "mlp.py", "--report", "/proc/no/page.html"], "cannot write /proc/no/page.html /proc/no/page.html: "),
    (["lock", "mlp.py", "-o", "."], "cannot write ."),
    (["demo", "-o", "mlp.py"], "cannot write mlp.py/index.html"),
    (["launch", "-n", "2", "rank.py"], "there is no file rank.py; did you mean 'ranks.py'"),
    (["mesh", "dp=2,tp=-1"], "mesh dp=2,tp=-1 has no size yet"),
    (["mesh", "dp=2,dp=2"], "this mesh cannot be"),
    (["mesh", "dp=2", "--axis", "pd"], "no axis 'pd' in mesh dp=2; did you mean 'dp'?"),
    (["targets", "v7"], "unknown chip 'v7'"),
    (["targets", "tpu"], "'tpu' is no chip"),
]
NO = [
    (["layout", "mlp.py:odd"], "2 leaves do not fit the mesh dp=2,fsdp=2,tp=2"),
    (["layout", "mlp.py:alone"], "no mesh is given for step"),
]


@pytest.mark.parametrize(
    ("arguments", "words"), USAGE, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_command_line_that_is_wrong_is_exit_code_2(quickly, arguments, words):
    ended = quickly(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert one_line(ended.err).startswith(f"error: {words}")
    assert len(ended.err.splitlines()) <= 12 and "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("arguments", "words"), NO, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_program_that_is_wrong_is_exit_code_1(quickly, arguments, words):
    ended = quickly(*arguments)
    assert (ended.code, ended.out) == (1, "")
    assert one_line(ended.err).startswith(f"error: {words}")


def one_line(text):
    return re.sub(r"\s+", " ", text)


def test_a_missing_compiler_is_exit_code_3(command):
    ended = command("prove", "mlp.py", "-t", "tpu:v5e:2x4", TPU_LIBRARY_PATH="/nowhere/libtpu.so")
    assert ended.code == 3
    assert (
        "error: cannot compile for tpu:v5e:2x4 tpu: TPU_LIBRARY_PATH='/nowhere/libtpu.so' does not exist"
        in one_line(ended.err)
    )
    assert 'pip install "shardax[tpu]"' in ended.err


def test_an_exception_of_the_program_is_exit_code_4_and_names_its_line(command):
    ended = command("layout", "mlp.py:explodes")
    assert ended.code == 4
    lines = [line.strip() for line in ended.err.splitlines()]
    assert lines[0] == "error: ZeroDivisionError: division by zero"
    assert re.fullmatch(r"at mlp.py:\d+, in explodes", lines[1]) and lines[2] == "return 1 / 0"
    assert lines[3] == "--debug shows the whole traceback"
    whole = command("layout", "mlp.py:explodes", "--debug")
    assert whole.code == 4 and "Traceback (most recent call last)" in whole.err


def test_a_step_that_does_not_trace_names_its_line(quickly):
    ended = quickly("check", "mlp.py:wrong")
    assert ended.code in (1, 4)
    assert "mlp.py:" in ended.err and "Traceback" not in ended.err and len(ended.err.splitlines()) <= 16


def test_a_file_that_is_not_python_and_one_that_imports_what_is_not_there(quickly):
    broken = quickly("layout", "broken.py")
    assert broken.code == 4 and broken.err.startswith("error: SyntaxError")
    imports = quickly("layout", "imports.py")
    assert imports.code == 4 and "No module named 'not_there_at_all'" in imports.err and "imports.py:1" in imports.err


def test_errors_are_data_with_json(command, quickly):
    ended = command("layout", "mlp.py:odd", "--json")
    assert ended.code == ended.data["exit_code"] == 1
    error = ended.data["error"]
    assert error["type"] == "SpecError" or error["type"].endswith("Error")
    assert {each["where"] for each in error["offences"]} >= {"params/up", "params/down"}
    assert quickly("layout", "nowhere.py", "--json").data["error"]["type"] == "CommandError"
    assert quickly("layout", "mlp.py:explodes", "--json").data["exit_code"] == 4


def test_many_offences_fit_a_screen_and_say_how_many_they_are(quickly, folder):
    (folder / "many.py").write_text(
        "import jax, shardax as sx\n"
        "def case():\n"
        "    leaves = {f'w{n}': jax.ShapeDtypeStruct((n, 4), 'float32') for n in range(3, 403, 2)}\n"
        "    return sx.Case(lambda tree: tree, (leaves,), [('tree', jax.P('dp'))], mesh='dp=2')\n"
    )
    ended = quickly("layout", "many.py")
    assert ended.code == 1 and "error: 200 leaves do not fit the mesh dp=2" in ended.err
    assert len(ended.err.splitlines()) <= 48 and "more: --json lists all" in ended.err
    assert len(quickly("layout", "many.py", "--json").data["error"]["offences"]) == 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["layot"], "No such command 'layot'"),
        (["layout"], "Missing argument 'MODULE:FN'"),
        (["layout", "mlp.py", "--mehs", "dp=8"], "No such option: --mehs"),
        (["launch", "ranks.py"], "Missing option '-n' / '--processes'"),
        (["launch", "-n", "0", "ranks.py"], "should be greater than or equal to"),
    ],
)
def test_a_mistyped_command_line(quickly, arguments, words):
    ended = quickly(*arguments)
    assert ended.code == 2
    assert words in one_line(ended.err.replace("│", " "))

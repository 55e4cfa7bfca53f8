"""gemctl as its users meet it: a program with help, one JSON object, exit codes and messages that show the way out."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feature_store.errors import InvalidInput
from services.cli.console import as_json_line
from services.cli.period import Period
from services.cli.processes import Ports

COMMANDS = [
    ["demo"],
    ["world"],
    ["import"],
    ["train"],
    ["train", "foundation"],
    ["train", "vertical"],
    ["annotate"],
    ["evaluate"],
    ["profile"],
    ["up"],
    ["rank"],
    ["trace"],
    ["solaris"],
    ["solaris", "status"],
]
WORLD = ["world", "--users", "12", "--ads", "20", "--days", "3", "--json"]
NOWHERE = "127.0.0.1:1"
"""Nothing listens there."""


def _arguments(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "services.cli", *arguments]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def gemctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_arguments(*arguments), env=_environment(), capture_output=True, text=True, check=False, timeout=60)


def only_object(stdout: str) -> dict[str, Any]:
    """The one JSON object that stdout is; the words that JSON lacks are refused."""

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is not JSON")

    found: dict[str, Any] = json.loads(stdout, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small world."""
    folder = tmp_path_factory.mktemp("home")
    done = gemctl(*WORLD, "--home", str(folder))
    assert done.returncode == 0, done.stderr
    assert only_object(done.stdout)["rows"]["users"] == 12
    return folder


@pytest.fixture(scope="module")
def helps() -> list[str]:
    """What `--help` says, of the program and of every command, printed by one process."""
    program = (
        "import json, sys\nfrom services.cli.app import run\n"
        "for command in json.loads(sys.argv[1]):\n    assert run([*command, '--help']) == 0\n    print('\\f', end='')\n"
    )
    arguments = [sys.executable, "-c", program, json.dumps([[], *COMMANDS])]
    done = subprocess.run(arguments, env=_environment(), capture_output=True, text=True, check=True)
    return done.stdout.split("\f")[:-1]


def test_help_teaches_by_an_example_that_is_of_the_same_command(helps: list[str]) -> None:
    for command, text in zip([[], *COMMANDS], helps, strict=True):
        examples = [line.strip() for line in text.splitlines() if line.strip().startswith("Example: ")]
        assert len(examples) == 1, text
        assert examples[0].startswith(" ".join(["Example: gemctl", *command]))


def test_every_command_is_among_those_whose_help_is_tested() -> None:
    done = gemctl("--help")
    assert done.returncode == 0
    listed = [line.split() for line in done.stdout.partition("Commands:")[2].splitlines()]
    assert {words[0] for words in listed if words and words[0] != "Example:"} == {command[0] for command in COMMANDS}


def test_help_is_quick_for_it_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom services.cli.app import run\nassert run(['train', 'vertical', '--help']) == 0\n"
        "print(sorted({'torch', 'pyarrow', 'deltalake', 'pandas', 'grpc'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


REFUSED: list[tuple[list[str], str, str]] = [
    (["demo", "--size", "huge"], "INVALID_INPUT", "'huge' is not known; use one of"),
    (["world", "--users", "0"], "INVALID_INPUT", "users is 0"),
    (["world", "--seed", "-1"], "INVALID_INPUT", "seed is -1"),
    (["import", "nowhere"], "NOT_FOUND", "nowhere is not a folder"),
    (["import", ".", "--spec", "nowhere.yaml"], "INVALID_INPUT", "nowhere.yaml cannot be read"),
    (["import", "."], "INVALID_INPUT", "give --spec"),
    (["train", "foundation"], "NOT_FOUND", "run `gemctl import` or `gemctl world`"),
    (["train", "vertical", "--surface", "feed", "--arm", "A9"], "INVALID_INPUT", "'A9' is not known; use one of"),
    (["annotate", "--since", "now"], "NOT_FOUND", "run `gemctl import` or `gemctl world`"),
    (["evaluate"], "NOT_FOUND", "run `gemctl import` or `gemctl world`"),
    (["profile", "--candidates", "0"], "INVALID_INPUT", "candidates is 0; it must be at least 1"),
    (["profile", "--plot", "roof.pdf"], "INVALID_INPUT", "let it end with one of"),
    (["profile", "--plot", "nowhere/roof.svg"], "NOT_FOUND", "nowhere is not a folder"),
    (["rank", "--surface", "feed", "--user", "1", "--ads", ","], "INVALID_INPUT", "names no ad"),
    (["rank", "--surface", "feed", "--user", "1", "--ads", "1", "--at", "noon"], "INVALID_INPUT", "'noon' is no time; write"),
    (["rank", "--surface", "feed", "--user", "1", "--ads", "1", "--router", NOWHERE], "NOT_READY", "run `gemctl up`"),
    (["trace", "ff"], "NOT_FOUND", "copy the id that `gemctl rank` prints"),
    (["solaris", "status"], "NOT_FOUND", "run `gemctl train`"),
]


@pytest.mark.parametrize(("command", "reason", "message"), REFUSED, ids=lambda part: part if isinstance(part, str) else " ".join(part))
def test_what_is_refused_ends_with_1_and_one_object_that_says_why_and_the_way_out(
    command: list[str], reason: str, message: str, tmp_path: Path
) -> None:
    home = [] if command[0] == "rank" else ["--home", str(tmp_path / "home")]
    done = gemctl(*command, *home, "--json")
    assert done.returncode == 1, done.stderr
    error = only_object(done.stdout)["error"]
    assert (set(error), error["reason"]) == ({"code", "reason", "message"}, reason)
    assert message in error["message"]
    assert f"gemctl: {error['message']}\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_json_a_refusal_leaves_stdout_empty() -> None:
    done = gemctl("world", "--users", "0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gemctl: users is 0; it must be a whole number of at least 1\n"


def test_a_path_that_the_system_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = gemctl(*WORLD, "--home", str(tmp_path / "file" / "home"))
    assert done.returncode == 1
    assert str(tmp_path / "file") in only_object(done.stdout)["error"]["message"]


@pytest.mark.parametrize(
    "command", [["world", "--users", "many"], ["world", "--colour", "red"], ["rank"], ["no-such-command"], ["train", "nothing"]]
)
def test_wrong_usage_ends_with_2(command: list[str]) -> None:
    done = gemctl(*command, "--json")
    assert done.returncode == 2
    error = only_object(done.stdout)["error"]
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "USAGE")
    assert "--help" in error["message"]
    assert "Traceback" not in done.stderr


def test_a_second_log_in_one_home_is_refused_and_the_first_keeps_its_spec(home: Path, tmp_path: Path) -> None:
    before = (home / "spec.yaml").read_bytes()
    other = tmp_path / "other.yaml"
    other.write_bytes(before.replace(b"name: world", b"name: other"))
    for command in (WORLD, ["import", str(tmp_path), "--spec", str(other), "--json"]):
        done = gemctl(*command, "--home", str(home))
        assert done.returncode == 1
        assert "already holds a log; give another --home" in only_object(done.stdout)["error"]["message"]
    assert (home / "spec.yaml").read_bytes() == before


def test_a_spec_with_a_mistake_is_not_adopted(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: mine\nsurface: [feed]\n")
    done = gemctl("import", str(tmp_path), "--spec", str(tmp_path / "bad.yaml"), "--home", str(tmp_path / "home"))
    assert done.returncode == 1
    assert "line 2: surface: unknown key; did you mean 'surfaces'?" in done.stderr
    assert not (tmp_path / "home" / "spec.yaml").exists()


def test_a_model_that_is_not_there_is_named_with_those_that_are(home: Path) -> None:
    done = gemctl("evaluate", "--model", "feed-a7", "--home", str(home), "--json")
    message = only_object(done.stdout)["error"]["message"]
    assert done.returncode == 1
    assert "holds no model 'feed-a7', only []; run `gemctl train`" in message


def test_a_profile_names_what_every_part_costs_and_draws_it(home: Path, tmp_path: Path) -> None:
    tiny = ["profile", "--preset", "model.gem.presets:tiny", "--steps", "1", "--candidates", "5", "--history", "9"]
    done = gemctl(*tiny, "--plot", str(tmp_path / "roof.svg"), "--home", str(home), "--json")
    assert done.returncode == 0, done.stderr
    found = only_object(done.stdout)
    assert (found["log"], found["plot"]) == (str(home), str(tmp_path / "roof.svg"))
    assert found["machine"]["bandwidth"] > 0
    for what in ("training", "scoring"):
        profile = found[what]
        assert profile["mfu"] == pytest.approx(profile["flops"] / profile["seconds"] / found["machine"]["measured"])
        assert profile["nominal_mfu"] is None
        assert sum(part["share"] for part in profile["parts"].values()) == pytest.approx(1.0)
        assert [cost["share"] for cost in profile["largest"]] == sorted((c["share"] for c in profile["largest"]), reverse=True)
        assert len(profile["largest"]) == 3
    assert [found["scoring"][size] for size in ("requests", "candidates", "events")] == [1, 5, 9]
    assert found["training"]["requests"] > 1
    drawn = (tmp_path / "roof.svg").read_text()
    assert drawn.count("<!-- interaction -->") == 2
    assert "<!-- products" in drawn
    assert "<!-- copies" in drawn


def test_the_log_without_a_label_is_measured_with_nulls_and_their_reasons(home: Path) -> None:
    trained = gemctl("train", "foundation", "--until", "2026-01-02", "--home", str(home), "--json")
    assert trained.returncode == 0, trained.stderr
    assert only_object(trained.stdout)["steps"] > 0
    done = gemctl("evaluate", "--home", str(home), "--json")
    assert done.returncode == 0, done.stderr
    slices = only_object(done.stdout)["evaluation"]
    figures = [figure for surface in slices.values() for figure in surface.values()]
    nulls = {name for figure in figures for name in figure if figure[name] is None}
    assert nulls, "twelve users do not buy on every surface"
    for figure in figures:
        assert {name for name in figure if figure[name] is None} == set(figure.get("undefined", {}))
    taught = gemctl("train", "vertical", "--surface", "feed", "--arm", "A1", "--home", str(home), "--json")
    assert taught.returncode == 1
    assert "run `gemctl annotate` before training this arm" in only_object(taught.stdout)["error"]["message"]


def test_ctrl_c_ends_a_long_command_with_130_and_leaves_no_half_of_a_log(tmp_path: Path) -> None:
    arguments = ["world", "--users", "200000", "--ads", "2000", "--home", str(tmp_path), "--json"]
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, sys.argv[1:])"
    running = subprocess.Popen(  # shells let background jobs, such as these tests may be, ignore Ctrl-C
        [sys.executable, "-c", heed, *_arguments(*arguments)],
        env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "tables").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        stdout, stderr = running.communicate(timeout=20)
    finally:
        running.kill()
    assert running.returncode == 130, stderr
    assert only_object(stdout)["error"]["reason"] == "INTERRUPTED"
    assert "Traceback" not in stderr
    assert gemctl(*WORLD, "--home", str(tmp_path)).returncode == 0


def test_ctrl_c_ends_a_program_that_is_still_starting_with_130() -> None:
    program = "import os, signal, sys\nfrom services.cli import __main__ as gemctl\n" + (
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupt:\n    def find_spec(self, name, *rest):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\nsys.argv = ['gemctl', '--help']\ngemctl.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "")


def test_json_holds_no_number_that_is_none() -> None:
    line = as_json_line({"loss": math.nan, "best": -math.inf, "steps": 3, "series": [1.0, math.inf], "deep": ({"ne": math.nan},)})
    assert only_object(line) == {
        "loss": None,
        "loss_is": "nan",
        "best": None,
        "best_is": "-inf",
        "steps": 3,
        "series": [1.0, None],
        "deep": [{"ne": None, "ne_is": "nan"}],
    }


def test_a_period_reaches_as_far_as_the_log_unless_told_otherwise() -> None:
    assert Period().bounds(5, 9) == (5, 9)
    period = Period(since="2026-01-10", until="2026-01-10T12:00", zone="Asia/Shanghai")
    assert period.bounds(5, 9) == (1_767_974_400_000, 1_768_017_600_000)


def test_a_period_without_anything_in_it_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"nothing lies from 2026-01-10 until 9; .*give another --since or --until"):
        Period(since="2026-01-10").bounds(5, 9)


@pytest.mark.parametrize("base", [0, 1023, 65_517, 99_999, -1])
def test_ports_that_do_not_exist_are_refused(base: int) -> None:
    with pytest.raises(InvalidInput, match=f"base port {base} must lie between 1024 and 65516"):
        Ports(base=base)


@pytest.fixture(autouse=True)
def _nothing_is_left_where_it_runs(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own: others write into the one that tests are started from."""
    folder = tmp_path_factory.mktemp("here")
    monkeypatch.chdir(folder)
    yield
    assert list(folder.iterdir()) == []


def test_a_folder_of_trivagos_sessions_needs_no_spec(tmp_path: Path) -> None:
    header = "user_id,session_id,timestamp,step,action_type,reference,platform,city,device,current_filters,impressions,prices"
    clickout = "U,S,1541600000,1,clickout item,11,DE,Berlin,mobile,,10|11,90|50"
    (tmp_path / "train.csv").write_text(f"{header}\n{clickout}\n")
    done = gemctl("import", str(tmp_path), "--home", str(tmp_path / "home"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"] == {"catalogue": 2, "outcomes": 1, "impressions": 2}

"""gemctl: one command for everything a platform team does with gem on one machine.

Knows commands and their options. Does not know how anything is done: rooms and services do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from services.cli import commands, learning, profiling
from services.cli.console import Console
from services.cli.failures import guarded
from services.cli.home import Home
from services.cli.period import Period

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
HomeOption = Annotated[Path, typer.Option("--home", help="Folder of this platform: spec, tables, store, models, traces.")]
_HOME = Path(".gem")
Since = Annotated[str | None, typer.Option(help="First event that is used: a day, a time, or milliseconds.")]
Until = Annotated[str | None, typer.Option(help="Only earlier events are used: a day, a time, or milliseconds.")]
Zone = Annotated[str, typer.Option(help="Time zone of days and times that name none, such as Asia/Shanghai.")]

app = typer.Typer(
    name="gemctl",
    help="One ads foundation model for all surfaces, and the platform that serves it.\n\n"
    "Start with `gemctl demo`, or with `gemctl import` of own logs.\n\n"
    "Exit codes: 0 done, 1 refused (the message says why and the way out), 2 wrong usage, 130 interrupted.",
    epilog="Example: gemctl demo --size small",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
train_app = typer.Typer(
    help="Train the foundation model, or a surface's vertical model.",
    epilog="Example: gemctl train foundation --until 2026-01-10",
    no_args_is_help=True,
)
solaris_app = typer.Typer(
    help="Look at pair embeddings.", epilog="Example: gemctl solaris status --json", no_args_is_help=True
)
app.add_typer(train_app, name="train")
app.add_typer(solaris_app, name="solaris")


def run(arguments: Sequence[str]) -> int:
    """Runs a command; returns its exit code, see `services.cli.failures`."""
    return guarded(lambda: app(list(arguments)), as_json="--json" in arguments)


@app.command(epilog="Example: gemctl demo --size small")
def demo(
    data: Annotated[Path | None, typer.Option(help="Folder of real logs: KuaiRand, or files with a spec.yaml.")] = None,
    size: Annotated[str, typer.Option(help="small, default or large.")] = "default",
    home: HomeOption = Path(".demo"),
    as_json: Json = False,
) -> None:
    """Run the whole loop on this machine and write report.json and report.html."""
    commands.demo(Console(as_json=as_json), Home(home), size=size, data=data)


@app.command(epilog="Example: gemctl world --users 200 --ads 100 --days 7")
def world(
    users: Annotated[int, typer.Option(help="Users.")] = 1200,
    ads: Annotated[int, typer.Option(help="Ads.")] = 500,
    days: Annotated[int, typer.Option(help="Days.")] = 12,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal worlds.")] = 7,
    home: HomeOption = _HOME,
    as_json: Json = False,
) -> None:
    """Generate a world whose true probabilities are known."""
    commands.world(Console(as_json=as_json), Home(home), users=users, ads=ads, days=days, seed=seed)


@app.command("import", epilog="Example: gemctl import logs --spec spec.yaml")
def import_(
    source: Annotated[Path, typer.Argument(help="Folder of the files to import.")],
    spec: Annotated[Path | None, typer.Option(help="Dataset spec; KuaiRand's files have one built in.")] = None,
    max_reject_share: Annotated[float, typer.Option(help="Refuse the import if more rows than this are bad.")] = 0.01,
    home: HomeOption = _HOME,
    as_json: Json = False,
) -> None:
    """Import logs; bad rows are counted and kept aside with their reason."""
    commands.import_(Console(as_json=as_json), Home(home), source=source, spec=spec, max_reject_share=max_reject_share)


@train_app.command("foundation", epilog="Example: gemctl train foundation --until 2026-01-10 --epochs 1")
def train_foundation(
    preset: Annotated[str, typer.Option(help="A function that returns a configuration.")] = "model.gem.presets:tiny",
    since: Since = None,
    until: Until = None,
    zone: Zone = "UTC",
    epochs: Annotated[int, typer.Option(help="Passes over the log.")] = 1,
    home: HomeOption = _HOME,
    as_json: Json = False,
) -> None:
    """Train one foundation model on all surfaces and objectives, and publish it."""
    period = Period(since=since, until=until, zone=zone)
    learning.train_foundation(Console(as_json=as_json), Home(home), preset=preset, period=period, epochs=epochs)


@train_app.command("vertical", epilog="Example: gemctl train vertical --surface feed --arm A3")
def train_vertical(
    surface: Annotated[str, typer.Option(help="Surface that it will serve.")],
    arm: Annotated[str, typer.Option(help="A0 nothing, A1 soft labels, A2 and LoopFM, A3 and Solaris.")] = "A3",
    since: Since = None,
    until: Until = None,
    zone: Zone = "UTC",
    epochs: Annotated[int, typer.Option(help="Passes over the log.")] = 2,
    home: HomeOption = _HOME,
    as_json: Json = False,
) -> None:
    """Train one surface's vertical model on annotated rows, and publish it."""
    console, period = Console(as_json=as_json), Period(since=since, until=until, zone=zone)
    learning.train_vertical(console, Home(home), surface=surface, arm_name=arm, period=period, epochs=epochs)


@app.command(epilog="Example: gemctl annotate --since 2026-01-10 --until 2026-01-12")
def annotate(
    since: Since = None,
    until: Until = None,
    zone: Zone = "UTC",
    home: HomeOption = _HOME,
    as_json: Json = False,
) -> None:
    """Let the current foundation model annotate impressions: soft labels, memories, pair embeddings.

    It begins where the model's training ended unless told otherwise.
    """
    learning.annotate(Console(as_json=as_json), Home(home), period=Period(since=since, until=until, zone=zone))


@app.command(epilog="Example: gemctl evaluate --model feed-a3 --since 2026-01-12 --json")
def evaluate(
    model: Annotated[str, typer.Option(help="Name of a published model.")] = "foundation",
    since: Since = None,
    until: Until = None,
    zone: Zone = "UTC",
    home: HomeOption = _HOME,
    as_json: Json = False,
) -> None:
    """Measure a model per surface and objective: NE, AUC, GAUC, calibration.

    It begins where the model's training ended unless told otherwise.
    """
    period = Period(since=since, until=until, zone=zone)
    learning.evaluate_model(Console(as_json=as_json), Home(home), model=model, period=period)


@app.command(epilog="Example: gemctl profile --preset model.gem.presets:tiny --candidates 200 --plot roofline.svg")
def profile(
    preset: Annotated[str, typer.Option(help="A function that returns a configuration.")] = "model.gem.presets:public_s",
    candidates: Annotated[int, typer.Option(help="Candidates of the scoring call.")] = 100,
    history: Annotated[int, typer.Option(help="Events of the scoring call; repeated if the log has fewer.")] = 256,
    steps: Annotated[int, typer.Option(help="Training steps that are measured, as they are and by part.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Roofline to write: a file that ends with .svg or .png.")] = None,
    home: HomeOption = _HOME,
    as_json: Json = False,
) -> None:
    """Say where a training step and a scoring call spend their time: FLOPs, bytes, seconds and MFU of every part.

    It measures on the home's log, or on a small generated one. Nothing is trained that stays.
    """
    console = Console(as_json=as_json)
    sizes = {"candidates": candidates, "history": history, "steps": steps}
    profiling.profile(console, Home(home), preset=preset, plot=plot, **sizes)


@app.command(epilog="Example: gemctl up --base-port 7100")
def up(
    base_port: Annotated[int, typer.Option(help="First of 20 ports on loopback.")] = 7100,
    home: HomeOption = _HOME,
) -> None:
    """Start the six services over what was trained, until interrupted."""
    commands.up(Console(), Home(home), base_port=base_port)


@app.command(epilog="Example: gemctl rank --surface feed --user 1 --ads 1,2,3")
def rank(
    surface: Annotated[str, typer.Option(help="Surface of the request.")],
    user: Annotated[str, typer.Option(help="User id.")],
    ads: Annotated[str, typer.Option(help="Ad ids, separated by commas.")],
    at: Annotated[str | None, typer.Option(help="Time of the request: a date or milliseconds; else now.")] = None,
    router: Annotated[str, typer.Option(help="Address of the router.")] = "127.0.0.1:7100",
    as_json: Json = False,
) -> None:
    """Rank ads for a user as a client would."""
    commands.rank(Console(as_json=as_json), surface=surface, user=user, ads=ads, at=at, router=router)


@app.command(epilog="Example: gemctl trace 4bf92f35")
def trace(
    trace_id: Annotated[str, typer.Argument(help="Trace id, or the beginning of one.")],
    home: HomeOption = _HOME,
    as_json: Json = False,
) -> None:
    """Draw where a request spent its time."""
    commands.trace(Console(as_json=as_json), Home(home), trace_id)


@solaris_app.command("status", epilog="Example: gemctl solaris status --json")
def solaris_status(home: HomeOption = _HOME, as_json: Json = False) -> None:
    """Say how far pair embeddings reach: backlog, coverage by level, precision."""
    commands.solaris_status(Console(as_json=as_json), Home(home))

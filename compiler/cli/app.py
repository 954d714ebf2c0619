"""The application: finds commands, and turns every way of ending into an exit status."""

from __future__ import annotations

import errno
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer import completion
from typer.core import TyperGroup
from typer.exceptions import Abort, TyperException

from shipway.compiler.cli import commands, exit_codes

if TYPE_CHECKING:
    from shipway.compiler.cli.planner import Planner

ORDER = ("init", "validate", "plan", "show", "build", "launch", "explain", "schema", "doctor")
"""Commands in the order that a newcomer meets them; the others follow alphabetically."""


class CommandFolder(TyperGroup):
    """The commands in `commands/`, imported when named, so that help comes fast."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands."""
        names = {m.name.rstrip("_").replace("_", "-") for m in pkgutil.iter_modules(commands.__path__)}
        first = [name for name in ORDER if name in names]
        return first + sorted(names - set(first))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, or None when there is no such."""
        if cmd_name not in self.list_commands(ctx):
            return None
        module_name = cmd_name.replace("-", "_")
        found = {m.name for m in pkgutil.iter_modules(commands.__path__)}
        if module_name not in found:
            module_name += "_"
        module = importlib.import_module(f"{commands.__name__}.{module_name}")
        if hasattr(module, "application"):
            return typer.main.get_command(module.application())
        single = typer.Typer(add_completion=False, rich_markup_mode=None)
        single.command(cmd_name, no_args_is_help=getattr(module, "NO_ARGUMENTS_IS_HELP", False))(
            module.command
        )
        return typer.main.get_command(single)

    def get_help_option(self, ctx: Any) -> Any:
        """The `--help` option, with a value when it is not given that needs no pydantic to be understood."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """All commands with the whole first sentence of each one's help."""
        found = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.get_short_help_str(1000)) for name, command in found.items()])


def application() -> typer.Typer:
    """The whole application.

    The options of completion are Typer's own, with a default that needs no pydantic to be understood.
    """
    app = typer.Typer(
        name="shipway",
        cls=CommandFolder,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # rich's own imports would take longer than all the rest of a help page
        pretty_exceptions_enable=False,
        help="Plan, build and launch the training of very large models from one blueprint.",
        epilog="Exit status: 0 done, 2 usage, blueprint or edited plan, 3 nothing fits, 4 environment, "
        "5 stale plan, 6 plan --diff --exit-code found differences.",
    )

    @app.callback()
    def shared(
        version: bool = typer.Option(
            False, "--version", is_eager=True, callback=_print_version, help="Print the version and leave."
        ),
        install_completion: bool = typer.Option(
            False,
            "--install-completion",
            is_eager=True,
            callback=completion.install_callback,
            help="Install completion for the current shell.",
        ),
        show_completion: bool = typer.Option(
            False,
            "--show-completion",
            is_eager=True,
            callback=completion.show_callback,
            help="Show completion for the current shell, to copy it.",
        ),
    ) -> None:
        del version, install_completion, show_completion

    completion.get_completion_inspect_parameters()  # makes the shells known
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from shipway.compiler.version import version

        print(version())
        raise typer.Exit(exit_codes.OK)


def run(arguments: Sequence[str], planner: Planner | None = None) -> int:
    """Run one command line, with the planner where one loads for it already; returns its exit status."""
    try:
        status = _run(arguments, planner)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone (`| head`)
        _drop_output()
        return exit_codes.OK
    except OSError as error:
        if not _unwritable(error):
            raise
        _drop_output()
        reason = (error.strerror or "error").lower()
        print(f"error[EN003]: output cannot be written: {reason}", file=sys.stderr)
        print(" = help: Make room, or write elsewhere.", file=sys.stderr)
        return exit_codes.ENVIRONMENT
    return status


def _run(arguments: Sequence[str], planner: Planner | None) -> int:
    command = typer.main.get_command(application())
    try:
        status = command.main(list(arguments), prog_name="shipway", standalone_mode=False, obj=planner)
    except TyperException as error:
        return _usage(error, arguments)
    except (Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and _unwritable(error):
            raise
        return _internal(error, arguments)
    return status if isinstance(status, int) else exit_codes.OK


def _unwritable(error: OSError) -> bool:
    """Whether the fault lies with what is written to, such as a full disk or a reader that has gone."""
    return error.errno in (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _drop_output() -> None:
    """What is still buffered must not raise again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage(error: TyperException, arguments: Sequence[str]) -> int:
    message = error.format_message() or "a command is needed"
    if "--json" in arguments:
        diagnostic = {"code": "CL001", "severity": "error", "summary": message}
        print(json.dumps({"diagnostics": [diagnostic]}, indent=2))
        return exit_codes.INVALID
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "shipway"
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message)
        return exit_codes.INVALID
    print(f"error[CL001]: {message}", file=sys.stderr)
    print(f" = help: {path} --help", file=sys.stderr)
    return exit_codes.INVALID


def _internal(error: Exception, arguments: Sequence[str]) -> int:
    if os.environ.get("SHIPWAY_TRACEBACK") == "1":
        raise error
    from shipway.compiler.version import version

    summary = f"{type(error).__name__}: {error}".splitlines()[0]
    text = (
        f"internal error in shipway {version()}: {summary}. Please report it with the command and "
        "the blueprint; SHIPWAY_TRACEBACK=1 shows the traceback."
    )
    if "--json" in arguments:
        diagnostic = {"code": "IN001", "severity": "error", "summary": text}
        print(json.dumps({"diagnostics": [diagnostic]}, indent=2))
    else:
        print(text, file=sys.stderr)
    return exit_codes.INTERNAL

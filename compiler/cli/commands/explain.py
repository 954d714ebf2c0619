"""shipway explain"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shipway.compiler.cli.options import Json, Quiet

if TYPE_CHECKING:
    from shipway.compiler.codes import Code
    from shipway.compiler.explain import FieldWords
    from shipway.compiler.glossary import Term
    from shipway.schemas.diagnostics import Diagnostic


def _complete(incomplete: str) -> list[str]:
    from shipway.compiler.explain import names

    return [name for name in names() if name.startswith(incomplete)]


def command(
    subject: Annotated[
        list[str],
        typer.Argument(
            metavar="CODE|FIELD|TERM",
            help="A diagnostic's code, a field such as training.stages.context, or a term of a plan.",
            autocompletion=_complete,
            show_default=False,
        ),
    ],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Explain a diagnostic's code, a field of the blueprint, or a term of a plan."""
    from dataclasses import asdict

    from shipway.compiler.cli.output import Output
    from shipway.compiler.explain import FieldWords, find_each
    from shipway.compiler.glossary import Term

    output = Output(as_json=json, quiet=quiet)
    found, unknown = find_each(subject)
    if unknown and json:
        output.fail([_unknown(asked) for asked in unknown])
    output.data([asdict(item) for item in found])
    for index, item in enumerate(found):
        if index:
            output.show("")
        if isinstance(item, FieldWords):
            _show_field(item, output)
        elif isinstance(item, Term):
            _show_term(item, output)
        else:
            _show_code(item, output)
    if unknown:
        output.fail([_unknown(asked) for asked in unknown])


def _unknown(asked: str) -> Diagnostic:
    from shipway.compiler.explain import names
    from shipway.compiler.suggest import near
    from shipway.schemas.diagnostics import Diagnostic

    close = near(asked, names())
    guess = " or ".join(f"`{name}`" for name in close)
    return Diagnostic(
        code="CL003",
        summary=f"nothing is known of `{asked}`",
        help=f"Did you mean {guess}?" if close else "Name a code, a field, or a term of a plan.",
    )


def _show_code(code: Code, output: object) -> None:
    from shipway.compiler.cli.output import Output

    assert isinstance(output, Output)
    output.show(f"[bold]{code.code}[/]: [bold]{code.title}[/]", "", code.explanation)
    if code.example:
        from rich.padding import Padding
        from rich.text import Text

        output.show("", Padding(Text(code.example, style="cyan"), (0, 0, 0, 2)))


def _show_term(term: Term, output: object) -> None:
    from shipway.compiler.cli.output import Output

    assert isinstance(output, Output)
    output.show(f"[bold]{term.name}[/]", "", term.meaning)
    if term.moves:
        output.show("", f"[dim]what moves it:[/] {term.moves}")


def _show_field(field: FieldWords, output: object) -> None:
    from rich.text import Text

    from shipway.compiler.cli.output import Output

    assert isinstance(output, Output)
    head = Text(field.path, style="bold")
    if field.owner:
        head.append(f" ({field.owner})", style="dim")
    output.show(head, Text(field.description))
    output.show(Text(f"  type     {field.type}"), Text(f"  default  {field.default}"))
    for name, description in field.keys:
        output.show(Text.assemble(("    " + name, "cyan"), "  ", description))
    output.show("")

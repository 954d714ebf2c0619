"""Commands: a file here named X is `shipway X`; its function `command` is what runs.

A file's name may end in `_` where the command's name is a Python keyword. `command` takes Typer
parameters, has a docstring (the help), and ends by returning or through `Output.fail`. A file with
commands of its own (`shipway data pack`) has a function `application` instead, which makes their Typer.
"""

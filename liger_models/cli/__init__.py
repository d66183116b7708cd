"""The command ``liger-models``. The module `commands` has the subcommands and needs the extra ``cli``."""

import sys

from liger_models.common.printable import show_warnings_as_lines


def main() -> None:
    """Run the command line."""
    # The extra may be missing. If any other import fails, this is a bug, and the traceback is shown.
    try:
        from liger_models.cli.commands import app
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("liger-models: typer and rich must be installed, got none. Run: pip install 'liger_models[cli]'")
    show_warnings_as_lines()
    app(prog_name="liger-models")

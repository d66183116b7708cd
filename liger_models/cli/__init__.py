"""The command ``liger-models``. Its subcommands are in `commands`, which needs the extra ``cli``."""

import sys
import warnings

from liger_models.common.printable import printable


def main() -> None:
    """Run the command line."""
    # The extra may be missing. Any other failing import is a bug and keeps its traceback.
    try:
        from liger_models.cli.commands import app
    except ImportError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit("liger-models: typer and rich must be installed, got none. Run: pip install 'liger_models[cli]'")
    # A warning is one line without the place in the source.
    warnings.showwarning = lambda message, *_, **__: print(printable(f"warning: {message}"), file=sys.stderr)
    app(prog_name="liger-models")

"""A script that runs as the main module, here rather than in one more process."""

import sys
import types


def run_as_main(monkeypatch, text, path=None):
    """Run the script, and return its module; without a path it is a notebook."""
    main = types.ModuleType("__main__")
    main.__package__ = None
    if path is not None:
        path.write_text(text)
        main.__file__ = str(path)
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(text, vars(main))
    return main

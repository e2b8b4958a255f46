"""The site engine, which turns Markdown into pages, run strictly: any warning stops the build, in one line.

It runs in this process, so that its macros find every scenario answered already.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jinja2

from calc.base.schema import InputError
from calc.site.faults import BuildError, Interrupted, line_of, short

# Both engines read one mkdocs.yml: the second outlives the first.
ENGINES = ("mkdocs", "properdocs")
QUIET = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}


class Strict:
    """One build of a site."""

    def __init__(self, engine: str, config: Path, out: Path) -> None:
        """Reads `config`, to build into `out`; BuildError for any fault in it."""
        os.environ.update(QUIET)
        self.engine = engine
        with self._lines(f"{config.name}: "):
            import_module(f"{engine}.__main__")  # from now on plugins find this engine
            load = import_module(f"{engine}.config").load_config
            self._config = load(str(config), site_dir=str(out), strict=True)

    def build(self) -> None:
        """Builds the site; BuildError with a line for each warning."""
        with self._lines():
            self._config.plugins.on_startup(command="build", dirty=False)
            try:
                import_module(f"{self.engine}.commands.build").build(self._config)
            finally:
                self._config.plugins.on_shutdown()

    @contextlib.contextmanager
    def _lines(self, place: str = "") -> Iterator[None]:
        """Collects what is logged, and raises BuildError for it; `place` begins each line."""
        said = _Said()
        loggers = [logging.getLogger(name) for name in {self.engine, "mkdocs"}]
        for logger in loggers:
            logger.addHandler(said)
        try:
            yield
        except jinja2.TemplateError as error:  # the logged text names the page being made, which does not help
            raise BuildError(_line(error)) from error
        except (InputError, BuildError, OSError, Interrupted):
            raise
        except (Exception, SystemExit) as error:  # the engine stops with a SystemExit
            raise BuildError("\n".join(f"{place}{line}" for line in said.lines or [_line(error)])) from error
        finally:
            for logger in loggers:
                logger.removeHandler(said)
        if said.lines:
            raise BuildError("\n".join(f"{place}{line}" for line in said.lines))


class _Said(logging.Handler):
    """The warnings and errors that are logged, each once and on one line."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.lines[_line(error) if error else " ".join(record.getMessage().split())] = None


def _line(error: Any) -> str:
    """An exception on one line; for a template with its name and line."""
    text = " ".join(str(error).split())
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{short(Path(error.filename or ''))}:{error.lineno}: {error.message}"
    place = line_of(error) if isinstance(error, jinja2.TemplateError) else None
    return f"{short(Path(place[0]))}:{place[1]}: {text}" if place else text

"""Writes the tables of the settings into `reference/settings.md`. mkdocs calls `on_page_markdown` (mkdocs.yml, hooks).

The tables have the same source as `gleanrl settings`: the fields of the configuration classes.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

from gleanrl.cli.settings import describe_type, format_value
from gleanrl.config.loading import JOBS, fields
from gleanrl.config.settings import Config
from gleanrl.utils.settings import JobConfig


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each line ``<!-- settings of JOB -->`` of a page by the tables of that kind of job."""
    jobs = {job.kind: job for job in (Config, *JOBS.values())}
    return re.sub(r"^<!-- settings of (.+) -->$", lambda match: tables(jobs[match[1]]), markdown, flags=re.MULTILINE)


def tables(job: type[JobConfig]) -> str:
    """Return a heading and a table for each section of a configuration class."""
    text, anchor, changeable = "", "" if job is Config else f"{job.kind}.", set(job.changeable())
    for section, found in groupby(fields(job), lambda pair: pair[0].rpartition(".")[0]):
        cls = job.model_fields[section].annotation if section else job
        text += f"\n### {section or 'Top level'} {{ #{anchor}{section or 'top-level'} }}\n\n"
        text += f"In Python: `{cls.__module__}.{cls.__name__}`\n\n| key | default | meaning |\n|---|---|---|\n"
        for name, field in found:
            default = format_value(field.get_default(call_default_factory=True))
            meaning = (
                f"*{describe_type(field.annotation, field.metadata)}.* {' '.join((field.description or '').split())}"
            )
            meaning += " May change on `--resume`." if name in changeable else ""
            cells = (f"`{name}`{{ #{anchor}{name} }}", f"`{default}`", meaning)
            text += f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
    return text

"""The studies by name."""

from megasao.config.errors import UserError
from megasao.environments.options import nearest
from megasao.studies.ablation import ABLATION
from megasao.studies.collapse import COLLAPSE
from megasao.studies.lag import STALENESS
from megasao.studies.online import ONLINE
from megasao.studies.study import Study

STUDIES: dict[str, Study] = {study.name: study for study in (COLLAPSE, ABLATION, ONLINE, STALENESS)}


def study_named(name: str) -> Study:
    """The study of this name; UserError with the nearest one."""
    if name not in STUDIES:
        raise UserError(f"no study {name!r}{nearest(name, list(STUDIES))}; there are {', '.join(STUDIES)}")
    return STUDIES[name]
